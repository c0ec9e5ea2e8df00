"""What options that change no number of training cost and save: each beside the defaults, on CPU threads.

    OMP_NUM_THREADS=1 python -m benchmarks.speed

The transformers, the sample and the LoRA of benchmarks/methods.py, in float32: a step is its forward and backward pass.
Peak: bytes of tensors that are alive at once in a step, beyond the weights. An update is the step of an optimizer on
the weights of that Sana transformer, of its LoRA or all of them. In every turn each way runs once; ratios are of the
same turn, to the first row of its kind. Blocks are compiled by inductor where a C++ compiler is found (CXX names
another), else by aot_eager, which makes no code; what that takes is printed at the end.
"""

import argparse
import os
import shutil
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.common import MIB, measure_by_turns, print_header, print_row, time_call
from benchmarks.methods import FAMILY_TASKS, make_shape_parser, make_step, make_transformer, run_step
from schemas.catalog import FAMILIES
from schemas.config.training import Optimizer, Train
from trainer.families.base import ModelFamily, module_of
from trainer.memory.meter import MemoryMeter
from trainer.setup.optimizers import make_optimizer

OPTIMIZERS = ("adamw", "adamw-foreach", "adamw-fused", "optimi-adamw")
ADAPTERS = {"update of a LoRA": "lora", "update of all weights": "full"}
UPDATES = 5  # in one measurement


def find_compiler() -> str:
    """train.compile_backend."""
    return "inductor" if shutil.which(os.environ.get("CXX", "g++")) else "aot_eager"


def ways(name: str) -> dict[str, dict[str, Any]]:
    """Settings of `train` by name; the first are the defaults, which computes every block again."""
    backend = find_compiler()
    found: dict[str, dict[str, Any]] = {
        "defaults": {},
        "checkpointing interval 2": {"gradient_checkpointing_interval": 2},
        "checkpointing interval 4": {"gradient_checkpointing_interval": 4},
        "no checkpointing": {"gradient_checkpointing": False},
        f"blocks compiled, {backend}": {"compile": "blocks", "compile_backend": backend},
    }
    if name != "sana":  # whose self-attention is linear
        found |= {f"attention {each}": {"attention_backend": each} for each in ("_native_flash", "_native_math")}
    return found


def measure_peak(step: Callable[[], None], model: Any) -> int:
    """Bytes of a step's tensors that are alive at once, its gradients included."""
    model.zero_grad(set_to_none=True)
    meter = MemoryMeter()
    for weight in model.parameters():
        meter.add(weight)
    weights = meter.live
    with meter:
        step()
    return meter.peak - weights


def compare_steps(name: str, options: argparse.Namespace) -> list[tuple[str, float]]:
    """Print a row for each way; returns the seconds that compiling took."""
    family = module_of(FAMILIES[name])
    steps: dict[str, Callable[[], tuple[float, float]]] = {}
    peaks: dict[str, int] = {}
    first: dict[str, float] = {}
    for way, settings in ways(name).items():
        model = make_transformer(name, family, options, Train.model_validate(settings))
        step = partial(run_step, partial(make_step, name, family, model, options, 1), [])
        steps[way] = partial(time_call, step)
        first[way] = time_call(step)[0]
        if "compile" not in settings:  # inside a graph nothing is counted
            peaks[way] = measure_peak(step, model)
    found = measure_by_turns(steps, options.repeat, uncounted=1)
    print_ways(name, {way: [spent for _, spent in times] for way, times in found.items()}, peaks)
    plain = statistics.median(seconds for seconds, _ in found["defaults"])
    return [(f"{name}, {way}", first[way] - plain) for way in first if "compiled" in way]


def print_ways(what: str, found: Mapping[str, list[float]], peaks: Mapping[str, int]) -> None:
    """Of a kind; found: processor seconds in each turn."""
    usual = next(iter(found))
    for way, times in found.items():
        ratios = [one / other for one, other in zip(times, found[usual], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        memory = [f"{peaks[way] / MIB:.0f}", f"{peaks[way] / peaks[usual]:.2f}"] if way in peaks else ["", ""]
        print_row(what, way, f"{statistics.median(times):.3g}", f"{statistics.median(ratios):.2f}", spread, *memory)


def compare_updates(what: str, adapter: str, family: ModelFamily, options: argparse.Namespace) -> None:
    settings = {"adapter": {"type": adapter}, "optimizer": {"lr": 1e-5}}
    model = make_transformer("sana", family, options, Train.model_validate(settings))
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    for weight in trained.values():
        weight.grad = torch.full_like(weight, 1e-3)
    updates = {name: make_optimizer(trained, Optimizer(name=name, lr=1e-5)).step for name in OPTIMIZERS}
    found = measure_by_turns(
        {name: partial(time_call, partial(repeat, update)) for name, update in updates.items()}, options.repeat, 1
    )
    print_ways(what, {name: [spent / UPDATES for _, spent in times] for name, times in found.items()}, {})


def repeat(update: Callable[[], object]) -> None:
    for _ in range(UPDATES):
        update()


def main() -> None:
    options = make_shape_parser(__doc__, heads=4, repeat=4).parse_args()
    torch.set_num_threads(options.threads)
    print_header("", "setting", "processor s", "ratio", "its range", "peak MiB", "ratio")
    compiling = []
    for name in FAMILY_TASKS:
        with torch.compiler.config.patch(force_disable_caches=True):  # of an earlier run
            compiling += compare_steps(name, options)
        torch.compiler.reset()
    for what, adapter in ADAPTERS.items():
        compare_updates(what, adapter, module_of(FAMILIES["sana"]), options)
    for what, seconds in compiling:
        print(f"\nCompiling, {what}: {seconds:.1f} s.")


if __name__ == "__main__":
    main()
