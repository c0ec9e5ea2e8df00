"""The whole pipeline with its root on S3: the shards of a local root, killed and in trouble, with few requests."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest

from cache.store.store import Store
from schemas.cli.console import Report
from stages import bucket, decode, discover, encode_latents, encode_text, export, gc, index, status, verify
from tests.project import Project
from tests.s3_server import BUCKET, Request, S3Server
from trainer.__main__ import run as train

pytestmark = pytest.mark.slow

ROOT = f"s3://{BUCKET}/work"
TRAIN = {
    "device": "cpu",
    "steps": 2,
    "batch_size": 2,
    "threads": 1,
    "run": "r",
    "checkpoint_every": 2,
    "shuffle_shards": 100,
}
#: Requests of a program whatever it finds, and for each shard.
FIXED, PER_SHARD = 60, 5


@pytest.fixture
def home(project: Callable[..., Project], s3: S3Server) -> Project:
    made = project(
        root=ROOT,
        train=TRAIN,
        validation={"prompts": [{"name": "tree", "prompt": "a tree"}], "every": 2, "steps": 1, "eval_samples": 0},
    )
    made.settings["cache"]["unit_mib"] = 0.05
    for number in range(8):
        made.image(f"{number}.png", (64, 48) if number % 2 else (48, 64), f"picture {number}", number)
    return made


def objects(top: str) -> dict[str, bytes]:
    store = Store(ROOT)
    return {name: store.read_bytes(f"{top}/{name}") for name in store.list_names(top)}


def counted(
    home: Project, s3: S3Server, program: Callable[..., Report], overrides: tuple[str, ...] = (), **options: object
) -> tuple[Report, int]:
    s3.reset()
    report = home.run(program, *overrides, **options)
    assert report.exit_code == 0, report.to_dict()
    return report, len(s3.requests)


@pytest.mark.long
def test_from_media_to_a_trained_adapter(home: Project, s3: S3Server, tmp_path: Path, is_long: bool) -> None:
    programs = [discover.run, bucket.run, encode_text.run, encode_latents.run, index.run]
    for program in programs:
        _, requests = counted(home, s3, program)
        shards = len([*Store(ROOT).list_names("text"), *Store(ROOT).list_names("latents")])
        assert requests <= FIXED + PER_SHARD * shards, program
    assert {request.operation for request in s3.requests} <= {
        *("ListObjectsV2", "HeadObject", "GetObject", "PutObject", "DeleteObject"),
    }
    made = {top: objects(top) for top in ("text", "latents")}
    set_id = objects("sets").keys()
    for program in programs:  # nothing remains
        report, requests = counted(home, s3, program)
        assert report.remaining == 0 and s3.counts()["PutObject"] == 0, program
    report, requests = counted(home, s3, status.run)
    assert report.remaining == 0 and requests <= FIXED + 4 * shards
    report, requests = counted(home, s3, verify.run)
    assert report.done == shards - 2 and not report.damage and requests <= FIXED + 4 * shards
    report, requests = counted(home, s3, gc.run)
    assert report.details["unused"].startswith("no files") and requests <= FIXED
    report, _ = counted(home, s3, train)
    assert report.done == 2
    assert not (home.folder / "scratch").exists() and not any(tmp_path.glob("scratch/*"))
    if is_long:
        counted(home, s3, decode.run)
        report, _ = counted(home, s3, export.run, to=f"s3://{BUCKET}/out", with_captions=True)
        exported = report.done
        assert exported > 0
        copied = [request.key for request in s3.requests if request.operation == "GetObject"]
        assert all(copied.count(f"work/{top}/{name}") <= 5 for top in ("text", "latents") for name in objects(top))
        report, _ = counted(home, s3, verify.run, overrides=(f"root=s3://{BUCKET}/out",))
        assert report.done > 0 and not report.damage, "the export is a root of its own"
        report, _ = counted(home, s3, export.run, to=f"s3://{BUCKET}/out", with_captions=True)
        assert (report.done, report.skipped) == (0, exported)
        # The same shards as those of a root on a disk.
        home.settings["root"] = "local"
        for program in programs:
            home.run(program)
        local = Store(home.folder / "local")
        assert {
            top: {name: local.read_bytes(f"{top}/{name}") for name in local.list_names(top)} for top in made
        } == made
        assert set_id == set(local.list_names("sets"))
        # And of media on one store for caches on another.
        s3.make_bucket("elsewhere")
        media = Store("s3://elsewhere/photos")
        for path in home.media.iterdir():
            media.publish_bytes(path.name, path.read_bytes())
        home.settings["root"], home.settings["datasets"][0]["instance_data_dir"] = f"s3://{BUCKET}/b", media.url
        for program in programs:
            report, requests = counted(home, s3, program)
            assert requests <= 2 * FIXED + PER_SHARD * (shards + 8), program
        other = Store(f"s3://{BUCKET}/b")
        for top, shards_of_top in made.items():
            assert {name: other.read_bytes(f"{top}/{name}") for name in other.list_names(top)} == shards_of_top


@pytest.mark.long
def test_damaged_and_short_answers_end_nothing(home: Project, s3: S3Server, tmp_path: Path) -> None:
    """The first answer about each object is wrong, for every program. verify moves nothing because of it."""
    seen = set[Request]()

    def first_is_wrong(request: Request) -> str:
        new = request.operation == "GetObject" and request not in seen
        seen.add(request)
        return ("damaged", "short")[crc32(request.key.encode()) % 2] if new else ""

    s3.answer = first_is_wrong
    for program in (discover.run, bucket.run, encode_text.run, encode_latents.run, index.run, status.run, train):
        seen.clear()
        report = home.run(program)
        assert report.exit_code == 0, (program, report.to_dict())
    before = Store(ROOT).list_names()
    seen.clear()
    report = home.run(verify.run, repair=True)
    assert report.exit_code == 0 and not report.damage and not report.next_steps
    assert Store(ROOT).list_names() == before


@pytest.mark.long
def test_killed_in_an_upload_and_in_trouble(home: Project, s3: S3Server) -> None:
    """encode-text is killed while a shard is on its way, and started again beside a store that throttles and cuts."""
    home.run(discover.run)
    home.run(bucket.run)
    arrived = threading.Semaphore(0)

    def notice(request: Request) -> str:
        is_shard = request.operation == "PutObject" and request.key.endswith(".arrow") and "/text/" in request.key
        if is_shard:
            arrived.release()
        return "dropped" if is_shard and killing else ""

    killing = True
    s3.answer = notice
    home.config()
    program = subprocess.Popen([sys.executable, "-m", "latentpress", "encode-text"], cwd=home.folder)
    try:
        assert arrived.acquire(timeout=120)
    finally:
        program.kill()
        program.wait()
    killing = False
    assert [name for name in Store(ROOT).list_names("text") if name.endswith(".arrow")] == []
    seen = set[Request]()

    def once(request: Request) -> str:
        new = request not in seen
        seen.add(request)
        kinds = {"PutObject": "throttled", "GetObject": "cut", "HeadObject": "broken", "ListObjectsV2": "dropped"}
        return kinds.get(request.operation, "") if new and crc32(request.key.encode()) % 4 == 0 else ""

    s3.answer = once
    assert home.run(encode_text.run).exit_code == 0
    s3.reset()
    made = objects("text")
    for name in made:
        Store(ROOT).remove(f"text/{name}")
    home.run(encode_text.run)
    assert objects("text") == made and sum(name.endswith(".arrow") for name in made) > 1
