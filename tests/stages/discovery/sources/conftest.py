"""Whole pipelines over servers on loopback: projects, and places that media are offered at."""

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from cache.sets import plans
from cache.store.buckets import Buckets
from cache.store.store import Store
from schemas.cli.console import Console, Options, Report
from schemas.config.loading import load_config
from stages.discovery.sources import huggingface
from stages.engines import sandbox
from tests.background import answered
from tests.processes import forget_forkserver
from tests.project import CHECKPOINTS, SETTINGS
from tests.s3_server import S3Server

SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIAEXAMPLEEXAMPLE77",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI-not-a-real-key",
    "AWS_SESSION_TOKEN": "session-token-that-nobody-may-see",
}
PASSWORD = "password-within-a-url"
NO_PROXY = "*"


@dataclass
class Place:
    """A folder of this test, a prefix in S3 and a web server that shows the folder (with a password in its URL).
    Writing leaves what is the same as it is, and takes away what is no longer offered."""

    folder: Path
    prefix: str
    web: str

    def local(self, files: dict[str, bytes]) -> Path:
        there = {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}
        for name in there - files.keys():
            (self.folder / name).unlink()
        for name, data in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)
        return self.folder

    def remote(self, files: dict[str, bytes]) -> str:
        store = Store(f"s3://{self.prefix}")
        there = store.list_names()
        for name in set(there) - files.keys():
            store.remove(name)
        for name, data in files.items():
            if name not in there or store.read_bytes(name) != data:
                store.publish_bytes(name, data)
        return store.url


@pytest.fixture
def media(s3: S3Server) -> S3Server:
    """The server with an empty bucket `media`."""
    Buckets.clear_instance_cache()
    s3.make_bucket("media")
    return s3


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


class Ranged(BaseHTTPRequestHandler):
    """Serves `content` with ranges, or (`ranges` off) whole whatever is asked for; to one user only, if `user`."""

    content, ranges, length, authorization = b"", True, True, ""
    served: int = 0

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        cls = type(self)
        if cls.authorization and self.headers.get("Authorization") != cls.authorization:
            self.send_error(403)
            return
        data, asked = cls.content, self.headers.get("Range")
        if asked and cls.ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            data = data[int(first) : int(last) + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(data) - 1}/{len(cls.content)}")
        else:
            self.send_response(200)
        if cls.length:
            self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", '"' + hashlib.sha1(cls.content).hexdigest() + '"')
        self.end_headers()
        if body:
            cls.served += len(data)
            self.wfile.write(data)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[Ranged]]]:
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("NO_PROXY", NO_PROXY)
    handler = type("Handler", (Ranged,), {})
    with answered(handler) as url:
        yield url.removeprefix("http://"), handler


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], str]]:
    """serve(folder) -> host and port of a web server that shows it, without ranges."""
    monkeypatch.setenv("NO_PROXY", NO_PROXY)
    with ExitStack() as stack:
        yield lambda folder: stack.enter_context(answered(partial(Quiet, directory=str(folder)))).removeprefix(
            "http://"
        )


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def s3_of_pipelines(top: Path, patch: pytest.MonkeyPatch, s3_server: S3Server) -> Iterator[S3Server]:
    hf = pytest.importorskip("datasets")
    none = str(top / "none")
    settings = {"AWS_ENDPOINT_URL": s3_server.url, "AWS_DEFAULT_REGION": "us-east-1", "NO_PROXY": "*"}
    settings |= {"AWS_CONFIG_FILE": none, "AWS_SHARED_CREDENTIALS_FILE": none, "HF_HOME": str(top / "hf")}
    for name, value in (settings | SECRETS).items():
        patch.setenv(name, value)
    patch.setattr(hf.config, "HF_DATASETS_CACHE", top / "hf/datasets")
    patch.setattr(sandbox, "SOURCE_LIBRARIES", ["datasets", "obstore", "aiohttp"])
    forget_forkserver()
    Buckets.clear_instance_cache()
    s3_server.make_bucket("media")
    yield s3_server
    s3_server.clear()


@pytest.fixture(scope="module")
def web(top: Path) -> Iterator[str]:
    with answered(partial(Quiet, directory=str(top))) as url:
        yield url.replace("http://", f"user:{PASSWORD}@")


@dataclass
class Home:
    """A configuration and its caches. said: everything that its programs wrote to the screen."""

    folder: Path
    model: dict
    root: str = ""
    datasets: list[dict] = field(default_factory=list)
    settings: dict = field(default_factory=dict)
    said: str = ""

    def __post_init__(self) -> None:
        self.root = self.root or str(self.folder / "work")

    @property
    def store(self) -> Store:
        return Store(self.root)

    def run(self, *programs: Any, **options: Any) -> list[Report]:
        common = {"resolution": 64, "bucket_step": 1, "allow_upscale": True} | self.settings
        if "video" in self.model["family"]:
            common |= {"dataset_type": "video", "video": {"num_frames": 9, "frame_rate": 12.0}}
        document = {
            "root": self.root,
            "output": str(self.folder / "output"),
            "cache": {"unit_mib": 0.02},
            "model": self.model,
            "datasets": [{"id": "photos"} | common | dataset for dataset in self.datasets],
            # Two, as each process imports datasets or aiohttp, which takes seconds.
            "stages": {"discover": {"workers": 2}, "encode-text": {"threads": 1}, "encode-latents": {"threads": 1}},
        }
        self.folder.mkdir(exist_ok=True)
        path = self.folder / "pipeline.yaml"
        path.write_text(json.dumps(document))
        found = []
        for program in programs:
            huggingface.load_rows.cache_clear()  # every program is a process of its own
            screen = io.StringIO()
            console = Console(stdout=screen, stderr=screen)
            with redirect_stdout(screen):
                report = program.run(load_config(path, ()), Options(path, (), **options), console)
                console.print_report(report)
            self.said += screen.getvalue() + report.json()
            found.append(report)
        return found

    def shards(self, *kinds: str) -> dict[str, bytes]:
        """Every shard: name -> bytes."""
        store, tops = self.store, kinds or ("text", "latents")
        return {
            f"{kind}/{name}": store.read_bytes(f"{kind}/{name}") for kind in tops for name in store.list_names(kind)
        }

    @property
    def plan(self) -> plans.Plan:
        return plans.load_plan(self.store, plans.list_plans(self.store)[-1])

    def active(self) -> pa.Table:
        return self.plan.active

    def texts(self) -> set[str]:
        """The ids of all texts that are to be encoded."""
        return {name for unit in self.plan.units("text") for name in unit.members}

    def roles(self) -> dict[str, str]:
        active = self.active()
        return dict(zip(active["sample_id"].to_pylist(), active["role"].to_pylist(), strict=True))

    def news(self, report: Report) -> dict[str, int]:
        """What a discovery found, over all datasets."""
        keys = ("new", "removed", "changed", "captions_changed")
        return {key: sum(row[key] for row in report.details["datasets"]) for key in keys}

    def files(self) -> dict[str, tuple[int, bytes]]:
        """Every file of the caches: modification time and content."""
        paths = [path for path in Path(self.root).rglob("*") if path.is_file()]
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}

    def assert_no_secret(self, *secrets: str) -> None:
        texts = {"screen": self.said.encode()}
        texts |= {str(path): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}
        texts |= {name: self.store.read_bytes(name) for name in self.store.list_names()}
        for secret in (*SECRETS.values(), PASSWORD, "Signature=", *secrets):
            for name, text in texts.items():
                assert secret.encode() not in text, f"{secret} in {name}"


@pytest.fixture(scope="module")
def place_of(top: Path, s3_of_pipelines: Any, web: str) -> Callable[[str], Place]:
    def make(name: str) -> Place:
        return Place(top / name, f"media/{name}", f"{web}/{name}")

    return make


@pytest.fixture(scope="module")
def home_of(top: Path, tiny: Callable[[str], Path]) -> Callable[..., Home]:
    def make(name: str, kind: str = "kandinsky5-video-t2v", **more: Any) -> Home:
        model = SETTINGS[kind] | {"path": str(tiny(CHECKPOINTS.get(kind, kind))), "precision": "float32"}
        return Home(top / f"home-{name}", model, **more)

    return make


@pytest.fixture(scope="session")
def photo() -> Callable[..., bytes]:
    """photo(number, size=(64, 64)) -> a JPEG like no other."""

    def make(number: int, size: tuple[int, int] = (64, 64)) -> bytes:
        colors = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        out = io.BytesIO()
        Image.fromarray(colors).resize(size, Image.Resampling.BICUBIC).save(out, "JPEG")
        return out.getvalue()

    return make
