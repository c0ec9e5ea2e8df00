"""Discovery beside the least that could be done instead, in one run; files are made on the spot.

    python -m benchmarks.discover
    python -m benchmarks.discover --images 40 --videos 4 --tree 400 --entries 1000 --repeat 1

1. A first scan, hashing included, and a bare loop over the same files with as many processes that opens each header
   and hashes each file; alternately, medians. Limit 1.5.
2. A second scan of an unchanged tree (images and caption files) and a bare walk with a stat of each file, plus reading
   the table. Limit 2.
3. Ten files more: how many are read.
4. Peak memory of a first and of a second scan of entries that a source makes up, in the process that keeps the table;
   over what it has after a small scan. "own" is memory that is no file's (RssAnon, looked at every 2 ms); "resident"
   counts mapped files too, which the system can drop (VmHWM). Linux only.
"""

import argparse
import io
import json
import os
import resource
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import xxhash
from PIL import Image

from cache.store import Store
from schemas.cli.console import Console, Options, Report
from schemas.config.pipeline import Config
from stages import discover
from stages.discovery import item_reader
from stages.discovery.sources.base import CHUNK_ROWS, LISTING_SCHEMA

WORKERS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- files ----------------------------------------------------------------------------------------------------------


def make_jpeg(width: int, height: int, seed: int) -> bytes:
    """Something like a photograph: smooth, with some grain."""
    random = np.random.default_rng(seed)
    smooth = Image.fromarray(random.integers(0, 256, (height // 64, width // 64, 3), dtype=np.uint8))
    grain = random.integers(-6, 7, (height, width, 1))
    pixels = np.asarray(smooth.resize((width, height), Image.Resampling.BICUBIC)) + grain
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def unique_jpeg(data: bytes, number: int) -> bytes:
    """The same picture with other bytes: a comment behind the first marker."""
    return data[:2] + b"\xff\xfe\x00\x0a" + b"%08d" % number + data[2:]


def make_video(folder: Path, width: int = 1280, height: int = 720, frames: int = 72) -> bytes:
    path = folder / "one.mp4"
    smooth = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 32, 3), dtype=np.uint8))
    wide = np.asarray(smooth.resize((width + 2 * frames, height), Image.Resampling.BICUBIC))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=24, options={"crf": "20", "preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(frames):
            picture = np.ascontiguousarray(wide[:, 2 * index : 2 * index + width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    data = path.read_bytes()
    path.unlink()
    return data


def unique_video(data: bytes, number: int) -> bytes:
    return data + b"\x00\x00\x00\x10free%08d" % number


def make_config(folder: Path, **dataset: object) -> Config:
    entry = {"id": "data", "instance_data_dir": str(folder / "media"), "dataset_type": "video", **dataset}
    return Config.model_validate(
        {
            "root": str(folder / "work"),
            "model": {"family": "kandinsky5-video"},
            "datasets": [entry],
            "stages": {"max_reject_fraction": 0.0, "discover": {"workers": WORKERS}},
        }
    )


def run_discover(settings: Config) -> Report:
    with open(os.devnull, "w") as silent:
        return discover.run(settings, Options(), Console(stderr=silent))


# -- the bare loops -------------------------------------------------------------------------------------------------


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
        while block := file.read(1 << 22):
            state.update(block)
    return state.hexdigest()


def bare_read(media: Path) -> int:
    paths = sorted(entry.path for entry in os.scandir(media) if not entry.name.endswith(".txt"))
    with ProcessPoolExecutor(WORKERS) as pool:
        return len(list(pool.map(header_and_hash, paths, chunksize=16)))


def bare_walk(media: Path, settings: Config) -> int:
    count, todo = 0, [str(media)]
    while todo:
        for entry in os.scandir(todo.pop()):
            if entry.is_dir():
                todo.append(entry.path)
            else:
                entry.stat()
                count += 1
    table = Store(settings.root).read_table(discover.media_table_path("data"))
    return count + 0 * sum(column.nbytes for column in table.columns)


def time_alternately(repeat: int, bare: Callable[[], object], ours: Callable[[], object]) -> tuple[str, str, str]:
    """Medians: seconds of the one and of the other, with those of the processors, and ratios; lowest to highest."""
    times: dict[str, list[tuple[float, float]]] = {"bare": [], "ours": []}
    for number in range(repeat):
        pair = [("bare", bare), ("ours", ours)]
        for name, work in pair if number % 2 == 0 else reversed(pair):
            began, busy = time.perf_counter(), _cpu_seconds()
            work()
            times[name].append((time.perf_counter() - began, _cpu_seconds() - busy))
    (bare_s, bare_cpu), (own_s, own_cpu) = (map(statistics.median, zip(*t, strict=True)) for t in times.values())
    each = sorted(own / bare for (own, _), (bare, _) in zip(times["ours"], times["bare"], strict=True))
    ratio = f"{own_s / bare_s:.2f} ({each[0]:.2f} to {each[-1]:.2f}; processor {own_cpu / bare_cpu:.2f})"
    return f"{bare_s:.3f} s ({bare_cpu:.2f})", f"{own_s:.3f} s ({own_cpu:.2f})", ratio


def _cpu_seconds() -> float:
    """Of this process and of those that it has waited for, and those for theirs."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


# -- what is measured -----------------------------------------------------------------------------------------------


def benchmark_first_scan(images: int, videos: int, repeat: int) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        media = folder / "media"
        media.mkdir()
        pictures = [make_jpeg(1152, 896, 0), make_jpeg(1600, 1200, 1), make_jpeg(1024, 1408, 2)]
        clip = make_video(folder)
        for number in range(images):
            (media / f"{number:05d}.jpg").write_bytes(unique_jpeg(pictures[number % 3], number))
            (media / f"{number:05d}.txt").write_text(f"picture {number}")
        for number in range(videos):
            (media / f"v{number:05d}.mp4").write_bytes(unique_video(clip, number))
            (media / f"v{number:05d}.txt").write_text(f"video {number}")
        settings = make_config(folder)

        def ours() -> None:
            shutil.rmtree(folder / "work", ignore_errors=True)
            assert run_discover(settings).done == images + videos

        bare, own, ratio = time_alternately(repeat, lambda: bare_read(media), ours)
        size = sum(path.stat().st_size for path in media.iterdir()) / 2**20
    what = f"first scan: {images} JPEGs, {videos} videos, {size:.0f} MiB, {WORKERS} processes"
    return f"| {what} | {bare} | {own} | {ratio} | 1.5 |"


def benchmark_second_scan(files: int, repeat: int) -> list[str]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        media = folder / "media"
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, "JPEG")
        for number in range(files // 2):
            inside = media / f"{number // 1000:03d}"
            inside.mkdir(parents=True, exist_ok=True)
            (inside / f"{number:06d}.jpg").write_bytes(unique_jpeg(file.getvalue(), number))
            (inside / f"{number:06d}.txt").write_text(f"picture {number}")
        settings = make_config(folder)
        run_discover(settings)

        def ours() -> None:
            assert run_discover(settings).details["datasets"][0]["files_read"] == 0

        bare, own, ratio = time_alternately(repeat, lambda: bare_walk(media, settings), ours)
        for number in range(10):
            (media / "000" / f"new{number}.jpg").write_bytes(unique_jpeg(file.getvalue(), files + number))
            (media / "000" / f"new{number}.txt").write_text(f"new {number}")
        read = run_discover(settings).details["datasets"][0]["files_read"]
    return [
        f"| second scan of {files} unchanged files | {bare} | {own} | {ratio} | 2 |",
        f"| files read after adding 10 | 10 | {read} | {read / 10:.1f} | 1 |",
    ]


class SyntheticSource:
    """Entries that are nowhere, in no order, as a source lists them."""

    entries = 0

    def __init__(self, *_: object) -> None:
        self.ignored: Counter[str] = Counter()

    def scan(self, known: pa.Table | None) -> Iterator[pa.Table]:
        for start in range(0, self.entries, CHUNK_ROWS):
            numbers = range(start, min(start + CHUNK_ROWS, self.entries))
            paths = [f"{number * 7919 % self.entries:08d}/picture number {number}.jpg" for number in numbers]
            columns: dict[str, object] = {name: [None] * len(paths) for name in LISTING_SCHEMA.names}
            columns |= {"path": paths, "kind": ["image"] * len(paths), "size": [123456] * len(paths)}
            columns |= {"version": ["1700000000000000000"] * len(paths), "captions_version": ["1"] * len(paths)}
            columns["captions_at"] = [path.replace(".jpg", ".txt") for path in paths]
            yield pa.table(columns, schema=LISTING_SCHEMA)


class SyntheticReader:
    """What would be read of them."""

    def __init__(self, *_: object) -> None:
        pass

    def __call__(self, task: item_reader.ReadTask) -> dict[str, object]:
        found = {
            "media_id": xxhash.xxh3_128_hexdigest(task.path.encode()),
            "kind": "image",
            "width": 1024,
            "height": 768,
        }
        return found | {"captions": [f"what is to be seen in {task.path}, told in about a hundred letters or so"]}


def scan_synthetic(entries: int, folder: Path) -> None:
    """In a process of its own: one scan, after a small one for what is only ever made once."""
    discover.open_source = SyntheticSource  # type: ignore[assignment]
    item_reader.ItemReader = SyntheticReader  # type: ignore[assignment,misc]
    with tempfile.TemporaryDirectory() as name:
        SyntheticSource.entries = 1000
        run_discover(make_config(Path(name)))
    SyntheticSource.entries, settings = entries, make_config(folder)
    pa.default_memory_pool().release_unused()
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    print(json.dumps(memory_of("self")), flush=True)
    began = time.perf_counter()
    run_discover(settings)
    took = time.perf_counter() - began
    size = Path(settings.root, discover.media_table_path("data")).stat().st_size / 2**20
    print(json.dumps({"seconds": took, "table": size, "most": memory_of("self")["VmHWM"]}), flush=True)


def memory_of(process: object) -> dict[str, float]:
    """MiB of a process: resident, the highest of that so far, and of its own (not of files)."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    pairs = (line.split(":") for line in lines if line.startswith(("VmHWM", "VmRSS", "RssAnon")))
    return {name: int(value.split()[0]) / 1024 for name, value in pairs}


def benchmark_memory(entries: int) -> list[str]:
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for which in ("first", "second"):
            command = [sys.executable, "-m", "benchmarks.discover", "--invented", folder, "--entries", str(entries)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout is not None
                start, own = json.loads(child.stdout.readline()), 0.0
                while not select.select([child.stdout], [], [], 0.002)[0]:
                    own = max(own, memory_of(child.pid)["RssAnon"])
                end = json.loads(child.stdout.readline())
            table, most, own = end["table"], end["most"] - start["VmRSS"], max(own - start["RssAnon"], 0.0)
            cells = [f"{entries}", which, f"{table:.1f} MiB", f"{own:.0f} MiB", f"{most:.0f} MiB"]
            lines.append(f"| {' | '.join(cells)} | {most / table:.2f} | {end['seconds']:.1f} s |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--videos", type=int, default=200)
    parser.add_argument("--tree", type=int, default=100_000, help="files of the unchanged tree")
    parser.add_argument("--entries", type=int, nargs="*", default=[100_000, 1_000_000], help="made-up entries")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--invented", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.invented:
        scan_synthetic(given.entries[0], given.invented)
        return
    print("| | bare | discover | ratio | limit |\n|---|---|---|---|---|")
    print(benchmark_first_scan(given.images, given.videos, given.repeat), flush=True)
    print("\n".join(benchmark_second_scan(given.tree, given.repeat)), flush=True)
    print(
        "\n| entries | scan | table | own memory | resident | resident / table | time |\n|---|---|---|---|---|---|---|"
    )
    for entries in given.entries if sys.platform == "linux" else ():
        print("\n".join(benchmark_memory(entries)), flush=True)


if __name__ == "__main__":
    main()
