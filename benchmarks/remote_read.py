"""Time that training steps wait for data of a slow object store, with a window of shards on this machine.

    python -m benchmarks.remote_read [--case NAME] [--steps 250] [--step-s 0.5] [--latency-ms 100] [--mb-per-s 200]
                                     [--set-mib 2048] [--unit-mib 128] [--root DIR] [--tiny]

The store is an S3 server on loopback, a separate process, which waits `--latency-ms` before each answer and sends
`--mb-per-s` (10^6 bytes) over all connections together. A step reads the trainer's batches and then sleeps for
`--step-s`. Samples have the sizes of the flavours: a latent of a picture of 1024x1024 or of 61 or 121 frames of
768x512, and a text of 135 tokens x 3584, all bfloat16. Shards have `--unit-mib`. Texts are in the order of their
samples.

`shards`: the window may have half of the set's bytes, with the largest `train.shuffle_shards` for this limit. `eight
cards`: the samples per step of eight ranks with two samples each. `whole`: one section with all shards.

waiting: share of the time after the first step. at the start: seconds until the data of the first step are available.
Sets are written first (`--set-mib` each on the disk, twice as much with the copies). Takes about 13 minutes.
"""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pyarrow as pa

from benchmarks.common import MIB, cpu_seconds, make_parser, make_rows, print_header, print_row, write_shard
from cache.sets.set_lookup import open_set
from cache.sets.table_checks import SetRecord
from cache.sets.trainset import TrainSet
from cache.sets.window import list_sections, open_window
from cache.shards.shard import ShardMeta
from cache.store.store import Store
from schemas.config.training import Train
from schemas.tables import INDEX_SCHEMA, SET_SHARDS_SCHEMA, SET_TEXTS_SCHEMA
from trainer.data import BatchLoader
from trainer.run.metrics import StepTimer

FAMILY, TASK = "kandinsky5-image", "t2i"
TOKENS, WIDTH = 135, 3584
PIECE = 1 << 20  # bytes sent at a time


class Case(NamedTuple):
    """shape: shape of a latent. samples: number of samples per step. order: "shards" or "whole"."""

    shape: tuple[int, ...]
    bucket: str
    samples: int
    order: str = "shards"


IMAGE, VIDEO = ((16, 1, 128, 128), "1024x1024"), ((16, 16, 64, 96), "768x512@61")
CASES = {
    "image": Case(*IMAGE, 4),
    "video, 61 frames": Case(*VIDEO, 1),
    "video, 121 frames": Case((16, 31, 64, 96), "768x512@121", 1),
    "image, eight cards": Case(*IMAGE, 16),
    "image, whole": Case(*IMAGE, 4, "whole"),
}


# -- the store ---------------------------------------------------------------------------------------------------------


class SlowStore(BaseHTTPRequestHandler):
    """The files below `root` as objects of one bucket: HEAD, GET and listings like S3."""

    protocol_version = "HTTP/1.1"
    root: ClassVar[Path]
    latency_s: ClassVar[float]
    bytes_per_s: ClassVar[float]
    lock: ClassVar[threading.Lock] = threading.Lock()
    free_at: ClassVar[float] = 0.0  # time at which the connection is free again

    def _begin(self, status: int, size: int, etag: str = "", place: str = "") -> None:
        time.sleep(self.latency_s)
        self.send_response(status)
        if place:
            self.send_header("Content-Range", place)
        self.send_header("Content-Length", str(size))
        if etag:
            self.send_header("ETag", f'"{etag}"')
        self.end_headers()

    def _object(self) -> Path:
        return self.root / unquote(urlsplit(self.path).path.lstrip("/").partition("/")[2])

    def do_HEAD(self) -> None:
        path = self._object()
        if path.is_file():
            self._begin(200, path.stat().st_size, _etag(path))
        else:
            self._begin(404, 0)

    def do_GET(self) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        if "list-type" in query:
            return self._list(query.get("prefix", ""))
        path = self._object()
        if not path.is_file():
            body = b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>"
            self._begin(404, len(body))
            self.wfile.write(body)
            return None
        size = path.stat().st_size
        begin, end = 0, size
        if (range_header := self.headers.get("Range")) is None:
            self._begin(200, size, _etag(path))
        else:
            first, _, last = range_header.removeprefix("bytes=").partition("-")
            begin = int(first) if first else max(0, size - int(last))
            end = min(size, int(last) + 1) if first and last else size
            self._begin(206, end - begin, _etag(path), f"bytes {begin}-{end - 1}/{size}")
        with path.open("rb") as file:
            for start in range(begin, end, PIECE):
                self._send(file.fileno(), start, min(PIECE, end - start))

    def _send(self, file: int, start: int, count: int) -> None:
        """Send a part of a file when the connection is free."""
        with self.lock:
            current_s = time.monotonic()
            begin = max(current_s, SlowStore.free_at)
            SlowStore.free_at = begin + count / self.bytes_per_s
        time.sleep(max(0.0, begin - current_s))
        while count:
            sent_bytes = os.sendfile(self.connection.fileno(), file, start, count)
            start, count = start + sent_bytes, count - sent_bytes

    def _list(self, prefix: str) -> None:
        paths = (path for path in sorted((self.root / prefix).rglob("*")) if path.is_file())
        rows = "".join(
            f"<Contents><Key>{escape(str(path.relative_to(self.root)))}</Key>"
            f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;{_etag(path)}&quot;</ETag>"
            f"<Size>{path.stat().st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for path in paths
        )
        body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode()
        self._begin(200, len(body))
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def _etag(path: Path) -> str:
    return f"{path.stat().st_mtime_ns:x}"


def serve(port: Connection, root: Path, latency_s: float, bytes_per_s: float) -> None:
    """Run the server in a separate process: send the port, then answer requests."""
    SlowStore.root, SlowStore.latency_s, SlowStore.bytes_per_s = root, latency_s, bytes_per_s
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowStore)
    port.send(server.server_port)
    server.serve_forever()


# -- the set -----------------------------------------------------------------------------------------------------------


def write_set(root: Path, case: Case, set_mib: float, unit_mib: float, tokens: int) -> int:
    """Write a set of about `set_mib` in shards of `unit_mib`. Returns its bytes."""
    store = Store(root)
    (latent, *_), (text, *_) = make_rows("latent", case.shape, 1), make_rows("embeds", (tokens, WIDTH), 1)
    sizes = {"latents": latent.tensors["latent"].nbytes, "text": text.tensors["embeds"].nbytes}
    count = max(4 * case.samples, int(set_mib * MIB / sum(sizes.values())))
    shards, places = list[tuple[str, str]](), dict[str, list[tuple[int, int]]]()
    for kind, name, shape in (("latents", "latent", case.shape), ("text", "embeds", (tokens, WIDTH))):
        each = max(1, int(unit_mib * MIB / sizes[kind]))
        places[kind] = [(len(shards) + number // each, number % each) for number in range(count)]
        rows = make_rows(name, shape, count)
        for first in range(0, count, each):
            meta = ShardMeta(kind, "f" * 24, f"u{first:08}", case.bucket if kind == "latents" else "")
            shards.append((write_shard(store, meta, rows[first : first + each]), kind))
    ids = [f"{number:032x}" for number in range(count)]
    index = [(ids[i], "train", "d", case.bucket, 0, 1.0, False, *places["latents"][i], [i], 0) for i in range(count)]
    texts = [(ids[i], *places["text"][i]) for i in range(count)]
    tables = (("shards", SET_SHARDS_SCHEMA, shards), ("texts", SET_TEXTS_SCHEMA, texts), ("index", INDEX_SCHEMA, index))
    for name, schema, values in tables:
        table = pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in values], schema)
        store.write_table(f"sets/s/{name}.arrow", table)
    store.publish_record("sets/s/set.json", SetRecord(id="s", family=FAMILY, task=TASK, null_text=0, validation=[]))
    return sum((root / path).stat().st_size for path, _ in shards)


# -- training ----------------------------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """start_s: seconds until the data of the first step are available. waited_s, total_s: seconds of the steps after
    it. fetched_bytes: bytes from the store. held_bytes: most bytes on this machine."""

    start_s: float
    waited_s: float
    total_s: float
    fetched_bytes: float
    cpu_s: float
    held_bytes: int


def train(case: Case, folder: Path, limit: int, shuffle_shards: int, steps: int, step_s: float) -> Reading:
    """Read `steps` steps from the store, sleep in each step, and measure the bytes on this machine."""
    cache = {"folder": str(folder), "max_gb": limit / 1e9}
    settings = Train.model_validate(
        {"batch_size": case.samples, "steps": steps, "shuffle_shards": shuffle_shards, "local_cache": cache}
    )
    data = open_set(Store("s3://bucket/"), "s", FAMILY, TASK)
    schedule = data.make_schedule(settings)
    cpu, held_bytes = cpu_seconds(), 0
    open_window(settings, data, schedule, range(steps))
    loader = BatchLoader(data, schedule, 0.0, draw_noise=False)
    clock, waits, fetched_bytes = StepTimer(0, steps, case.samples), list[float](), 0.0
    for step, _ in enumerate(clock.time_waits(loader.steps(0, steps)), 1):
        time.sleep(step_s)
        waits.append(clock.rates(step)["data_wait_s"])
        fetched_bytes += data.supply.metrics()["shards_fetched_mb"] * 1e6
        with suppress(FileNotFoundError):  # removed during the walk
            held_bytes = max(held_bytes, sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
    data.close()
    later = waits[1:]
    return Reading(
        waits[0], sum(later), sum(later) + step_s * len(later), fetched_bytes, cpu_seconds() - cpu, held_bytes
    )


def name_order(root: Path, case: Case, limit: int, steps: int) -> int:
    """The largest train.shuffle_shards whose sections fit the limit."""
    data = open_set(Store(root), "s", FAMILY, TASK)
    sizes = [(root / path).stat().st_size for path in data.tables["shards"].column("path").to_pylist()]
    for value in range(len(sizes), 0, -1):
        settings = Train(batch_size=case.samples, steps=steps, shuffle_shards=value)
        if largest_pair(data, settings, sizes) <= limit:
            data.close()
            return value
    raise SystemExit(f"no train.shuffle_shards fits in {limit / 1e9:.3g} GB")


def largest_pair(data: TrainSet, settings: Train, sizes: Sequence[int]) -> int:
    """The largest number of bytes of two successive sections."""
    schedule, steps = data.make_schedule(settings), range(settings.steps)
    sections = [
        set(section.shards) for section in list_sections(data, schedule, 0.0, steps, settings.reading.steps_ahead)
    ]
    return max(sum(sizes[number] for number in one | two) for one, two in pairwise([*sections, set[int]()]))


def main() -> None:
    parser = make_parser(__doc__, root=True)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--step-s", type=float, default=0.5)
    parser.add_argument("--latency-ms", type=float, default=100.0)
    parser.add_argument("--mb-per-s", type=float, default=200.0)
    parser.add_argument("--set-mib", type=float, default=2048)
    parser.add_argument("--unit-mib", type=float, default=128)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ["NO_PROXY"] = "*"
    print_header(
        *("case", "set, GB", "limit, GB", "most held, GB", "order", "at the start, s", "waiting", "fetched, GB"),
        *("needed, MB/s", "processor"),
    )
    with tempfile.TemporaryDirectory(dir=options.root) as top:
        total, current_set = 0, None
        for name in options.case or CASES:
            case = CASES[name]
            tokens = 2 if options.tiny else TOKENS
            if options.tiny:
                case = case._replace(shape=(16, 1, 8, 8))
            root, folder = Path(top, "store"), Path(top, "copies")
            if current_set != (case.shape, case.bucket):
                shutil.rmtree(root, ignore_errors=True)
                total, current_set = (
                    write_set(root, case, options.set_mib, options.unit_mib, tokens),
                    (case.shape, case.bucket),
                )
            limit = total // 2 if case.order == "shards" else 2 * total
            shards = name_order(root, case, limit, options.steps) if case.order == "shards" else 10**6
            ours, theirs = Pipe()
            speed = options.latency_ms / 1e3, options.mb_per_s * 1e6
            server = get_context("fork").Process(target=serve, args=(theirs, root, *speed), daemon=True)
            server.start()
            os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{ours.recv()}"
            try:
                reading = train(case, folder, limit, shards, options.steps, options.step_s)
            finally:
                server.terminate()
            sample = total / len(Store(root).read_table("sets/s/index.arrow"))
            print_row(
                *(name, f"{total / 1e9:.1f}", f"{limit / 1e9:.1f}", f"{reading.held_bytes / 1e9:.1f}"),
                *(f"shuffle_shards: {shards}" if case.order == "shards" else "whole", f"{reading.start_s:.2f}"),
                *(f"{reading.waited_s / reading.total_s:.2%}", f"{reading.fetched_bytes / 1e9:.2f}"),
                *(f"{case.samples * sample / options.step_s / 1e6:.1f}", f"{reading.cpu_s / reading.total_s:.0%}"),
            )


if __name__ == "__main__":
    main()
