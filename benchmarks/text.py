"""Rate of caption tokens: encode-text's encoder compared with `encode_prompt` of the diffusers pipeline.

    python -m benchmarks.text [--captions 64] [--repeat 3] [--kind kandinsky5-video-t2v]
    python -m benchmarks.text --true-size --device cuda [--captions 512]
    python -m benchmarks.text --model DIR

Captions have 10 to 250 tokens, in random order. The pipeline encodes them in batches of 8, padded to the longest; the
encoder sorts them by length and fills batches to a budget of tokens, with the template's prefix computed once. Both
tokenize and run CLIP, in the same precision, in turns in one process; only tokens after the template are counted. Also
measured: the encoder without the shared prefix, and the pipeline on captions sorted by length. The models have middle
size and random weights; --true-size has the true shapes of Qwen2.5-VL-7B and CLIP-L. On one CPU thread, processor
seconds are measured, so that other programs have no effect. Loading is not included. On a GPU, a second table shows the
share of the GPU that each way uses.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.common import print_header, print_row

HIDDEN, LAYERS = 512, 4
MID_QWEN = {
    "text_config": {
        "hidden_size": HIDDEN, "intermediate_size": 5 * HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_window_layers": LAYERS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
    },
    "vision_config": {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": HIDDEN,
        "fullatt_block_indexes": [0], "tokens_per_second": 2,
    },
}  # fmt: skip
CLIP_COMPONENTS = ("text_encoder_2", "tokenizer", "tokenizer_2")
COMPONENTS = ("text_encoder", *CLIP_COMPONENTS)


def make_checkpoint(folder: Path, options: argparse.Namespace) -> Path:
    """Make the text encoders and tokenizers of a checkpoint, with random weights."""
    from stages.rehearsing import tiny_models

    if options.true_size:
        only, model_options = COMPONENTS, {"dtype": options.precision, "device": options.device}
        return tiny_models.build(options.kind, folder, size="true", only=only, **model_options)
    tiny_models.build(options.kind, folder, only=CLIP_COMPONENTS)
    tiny_models.make_model("qwen", overrides=MID_QWEN).save_pretrained(folder / "text_encoder")
    return folder


def make_captions(folder: Path, number: int, longest: int) -> list[str]:
    """Make captions from the tokenizer's vocabulary, with 10 to `longest` tokens, each length equally likely."""
    from transformers import AutoTokenizer

    from stages.rehearsing.tiny_tokenizers import SENTENCES

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    rng = np.random.default_rng(0)
    words = " ".join(SENTENCES).split()
    return [
        tokenizer.decode(tokenizer(" ".join(rng.choice(words, longest)))["input_ids"][:tokens]).strip()
        for tokens in rng.integers(10, longest + 1, number)
    ]


def make_pipeline(folder: Path, kind: str, dtype: Any, device: Any) -> Any:
    """Make the pipeline with only its text encoders. Its tokenizer is called directly, like the processor does for
    text."""
    import diffusers
    from transformers import AutoTokenizer, CLIPTextModel, CLIPTokenizer, Qwen2_5_VLForConditionalGeneration

    from stages.rehearsing.tiny_models import KINDS

    class Text:
        def __init__(self) -> None:
            self.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")

        def __call__(self, text: list[str], images: None, videos: None, **options: Any) -> Any:
            return self.tokenizer(text, **options)

        def decode(self, ids: Any) -> str:
            return self.tokenizer.decode(ids)

    pipe = getattr(diffusers, KINDS[kind].pipeline)(*[None] * 7)
    qwen: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=dtype)
    clip: Any = CLIPTextModel.from_pretrained(folder / "text_encoder_2", dtype=dtype)
    pipe.text_encoder, pipe.text_encoder_2 = qwen.to(device).eval(), clip.to(device).eval()
    pipe.tokenizer = Text()
    pipe.tokenizer_2 = CLIPTokenizer.from_pretrained(folder / "tokenizer_2")
    return pipe


def encode_with_pipeline(pipe: Any, texts: list[str], device: Any) -> int:
    """Encode in batches of 8, and copy results to the host like the encoder. Returns the number of tokens."""
    import torch

    tokens = 0
    with torch.no_grad():
        for start in range(0, len(texts), 8):
            embeds, pooled, lengths = pipe.encode_prompt(texts[start : start + 8], device=device)
            embeds.cpu(), pooled.cpu()
            tokens += int(lengths[-1])
    return tokens


def encode_with_encoder(encoder: Any, texts: list[str], budget: int) -> int:
    """Prepare, sort by length and encode batches of at most `budget` tokens. Returns the number of tokens."""
    from stages.encoding.text.base import TextRequest

    batches: list[list[Any]] = [[]]
    for prepared in sorted((encoder.prepare(TextRequest(text)) for text in texts), key=lambda text: text.cost):
        if batches[-1] and (len(batches[-1]) + 1) * prepared.cost > budget:
            batches.append([])
        batches[-1].append(prepared)
    return sum(result.kept for batch in batches for result in encoder.encode(batch))


def compare(folder: Path, options: argparse.Namespace) -> None:
    import torch

    from schemas.catalog import FAMILIES
    from stages.encoding.text.kandinsky5 import Encoder

    device, dtype = torch.device(options.device), getattr(torch, options.precision)
    family, _, task = options.kind.rpartition("-")
    template = FAMILIES[family].templates[task]
    texts = make_captions(folder, options.captions, options.longest)
    ordered = sorted(texts, key=len)
    arguments = (str(folder), None, template, template.max_length, dtype, device)
    encoder, without_prefix = Encoder(*arguments), Encoder(*arguments, share_prefix=False)
    pipe = make_pipeline(folder, options.kind, dtype, device)
    ways = {
        "pipeline, batches of 8": lambda: encode_with_pipeline(pipe, texts, device),
        "pipeline, sorted by length": lambda: encode_with_pipeline(pipe, ordered, device),
        "encoder without the shared prefix": lambda: encode_with_encoder(without_prefix, texts, options.budget),
        "encoder": lambda: encode_with_encoder(encoder, texts, options.budget),
    }
    # On one CPU thread, processor seconds equal the wall clock of an idle machine.
    clock = time.process_time if device.type == "cpu" and options.threads == 1 else time.perf_counter

    def measure_rate(way: Callable[[], int]) -> float:
        start = clock()
        return way() / (clock() - start)

    rates = common.measure_by_turns({name: partial(measure_rate, way) for name, way in ways.items()}, options.repeat, 1)
    medians = {name: float(np.median(values)) for name, values in rates.items()}
    print(f"{options.captions} captions of 10 to {options.longest} tokens, {options.kind}, {dtype}, {device}")
    print_header("", "tokens/s, median", "min to max", "times the pipeline")
    for name, values in rates.items():
        ratio = medians[name] / medians["pipeline, batches of 8"]
        print_row(name, f"{medians[name]:,.0f}", f"{min(values):,.0f} to {max(values):,.0f}", f"{ratio:.2f}")
    summary = f"texts after the shared prefix: {encoder.stats.prefixed_texts}, whole: {encoder.stats.full_texts}"
    if options.device_usage or device.type == "cuda":
        from benchmarks import device_usage as devices

        peak_flops = devices.peak_flops(device, dtype)
        print()
        print_header("", *devices.COLUMNS)
        for name, way in ways.items():  # memory includes all models of this comparison
            print_row(name, *devices.measure_usage(way, device, way() / medians[name]).cells(peak_flops))
    print(summary)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = common.make_parser(__doc__, repeat=3)
    parser.add_argument("--captions", type=int, default=64)
    parser.add_argument("--longest", type=int, default=250, help="tokens of the longest caption")
    parser.add_argument("--budget", type=int, default=4096, help="text.batch_tokens")
    kinds = ("kandinsky5-video-t2v", "kandinsky5-image-t2i")
    parser.add_argument("--kind", choices=kinds, default=kinds[0])
    parser.add_argument(
        "--true-size", action="store_true", help="Qwen2.5-VL-7B; needs 20 GB of disk, 50 GB of the device"
    )
    parser.add_argument("--model", type=Path, help="checkpoint in diffusers layout, instead of random weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU")
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads")
    usage = "also: share of peak arithmetic, idle share, peak memory; always on a GPU"
    parser.add_argument("--device-usage", action="store_true", help=usage)
    options = parser.parse_args(arguments)
    options.precision = options.precision or ("float32" if options.device == "cpu" else "bfloat16")
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        compare(options.model or make_checkpoint(Path(name), options), options)


if __name__ == "__main__":
    main()
