"""Time of an update with each optimizer, on all weights of Sana 1.6B and on a LoRA of Video Lite."""

from functools import partial
from statistics import median

import torch

from benchmarks import device_usage as devices
from benchmarks.common import print_header, print_row
from benchmarks.gpu import sana, video_lite
from benchmarks.gpu.parts import PartOptions
from benchmarks.gpu.training import GIB, Model, describe, forget_models
from schemas.catalog import FAMILIES
from schemas.config.training import OPTIMIZERS, Adapter, Optimizer
from schemas.errors import LatentpressError
from trainer.families.base import module_of
from trainer.setup.adapters import make_trainable
from trainer.setup.optimizers import make_optimizer

COLUMNS = ("weights", "optimizer", "ms", "of adamw's", "state, GiB")
UPDATES = 5


def run(options: PartOptions) -> None:
    device = torch.device(options.device)
    print("float32 weights and gradients; the LoRA has rank 32.\n")
    print_header(*COLUMNS)
    for title, model, adapter in (
        ("all of Sana 1.6B", sana.model(options.tiny), Adapter(type="full")),
        ("LoRA of Video Lite", video_lite.model(options.tiny), Adapter(rank=32)),
    ):
        baseline = None
        shapes = trained_shapes(model, adapter)
        for name in OPTIMIZERS:
            try:
                seconds, state = measure(name, shapes, device)
            except (torch.OutOfMemoryError, LatentpressError) as error:
                print_row(title, name, describe(error), "", "")
            else:
                baseline = baseline or seconds
                size = "" if state is None else f"{state / GIB:.2f}"
                print_row(title, name, f"{1e3 * seconds:.3g}", f"{seconds / baseline:.2f}", size)
            forget_models()


def trained_shapes(model: Model, adapter: Adapter) -> dict[str, torch.Size]:
    family = module_of(FAMILIES[model.family])
    with torch.device("meta"):
        transformer = family.untrained(model.shape)
        make_trainable(transformer, family, model.task, adapter, "float32")
    return {name: weight.shape for name, weight in transformer.named_parameters() if weight.requires_grad}


def measure(name: str, shapes: dict[str, torch.Size], device: torch.device) -> tuple[float, int | None]:
    """(seconds of an update, bytes of the state on the device, None without CUDA)."""
    weights = {key: torch.nn.Parameter(torch.zeros(shape, device=device)) for key, shape in shapes.items()}
    for weight in weights.values():
        weight.grad = torch.full_like(weight, 1e-3)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
    update = make_optimizer(weights, Optimizer(name=name, lr=1e-5)).step
    update()  # the first update makes the state
    state = None if before is None else torch.cuda.memory_allocated(device) - before
    return median(devices.time_call(partial(repeat, update), device) for _ in range(3)) / UPDATES, state


def repeat(update: object) -> None:
    for _ in range(UPDATES):
        update()  # type: ignore[operator]
