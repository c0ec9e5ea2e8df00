"""Rate at which samples become batches: the trainer's reader compared with a bare copy and with other formats.

    python -m benchmarks.data_read [--case NAME] [--mib 512] [--threads 1,2] [--repeat 5] [--tiny] [--root DIR]

A sample is a latent and a text of 20 to 250 tokens x 3584, bfloat16; a step has four samples. Every way reads the same
samples, in random order if it can, with the same number of threads, into batches; files are in the page cache. Ways
take turns; figures are medians, in GB of tensors per second. The bare loops have the offset of each tensor, copy into
as much memory as the reader's batches need, and clear the padding; the reader finds, checks, pads and stacks. Takes
about 4 minutes.
"""

import gzip
import mmap
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import memmove, memset
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from benchmarks.common import make_parser, measure_by_turns, print_header, print_row
from benchmarks.tensor_formats import SHARDS, Samples, make_samples
from trainer.data import BatchReader

CASES = {"image": ((16, 1, 128, 128), "1024x1024", 4), "video": ((16, 16, 64, 96), "768x512@61", 1)}
BARE_COPY, BARE_HASH = "bare copy", "bare copy + xxh3"
READER = "the reader"
#: Way -> goal for the ratio of the reader's rate to its rate.
SLOWER = {
    "webdataset, tars": 1.0,
    "safetensors, a file each": 0.0,
    "torch.save + gzip, a file each": 1.0,
    "datasets, random, unchecked": 1.0,
}


def in_threads(threads: int, orders: Sequence[Sequence[int]], read: Callable[[Sequence[int]], object]) -> float:
    """Seconds to call `read` for all `orders`, in `threads` threads."""
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        list(pool.map(read, orders))
        return time.perf_counter() - start


def divide(order: Sequence[int], threads: int) -> list[Sequence[int]]:
    return [order[thread::threads] for thread in range(threads)]


def bare_loop(samples: Samples, threads: int, order: Sequence[int], hashed: bool, is_remapped: bool) -> float:
    """Seconds to copy tensors at known offsets into allocated memory. hashed: whether tensors are hashed, too.
    is_remapped: whether files are mapped again, so that the map has no page tables."""
    samples_ahead = STEPS_AHEAD * STEP  # samples in memory at once, like with the reader
    largest = max(size for each in samples.places for _, _, size in each)
    targets = [np.zeros((2 * samples_ahead // threads, largest), np.uint8) for _ in range(threads)]

    def open_maps() -> list[np.ndarray]:
        opened = []
        for path in samples.files:
            with open(path, "rb") as file:
                opened.append(np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8))
        return opened

    maps = open_maps() if is_remapped else MAPS.setdefault(str(samples.root), open_maps())
    bases = [each.ctypes.data for each in maps]

    def copy(part: tuple[Sequence[int], np.ndarray]) -> None:
        addresses, turn = [row.ctypes.data for row in part[1]], 0
        views = [row.data for row in part[1]]
        for number in part[0]:
            for file, offset, size in samples.places[number]:
                memmove(addresses[turn], bases[file] + offset, size)
                memset(addresses[turn] + size, 0, samples.padding[number] * (turn % 2))  # only for texts
                if hashed:
                    xxhash.xxh3_128_digest(views[turn][:size])
                turn = (turn + 1) % len(views)  # latents and texts take turns

    parts: Any = list(zip(divide(order, threads), targets, strict=True))
    return in_threads(threads, parts, copy)  # type: ignore[arg-type]


STEP = 4  # samples per optimizer step
STEPS_AHEAD = 4  # two steps that are read ahead, the current step, and the step that is being read
MAPS: dict[str, list[np.ndarray]] = {}


def read_ours(samples: Samples, threads: int, order: Sequence[int], reader: BatchReader) -> float:
    """Seconds to read steps by the trainer's reader. Each thread reads a share, and keeps the last steps like reading
    ahead does."""
    size, starts = samples.batch, range(0, len(order) - STEP + 1, STEP)
    rows = np.array(order)
    texts = samples.data.row_texts.first(rows)

    def read(numbers: Sequence[int]) -> None:
        batches = deque[object](maxlen=max(1, STEPS_AHEAD // threads - 1))  # in addition to the step that is being read
        for number in numbers:
            shares = [slice(first, first + size) for first in range(number, number + STEP, size)]
            batches.append([reader.read(rows[share], texts[share], samples.bucket) for share in shares])

    return in_threads(threads, divide(starts, threads), read)


def read_webdataset(samples: Samples, threads: int, order: Sequence[int]) -> float:
    import webdataset
    from safetensors.torch import load

    def read(files: Sequence[int]) -> None:
        for number in files:
            paths = [f"{samples.root}/tars/{kind}/{'f' * 24}/u{number}.tar" for kind in ("latents", "text")]
            tars = (iter(webdataset.WebDataset(path, shardshuffle=False)) for path in paths)
            pairs = (
                (load(latent_row["safetensors"]), load(text_row["safetensors"]))
                for latent_row, text_row in zip(*tars, strict=True)
            )
            while rows := list(islice(pairs, samples.batch)):
                stack_rows([latents["latent"] for latents, _ in rows], [texts["embeds"] for _, texts in rows])

    return in_threads(threads, divide(range(SHARDS), threads), read)


def stack_rows(latents: Sequence[torch.Tensor], texts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a batch like a data loader."""
    return torch.stack(list(latents)), torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)


def read_single(samples: Samples, threads: int, order: Sequence[int], compressed: bool) -> float:
    from safetensors.torch import load_file

    def load_one(number: int, name: str) -> torch.Tensor:
        path = samples.root / "single" / f"{number}.{name}"
        if not compressed:
            return load_file(f"{path}.safetensors")[name]  # a map of the file
        with gzip.open(f"{path}.pt.gz") as file:
            return torch.load(file, weights_only=True)

    def read(batches: Sequence[Sequence[int]]) -> None:
        for numbers in batches:
            stack_rows(*([load_one(number, name) for number in numbers] for name in ("latent", "embeds")))

    return in_threads(threads, divide(samples.batches(order), threads), read)


def read_datasets(samples: Samples, threads: int, order: Sequence[int], tables: tuple[Any, Any]) -> float:
    """Seconds to read the shards by `datasets`, with its bytes as tensors."""
    parts = list(zip(tables, ("latent", "embeds"), (samples.shape, (-1, samples.width)), strict=True))

    def load_one(number: int, table: Any, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.frombuffer(table[number][name], dtype=torch.bfloat16).view(shape)

    def read(batches: Sequence[Sequence[int]]) -> None:
        for numbers in batches:
            stack_rows(*([load_one(number, *part) for number in numbers] for part in parts))

    return in_threads(threads, divide(samples.batches(order), threads), read)


def open_datasets(samples: Samples) -> tuple[Any, Any]:
    import datasets

    datasets.disable_progress_bars()
    tables = []
    for kind, name in (("latents", "latent"), ("text", "embeds")):
        files = [f"{samples.root}/{kind}/{'f' * 24}/u{unit}.arrow" for unit in range(SHARDS)]
        cache = str(samples.root / "datasets")
        tables.append(
            datasets.load_dataset("arrow", data_files=files, split="train", cache_dir=cache).select_columns(name)
        )
    return tables[0], tables[1]


def make_ways(samples: Samples, threads: int) -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield (name, function that returns GB/s)."""
    order = samples.order
    few = list(range(min(16, len(samples))))
    opened = open_datasets(samples)

    def rate(read: Callable[..., float], *options: Any, numbers: Sequence[int] = order) -> Callable[[], float]:
        size = sum(samples.bytes[number] for number in numbers) / 1e9
        return lambda: size / read(samples, threads, numbers, *options)

    yield BARE_COPY, rate(bare_loop, False, False)
    yield BARE_HASH, rate(bare_loop, True, False)
    yield BARE_HASH + ", mapped anew", rate(bare_loop, True, True)
    yield READER, rate(read_ours, BatchReader(samples.data))
    yield "webdataset, tars", rate(read_webdataset)
    yield "safetensors, a file each", rate(read_single, False)
    yield "torch.save + gzip, a file each", rate(read_single, True, numbers=few)
    yield "datasets, random, unchecked", rate(read_datasets, opened)


def measure(name: str, samples: Samples, threads: int, repeat: int) -> None:
    """Print the rows of one case. Ratios are medians of the ratios within each turn."""
    rates_by_way = measure_by_turns(dict(make_ways(samples, threads)), repeat, uncounted=1)
    for way, rates in rates_by_way.items():
        compared, bound = "", ""
        if way == READER:
            ratio = statistics.median(rate / base for rate, base in zip(rates, rates_by_way[BARE_HASH], strict=True))
            compared = f"{ratio:.2f} of {BARE_HASH}"
        elif way in SLOWER:
            # These formats do not check the data.
            ratio = statistics.median(ours / theirs for ours, theirs in zip(rates_by_way[READER], rates, strict=True))
            compared, bound = f"the reader is {ratio:.1f} times as fast", f">= {SLOWER[way]:g}"
        print_row(name, threads, way, f"{statistics.median(rates):.2f}", compared, bound)


def main() -> None:
    parser = make_parser(__doc__, repeat=5, root=True)
    parser.add_argument("--case", choices=CASES, help="default: all cases")
    parser.add_argument("--mib", type=int, default=512, help="MiB of tensors in each case")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="small tensors, to test the program")
    options = parser.parse_args()
    torch.set_num_threads(1)  # only the threads that read are used
    print_header("case", "threads", "way", "GB/s", "compared", "goal")
    for name, (shape, bucket, batch) in CASES.items():
        if options.case in (None, name):
            with tempfile.TemporaryDirectory(dir=options.root) as root:
                shape, mib = ((16, 1, 8, 8), 1) if options.tiny else (shape, options.mib)
                samples = make_samples(Path(root), shape, bucket, batch, mib, options.tiny)
                for threads in map(int, options.threads.split(",")):
                    measure(name, samples, threads, options.repeat)


if __name__ == "__main__":
    main()
