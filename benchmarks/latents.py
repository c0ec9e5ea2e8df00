"""encode-latents beside the least that could be done instead, in one run: total processor time and time.

    python -m benchmarks.latents [--images 200] [--side 512] [--repeat 3] [--channels 32]
    python -m benchmarks.latents --device cuda --true-size [--kind kandinsky5-video-t2v] [--images 200]

Without --device both sides read the same JPEGs and encode them with the same autoencoder, Flux's architecture with
fewer channels and random weights, in batches of the same shapes. Bare: one process that decodes, resizes, normalises
and calls `vae.encode`. Each side runs once with one image and once with all, in processes of their own; what the first
takes (imports, loading) is taken off. Processor time is that of all processes of a side. Linux only.

With --device, in one process and by turns: the stage over all pictures or clips, less what it takes with one, beside
`vae.encode` alone, on tensors of the same batches that are on the device already; and what that asks of the device.
--true-size: the autoencoder's published shape, in the precision that the stage has by default.
"""

import argparse
import ctypes
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.discover import make_jpeg, make_video, unique_jpeg, unique_video
from schemas.cli.console import Console, Options
from schemas.config.loading import load_config

PR_SET_CHILD_SUBREAPER = 36
SIZES = ((1152, 896), (1600, 1200), (1024, 1408))
#: kind of checkpoint -> side of a square of as many pixels as the usual size has (of clips 768x512)
KINDS = {"kandinsky5-image-t2i": 1024, "kandinsky5-video-t2v": 627, "sana": 1024}
FRAMES = 61


def make_checkpoint(folder: Path, channels: int) -> Path:
    """A tiny checkpoint whose autoencoder has `channels` on its first level."""
    import torch
    from diffusers import AutoencoderKL

    from examples import tiny_models

    tiny_models.build("kandinsky5-image-t2i", folder)
    torch.manual_seed(0)
    config = dict(AutoencoderKL.load_config(folder / "vae"))
    config["block_out_channels"] = [channels, 2 * channels, 4 * channels, 4 * channels]
    levels = len(config["block_out_channels"])
    config |= {"down_block_types": ["DownEncoderBlock2D"] * levels, "up_block_types": ["UpDecoderBlock2D"] * levels}
    config["norm_num_groups"] = min(32, channels)
    AutoencoderKL.from_config(config).save_pretrained(folder / "vae")
    return folder


def make_project(
    folder: Path, count: int, side: int, model: Path, kind: str = "kandinsky5-image-t2i", **resources: str
) -> Path:
    """A planned project of so many pictures or clips; the configuration's path."""
    from stages import bucket, discover

    media = folder / "media"
    media.mkdir(parents=True)
    clips = "video" in kind
    some = [make_video(folder, 1152, 768)] if clips else [make_jpeg(*size, seed) for seed, size in enumerate(SIZES)]
    for number in range(count):
        data = (unique_video if clips else unique_jpeg)(some[number % len(some)], number)
        (media / f"{number:05d}.{'mp4' if clips else 'jpg'}").write_bytes(data)
        (media / f"{number:05d}.txt").write_text(f"picture {number}")
    dataset: dict = {"id": "media", "instance_data_dir": "media", "resolution": side}
    if clips:
        dataset |= {"dataset_type": "video", "video": {"num_frames": FRAMES, "clip": "head"}}
    precision = "float32" if resources.get("device", "cpu") == "cpu" else "bfloat16"
    config = {
        "root": "work",
        "model": {"family": kind.rpartition("-")[0] or kind, "path": str(model), "precision": precision},
        "datasets": [dataset],
        "stages": {"encode-latents": {"threads": 1, **resources}},
    }
    path = folder / "pipeline.json"
    path.write_text(json.dumps(config))
    for program in (discover.run, bucket.run):
        with open(os.devnull, "w") as silent:
            program(load_config(path), Options(path), Console(stderr=silent))
    return path


def run_stage(path: Path) -> None:
    from stages import encode_latents

    with open(os.devnull, "w") as silent:
        encode_latents.run(load_config(path), Options(path), Console(stderr=silent))


def run_bare(path: Path) -> None:
    import torch
    from diffusers import AutoencoderKL

    from cache.store import Store
    from schemas.geometry import Bucket
    from stages.media import pixels
    from stages.media.image import load_image
    from stages.media.sample_reader import parse_crop
    from stages.planning.plan_lookup import current_plan

    torch.set_num_threads(1)
    config = load_config(path)
    vae = AutoencoderKL.from_pretrained(Path(config.model.source) / "vae").eval()
    plan = current_plan(Store(config.root), config)
    for unit in plan.units("latents"):
        bucket = Bucket.parse(unit.bucket)
        size = max(1, config.latents.batch_pixels // (bucket.width * bucket.height))
        for start in range(0, len(unit.members), size):
            batch = []
            for name in unit.members[start : start + size]:
                row = plan.samples[name]
                picture = load_image(path.parent / "media" / row["path"])
                batch.append(pixels.normalise_pixels(pixels.resize_and_crop(picture, *parse_crop(row["geometry"]))))
            with torch.no_grad():
                vae.encode(torch.from_numpy(np.stack(batch))).latent_dist.sample()


def batch_shapes(path: Path) -> list[tuple[int, int, int, int]]:
    """Of the stage's batches: members, frames, height, width."""
    from cache.store import Store
    from schemas.geometry import Bucket
    from stages.planning.plan_lookup import current_plan

    config, found = load_config(path), []
    for unit in current_plan(Store(config.root), config).units("latents"):
        bucket = Bucket.parse(unit.bucket)
        size = max(1, config.latents.batch_pixels // (bucket.frames * bucket.width * bucket.height))
        for start in range(0, len(unit.members), size):
            members = min(size, len(unit.members) - start)
            found.append((members, bucket.frames, bucket.height, bucket.width))
    return found


def benchmark_on_device(one: Path, all_: Path, repeat: int) -> None:
    """The stage and `vae.encode` on ready tensors, by turns."""
    import torch

    from benchmarks import device_usage as devices
    from stages.encoding import model_loading
    from stages.encoding.vae import base

    config = load_config(all_)
    device = model_loading.select_device(config.stages.encode_latents)
    vae = base.load_autoencoder(config, device)._vae
    batches = batch_shapes(all_)
    clips, frames = config.model.family_spec.video, sum(members * frames for members, frames, _, _ in batches)
    ready = [torch.rand(b, 3, t, h, w, device=device, dtype=vae.dtype) * 2 - 1 for b, t, h, w in batches]
    ready = ready if clips else [batch[:, :, 0] for batch in ready]

    @torch.no_grad()
    def alone() -> None:
        for batch in ready:
            vae.encode(batch)

    def staged(path: Path) -> None:
        if (work := path.parent / "work" / "latents").exists():
            shutil.rmtree(work)
        run_stage(path)

    others = 1 - batches[0][1] / frames  # the share of all but one
    turns: dict[str, list[float]] = {"bare": [], "stage": []}
    for turn in range(repeat + 1):
        seconds = devices.time_call(alone, device)
        whole = devices.time_call(lambda: staged(all_), device) - devices.time_call(lambda: staged(one), device)
        for side, found in (("bare", seconds), ("stage", whole / others)):
            turns[side] += [found] if turn else []
    bare, ours = (statistics.median(turns[side]) for side in ("bare", "stage"))
    able = devices.peak_flops(device, vae.dtype)
    print(f"{len(ready)} batches, as {'x'.join(map(str, batches[0]))}, {vae.dtype}, {device}")
    print(f"| | s, median | least to most | frames/s | times bare | {devices.TABLE_HEADER} |\n" + "|---" * 9 + "|")
    least = devices.measure_usage(alone, device, bare)
    ready.clear()
    vae.to("cpu")
    seen = {"bare": least, "stage": replace(least, seconds=ours)}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        busy = (
            devices.kernel_seconds(lambda: staged(all_), device) - devices.kernel_seconds(lambda: staged(one), device)
        ) / others
        seen["stage"] = replace(seen["stage"], busy=busy / ours, peak=torch.cuda.max_memory_allocated(device))
    for side, asked in seen.items():
        spread, ratio = f"{min(turns[side]):.2f} to {max(turns[side]):.2f}", asked.seconds / bare
        cells = f"{asked.seconds:.2f} | {spread} | {frames / asked.seconds:.1f} | {ratio:.2f} | {asked.cells(able)}"
        print(f"| {side} | {cells} |")


def measure_side(side: str, path: Path) -> tuple[float, float]:
    """(seconds, processor seconds) of a side in processes of its own, orphans included."""
    work = path.parent / "work" / "latents"
    if work.exists():
        shutil.rmtree(work)
    ours, before = child_pids(), resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.latents", "--child", side, "--config", str(path)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    seconds = time.perf_counter() - began
    while orphans := child_pids() - ours:
        for process in orphans:
            os.waitpid(process, 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def child_pids() -> set[int]:
    """Processes of this one, and orphans of those, which it inherits."""
    return {int(number) for number in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def compare_processes(folder: Path, options: argparse.Namespace) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    model = make_checkpoint(folder / "model", options.channels)
    one, all_ = (make_project(folder / str(count), count, options.side or 512, model) for count in (1, options.images))
    rows = []
    for _ in range(options.repeat):
        for side in ("bare", "stage"):
            alone = measure_side(side, one)
            whole = measure_side(side, all_)
            rows.append((side, *(there - here for here, there in zip(alone, whole, strict=True))))
    print("| | time | processor | ratio |\n|---|---|---|---|")
    found = {
        side: [statistics.median(row[place] for row in rows if row[0] == side) for place in (1, 2)]
        for side in ("bare", "stage")
    }
    for side, (seconds, busy) in found.items():
        ratio = "" if side == "bare" else f"{busy / found['bare'][1]:.2f} (processor; limit 1.15)"
        print(f"| {side}, {options.images} images | {seconds:.2f} s | {busy:.2f} s | {ratio} |")


def compare_on_device(folder: Path, options: argparse.Namespace) -> None:
    from examples import tiny_models

    model = tiny_models.build(options.kind, folder / "model")
    if options.true_size:
        tiny_models.build(options.kind, model, size="true", dtype=options.precision, only=("vae",))
    side = options.side or KINDS[options.kind]
    one, all_ = (
        make_project(folder / str(count), count, side, model, options.kind, device=options.device)
        for count in (1, options.images)
    )
    benchmark_on_device(one, all_, options.repeat)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200, help="or clips; 2 or more")
    parser.add_argument("--side", type=int, help="default: 512; with --device the usual one")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--device", help="cuda, or cpu; see above")
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
