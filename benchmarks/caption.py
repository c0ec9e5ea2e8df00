"""Compares `caption` with a minimal program: transformers' `generate` on the same pictures.

    python -m benchmarks.caption [--images 48] [--tokens 40] [--side 448] [--prompts 1] [--repeat 3]
    python -m benchmarks.caption --true-size --device cuda

Each way is a whole process, from its start to its end, by turns: imports, loading, decoding, writing. The bare program
opens a picture, resizes it, prepares it with transformers' processor (on Pillow images) and calls `generate`, for one
picture at a time, and for as many as the stage has in a batch; with several prompts, for each of them. Then the stage
runs, too, without the keys and values that its prompts share. Random weights end no caption, so every way writes
`--tokens` tokens of each picture (which the stage then rejects as cut). A Qwen2.5-VL of middle size in float32 on
one thread, or of its true size in bfloat16.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import (
    make_parser,
    measure_by_turns,
    medians,
    print_header,
    print_row,
    run_silently,
    write_config,
)
from benchmarks.discover import make_jpeg, unique_jpeg, write_item
from benchmarks.text import MID_QWEN
from cache.store.store import Store
from schemas.config.encoding import PRESETS
from schemas.config.loading import load_config
from schemas.geometry import Bucket
from stages import caption, discover
from stages.encoding.captions.describer import QWEN_CHAT, PreparedItem
from stages.encoding.stage_registry import CAPTION
from stages.rehearsing import tiny_models

KIND = "kandinsky5-image-t2i"
COMPONENTS = ("text_encoder", "tokenizer")
SIZES = ((1152, 896), (896, 1152), (1024, 1024))
BATCH = 8  # pictures
PROMPTS = ("detailed", "plain", "tags", "motion")


def make_checkpoint(folder: Path, options: argparse.Namespace) -> Path:
    if options.true_size:
        model_options = {"dtype": "bfloat16", "device": options.device}
        return tiny_models.build(KIND, folder, size="true", only=COMPONENTS, **model_options)
    tiny_models.build(KIND, folder, only=("tokenizer",))
    tiny_models.make_model("qwen", overrides=MID_QWEN).save_pretrained(folder / "text_encoder")
    return folder


def without_end(folder: Path) -> None:
    """Give every caption the largest length, by an end token that can't be chosen."""
    settings = folder / "text_encoder" / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token_id": 10**6}))


def make_project(folder: Path, model: Path, options: argparse.Namespace) -> Path:
    """Make a project. Returns the path of its configuration."""
    pictures = [make_jpeg(*size, seed) for seed, size in enumerate(SIZES)]
    for number in range(options.images):
        write_item(folder / "media" / f"{number:05d}.jpg", unique_jpeg(pictures[number % len(SIZES)], number))
    tokens = (options.side // 28) ** 2 + 150 + options.tokens  # tokens of one caption, with its picture and prompt
    described = {
        "resolution": options.side,
        "max_tokens": options.tokens,
        "batch_tokens": BATCH * tokens,
        "prompts": PROMPTS[: options.prompts],
    }
    config = {
        "root": "work",
        "model": {"family": "kandinsky5-image", "path": str(model)},
        "datasets": [{"id": "media", "instance_data_dir": "media", "make_captions": "all"}],
        "caption": described,
        "stages": {"caption": {"threads": 1, "device": options.device}, "max_reject_fraction": 1.0},
    }
    config["model"]["precision"] = "bfloat16" if options.true_size else "float32"  # type: ignore[index]
    path = write_config(folder / "pipeline.json", config)
    run_silently(discover.run, path)
    return path


def generate(path: Path, batch: int) -> None:
    """Run the bare program."""
    import torch
    from PIL import Image
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.set_num_threads(1)
    config = load_config(path)
    assert config.caption is not None
    folder, device = Path(config.model.source), torch.device(config.stages.caption.device)
    dtype = getattr(torch, config.model.precision)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=dtype).eval().to(device)
    tokenizer, images = AutoTokenizer.from_pretrained(folder / "tokenizer"), Qwen2VLImageProcessorPil()
    plan = CAPTION.find_plan(Store(config.root), config)
    settings = {"max_new_tokens": config.caption.max_tokens, "pad_token_id": tokenizer.pad_token_id, "do_sample": False}
    for unit in plan.units("items"):
        size, captions = Bucket.parse(unit.bucket), []
        for start in range(0, len(unit.members), batch):
            rows = [plan.samples[name] for name in unit.members[start : start + batch]]
            files = [path.parent / "media" / row["path"] for row in rows]
            pictures = [Image.open(file).convert("RGB").resize((size.width, size.height), 1) for file in files]
            image_inputs = images(images=pictures, return_tensors="pt")
            places = "<|image_pad|>" * int(image_inputs["image_grid_thw"][0].prod() // 4)
            for prompt in config.caption.prompts:
                question = f"<|vision_start|>{places}<|vision_end|>{PRESETS[prompt]}"
                ids = torch.tensor([tokenizer(QWEN_CHAT.replace("{}", question))["input_ids"]] * len(rows))
                inputs = {
                    "input_ids": ids,
                    "attention_mask": torch.ones_like(ids),
                    "mm_token_type_ids": (ids == model.config.image_token_id).int(),
                    **image_inputs,
                }
                out = model.generate(**{name: tensor.to(device) for name, tensor in inputs.items()}, **settings)
                captions += tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
        assert len(captions) == len(config.caption.prompts) * len(unit.members)


def run_unshared(path: Path) -> None:
    """Run the stage without sharing keys and values between prompts."""
    PreparedItem.shared_tokens = lambda item, picture_ids: 0  # type: ignore[method-assign]
    run_silently(caption.run, path)


def run_process(words: list[str]) -> tuple[float, float]:
    """Run a whole program. Returns (seconds, processor seconds of all its processes)."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    took, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__, repeat=3)
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--side", type=int, default=448)
    parser.add_argument("--prompts", type=int, default=1, choices=range(1, len(PROMPTS) + 1))
    parser.add_argument("--true-size", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bare", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--unshared", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.unshared:
        return run_unshared(options.config)
    if options.bare:
        return generate(options.config, options.bare)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make_checkpoint(folder / "model", options)
        without_end(model)
        path = make_project(folder, model, options)

        def run_stage(words: tuple[str, ...] = ("stages.caption",)) -> tuple[float, float]:
            shutil.rmtree(folder / "work" / "captions", ignore_errors=True)
            return run_process(["-m", *words, "--config", str(path)])

        def run_bare(batch: int) -> tuple[float, float]:
            return run_process(["-m", "benchmarks.caption", "--config", str(path), "--bare", str(batch)])

        ways = {
            "caption": run_stage,
            f"generate, {BATCH} pictures at a time": lambda: run_bare(BATCH),
            "generate, one picture at a time": lambda: run_bare(1),
        }
        if options.prompts > 1:
            ways["caption, each prompt read whole"] = lambda: run_stage(("benchmarks.caption", "--unshared"))
        times = measure_by_turns(ways, options.repeat, uncounted=1)
    times_by_way = {name: medians(rows) for name, rows in times.items()}
    print(
        f"{options.images} pictures of about {options.side}x{options.side}, captions of each: "
        f"{options.prompts} of {options.tokens} tokens, {options.device}"
    )
    print_header("whole program", "s", "processor s", "pictures/s", "of caption")
    for name, (seconds, processor) in times_by_way.items():
        ratio = times_by_way["caption"][0] / seconds, times_by_way["caption"][1] / processor
        rate = f"{options.images / seconds:.2f}"
        print_row(name, f"{seconds:.1f}", f"{processor:.1f}", rate, f"{ratio[0]:.2f}, {ratio[1]:.2f}")


if __name__ == "__main__":
    main()
