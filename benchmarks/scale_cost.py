"""GPU hours for a million samples, computed from operations at the published shapes and an assumed rate.

    python -m benchmarks.scale_cost [--cases "Sana 1.6B, 1024x1024"] [--peak 989] [--share 0.4]

Floating-point operations (a product and a sum are two) are counted by torch.utils.flop_counter on the meta device,
which computes nothing: the autoencoder's `encode` of one sample, the language model's forward pass of a caption
(`--tokens`; the shared prefix of the template is not computed again), and one step of the trainer with one sample:
forward, backward, and forward again for gradient checkpointing. A full-rank step is counted as four times its forward
pass, because the counter counts gradients of grouped convolutions like gradients of full convolutions. NABLA counts as
full attention.

GPU hours = operations / (`--peak` x `--share`). The peak is the bfloat16 rate of an H100 SXM in its data sheet, in
TFLOP/s; the share is assumed, not measured. `make gpu` measures it for each part. MiB: size of a stored sample.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import make_parser, print_header, print_row
from benchmarks.memory_table import LORA, make_config
from benchmarks.memory_table import Case as Flavour
from benchmarks.vae_memory import MODEL_NAMES, Case
from schemas.catalog import FAMILIES
from schemas.geometry import Bucket
from stages.encoding.vae.base import MemoryOptions
from stages.rehearsing.tiny_models import make_untrained
from stages.rehearsing.tiny_shapes import SHAPES
from trainer import flow
from trainer.families.base import module_of
from trainer.memory.estimate import make_batch
from trainer.setup.adapters import make_trainable
from trainer.setup.wrap import Denoiser

META = torch.device("meta")
MILLION, HOUR = 10**6, 3600
LANGUAGE_MODELS = {"kandinsky5": "qwen", "gemma": "gemma"}
TRUE = SHAPES["true"]
CASES = {
    "Sana 1.6B, 1024x1024": Flavour("sana", "sana-1.6b-1024px", TRUE["sana"], "1024x1024"),
    "Image Lite t2i, 1024x1024": Flavour(
        "kandinsky5-image", "t2i-lite-sft", TRUE["image"] | {"visual_cond": False}, "1024x1024"
    ),
    "Video Lite t2v, 768x512, 61 frames": Flavour("kandinsky5-video", "t2v-lite-sft-5s", TRUE["video"], "768x512@61"),
    "Video Lite t2v, 768x512, 121 frames": Flavour("kandinsky5-video", "t2v-lite-sft-5s", TRUE["video"], "768x512@121"),
    "Video Pro t2v, 768x512, 121 frames": Flavour(
        "kandinsky5-video", "t2v-pro-sft-5s-hd", SHAPES["pro"]["video"], "768x512@121"
    ),
}


@dataclass(frozen=True)
class Operations:
    """Floating-point operations for one sample: latents, text, LoRA step, full-rank step; and bytes of its latent and
    text."""

    latents: int
    text: int
    lora: int
    full: int
    latent_bytes: int
    text_bytes: int


def count(case: Flavour, tokens: int) -> Operations:
    spec, bucket = FAMILIES[case.family], Bucket.parse(case.bucket)
    shape = bucket.latent_shape(spec.spatial_stride, spec.temporal_stride)
    latent_bytes = spec.latent_channels * prod(shape) * (4 if spec.latent_precision == "float32" else 2)
    latents = count_latents(spec.autoencoder, (bucket.frames, bucket.height, bucket.width))
    text = count_text(LANGUAGE_MODELS[spec.text_encoder], tokens)
    return Operations(latents, text, *count_step(case, tokens), latent_bytes, 2 * spec.text_width * tokens)


def count_latents(autoencoder: str, shape: tuple[int, int, int]) -> int:
    """Count the operations of an autoencoder. shape: frames, height, width."""
    case = Case(autoencoder, shape, "float32", MemoryOptions())
    with META:
        vae = make_untrained(MODEL_NAMES[autoencoder], "true").eval()
    case.apply_options(vae)
    with FlopCounterMode(display=False) as counter:
        case.encode(vae, "meta")
    return counter.get_total_flops()


def count_text(part: str, tokens: int) -> int:
    """Count the operations of a language model without its output head."""
    with META:
        model: Any = make_untrained(part, "true").eval()
        language = model.model.language_model if part == "qwen" else model
        embeds_BLC = torch.empty(1, tokens, language.config.hidden_size)
        # The mask is already prepared, because its values can't be read on the meta device.
        mask_B1LL = torch.zeros(1, 1, tokens, tokens)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            language(inputs_embeds=embeds_BLC, attention_mask=mask_B1LL, use_cache=False)
    return counter.get_total_flops()


class WithoutMask(TorchFunctionMode):
    """Mode in which attention has no mask. A batch's mask is on the host, because code reads its values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.nn.functional.scaled_dot_product_attention:
            kwargs["attn_mask"], args = None, args[:3]
        return func(*args, **kwargs)


def count_step(case: Flavour, tokens: int) -> tuple[int, int]:
    """Count the operations of a step with one sample: (LoRA, full rank). tokens: number of tokens of the caption."""
    config = make_config(case, LORA)
    family, settings = module_of(config.model.family_spec), config.train
    with META:
        model = family.untrained(case.shape, torch.float32)
    batch = make_batch(model, config.model, config.train.batch_size, case.bucket, tokens)

    def compute_loss() -> torch.Tensor:
        noise, sigma_B = torch.empty_like(batch.latents_BCTHW), torch.empty(settings.batch_size)
        denoiser = Denoiser(model, family, config.model.task, None, {}, settings.offload)
        predicted = denoiser(flow.interpolate(batch.latents_BCTHW, noise, sigma_B), sigma_B, batch)
        return flow.loss_per_sample(predicted, flow.velocity(batch.latents_BCTHW, noise), 0).sum()

    with META, WithoutMask(), torch.no_grad(), FlopCounterMode(display=False) as base:
        compute_loss()
    with META:
        make_trainable(model, family, config.model.task, settings.adapter, settings.weight_precision, None)
    with META, WithoutMask(), FlopCounterMode(display=False) as lora:
        loss = compute_loss()
        forward = lora.get_total_flops()
        loss.backward()
    return lora.get_total_flops() + forward, 4 * base.get_total_flops()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--peak", type=float, default=989.0)
    parser.add_argument("--share", type=float, default=0.4)
    options = parser.parse_args()
    rate = options.peak * 1e12 * options.share
    parts = "latents", "text", "LoRA step", "full-rank step"
    print_header("one sample, TFLOP", *parts, "latent, MiB", "text, MiB")
    operations = {name: count(CASES[name], options.tokens) for name in options.cases}
    for name, each in operations.items():
        teraflops = [f"{part / 1e12:.3g}" for part in (each.latents, each.text, each.lora, each.full)]
        print_row(name, *teraflops, *(f"{size / 2**20:.2f}" for size in (each.latent_bytes, each.text_bytes)))
    print()
    print_header("GPU hours, a million samples", *parts)
    for name, each in operations.items():
        hours = [MILLION * part / rate / HOUR for part in (each.latents, each.text, each.lora, each.full)]
        print_row(name, *(f"{hour:,.3g}" if hour < 1000 else f"{hour:,.0f}" for hour in hours))


if __name__ == "__main__":
    main()
