"""Compares encode-latents with the minimal work: time and total processor time.

    python -m benchmarks.latents [--images 200] [--side 512] [--repeat 3] [--channels 32]
    python -m benchmarks.latents --device cuda --true-size [--kind kandinsky5-video-t2v] [--images 200]

Without --device, both sides read the same JPEGs and encode them with the same autoencoder (Flux's architecture with
fewer channels and random weights) in batches of the same shapes. Bare: one process that decodes, resizes, normalizes
and calls `vae.encode`. Each side runs once with one image and once with all images, in separate processes; the time
with one image (imports, loading) is subtracted. Processor time is the sum over all processes of a side. Linux only.

With --device, in one process and in turns: the stage on all pictures or clips, minus its time with one of them,
compared with `vae.encode` alone on the same batches, which are already on the device; and the share of the device that
is used. --true-size: the published shape of the autoencoder, in the stage's default precision.
"""

import argparse
import ctypes
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.common import medians, print_header, print_row, run_silently, time_call, write_config
from benchmarks.discover import make_jpeg, make_video, unique_jpeg, unique_video, write_item
from cache.sets.set_lookup import current_plan
from cache.store.store import Store
from schemas.config.loading import load_config
from schemas.geometry import Bucket
from stages import bucket, discover, encode_latents
from stages.rehearsing import tiny_models

PR_SET_CHILD_SUBREAPER = 36
SIZES = ((1152, 896), (1600, 1200), (1024, 1408))
#: kind of checkpoint -> side of a square with as many pixels as the usual size (768x512 for clips)
KINDS = {"kandinsky5-image-t2i": 1024, "kandinsky5-video-t2v": 627, "sana": 1024}
FRAMES = 61


def make_checkpoint(folder: Path, channels: int) -> Path:
    """Make a tiny checkpoint whose autoencoder has `channels` channels on its first level."""
    import torch
    from diffusers import AutoencoderKL

    tiny_models.build("kandinsky5-image-t2i", folder)
    torch.manual_seed(0)
    config = dict(AutoencoderKL.load_config(folder / "vae"))
    config["block_out_channels"] = [channels, 2 * channels, 4 * channels, 4 * channels]
    config["norm_num_groups"] = min(32, channels)
    AutoencoderKL.from_config(config).save_pretrained(folder / "vae")
    return folder


def make_project(
    folder: Path,
    count: int,
    side: int,
    model: Path,
    kind: str = "kandinsky5-image-t2i",
    sizes: Sequence[tuple[int, int]] = SIZES,
    **resources: str,
) -> Path:
    """Make a project of `count` pictures of these `sizes`, or of clips. Returns the path of its configuration."""
    dataset: dict = {"id": "media", "instance_data_dir": "media", "resolution": side, "bucket_step": 1}
    if "video" in kind:
        dataset |= {"dataset_type": "video", "video": {"num_frames": FRAMES, "clip_selection": "head"}}
        clip = make_video(1152, 768)
        for number in range(count):
            write_item(folder / "media" / f"{number:05d}.mp4", unique_video(clip, number))
    else:
        pictures = [make_jpeg(*size, seed) for seed, size in enumerate(sizes)]
        for number in range(count):
            write_item(folder / "media" / f"{number:05d}.jpg", unique_jpeg(pictures[number % len(pictures)], number))
    precision = "float32" if resources.get("device", "cpu") == "cpu" else "bfloat16"
    config = {
        "root": "work",
        "model": {"family": kind.rpartition("-")[0] or kind, "path": str(model), "precision": precision},
        "datasets": [dataset],
        "stages": {"encode-latents": {"threads": 1, **resources}},
    }
    path = write_config(folder / "pipeline.json", config)
    for program in (discover.run, bucket.run):
        run_silently(program, path)
    return path


def run_stage(path: Path) -> None:
    """Run encode-latents from scratch."""
    shutil.rmtree(path.parent / "work" / "latents", ignore_errors=True)
    run_silently(encode_latents.run, path)


def batches(path: Path) -> Iterator[tuple[Bucket, list[dict[str, Any]]]]:
    """Yield the stage's batches: (bucket, rows of the plan's samples)."""
    config = load_config(path)
    plan = current_plan(Store(config.root), config)
    for unit in plan.units("latents"):
        bucket = Bucket.parse(unit.bucket)
        size = max(1, config.latents.batch_pixels // (bucket.frames * bucket.width * bucket.height))
        for start in range(0, len(unit.members), size):
            yield bucket, [plan.samples[name] for name in unit.members[start : start + size]]


def batch_shapes(path: Path) -> list[tuple[int, int, int, int]]:
    """The shapes of the stage's batches: (members, frames, height, width)."""
    return [(len(rows), bucket.frames, bucket.height, bucket.width) for bucket, rows in batches(path)]


def run_bare(path: Path) -> None:
    import torch
    from diffusers import AutoencoderKL

    from stages.media.image import load_image
    from stages.media.sample_reader import normalize_pixels, parse_crop, resize_and_crop

    torch.set_num_threads(1)
    vae = AutoencoderKL.from_pretrained(Path(load_config(path).model.source) / "vae").eval()
    for _, rows in batches(path):
        batch = []
        for row in rows:
            picture = load_image(path.parent / "media" / row["path"])
            batch.append(normalize_pixels(resize_and_crop(picture, *parse_crop(row["geometry"]))))
        with torch.no_grad():
            vae.encode(torch.from_numpy(np.stack(batch))).latent_dist.sample()


def benchmark_on_device(one: Path, full: Path, repeat: int) -> None:
    """Compare the stage with `vae.encode` on tensors that are on the device, in turns."""
    import torch

    from benchmarks import device_usage as devices
    from stages.encoding import model_loading
    from stages.encoding.vae import base

    config = load_config(full)
    device = model_loading.select_device(config.stages.encode_latents)
    vae = base.load_autoencoder(config.model, config.latents, device)._vae
    shapes = batch_shapes(full)
    frames = sum(members * frames for members, frames, _, _ in shapes)
    ready = [torch.rand(b, 3, t, h, w, device=device, dtype=vae.dtype) * 2 - 1 for b, t, h, w in shapes]
    ready = ready if config.model.family_spec.video else [batch[:, :, 0] for batch in ready]

    @torch.no_grad()
    def alone() -> None:
        for batch in ready:
            vae.encode(batch)

    def without_start(measure: Any) -> float:
        """A measurement of the stage on all members without its start-up, from measurements with all members and with
        one."""
        difference = measure(lambda: run_stage(full), device) - measure(lambda: run_stage(one), device)
        return difference / (1 - shapes[0][1] / frames)

    ways = {"bare": lambda: devices.time_call(alone, device), "stage": lambda: without_start(devices.time_call)}
    turns = common.measure_by_turns(ways, repeat, uncounted=1)
    bare, ours = map(statistics.median, turns.values())
    peak_flops = devices.peak_flops(device, vae.dtype)
    print(f"{len(ready)} batches, as {'x'.join(map(str, shapes[0]))}, {vae.dtype}, {device}")
    print_header("", "s, median", "min to max", "frames/s", "times bare", *devices.COLUMNS)
    usage = devices.measure_usage(alone, device, bare)
    ready.clear()
    vae.to("cpu")
    usages = {"bare": usage, "stage": replace(usage, seconds=ours)}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        busy = without_start(devices.kernel_seconds) / ours
        usages["stage"] = replace(usages["stage"], busy=busy, peak=torch.cuda.max_memory_allocated(device))
    for side, usage in usages.items():
        spread = f"{min(turns[side]):.2f} to {max(turns[side]):.2f}"
        rates = (f"{frames / usage.seconds:.1f}", f"{usage.seconds / bare:.2f}")
        print_row(side, f"{usage.seconds:.2f}", spread, *rates, *usage.cells(peak_flops))


def measure_side(side: str, path: Path) -> tuple[float, float]:
    """(seconds, processor seconds) of a side in separate processes, including orphaned processes."""
    earlier_children, before = child_pids(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "benchmarks.latents", "--child", side, "--config", str(path)]
    seconds, _ = time_call(lambda: subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}))
    while orphans := child_pids() - earlier_children:  # this process inherits them, because it is a subreaper
        os.waitpid(orphans.pop(), 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def child_pids() -> set[int]:
    return {int(number) for number in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def compare_processes(folder: Path, options: argparse.Namespace) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    model = make_checkpoint(folder / "model", options.channels)
    one, full = (make_project(folder / str(count), count, options.side or 512, model) for count in (1, options.images))

    def without_start(side: str) -> tuple[float, float]:
        start, total = measure_side(side, one), measure_side(side, full)
        return total[0] - start[0], total[1] - start[1]

    times = common.measure_by_turns({side: partial(without_start, side) for side in ("bare", "stage")}, options.repeat)
    print_header("", "time", "processor", "ratio")
    medians_by_side = {side: medians(turns) for side, turns in times.items()}
    for side, (seconds, busy) in medians_by_side.items():
        ratio = "" if side == "bare" else f"{busy / medians_by_side['bare'][1]:.2f} (processor; limit 1.15)"
        print_row(f"{side}, {options.images} images", f"{seconds:.2f} s", f"{busy:.2f} s", ratio)


def compare_on_device(folder: Path, options: argparse.Namespace) -> None:
    model = tiny_models.build(options.kind, folder / "model")
    if options.true_size:
        tiny_models.build(options.kind, model, size="true", dtype=options.precision, only=("vae",))
    side = options.side or KINDS[options.kind]
    one, full = (
        make_project(folder / str(count), count, side, model, options.kind, device=options.device)
        for count in (1, options.images)
    )
    benchmark_on_device(one, full, options.repeat)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = common.make_parser(__doc__, repeat=3)
    parser.add_argument("--images", type=int, default=200, help="number of images or clips, at least 2")
    parser.add_argument(
        "--side", type=int, help="side of a square in pixels; default: 512, with --device the usual size"
    )
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--device", help="cuda or cpu; see above")
    parser.add_argument("--kind", choices=KINDS, default="kandinsky5-image-t2i", help="with --device")
    parser.add_argument("--true-size", action="store_true", help="with --device")
    parser.add_argument("--child", choices=("stage", "bare"), help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.precision = "float32" if options.kind == "sana" else "bfloat16"
    if options.child:
        {"stage": run_stage, "bare": run_bare}[options.child](options.config)
        return
    with tempfile.TemporaryDirectory() as name:
        (compare_on_device if options.device else compare_processes)(Path(name), options)


if __name__ == "__main__":
    main()
