"""Rate at which a step gets rows of shards on the card, with their noise, compared with bare copies of the same bytes
from pinned memory. Nothing is computed with the rows, so the rate is the upper limit for training.

The files are in the page cache. The first epoch verifies every row; the second is timed, too.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks import device_usage as devices
from benchmarks.common import print_header, print_row
from benchmarks.gpu.parts import PartOptions
from benchmarks.gpu.training import Case, Model, prepare
from stages.rehearsing.tiny_shapes import SHAPES
from trainer.data import MicroBatch
from trainer.setup.prepare import TrainState

TEXT_WIDTH = 3584  # width of Qwen2.5-VL
COLUMNS = ("rows", "samples/s", "GB/s", "of bare copies")


def models(tiny: bool) -> list[Model]:
    """Latents and texts of true sizes, for transformers that are small, so that they are made quickly."""
    cases = (
        ("kandinsky5-image", "t2i-lite-sft", "image", {"visual_cond": False}, "1024x1024", 256),
        ("kandinsky5-video", "t2v-lite-sft-5s", "video", {}, "768x512@61", 48),
    )
    if tiny:
        return [Model(*case[:2], {**SHAPES["tiny"][case[2]], **case[3]}, "64x64", 8, 8) for case in cases[:1]]
    width = {"in_text_dim": TEXT_WIDTH}
    return [
        Model(family, flavour, {**SHAPES["tiny"][part], **more, **width}, bucket, 250, samples)
        for family, flavour, part, more, bucket, samples in cases
    ]


def run(options: PartOptions) -> None:
    print("bfloat16 rows of a latent and a text of 250 tokens x 3584, one sample in a batch.\n")
    print_header(*COLUMNS)
    for model in models(options.tiny):
        with tempfile.TemporaryDirectory() as folder:
            case = Case("data", {"adapter": {"rank": 1}})
            measure(prepare(model, case, Path(folder), options.device), model)


def measure(state: TrainState, model: Model) -> None:
    device = state.accelerator.device
    micro_batches = [each for step in range(4) for each in state.loader.step(step).micro_batches]
    size = sum(map(stored_bytes, micro_batches)) // len(micro_batches)
    pinned, count = device.type == "cuda", model.samples
    sources = [torch.ones(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]
    target = torch.empty(size, dtype=torch.uint8, device=device)
    copy = lambda: [target.copy_(buffer, non_blocking=pinned) for buffer in sources]  # noqa: E731
    bare = devices.time_call(copy, device)
    times = {"bare copies": bare}
    for number, name in enumerate(("first epoch, verified", "second epoch")):
        times[name] = devices.time_call(partial(read_steps, state, number * count, (number + 1) * count), device)
    for name, seconds in times.items():
        rate = count / seconds
        print_row(f"{model.bucket}, {name}", f"{rate:.4g}", f"{size * rate / 1e9:.3g}", f"{bare / seconds:.0%}")


def stored_bytes(micro_batch: MicroBatch) -> int:
    """Bytes of the latents and of the text tokens without padding, as stored in shards."""
    width = micro_batch.batch.text_BLD.shape[-1]
    return 2 * (micro_batch.batch.latents_BCTHW.numel() + int(micro_batch.batch.text_mask_BL.sum()) * width)


def read_steps(state: TrainState, first: int, last: int) -> None:
    for batches in state.loader.steps(first, last):
        for each in batches.micro_batches:
            each.draw(state.accelerator.device, state.loader.family)
