"""Time and number of requests to find the remaining units if the root is on S3.

    python -m benchmarks.object_store [--shards 100000] [--latency-ms 0]

The server is on loopback: it answers HEAD, GET, PUT and listings in pages of 1,000 from memory like S3, and waits
`--latency-ms` before each answer. (moto's server takes a second per page of so many objects.) The plan has one sample
and one text for each unit; its shards are only names, because planning does not open shards. The time of a stage's
whole dry run is measured: the plan is read, and the shards are listed and compared. The first row is a root with one
shard.
"""

import json
import os
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from urllib.request import urlopen
from xml.sax.saxutils import escape

from benchmarks.common import make_parser, print_header, print_row, run_silently
from benchmarks.planning import make_project
from cache.sets import plans
from cache.store.store import Store
from schemas.config.loading import load_config

PAGE = 1000
TIME = "2026-01-01T00:00:00.000Z"


class Objects(BaseHTTPRequestHandler):
    """One bucket in memory, with the requests of S3 that a stage's dry run uses, and PUT."""

    protocol_version = "HTTP/1.1"
    content: ClassVar[dict[str, bytes]] = {}
    names: ClassVar[list[str]] = []  # sorted
    requests: ClassVar[Counter[str]] = Counter()
    latency_s = 0.0

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        time.sleep(self.latency_s)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path.lstrip("/").partition("/")[2])

    def do_PUT(self) -> None:
        self.content[self._key()] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, ETag='"0"')

    def do_HEAD(self) -> None:
        self.requests["HEAD"] += 1
        data = self.content.get(self._key())
        if data is None:
            self._answer(404)
        else:
            self._answer(200, ETag=f'"{hash(data):x}"', Content_Length=str(len(data)))

    def do_GET(self) -> None:
        if self.path == "/requests":
            return self._answer(200, json.dumps(self.requests).encode())
        if not self._key():
            return self._list({name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()})
        self.requests["GET"] += 1
        data = self.content.get(self._key())
        if data is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>")
            return
        tag = f'"{hash(data):x}"'
        if (range_header := self.headers.get("Range")) is None:
            self._answer(200, data, ETag=tag)
            return
        first, _, last = range_header.removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, len(data) - int(last))
        part = data[start : int(last) + 1 if first and last else len(data)]
        place = f"bytes {start}-{start + len(part) - 1}/{len(data)}"
        self._answer(206, part, **{"ETag": tag, "Content-Range": place})

    def _list(self, query: dict[str, str]) -> None:
        self.requests["LIST"] += 1
        prefix, after = query.get("prefix", ""), query.get("start-after", "")
        first, last = bisect_left(self.names, prefix), bisect_left(self.names, prefix + "\U0010ffff")
        start = int(query.get("continuation-token", max(first, bisect_right(self.names, after))))
        page = self.names[start : min(start + PAGE, last)]
        rows = "".join(
            f'<Contents><Key>{escape(name)}</Key><LastModified>{TIME}</LastModified><ETag>"0"</ETag>'
            f"<Size>{len(self.content.get(name, b''))}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for name in page
        )
        more = start + PAGE < last
        token = f"<NextContinuationToken>{start + PAGE}</NextContinuationToken>" if more else ""
        body = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}</ListBucketResult>"
        self._answer(200, body.encode())

    def log_message(self, *args: Any) -> None:
        pass


def publish(local: Path, config: Path) -> Path:
    """Put the plan of a local root on the server, with all shards of its texts except the last. Returns the path of the
    new configuration."""
    from stages import encode_text

    settings = json.loads(config.read_text())
    store = Store(local)
    (name,) = plans.list_plans(store)
    units = plans.load_plan(store, name).units("text")
    fingerprint = encode_text.STAGE.fingerprint(load_config(config))
    Objects.content = {f"work/{name}": store.read_bytes(name) for name in store.list_names("")}
    shards = [f"work/text/{fingerprint}/{unit.unit_id}.arrow" for unit in units[:-1]]
    Objects.names = sorted([*Objects.content, *shards])
    settings.setdefault("train", {})["shuffle_shards"] = 100
    changed = config.with_name("remote.json")
    changed.write_text(json.dumps(settings | {"root": "s3://bucket/work"}))
    return changed


def serve(port: Connection) -> None:
    """Run the server in a separate process: send the port, then answer requests."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Objects)
    port.send(server.server_port)
    server.serve_forever()


def plan_remaining(config: Path) -> tuple[float, float, int]:
    """Find the remaining items. Returns (seconds, processor seconds of this process, number of items)."""
    from schemas.cli.console import Console, Options
    from stages import encode_text

    loaded = load_config(config)
    with open(os.devnull, "w") as silent:
        start, cpu = time.perf_counter(), time.process_time()
        report = encode_text.run(loaded, Options(config, dry_run=True), Console(stderr=silent))
        return time.perf_counter() - start, time.process_time() - cpu, report.remaining


def main() -> None:
    from stages import bucket

    parser = make_parser(__doc__)
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    options = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ["NO_PROXY"] = "*"
    Objects.latency_s = options.latency_ms / 1e3
    print_header("objects", "dry run, s", "of it processor, s", "requests", "LIST", "GET", "HEAD", "remain")
    with tempfile.TemporaryDirectory() as folder:
        for shards in (1, options.shards):
            path = make_project(Path(folder), shards, "image", 0.0, cache={"unit_mib": 1e-3})
            run_silently(bucket.run, path)
            remote = publish(Path(folder) / f"work{shards}", path)
            ours, theirs = Pipe()
            server = get_context("fork").Process(target=serve, args=(theirs,), daemon=True)
            server.start()
            os.environ["AWS_ENDPOINT_URL"] = url = f"http://127.0.0.1:{ours.recv()}"
            with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
                seconds, cpu, remaining = pool.apply(plan_remaining, (remote,))
            requests = Counter(json.load(urlopen(f"{url}/requests")))
            server.terminate()
            counts = [str(requests[name]) for name in ("LIST", "GET", "HEAD")]
            times = f"{seconds:.2f}", f"{cpu:.2f}"
            print_row(f"{len(Objects.names):,}", *times, str(requests.total()), *counts, str(remaining))


if __name__ == "__main__":
    main()
