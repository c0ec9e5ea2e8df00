"""Time and memory of options that do not change the results of training, compared with the defaults, on CPU threads.

    OMP_NUM_THREADS=1 python -m benchmarks.speed

The transformers, the sample and the LoRA come from benchmarks/methods.py, in float32; a step is a forward and backward
pass. Peak: bytes of tensors that are alive at the same time in a step, without the weights. An update is the step of an
optimizer on the weights of the Sana transformer, either of its LoRA or all of them. In every turn each way runs once;
ratios compare results of the same turn with the first row of the kind. Blocks are compiled by inductor if a C++
compiler is found (CXX names another compiler), else by aot_eager, which does not generate code; the compile time is
printed at the end.
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
UPDATES = 5  # updates in one measurement


def find_compiler() -> str:
    """The value of train.compile_backend that works on this machine."""
    return "inductor" if shutil.which(os.environ.get("CXX", "g++")) else "aot_eager"


def ways(name: str) -> dict[str, dict[str, Any]]:
    """Name -> settings of `train`. The first settings are the defaults, which compute every block again."""
    backend = find_compiler()
    settings: dict[str, dict[str, Any]] = {
        "defaults": {},
        "checkpointing interval 2": {"gradient_checkpointing_interval": 2},
        "checkpointing interval 4": {"gradient_checkpointing_interval": 4},
        "no checkpointing": {"gradient_checkpointing": False},
        f"blocks compiled, {backend}": {"compile": "blocks", "compile_backend": backend},
    }
    return settings


def measure_peak(step: Callable[[], None], model: Any) -> int:
    """Bytes of a step's tensors that are alive at the same time, including gradients."""
    model.zero_grad(set_to_none=True)
    meter = MemoryMeter()
    for weight in model.parameters():
        meter.add(weight)
    weights = meter.live
    with meter:
        step()
    return meter.peak - weights


def compare_steps(name: str, options: argparse.Namespace) -> list[tuple[str, float]]:
    """Print a row for each way. Returns (name, seconds of compiling) for the compiled ways."""
    family = module_of(FAMILIES[name])
    steps: dict[str, Callable[[], tuple[float, float]]] = {}
    peaks: dict[str, int] = {}
    first: dict[str, float] = {}
    for way, settings in ways(name).items():
        model = make_transformer(name, family, options, Train.model_validate(settings))
        step = partial(run_step, partial(make_step, name, family, model, options, 1), [])
        steps[way] = partial(time_call, step)
        first[way] = time_call(step)[0]
        if "compile" not in settings:  # tensors inside a graph are not counted
            peaks[way] = measure_peak(step, model)
    times_by_way = measure_by_turns(steps, options.repeat, uncounted=1)
    print_ways(name, {way: [spent for _, spent in times] for way, times in times_by_way.items()}, peaks)
    plain = statistics.median(seconds for seconds, _ in times_by_way["defaults"])
    return [(f"{name}, {way}", first[way] - plain) for way in first if "compiled" in way]


def print_ways(title: str, times_by_way: Mapping[str, list[float]], peaks: Mapping[str, int]) -> None:
    """Print the rows of a kind. times_by_way: processor seconds in each turn. peaks: bytes."""
    baseline = next(iter(times_by_way))
    for way, times in times_by_way.items():
        ratios = [one / base for one, base in zip(times, times_by_way[baseline], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        memory = [f"{peaks[way] / MIB:.0f}", f"{peaks[way] / peaks[baseline]:.2f}"] if way in peaks else ["", ""]
        print_row(title, way, f"{statistics.median(times):.3g}", f"{statistics.median(ratios):.2f}", spread, *memory)


def compare_updates(title: str, adapter: str, family: ModelFamily, options: argparse.Namespace) -> None:
    settings = {"adapter": {"type": adapter}, "optimizer": {"lr": 1e-5}}
    model = make_transformer("sana", family, options, Train.model_validate(settings))
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    for weight in trained.values():
        weight.grad = torch.full_like(weight, 1e-3)
    updates = {name: make_optimizer(trained, Optimizer(name=name, lr=1e-5)).step for name in OPTIMIZERS}
    times_by_name = measure_by_turns(
        {name: partial(time_call, partial(repeat, update)) for name, update in updates.items()}, options.repeat, 1
    )
    print_ways(title, {name: [spent / UPDATES for _, spent in times] for name, times in times_by_name.items()}, {})


def repeat(update: Callable[[], object]) -> None:
    for _ in range(UPDATES):
        update()


def main() -> None:
    options = make_shape_parser(__doc__, heads=4, repeat=4).parse_args()
    torch.set_num_threads(options.threads)
    print_header("", "setting", "processor s", "ratio", "range of the ratio", "peak MiB", "ratio")
    compiling = []
    for name in FAMILY_TASKS:
        with torch.compiler.config.patch(force_disable_caches=True):  # caches of an earlier run
            compiling += compare_steps(name, options)
        torch.compiler.reset()
    for title, adapter in ADAPTERS.items():
        compare_updates(title, adapter, module_of(FAMILIES["sana"]), options)
    for title, seconds in compiling:
        print(f"\nCompiling, {title}: {seconds:.1f} s.")


if __name__ == "__main__":
    main()
