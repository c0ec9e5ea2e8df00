"""How fast shards are written, compared with the disk, and how many bytes a sample takes, compared with other trainers.

    python -m benchmarks.shard_write [--mib 128] [--shards 2] [--repeat 9] [--captions 100] [--root DIR]

The first table: shards of the same tensors in both formats, synced and renamed, and, by turns with them, the same bytes
written to one file for each shard in blocks of 1 MiB, synced and renamed. Medians after one turn that is not counted.
The second: captions of 10 to 250 tokens and the latents of their samples, as shards and as the files that SimpleTuner
and musubi-tuner write for Kandinsky 5 (benchmarks/results/shard_write.md names the places in their sources), made by
torch.save and safetensors: `files` is the sum of their sizes, `disk` the space that the file system allocated.
"""

import math
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.common import MIB, make_rows, medians, print_header, print_row, time_call
from cache.shards import shard
from cache.shards.shard import ShardMeta, ShardRow
from cache.shards.tensors import Array
from cache.store.files import replace
from cache.store.store import Store

WIDTH, POOLED = 3584, 768  # of Qwen2.5-VL-7B and CLIP-L
LONGEST = 250
FLUX, HUNYUAN = (16, 1, 128, 128), (16, 16, 64, 96)
SQUARES = (64, 96, 128)  # sides of latents of images at 512, 768 and 1024

Rows = list[ShardRow]


def write_shard(folder: Path, format: str, rows: Rows, name: str) -> None:
    meta = ShardMeta("latents", "0" * 24, name, "", [row.id for row in rows])
    common.write_shard(Store(folder), meta, rows, format)


def make_texts(nbytes: int = 0, count: int = 0) -> Rows:
    """Texts of 10 to LONGEST tokens, each length equally likely: `count`, or as many as fill `nbytes`."""
    rng, lengths = np.random.default_rng(0), np.random.default_rng(0)
    longest = common.random_bfloat16((LONGEST, WIDTH), rng).numpy()
    rows: Rows = []
    while len(rows) < count if count else nbytes > 0:
        tokens = int(lengths.integers(10, LONGEST + 1))
        pooled = rng.random(POOLED, np.float32)
        tensors = {"embeds": Array.from_numpy(longest[:tokens], "bfloat16"), "pooled": Array.from_numpy(pooled)}
        rows.append(ShardRow(f"{len(rows):032x}", tensors, {"tokens": tokens, "kept": tokens}))
        nbytes -= sum(array.nbytes for array in tensors.values())
    return rows


def write_plain(folder: Path, data: memoryview, name: str) -> None:
    """Write bytes in blocks, synced and renamed."""
    temporary = folder / f".{name}"
    with open(temporary, "xb", buffering=0) as file:
        for start in range(0, len(data), MIB):
            file.write(data[start : start + MIB])
        os.fsync(file.fileno())
    replace(str(temporary), str(folder / name))


def remove_files(folder: Path) -> tuple[int, int, int]:
    """Remove all files below: their number, bytes, and bytes that the file system allocated."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    found = [path.stat() for path in paths]
    for path in paths:
        path.unlink()
    return len(paths), sum(stat.st_size for stat in found), sum(stat.st_blocks * 512 for stat in found)


# --- speed ---


def benchmark_speed(folder: Path, mib: float, shards: int, repeat: int) -> None:
    size = int(mib * MIB)
    units = {
        f"Flux latents {FLUX}": make_rows("latent", FLUX, max(1, size // (2 * math.prod(FLUX)))),
        f"HunyuanVideo latents {HUNYUAN}": make_rows("latent", HUNYUAN, max(1, size // (2 * math.prod(HUNYUAN)))),
        f"texts of 10 to {LONGEST} tokens": make_texts(size),
    }
    print_header("", "written as", "MiB/s, median", "min to max", "CPU s per GiB", "of the disk's speed", "bytes")
    for name, rows in units.items():
        compare_formats(folder, name, rows, shards, repeat)


def compare_formats(folder: Path, name: str, rows: Rows, shards: int, repeat: int) -> None:
    data = memoryview(b"".join(array.raw() for row in rows for array in row.tensors.values()))

    def measure(write: Callable[[str], None]) -> tuple[float, float, float]:
        """Seconds, processor seconds, and bytes of files for each byte of tensors."""
        seconds, cpu = time_call(lambda: [write(f"unit-{number}") for number in range(shards)])
        return seconds, cpu, remove_files(folder)[1] / (len(data) * shards)

    ways = {"blocks of 1 MiB": partial(measure, partial(write_plain, folder, data))}
    ways |= {format: partial(measure, partial(write_shard, folder, format, rows)) for format in shard.SUFFIXES}
    found, mib = common.measure_by_turns(ways, repeat, uncounted=1), len(data) * shards / MIB
    base = medians(found["blocks of 1 MiB"])[0]
    for way, turns in found.items():
        seconds, cpu, size = medians(turns)
        rates = sorted(mib / turn[0] for turn in turns)
        speed = [f"{mib / seconds:,.0f}", f"{rates[0]:,.0f} to {rates[-1]:,.0f}", f"{cpu / mib * 1024:.2f}"]
        print_row(name, way, *speed, f"{base / seconds:.2f}", f"{size:.4f}")


# --- bytes of a sample ---


def torch_array(array: Array) -> Any:
    import torch

    # .copy(): torch warns of read-only arrays.
    return torch.from_numpy(array.numpy().copy()).view(getattr(torch, array.dtype))


def write_like_simpletuner(folder: Path, captions: Rows, pictures: list[Rows], pad: int, dtype: str) -> None:
    """One .pt per caption, padded, and one .pt per sample."""
    import torch

    torch_dtype = getattr(torch, dtype)
    for row in captions:
        embeds = torch_array(row.tensors["embeds"])
        padded = torch.zeros(1, pad, WIDTH, dtype=torch_dtype)
        padded[0, : len(embeds)] = embeds
        pooled = torch_array(row.tensors["pooled"])[None].to(torch_dtype)
        mask = torch.ones(1, pad, dtype=torch.int32)
        text = {"prompt_embeds": padded, "pooled_prompt_embeds": pooled, "attention_masks": mask}
        torch.save(text, folder / f"{row.id}-kandinsky5-video.pt")
    for number, rows in enumerate(pictures):
        for row in rows:
            torch.save(torch_array(row.tensors["latent"]), folder / f"{row.id}-{number}.pt")


def write_like_musubi(folder: Path, captions: Rows, pictures: list[Rows]) -> None:
    """Two .safetensors per item: the text at its true length, and the latents with the first and the last repeated."""
    import torch
    from safetensors.torch import save_file

    metadata = {"architecture": "kandinsky5", "format_version": "1.0.1"}
    for number, rows in enumerate(pictures):
        for text, picture in zip(captions, rows, strict=True):
            embeds = torch_array(text.tensors["embeds"])
            mask = torch.ones(len(embeds), dtype=torch.bool)
            pooled = torch_array(text.tensors["pooled"])
            tensors = {"text_embeds_bf16": embeds, "pooled_embed_fp32": pooled, "attention_mask": mask}
            caption = {"caption1": "word " * len(embeds)}
            save_file(tensors, folder / f"{text.id}-{number}_k5_te.safetensors", metadata | caption)
            latent = torch_array(picture.tensors["latent"])
            size = "x".join(str(side) for side in latent.shape[1:])
            twice = torch.cat([latent[:, :1], latent[:, -1:]], 1)
            tensors = {f"latents_{size}_bf16": latent, f"latents_image_2x{size.split('x', 1)[1]}_bf16": twice}
            save_file(tensors, folder / f"{text.id}-{number}_k5.safetensors", metadata)


def write_shards(folder: Path, captions: Rows, pictures: list[Rows], format: str) -> None:
    for number, rows in enumerate([captions, *pictures]):
        write_shard(folder, format, rows, f"unit-{number}")


STORAGE_FORMATS: dict[str, Callable[[Path, Rows, list[Rows]], None]] = {
    **{f"shards, {format}": partial(write_shards, format=format) for format in shard.SUFFIXES},
    "musubi-tuner: a file per item, true length, bfloat16": write_like_musubi,
    "SimpleTuner: one per caption, padded to 256, bfloat16": partial(write_like_simpletuner, pad=256, dtype="bfloat16"),
    "the same, padded to 512": partial(write_like_simpletuner, pad=512, dtype="bfloat16"),
    "the same, padded to 512, float32": partial(write_like_simpletuner, pad=512, dtype="float32"),
}


def benchmark_size(folder: Path, count: int) -> None:
    captions = make_texts(count=count)
    sets = {
        "images 1024x1024": [make_rows("latent", FLUX, count)],
        "images at 512, 768 and 1024": [make_rows("latent", (16, 1, side, side), count) for side in SQUARES],
        "clips 512x768, 61 frames": [make_rows("latent", HUNYUAN, count)],
    }
    print()
    print_header("samples", "stored as", "files", "bytes per sample: files", "disk", "times the shards")
    for name, pictures in sets.items():
        samples, base = sum(map(len, pictures)), 0
        for way, write in STORAGE_FORMATS.items():
            write(folder, captions, pictures)
            number, size, disk = remove_files(folder)
            base = base or disk
            print_row(name, way, f"{number:,}", f"{size // samples:,}", f"{disk // samples:,}", f"{disk / base:.2f}")


def main() -> None:
    parser = common.make_parser(__doc__, repeat=9, root=True)
    parser.add_argument("--mib", type=float, default=128, help="of a shard's tensors")
    parser.add_argument("--shards", type=int, default=2, help="written in each turn")
    parser.add_argument("--captions", type=int, default=100, help="of the second table; 0: without it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.root) as folder:
        if options.repeat:
            benchmark_speed(Path(folder), options.mib, options.shards, options.repeat)
        if options.captions:
            benchmark_size(Path(folder), options.captions)


if __name__ == "__main__":
    main()
