"""The whole pipeline with its root on Google Cloud Storage: the shards of a local root."""

from collections.abc import Callable
from zlib import crc32

import pytest

from cache.store.store import Store
from stages import bucket, discover, encode_latents, encode_text, export, gc, index, status, verify
from tests.project import Project
from tests.s3_server import BUCKET, Request, S3Server
from trainer.__main__ import run as train

pytestmark = [pytest.mark.slow, pytest.mark.long]
ROOT = f"gs://{BUCKET}/work"
#: Requests of a program whatever it finds, and for each shard.
FIXED, PER_SHARD = 60, 5


@pytest.fixture
def home(project: Callable[..., Project], google: S3Server) -> Project:
    settings = {
        "device": "cpu",
        "steps": 2,
        "batch_size": 2,
        "threads": 1,
        "run": "r",
        "checkpoint_every": 2,
        "shuffle_shards": 100,
    }
    made = project(root=ROOT, train=settings)
    made.settings["cache"]["unit_mib"] = 0.05
    made.settings["validation"] = {"eval_samples": 0}
    for number in range(8):
        made.image(f"{number}.png", (64, 48) if number % 2 else (48, 64), f"picture {number}", number)
    return made


@pytest.mark.parametrize("format", ["arrow", "webdataset"])
def test_from_media_to_a_trained_adapter(home: Project, google: S3Server, format: str) -> None:
    home.settings["cache"]["format"] = format
    programs = [discover.run, bucket.run, encode_text.run, encode_latents.run, index.run]
    seen = set[Request]()

    def once(request: Request) -> str:  # a store that is now and then asked too often
        new = request not in seen
        seen.add(request)
        return "throttled" if new and crc32(request.key.encode()) % 8 == 0 else ""

    google.answer = once
    for program in programs:
        google.requests = []
        assert home.run(program).exit_code == 0
        shards = len([*Store(ROOT).list_names("text"), *Store(ROOT).list_names("latents")])
        assert len(google.requests) <= 2 * (FIXED + PER_SHARD * shards), program
    made = {top: Store(ROOT).list_names(top) for top in ("text", "latents", "sets")}
    contents = {f"{top}/{name}": Store(ROOT).read_bytes(f"{top}/{name}") for top in made for name in made[top]}
    google.reset()
    for program in programs:  # nothing remains
        report = home.run(program)
        assert report.remaining == 0 and google.counts()["PutObject"] == 0, program
    assert home.run(status.run).remaining == 0
    report = home.run(verify.run)
    assert report.done > 0 and not report.damage
    assert "nothing" in home.run(gc.run).details["unused"]
    assert home.run(train).done == 2
    assert home.run(export.run, to=f"gs://{BUCKET}/out").done > 0
    home.settings["root"] = "local"
    for program in programs:
        assert home.run(program).exit_code == 0
    local = Store(home.folder / "local")
    assert {top: local.list_names(top) for top in made} == made
    shards_of = {name: data for name, data in contents.items() if not name.startswith("sets/")}
    assert {name: local.read_bytes(name) for name in shards_of} == shards_of
