"""Cost of training methods: their forward and backward pass compared with the plain pass.

    OMP_NUM_THREADS=1 python -m benchmarks.methods

A random Kandinsky 5 Video and a random Sana transformer of `--blocks` blocks, one sample of `--frames` x `--rows` x
`--columns` tokens (Sana: one frame with the same number of tokens), a LoRA, gradient checkpointing, float32, on CPU
threads. In every turn each way runs once; ratios compare results of the same turn.

tread: the first and the last block compute all tokens, the blocks between them drop a share. crepa: on the second
block, with features on the tokens' grid, of the vision model's width. rollout: one Euler step. regularization data: the
sample is regularization data. guidance: with a null prompt of two tokens.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.common import make_parser, measure_by_turns, print_header, print_row, time_call
from schemas.catalog import FAMILIES
from schemas.config.training import Offload, Train
from schemas.family import Task
from stages.rehearsing.tiny_models import make_model
from trainer import flow
from trainer.attention import AUTO, use_kernels
from trainer.batch import NULL_LENGTHS, Batch
from trainer.families.base import ModelFamily, module_of
from trainer.families.kandinsky5 import Kandinsky5Transformer3DModel, install_processors
from trainer.methods import make_methods
from trainer.methods.base import Method, MethodStep
from trainer.setup.adapters import make_trainable
from trainer.setup.blocks import compile_blocks, reduce_memory
from trainer.setup.wrap import Denoiser

SHARES = (0.25, 0.5, 0.75)
TEXT_TOKENS, SHIFT = 64, 3.0
FAMILY_TASKS: dict[str, Task] = {"kandinsky5-video": "t2v", "sana": "t2i"}
#: Name of a way -> settings of `train`.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    **{
        f"tread, {share:.0%} dropped": {
            "methods": {"tread": {"routes": [{"selection_ratio": share, "start_layer_idx": 1, "end_layer_idx": -2}]}}
        }
        for share in SHARES
    },
    "crepa, dinov2_vits14": {"methods": {"crepa": {"block_index": 1}}},
    "crepa, dinov2_vitg14": {"methods": {"crepa": {"block_index": 1}}},
    "rollout": {"methods": {"scheduled_sampling": {"probability": 1.0, "max_step_offset": 1}}},
    "regularization data": {"methods": {"regularization": {}}},
    "input perturbation": {"methods": {"input_perturbation": {}}},
    "guidance": {"guidance": {}},
}
WIDTHS = {"crepa, dinov2_vits14": 384, "crepa, dinov2_vitg14": 1536}  # width of the vision models' tokens


def make_transformer(name: str, family: ModelFamily, options: argparse.Namespace, settings: Train) -> Any:
    """Make a transformer like in training, with a LoRA, gradient checkpointing and `settings`."""
    if name == "sana":
        heads = {"num_attention_heads": 4 * options.heads, "num_cross_attention_heads": 4 * options.heads}
        shape = heads | {"num_layers": options.blocks, "cross_attention_dim": 128 * options.heads}
        model = make_model("sana", overrides=shape)
    else:
        size = {"model_dim": 64 * options.heads, "ff_dim": 256 * options.heads, "axes_dims": (16, 24, 24)}
        stock = make_model("video", overrides=size | {"num_visual_blocks": options.blocks})
        model = Kandinsky5Transformer3DModel.from_config(stock.config)
        model.load_state_dict(stock.state_dict())
        install_processors(model)
    make_trainable(model, family, FAMILY_TASKS[name], settings.adapter, settings.weight_precision)
    if settings.attention != AUTO:
        use_kernels(model, family, settings.attention)
    if settings.compile == "blocks":
        compile_blocks(family.blocks(model, FAMILY_TASKS[name]), settings.compile_backend, lambda line: None)
    reduce_memory(model, family, FAMILY_TASKS[name], settings, torch.device("cpu"))
    return model.train()


def make_step(name: str, family: ModelFamily, model: Any, options: argparse.Namespace, width: int) -> MethodStep:
    """Make a step of one sample. width: width of the vision features."""
    spec, generator = FAMILIES[name], torch.Generator().manual_seed(0)
    grid = (options.frames, 2 * options.rows, 2 * options.columns)
    if name == "sana":
        grid = (1, options.frames * options.rows, options.columns)
    size = (1, spec.latent_channels, *grid)
    x0, noise = (torch.randn(size, generator=generator) for _ in range(2))
    text = torch.randn(1, TEXT_TOKENS, spec.read_text_widths(model.config)["embeds"], generator=generator)
    pooled = torch.randn(1, model.config["in_text_dim2"], generator=generator) if "pooled" in spec.text_widths else None
    batch = Batch(x0, None, text, torch.ones(1, TEXT_TOKENS, dtype=torch.bool), pooled, ["0"], "made")
    grid = family.token_grid(model, batch)
    vision = torch.randn(1, grid.frames, grid.rows, grid.columns, width, generator=generator)
    extras = {"vision": vision, "regularization": torch.tensor([True]), "null.embeds": text[:, :2]}
    extras |= {NULL_LENGTHS: torch.tensor([2])} | ({} if pooled is None else {"null.pooled": pooled})
    batch = replace(batch, extras=extras)
    return MethodStep(
        number=0,
        steps=1,
        model=model,
        family=family,
        task=FAMILY_TASKS[name],
        predict=Denoiser(model, family, FAMILY_TASKS[name], None, {}, Offload()).predict,
        most_passes=int,
        batch=batch,
        noise_BCTHW=noise,
        sigma_B=torch.tensor([0.6]),
        host_sigma_B=torch.tensor([0.6]),
        shift=SHIFT,
        identities=["0"],
    )


def make_used_methods(family: ModelFamily, model: Any, settings: dict[str, Any], width: int) -> list[Method]:
    methods = [*make_methods(Train.model_validate(settings).used_methods).values()]
    for method in methods:
        method.setup(model, family, {"vision": (width,)})
    return methods


def run_step(make: Callable[[], MethodStep], methods: list[Method]) -> None:
    """Run the forward and backward pass of one sample with at most one method."""
    step = make()
    for method in methods:
        method.prepare(step)
        with method.around(step):
            backward(step, methods)
    if not methods:
        backward(step, methods)


def backward(step: MethodStep, methods: list[Any]) -> None:
    step.prediction_BCTHW = step.family.predict(step.model, step.noisy_BCTHW, step.sigma_B, step.batch, step.task)
    loss_B = flow.loss_per_sample(step.prediction_BCTHW, step.target_BCTHW)
    sum((added for method in methods if (added := method.loss(step)) is not None), loss_B).sum().backward()


def make_shape_parser(description: str | None, heads: int, repeat: int) -> argparse.ArgumentParser:
    """Make a parser with the options of `make_transformer` and `make_step`, and the number of threads."""
    parser = make_parser(description, repeat)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument(
        "--heads",
        type=int,
        default=heads,
        help="number of heads of 64 channels; Sana has four times as many of 32 channels",
    )
    parser.add_argument("--frames", type=int, default=3)
    parser.add_argument("--rows", type=int, default=16, help="rows of tokens")
    parser.add_argument("--columns", type=int, default=24, help="columns of tokens")
    parser.add_argument("--threads", type=int, default=1)
    return parser


def main() -> None:
    options = make_shape_parser(__doc__, heads=6, repeat=5).parse_args()
    torch.set_num_threads(options.threads)
    print_header("transformer", "method", "step, processor s", "ratio to plain", "range of the ratio")
    for name in FAMILY_TASKS:
        family = module_of(FAMILIES[name])
        model = make_transformer(name, family, options, Train())
        ways = {}
        for way, settings in WAYS.items():
            width = WIDTHS.get(way, 1)
            make = partial(make_step, name, family, model, options, width)
            ways[way] = partial(time_call, partial(run_step, make, make_used_methods(family, model, settings, width)))
        times_by_way = measure_by_turns(ways, options.repeat, uncounted=1)
        for way, times in times_by_way.items():
            ratios = [one[1] / plain[1] for one, plain in zip(times, times_by_way["plain"], strict=True)]
            seconds = statistics.median(spent for _, spent in times)
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print_row(name, way, f"{seconds:.2f}", f"{statistics.median(ratios):.2f}", spread)


if __name__ == "__main__":
    main()
