"""Training sets of a thousand and of ten million samples: start, memory, planning an epoch.

    python -m benchmarks.big_set [--samples 1000 10000000] [--repeat 3] [--root DIR] [--cold] [--shuffle-shards N]

The sets are synthetic, without shards: eight buckets of two datasets with repeats and weights, one to three captions
per sample, as many texts as samples, a hundredth held out, 250 rows per shard. Each measurement is a separate process,
with the tables in the page cache (--cold: removed from it before). Figures are medians of seconds (and processor
seconds).

"start": open the set, which checks its tables, make the batch schedule, and locate the data of the first micro-batch.
"signature": compute the signature that `train` records, and compares when it resumes. "eval rows": choose the held-out
samples. "epoch": plan the rows and passes of every micro-batch of an epoch, with batches of 4 and 64 samples per step;
with --shuffle-shards in the order by shards. Memory in MiB: "anonymous" belongs only to the process (Anonymous in
/proc/self/smaps_rollup) at its end, "at most" is its peak (sampled every 3 ms), and "resident" also counts pages of the
tables, which are page cache.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.common import MIB, make_parser, print_header, print_row
from cache.order.schedule import BatchSchedule
from cache.sets.set_lookup import open_set, update_pointers
from cache.sets.table_checks import SetRecord
from cache.store.store import Store
from schemas.cli.starting import leave_out_pandas
from schemas.config.training import Train
from schemas.tables import INDEX_SCHEMA, SET_SHARDS_SCHEMA, SET_TEXTS_SCHEMA
from trainer.run.run_state import data_signature

FAMILY, TASK, SET_ID = "kandinsky5-image", "t2i", "0123456789abcdef"
BUCKETS = sorted(f"{1024 + 64 * step}x{1024 - 64 * step}@1" for step in range(-4, 4))
GROUPS = [("drawings", 0, 1.0), ("photos", 0, 0.5), ("photos", 1, 0.75)]  # dataset, repeats, weight
SHARD_ROWS = 250  # rows of 1024x1024 pixels: 128 MiB per shard
BATCH_SIZE, GLOBAL_BATCH = 4, 64
PLANNED_STEPS = 4096  # steps that are planned at once
POLL_S = 0.003
TIMES, SIZES = ("start", "signature", "eval rows", "epoch", "imports"), ("anonymous", "at most", "resident")


def random_ids(count: int, seed: int) -> pa.Array:
    """Distinct ids of 32 hex digits."""
    digits = np.random.default_rng(seed).integers(0, 16, 32 * count, np.uint8)
    ends = np.arange(0, 32 * count + 1, 32, dtype=np.int32)
    text = np.frombuffer(b"0123456789abcdef", np.uint8)[digits]
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(ends), pa.py_buffer(text)])


def make_tables(count: int) -> dict[str, pa.Table]:
    """The tables of a set of `count` samples."""
    held_out = count // 100
    order = [("train", bucket, *group) for bucket in BUCKETS for group in GROUPS]
    order += [("eval", bucket, *GROUPS[0]) for bucket in BUCKETS]
    starts = [(count - held_out) * number // (len(order) - len(BUCKETS)) for number in range(len(order) - len(BUCKETS))]
    starts += [count - held_out + held_out * number // len(BUCKETS) for number in range(len(BUCKETS))]
    group_of_row = np.repeat(np.arange(len(order)), [stop - start for start, stop in pairwise([*starts, count])])

    def spread(values: list[Any], kind: pa.DataType) -> pa.Array:
        return pa.array(values, kind).take(pa.array(group_of_row))

    numbers = np.arange(count, dtype=np.int32)
    captions = np.concatenate([[0], np.cumsum(np.random.default_rng(1).integers(1, 4, count))])
    texts = (np.arange(captions[-1]) * count // captions[-1]).astype(np.int32)
    columns = dict(zip(("role", "bucket", "dataset", "repeats", "weight"), zip(*order, strict=True), strict=True))
    index = {name: spread([*values], INDEX_SCHEMA.field(name).type) for name, values in columns.items()}
    index |= {"sample_id": random_ids(count, 2), "regularization": pa.array(group_of_row % 7 == 3)}
    index |= {"shard": numbers // SHARD_ROWS, "row": numbers % SHARD_ROWS, "null_text": pa.nulls(count, pa.int32())}
    index["texts"] = pa.ListArray.from_arrays(captions.astype(np.int32), pa.array(texts))
    shards = -(-count // SHARD_ROWS)
    paths = [(f"{kind}/{'f' * 24}/{kind}-{n:016x}.arrow", kind) for kind in ("latents", "text") for n in range(shards)]
    places = {"shard": shards + numbers // SHARD_ROWS, "row": numbers % SHARD_ROWS}
    return {
        "index": pa.table({name: index[name] for name in INDEX_SCHEMA.names}, schema=INDEX_SCHEMA),
        "texts": pa.table({"text_id": random_ids(count, 3), **places}, schema=SET_TEXTS_SCHEMA),
        "shards": pa.table([*zip(*paths, strict=True)], schema=SET_SHARDS_SCHEMA),
    }


def make_set(root: Path, count: int) -> None:
    record = SetRecord(id=SET_ID, family=FAMILY, task=TASK, template="image", null_text=0, validation=[])
    store = Store(root)
    for name, table in make_tables(count).items():
        store.write_table(f"sets/{SET_ID}/{name}.arrow", table)
    store.publish_record(f"sets/{SET_ID}/set.json", record)
    update_pointers(store, record)


def plan_epoch(schedule: BatchSchedule) -> None:
    """Plan every micro-batch of the first epoch."""
    steps = int(schedule.steps_per_epoch)
    for first in range(0, steps, PLANNED_STEPS):
        schedule.plan(first, min(first + PLANNED_STEPS, steps))


def read_kib(process: int | str, file: str, name: str) -> int:
    """The value in KiB of a line of a file in /proc/<process>; 0 if the process has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        match = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{process}/{file}").read_text(), re.MULTILINE)
        return int(match[1]) if match else 0
    return 0


def measure(root: str, shuffle_shards: int | None = None) -> dict[str, float]:
    """Measure this process: names of TIMES -> seconds, the names with " CPU" -> processor seconds, names of SIZES ->
    MiB."""
    leave_out_pandas()  # like in `latentpress train`
    figures = dict[str, float]()

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begin, cpu = time.perf_counter(), time.process_time()
        result = work()
        figures[name], figures[f"{name} CPU"] = time.perf_counter() - begin, time.process_time() - cpu
        return result

    def start() -> tuple[Any, BatchSchedule]:
        data = open_set(Store(root), "current", FAMILY, TASK)
        settings = Train(batch_size=BATCH_SIZE, accumulate=GLOBAL_BATCH // BATCH_SIZE, shuffle_shards=shuffle_shards)
        schedule = data.make_schedule(settings)
        rows = schedule.step(0)[0].rows
        data.row_texts.first(rows)
        for row in rows.tolist():
            data.part_locations(row)
        return data, schedule

    data, schedule = timed("start", start)
    timed("signature", lambda: data_signature(data))
    timed("eval rows", lambda: data.choose_eval_rows(256))
    timed("epoch", lambda: plan_epoch(schedule))
    figures["anonymous"] = read_kib("self", "smaps_rollup", "Anonymous") / 1024
    figures["resident"] = read_kib("self", "status", "VmHWM") / 1024
    return figures


def drop_from_page_cache(root: Path) -> None:
    """Remove the files from the page cache, so that the next reader reads them from the disk."""
    for path in root.rglob("*.*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_process(root: Path, shuffle_shards: int | None) -> dict[str, float]:
    program = (
        "import time; begin = time.perf_counter(); import json, sys; from benchmarks import big_set; "
        "imports = {'imports': time.perf_counter() - begin, 'imports CPU': time.process_time()}; "
        "print(json.dumps(big_set.measure(sys.argv[1], *map(int, sys.argv[2:])) | imports))"
    )
    arguments = [str(root), *([] if shuffle_shards is None else [str(shuffle_shards)])]
    with subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True) as process:
        most = 0
        while process.poll() is None:
            most = max(most, read_kib(process.pid, "status", "RssAnon"))
            time.sleep(POLL_S)
        assert process.stdout is not None and not process.returncode
        return json.loads(process.stdout.read()) | {"at most": most / 1024}


def main() -> None:
    parser = make_parser(__doc__, repeat=3, root=True)
    parser.add_argument("--samples", type=int, nargs="+", default=[1000, 10_000_000])
    parser.add_argument("--cold", action="store_true", help="remove the tables from the page cache before each process")
    parser.add_argument("--shuffle-shards", type=int, help="train.shuffle_shards")
    options = parser.parse_args()
    print_header("samples", "MiB on disk", *TIMES, *SIZES)
    for count in options.samples:
        with tempfile.TemporaryDirectory(dir=options.root) as folder:
            make_set(Path(folder), count)
            size = sum(path.stat().st_size for path in Path(folder).rglob("*.*")) / MIB
            measurements = []
            for _ in range(options.repeat):
                if options.cold:
                    drop_from_page_cache(Path(folder))
                measurements.append(run_process(Path(folder), options.shuffle_shards))
            middle = {name: statistics.median(one[name] for one in measurements) for name in measurements[0]}
            times = (f"{middle[name]:.2f} ({middle[f'{name} CPU']:.2f})" for name in TIMES)
            print_row(f"{count:,}", f"{size:.1f}", *times, *(f"{middle[name]:.0f}" for name in SIZES))


if __name__ == "__main__":
    main()
