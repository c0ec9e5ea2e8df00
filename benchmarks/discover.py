"""Compares `discover` with the minimal work, on synthetic files.

    python -m benchmarks.discover
    python -m benchmarks.discover --images 40 --videos 4 --tree 400 --entries 1000 --repeat 1

1. A first scan, including hashing, and a bare loop over the same files with as many processes, which opens each header
   and hashes each file; in turns, medians. Limit 1.5.
2. A second scan of an unchanged tree (images and caption files) and a bare walk with a stat of each file, plus reading
   the table. Limit 2.
3. Ten more files: number of files that are read.
4. Peak memory of a first and of a second scan of synthetic entries, in the process that keeps the table, minus the
   memory after a small scan. "own" is memory that does not belong to a file (RssAnon, sampled every 2 ms); "resident"
   also counts mapped files, which the system can drop (VmHWM). Linux only.
"""

import io
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import xxhash
from PIL import Image

from benchmarks import common
from benchmarks.common import MIB, print_header, print_row, run_silently, time_call, write_config
from cache.store.store import Store
from stages import discover
from stages.discovery import item_reader
from stages.discovery.media_table import media_table_path
from stages.discovery.sources.columns import CHUNK_ROWS, LISTING_SCHEMA

WORKERS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
TABLE = media_table_path("data")

# --- files ---


def make_jpeg(width: int, height: int, seed: int = 0) -> bytes:
    """Make a picture similar to a photograph: smooth, with some grain."""
    random = np.random.default_rng(seed)
    smooth = Image.fromarray(random.integers(0, 256, (height // 64, width // 64, 3), dtype=np.uint8))
    grain = random.integers(-6, 7, (height, width, 1))
    pixels = np.asarray(smooth.resize((width, height), Image.Resampling.BICUBIC)) + grain
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def unique_jpeg(data: bytes, number: int) -> bytes:
    """The same picture with different bytes: a comment after the first marker."""
    return data[:2] + b"\xff\xfe\x00\x0a" + b"%08d" % number + data[2:]


def make_video(width: int = 1280, height: int = 720, frames: int = 72) -> bytes:
    smooth = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 32, 3), dtype=np.uint8))
    wide = np.asarray(smooth.resize((width + 2 * frames, height), Image.Resampling.BICUBIC))
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        with av.open(file.name, "w") as container:
            stream = container.add_stream("libx264", rate=24, options={"crf": "20", "preset": "veryfast"})
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for index in range(frames):
                picture = np.ascontiguousarray(wide[:, 2 * index : 2 * index + width])
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
        return Path(file.name).read_bytes()


def unique_video(data: bytes, number: int) -> bytes:
    return data + b"\x00\x00\x00\x10free%08d" % number


def write_item(path: Path, data: bytes) -> None:
    """Write a file and its caption."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.with_suffix(".txt").write_text(f"item {path.stem}")


def make_config(folder: Path) -> Path:
    dataset = {"id": "data", "instance_data_dir": str(folder / "media"), "dataset_type": "video"}
    stages = {"max_reject_fraction": 0.0, "discover": {"workers": WORKERS}}
    settings = {"root": str(folder / "work"), "model": {"family": "kandinsky5-video"}, "datasets": [dataset]}
    return write_config(folder / "pipeline.json", settings | {"stages": stages})


# --- the bare loops ---


def header_and_hash(path: str) -> str:
    if path.endswith(".jpg"):
        with Image.open(path) as image:
            assert image.size
    else:
        with av.open(path) as container:
            stream = container.streams.video[0]
            _ = stream.width, stream.height, stream.frames, stream.duration, stream.average_rate
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(4 * MIB):
            state.update(block)
    return state.hexdigest()


def bare_read(media: Path) -> None:
    paths = sorted(entry.path for entry in os.scandir(media) if not entry.name.endswith(".txt"))
    with ProcessPoolExecutor(WORKERS) as pool:
        assert len(list(pool.map(header_and_hash, paths, chunksize=16))) == len(paths)


def bare_walk(folder: Path) -> None:
    todo = [str(folder / "media")]
    while todo:
        for entry in os.scandir(todo.pop()):
            if entry.is_dir():
                todo.append(entry.path)
            else:
                entry.stat()
    table = Store(folder / "work").read_table(TABLE)
    assert sum(column.nbytes for column in table.columns)


def time_alternately(repeat: int, bare: Callable[[], object], ours: Callable[[], object]) -> tuple[str, str, str]:
    """Median seconds (processor seconds) of both, and their ratio with its lowest and highest value."""
    ways = {"bare": partial(time_call, bare), "ours": partial(time_call, ours)}
    times = common.measure_by_turns(ways, repeat)
    (bare_s, bare_cpu), (own_s, own_cpu) = map(common.medians, times.values())
    ratios = sorted(ours_s / bare_s_ for (bare_s_, _), (ours_s, _) in zip(*times.values(), strict=True))
    ratio = f"{own_s / bare_s:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}; processor {own_cpu / bare_cpu:.2f})"
    return f"{bare_s:.3f} s ({bare_cpu:.2f})", f"{own_s:.3f} s ({own_cpu:.2f})", ratio


# --- measurements ---


def benchmark_first_scan(folder: Path, images: int, videos: int, repeat: int) -> None:
    media, path = folder / "media", make_config(folder)
    pictures = [make_jpeg(1152, 896, 0), make_jpeg(1600, 1200, 1), make_jpeg(1024, 1408, 2)]
    clip = make_video()
    for number in range(images):
        write_item(media / f"{number:05d}.jpg", unique_jpeg(pictures[number % 3], number))
    for number in range(videos):
        write_item(media / f"v{number:05d}.mp4", unique_video(clip, number))

    def ours() -> None:
        shutil.rmtree(folder / "work", ignore_errors=True)
        assert run_silently(discover.run, path).done == images + videos

    cells = time_alternately(repeat, lambda: bare_read(media), ours)
    size = sum(file.stat().st_size for file in media.iterdir()) / MIB
    title = f"first scan: {images} JPEGs, {videos} videos, {size:.0f} MiB, {WORKERS} processes"
    print_row(title, *cells, 1.5)


def benchmark_second_scan(folder: Path, files: int, repeat: int) -> None:
    media, path = folder / "media", make_config(folder)
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    for number in range(files // 2):
        write_item(media / f"{number // 1000:03d}" / f"{number:06d}.jpg", unique_jpeg(file.getvalue(), number))

    def files_read() -> int:
        return run_silently(discover.run, path).details["datasets"][0]["files_read"]

    def ours() -> None:
        assert files_read() == 0

    files_read()
    print_row(f"second scan of {files} unchanged files", *time_alternately(repeat, lambda: bare_walk(folder), ours), 2)
    for number in range(10):
        write_item(media / "000" / f"new{number}.jpg", unique_jpeg(file.getvalue(), files + number))
    read = files_read()
    print_row("files read after adding 10", 10, read, f"{read / 10:.1f}", 1)


class SyntheticSource:
    """A source of entries without files, in no order."""

    entries = 0

    def __init__(self, *_: object) -> None:
        self.ignored: Counter[str] = Counter()

    def scan(self, previous: pa.Table | None) -> Iterator[pa.Table]:
        for start in range(0, self.entries, CHUNK_ROWS):
            numbers = range(start, min(start + CHUNK_ROWS, self.entries))
            paths = [f"{number * 7919 % self.entries:08d}/picture number {number}.jpg" for number in numbers]
            columns: dict[str, object] = {name: [None] * len(paths) for name in LISTING_SCHEMA.names}
            columns |= {"path": paths, "kind": ["image"] * len(paths), "size": [123456] * len(paths)}
            columns |= {"version": ["1700000000000000000"] * len(paths), "captions_version": ["1"] * len(paths)}
            columns["captions_at"] = [path.replace(".jpg", ".txt") for path in paths]
            yield pa.table(columns, schema=LISTING_SCHEMA)


class SyntheticReader:
    """A reader that returns results for synthetic entries."""

    def __init__(self, *_: object) -> None:
        pass

    def __call__(self, task: item_reader.ReadTask) -> dict[str, object]:
        caption = f"a made-up caption of about a hundred letters for the picture that is called {task.path}"
        media_id = xxhash.xxh3_128_hexdigest(task.path.encode())
        return {"media_id": media_id, "kind": "image", "width": 1024, "height": 768, "captions": [caption]}


def scan_synthetic(entries: int, folder: Path, results: Connection) -> None:
    """Scan once in a separate process, after a small scan that makes everything that is made only once. Sends the
    memory before the scan, then (seconds, MiB of the table, VmHWM)."""
    discover.open_source = SyntheticSource  # type: ignore[assignment]
    item_reader.ItemReader = SyntheticReader  # type: ignore[assignment,misc]
    with tempfile.TemporaryDirectory() as name:
        SyntheticSource.entries = 1000
        run_silently(discover.run, make_config(Path(name)))
    SyntheticSource.entries, path = entries, make_config(folder)
    pa.default_memory_pool().release_unused()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    results.send(memory_of("self"))
    seconds, _ = time_call(lambda: run_silently(discover.run, path))
    results.send((seconds, (folder / "work" / TABLE).stat().st_size / MIB, memory_of("self")["VmHWM"]))


def memory_of(process: object) -> dict[str, float]:
    """MiB of a process: resident (VmRSS), its peak (VmHWM), and memory that does not belong to a file (RssAnon)."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    pairs = (line.split(":") for line in lines if line.startswith(("VmHWM", "VmRSS", "RssAnon")))
    return {name: int(value.split()[0]) / 1024 for name, value in pairs}


def benchmark_memory(folder: Path, entries: int) -> None:
    context = get_context("spawn")
    for scan in ("first", "second"):
        results, sender = context.Pipe(duplex=False)
        child = context.Process(target=scan_synthetic, args=(entries, folder, sender))
        child.start()
        sender.close()
        start, own_mib = results.recv(), 0.0
        while not results.poll(0.002):
            own_mib = max(own_mib, memory_of(child.pid)["RssAnon"])
        seconds, table, peak_mib = results.recv()
        child.join()
        peak_mib, own_mib = peak_mib - start["VmRSS"], max(own_mib - start["RssAnon"], 0.0)
        sizes = (f"{table:.1f} MiB", f"{own_mib:.0f} MiB", f"{peak_mib:.0f} MiB")
        print_row(entries, scan, *sizes, f"{peak_mib / table:.2f}", f"{seconds:.1f} s")


def main() -> None:
    parser = common.make_parser(__doc__, repeat=5)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--videos", type=int, default=200)
    parser.add_argument("--tree", type=int, default=100_000, help="number of files of the unchanged tree")
    parser.add_argument(
        "--entries", type=int, nargs="*", default=[100_000, 1_000_000], help="numbers of synthetic entries"
    )
    options = parser.parse_args()
    print_header("", "bare", "discover", "ratio", "limit")
    with tempfile.TemporaryDirectory() as folder:
        benchmark_first_scan(Path(folder), options.images, options.videos, options.repeat)
    with tempfile.TemporaryDirectory() as folder:
        benchmark_second_scan(Path(folder), options.tree, options.repeat)
    print()
    print_header("entries", "scan", "table", "own memory", "resident", "resident / table", "time")
    for entries in options.entries if sys.platform == "linux" else ():
        with tempfile.TemporaryDirectory() as folder:
            benchmark_memory(Path(folder), entries)


if __name__ == "__main__":
    main()
