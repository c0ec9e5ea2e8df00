"""encode-latents beside the least that could be done instead, in one run: total processor time and time.

    python -m benchmarks.latents [--images 200] [--side 512] [--repeat 3] [--channels 32]

Both sides read the same JPEGs and encode them with the same autoencoder, Flux's architecture with fewer channels and
random weights, in batches of the same shapes. Bare: one process that decodes, resizes, normalises and calls
`vae.encode`. Each side runs once with one image and once with all, in processes of their own; what the first takes
(imports, loading) is taken off. Processor time is that of all processes of a side. Linux only.
"""

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.discover import jpeg
from schemas.console import Console, Options
from schemas.loading import load

PR_SET_CHILD_SUBREAPER = 36
SIZES = ((1152, 896), (1600, 1200), (1024, 1408))


def checkpoint(folder: Path, channels: int) -> Path:
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


def project(folder: Path, images: int, side: int, model: Path) -> Path:
    """A planned project of so many pictures; the configuration's path."""
    from stages import bucket, discover

    media = folder / "media"
    media.mkdir(parents=True)
    kinds = [jpeg(*size, seed) for seed, size in enumerate(SIZES)]
    for number in range(images):
        data = kinds[number % len(kinds)]
        (media / f"{number:05d}.jpg").write_bytes(data[:2] + b"\xff\xfe\x00\x0a" + b"%08d" % number + data[2:])
        (media / f"{number:05d}.txt").write_text(f"picture {number}")
    config = {
        "root": "work",
        "model": {"family": "kandinsky5-image", "path": str(model), "precision": "float32"},
        "datasets": [{"id": "media", "instance_data_dir": "media", "resolution": side}],
        "stages": {"encode-latents": {"threads": 1}},
    }
    path = folder / "pipeline.json"
    path.write_text(json.dumps(config))
    for program in (discover.run, bucket.run):
        with open(os.devnull, "w") as silent:
            program(load(path), Options(path), Console(stderr=silent))
    return path


def stage(path: Path) -> None:
    from stages import encode_latents

    with open(os.devnull, "w") as silent:
        encode_latents.run(load(path), Options(path), Console(stderr=silent))


def bare(path: Path) -> None:
    import torch
    from diffusers import AutoencoderKL

    from cache.store import Store
    from schemas.geometry import Bucket
    from stages.media import pixels
    from stages.media.image import load_image
    from stages.media.samples import crop_of
    from stages.plan import current_plan

    torch.set_num_threads(1)
    config = load(path)
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
                batch.append(pixels.normalise(pixels.fit(picture, *crop_of(row["geometry"]))))
            with torch.no_grad():
                vae.encode(torch.from_numpy(np.stack(batch))).latent_dist.sample()


def measured(side: str, path: Path) -> tuple[float, float]:
    """(seconds, processor seconds) of a side in processes of its own, orphans included."""
    work = path.parent / "work" / "latents"
    if work.exists():
        subprocess.run(["rm", "-r", str(work)], check=True)
    ours, before = children(), resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.latents", "--child", side, "--config", str(path)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    seconds = time.perf_counter() - began
    while orphans := children() - ours:
        for process in orphans:
            os.waitpid(process, 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def children() -> set[int]:
    """Processes of this one, and orphans of those, which it inherits."""
    return {int(number) for number in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--child", choices=("stage", "bare"), help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return {"stage": stage, "bare": bare}[options.child](options.config)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    counts = {"one": 1, "all": options.images}
    with tempfile.TemporaryDirectory() as name:
        model = checkpoint(Path(name) / "model", options.channels)
        one, all_ = (project(Path(name) / what, count, options.side, model) for what, count in counts.items())
        rows = []
        for _ in range(options.repeat):
            for side in ("bare", "stage"):
                alone = measured(side, one) if options.images > 1 else (0.0, 0.0)
                whole = measured(side, all_)
                rows.append((side, *(there - here for here, there in zip(alone, whole, strict=True))))
    print("| | time | processor | ratio |\n|---|---|---|---|")
    found = {
        side: [statistics.median(row[place] for row in rows if row[0] == side) for place in (1, 2)]
        for side in ("bare", "stage")
    }
    for side, (seconds, busy) in found.items():
        ratio = "" if side == "bare" else f"{busy / found['bare'][1]:.2f} (processor; limit 1.15)"
        print(f"| {side}, {options.images} images | {seconds:.2f} s | {busy:.2f} s | {ratio} |")
    return None


if __name__ == "__main__":
    main()
