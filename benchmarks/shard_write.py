"""How fast shards are written, beside the disk itself, and how many bytes a sample takes, beside a file for each.

    python -m benchmarks.shard_write [--mib 128] [--shards 2] [--repeat 9] [--captions 100] [--root DIR]

The first table: shards of the same tensors in both formats, whole and durable (synced, renamed), and, by turns with
them, the same bytes written to one file for each shard in blocks of 1 MiB, synced and renamed. Medians of all turns
after one that is not counted. The second: captions of 10 to 250 tokens and the latents of their samples, as shards and
as the files that SimpleTuner and musubi-tuner write for Kandinsky 5 (benchmarks/results/shard_write.md says where that
stands in their sources), made by torch.save and safetensors and counted: `files` is the sum of their sizes, `disk` what
the file system gave them.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.verify import MIB, medians, time_call
from cache import shard, shard_io
from cache.files import replace
from cache.shard import ShardMeta, ShardRow
from cache.store import Store
from cache.tensors import Array

WIDTH, POOLED = 3584, 768  # of Qwen2.5-VL-7B and CLIP-L
LONGEST = 250
FLUX, HUNYUAN = (16, 1, 128, 128), (16, 16, 64, 96)
SQUARES = (64, 96, 128)  # sides of latents of images at 512, 768 and 1024


@dataclass
class Unit:
    """What a shard is made of."""

    columns: dict[str, str]
    rows: list[ShardRow]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for row in self.rows for array in row.tensors.values())

    def write(self, store: Store, name: str, format: str) -> str:
        meta = ShardMeta("latents", "0" * 24, name, "", [row.id for row in self.rows])
        with shard_io.open_writer(store, f"latents/{meta.fingerprint}/{name}", meta, self.columns, format) as out:
            for row in self.rows:
                out.add(row)
            return out.finish()


def random_bfloat16(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    return Array.from_numpy((rng.random(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16), "bfloat16")


def make_latents(shape: tuple[int, ...], count: int) -> Unit:
    rng = np.random.default_rng(0)
    some = [random_bfloat16(shape, rng) for _ in range(min(count, 64))]
    return Unit({"latent": "bfloat16"}, [ShardRow(f"{i:032x}", {"latent": some[i % 64]}) for i in range(count)])


def draw_lengths() -> Iterator[int]:
    """Tokens of captions, each number as likely as any other."""
    rng = np.random.default_rng(0)
    while True:
        yield int(rng.integers(10, LONGEST + 1))


def make_texts(nbytes: int = 0, count: int = 0) -> Unit:
    """As many as there are in `nbytes`, or `count`."""
    rng = np.random.default_rng(0)
    longest = random_bfloat16((LONGEST, WIDTH), rng).numpy()
    rows: list[ShardRow] = []
    for tokens in draw_lengths():
        if len(rows) == count if count else nbytes <= 0:
            break
        pooled = rng.random(POOLED, np.float32)
        tensors = {"embeds": Array.from_numpy(longest[:tokens], "bfloat16"), "pooled": Array.from_numpy(pooled)}
        rows.append(ShardRow(f"{len(rows):032x}", tensors, {"tokens": tokens, "kept": tokens}))
        nbytes -= sum(array.nbytes for array in tensors.values())
    return Unit({"embeds": "bfloat16", "pooled": "float32"}, rows)


def write_plain(folder: Path, data: memoryview, name: str) -> None:
    """Write bytes as fast as the disk takes them, one after the other."""
    temporary = folder / f".{name}"
    with open(temporary, "xb", buffering=0) as file:
        for start in range(0, len(data), MIB):
            file.write(data[start : start + MIB])
        os.fsync(file.fileno())
    replace(str(temporary), str(folder / name))


def disk_usage(folder: Path) -> tuple[int, int]:
    """Bytes of all files below, and bytes that the disk gave them."""
    found = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum(one.st_size for one in found), sum(one.st_blocks * 512 for one in found)


def remove_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            path.unlink()


# --- speed ---


def benchmark_speed(folder: Path, mib: float, shards: int, repeat: int) -> None:
    size = int(mib * MIB)
    units = {
        f"Flux latents {FLUX}": make_latents(FLUX, max(1, size // (2 * int(np.prod(FLUX))))),
        f"HunyuanVideo latents {HUNYUAN}": make_latents(HUNYUAN, max(1, size // (2 * int(np.prod(HUNYUAN))))),
        f"texts of 10 to {LONGEST} tokens": make_texts(size),
    }
    print("| | written as | MiB/s, median | least to most | s of the CPU a GiB | of the disk's speed | bytes |")
    print("|---|---|---:|---|---:|---:|---:|")
    for name, unit in units.items():
        for way, cells in compare_formats(folder, unit, shards, repeat).items():
            print(f"| {name} | {way} | {' | '.join(cells)} |", flush=True)


def compare_formats(folder: Path, unit: Unit, shards: int, repeat: int) -> dict[str, list[str]]:
    """Way to write -> what is said of it."""
    store = Store(folder)
    data = memoryview(b"".join(array.raw() for row in unit.rows for array in row.tensors.values()))
    ways: dict[str, Callable[[str], object]] = {"blocks of 1 MiB": partial(write_plain, folder, data)}
    ways |= {format: partial(unit.write, store, format=format) for format in shard.SUFFIXES}
    turns: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    sizes = {}
    for turn in range(repeat + 1):
        for way, write in ways.items():
            found = time_call(lambda write=write: [write(f"unit-{number}") for number in range(shards)])
            turns[way] += [found] if turn else []
            sizes[way] = disk_usage(folder)[0] / (unit.nbytes * shards)
            remove_files(folder)
    mib, said = unit.nbytes * shards / MIB, {}
    base, _ = medians(turns["blocks of 1 MiB"])
    for way, found_turns in turns.items():
        seconds, cpu = medians(found_turns)
        rates = [mib / seconds for seconds, _ in found_turns]
        said[way] = [f"{mib / seconds:,.0f}", f"{min(rates):,.0f} to {max(rates):,.0f}", f"{cpu / mib * 1024:.2f}"]
        said[way] += [f"{base / seconds:.2f}", f"{sizes[way]:.4f}"]
    return said


# --- bytes of a sample ---


def torch_array(array: Array) -> Any:
    import torch

    # .copy(): torch warns of arrays that are not to be written.
    return torch.from_numpy(array.numpy().copy()).view(getattr(torch, array.dtype))


def write_like_simpletuner(folder: Path, captions: Unit, pictures: list[Unit], pad: int, dtype: str) -> None:
    """One .pt a caption, padded, and one .pt a sample."""
    import torch

    wanted = getattr(torch, dtype)
    for row in captions.rows:
        embeds = torch_array(row.tensors["embeds"])
        padded = torch.zeros(1, pad, WIDTH, dtype=wanted)
        padded[0, : len(embeds)] = embeds
        pooled = torch_array(row.tensors["pooled"])[None].to(wanted)
        mask = torch.ones(1, pad, dtype=torch.int32)
        text = {"prompt_embeds": padded, "pooled_prompt_embeds": pooled, "attention_masks": mask}
        torch.save(text, folder / f"{row.id}-kandinsky5-video.pt")
    for number, unit in enumerate(pictures):
        for row in unit.rows:
            latent = torch_array(row.tensors["latent"])
            torch.save(latent.clone(), folder / f"{row.id}-{number}.pt")


def write_like_musubi(folder: Path, captions: Unit, pictures: list[Unit]) -> None:
    """Two .safetensors an item: the text at its true length, and the latents with the first and the last again."""
    import torch
    from safetensors.torch import save_file

    about = {"architecture": "kandinsky5", "format_version": "1.0.1"}
    for number, unit in enumerate(pictures):
        for text, picture in zip(captions.rows, unit.rows, strict=True):
            embeds = torch_array(text.tensors["embeds"])
            mask = torch.ones(len(embeds), dtype=torch.bool)
            pooled = torch_array(text.tensors["pooled"])
            tensors = {"text_embeds_bf16": embeds, "pooled_embed_fp32": pooled, "attention_mask": mask}
            caption = {"caption1": "word " * len(embeds)}
            save_file(tensors, folder / f"{text.id}-{number}_k5_te.safetensors", about | caption)
            latent = torch_array(picture.tensors["latent"])
            size = "x".join(str(side) for side in latent.shape[1:])
            twice = torch.cat([latent[:, :1], latent[:, -1:]], 1)
            tensors = {f"latents_{size}_bf16": latent, f"latents_image_2x{size.split('x', 1)[1]}_bf16": twice}
            save_file(tensors, folder / f"{text.id}-{number}_k5.safetensors", about)


def write_shards(folder: Path, captions: Unit, pictures: list[Unit], format: str) -> None:
    store = Store(folder)
    captions.write(store, "texts", format)
    for number, unit in enumerate(pictures):
        unit.write(store, f"latents-{number}", format)


STORAGE_FORMATS: dict[str, Callable[[Path, Unit, list[Unit]], None]] = {
    **{f"shards, {format}": partial(write_shards, format=format) for format in shard.SUFFIXES},
    "musubi-tuner: a file an item, true length, bfloat16": write_like_musubi,
    "SimpleTuner: a file a caption, padded to 256, bfloat16": partial(
        write_like_simpletuner, pad=256, dtype="bfloat16"
    ),
    "the same, padded to 512": partial(write_like_simpletuner, pad=512, dtype="bfloat16"),
    "the same, padded to 512, float32": partial(write_like_simpletuner, pad=512, dtype="float32"),
}


def benchmark_size(folder: Path, count: int) -> None:
    captions = make_texts(count=count)
    sets = {
        "images 1024x1024": [make_latents(FLUX, count)],
        "images at 512, 768 and 1024": [make_latents((16, 1, side, side), count) for side in SQUARES],
        "clips 512x768, 61 frames": [make_latents(HUNYUAN, count)],
    }
    print("\n| samples | stored as | files | bytes a sample: files | disk | times the shards |")
    print("|---|---|---:|---:|---:|---:|")
    for name, pictures in sets.items():
        samples, base = sum(len(unit.rows) for unit in pictures), 0
        for way, write in STORAGE_FORMATS.items():
            write(folder, captions, pictures)
            number = sum(path.is_file() for path in folder.rglob("*"))
            size, given = disk_usage(folder)
            remove_files(folder)
            base = base or given
            cells = f"{number:,} | {size // samples:,} | {given // samples:,} | {given / base:.2f}"
            print(f"| {name} | {way} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=128, help="of a shard's tensors")
    parser.add_argument("--shards", type=int, default=2, help="written in each turn")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--captions", type=int, default=100, help="of the second table; 0: leave it out")
    parser.add_argument("--root", type=Path, help="a folder on the disk to be measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.root) as folder:
        if options.repeat:
            benchmark_speed(Path(folder), options.mib, options.shards, options.repeat)
        if options.captions:
            benchmark_size(Path(folder), options.captions)


if __name__ == "__main__":
    main()
