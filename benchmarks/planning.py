"""Time and memory of `latentpress bucket` for many items on one core, including reading and writing of tables; and of
`latentpress encode-latents --dry-run`, with which each process of a stage starts.

    python -m benchmarks.planning [--items 100000 1000000] [--foreign 0.0] [--kind image|video]

The media tables are synthetic: sizes of 600 to 4000 pixels, captions of 14 English words, one in ten with typographic
quotes. `--foreign` is the share of captions with words in other scripts, which ftfy processes one by one. Each run is a
separate process, bound to one core; "again" is a second run without changes.
"""

import os
import resource
import tempfile
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.common import make_parser, print_header, print_row, run_silently, time_call, write_config
from cache.store.store import Store
from schemas.cli.console import Console, Options
from schemas.config.loading import load_config
from schemas.tables import MEDIA_SCHEMA
from stages.discovery import media_table

WORDS = ["a", "red", "house", "by", "the", "sea", "photo", "of", "cat", "dog", "tree", "light", "rain", "window"]
FOREIGN = ["кот", "на", "крыше", "海辺の赤い家", "café", "naïve"]


def make_media_table(items: int, kind: str, foreign: float) -> pa.Table:
    """Make a table of MEDIA_SCHEMA."""
    rng = np.random.default_rng(0)
    width, height = rng.integers(600, 4000, (2, items), dtype=np.int32)
    words = np.array(WORDS, object)[rng.integers(0, len(WORDS), (items, 14))]
    captions = np.array([" ".join(row) for row in words], object)
    captions[::10] += " \u201cby the sea\u201d"
    if foreign:
        captions[:: round(1 / foreign)] += " " + " ".join(FOREIGN)
    ids = rng.bytes(16 * items).hex()
    suffix = "mp4" if kind == "video" else "jpg"
    columns = {
        "path": [f"{number // 1000:04d}/{number:09d}.{suffix}" for number in range(items)],
        "size": width.astype(np.int64) * height,
        "version": pa.repeat("1700000000000000000", items),
        "media_id": [ids[32 * number : 32 * number + 32] for number in range(items)],
        "kind": pa.repeat(kind, items),
        "width": width,
        "height": height,
        "captions": pa.ListArray.from_arrays(np.arange(items + 1, dtype=np.int32), pa.array(captions, pa.string())),
    }
    if kind == "video":
        columns |= {"rate": pa.repeat(25.0, items), "duration": rng.uniform(2, 20, items)}
        columns |= {"frames": pa.repeat(pa.scalar(250, pa.int32()), items)}
    return pa.table({f.name: columns.get(f.name, pa.nulls(items, f.type)) for f in MEDIA_SCHEMA}, schema=MEDIA_SCHEMA)


def make_project(folder: Path, items: int, kind: str, foreign: float, **settings: object) -> Path:
    """Make a project with a media table of `items` items. Returns the path of its configuration."""
    name = "kandinsky5-video-t2v" if kind == "video" else "kandinsky5-image-t2i"
    model = folder / "model"
    if not model.exists():
        from stages.rehearsing import tiny_models

        tiny_models.build(name, model)
    dataset = {"id": "items", "instance_data_dir": "media", "dataset_type": kind, "resolution": 512, "bucket_step": 1}
    if kind == "video":
        dataset["video"] = {"num_frames": 121, "clip_selection": "head"}
    config = {"root": f"work{items}", "model": {"family": name.rpartition("-")[0], "path": str(model)}}
    path = write_config(folder / f"pipeline{items}.json", {**config, "datasets": [dataset], **settings})
    discovered_with = media_table.settings_of(load_config(path).datasets[0])
    table = media_table.with_table_metadata(make_media_table(items, kind, foreign), discovered_with)
    Store(folder / f"work{items}").write_table(media_table.media_table_path("items"), table)
    return path


def run_bucket(path: Path) -> tuple[float, float]:
    """Run bucket once on one core, in a separate process. Returns (seconds, peak MiB)."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pa.set_cpu_count(1)
    from stages import bucket

    seconds, _ = time_call(lambda: run_silently(bucket.run, path))
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_dry(path: Path) -> tuple[float, float]:
    """Find the remaining units once, in a separate process. Returns (seconds, peak MiB)."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pa.set_cpu_count(1)
    from stages import encode_latents

    config = load_config(path)
    with open(os.devnull, "w") as silent:
        options = Options(path, dry_run=True)
        seconds, _ = time_call(lambda: encode_latents.run(config, options, Console(stderr=silent)))
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--items", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--kind", choices=("image", "video"), default="image")
    parser.add_argument("--foreign", type=float, default=0.0)
    options = parser.parse_args()
    print_header("items", "plan, s", "again, s", "most memory, MiB", "encode-latents --dry-run, s", "MiB")
    with tempfile.TemporaryDirectory() as folder:
        for items in options.items:
            path = make_project(Path(folder), items, options.kind, options.foreign)
            with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
                (first, first_mib), (second, second_mib) = (pool.apply(run_bucket, (path,)) for _ in range(2))
            with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
                dry, dry_mib = pool.apply(run_dry, (path,))
            most = max(first_mib, second_mib)
            print_row(f"{items:,}", f"{first:.2f}", f"{second:.2f}", f"{most:,.0f}", f"{dry:.2f}", f"{dry_mib:,.0f}")


if __name__ == "__main__":
    main()
