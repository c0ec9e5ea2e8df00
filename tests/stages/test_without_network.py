"""Before the encoding stages no program asks the network: planning for a published checkpoint needs no checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cache.compatibility import CheckpointMismatch, bucket_side_multiple, pin_revision
from cache.store import Store
from cache.weights import WeightsError, fingerprint_weights
from schemas.catalogue import FAMILIES
from schemas.config.encoding import Model

COMMIT = "1234567890abcdef1234567890abcdef12345678"
FLAVOURS = [(family.name, flavour.name) for family in FAMILIES.values() for flavour in family.flavours.values()]

# Every program as its command line calls it, in one process, where a connection and a name looked up are counted.
LOOK = """
import io, json, socket, sys, time
from pathlib import Path

tried = []
def block(name, holder, local=lambda *_: False):
    done = getattr(holder, name)
    def refused(*arguments, **options):
        if local(*arguments):
            return done(*arguments, **options)
        tried.append(str(arguments))
        raise OSError("the network is blocked")
    setattr(holder, name, refused)
for name in ("connect", "connect_ex"):
    block(name, socket.socket, lambda self, *_: self.family == socket.AF_UNIX)
block("getaddrinfo", socket)

from schemas.cli.console import Console, Options
from schemas.errors import LatentpressError
from schemas.config.loading import load_config
from stages import bucket, discover, encode_latents, encode_text, index, preview, status

said = {}
for path in map(Path, sys.argv[1:]):
    def call(name, program, dry_run=False, **more):
        before = time.monotonic()
        try:
            options, console = Options(path, (), dry_run=dry_run), Console(stderr=io.StringIO())
            report = program(load_config(path, ()), options, console, **more)
            said[f"{path.stem} {name}"] = ["", json.dumps(report.details, default=str), time.monotonic() - before]
        except LatentpressError as error:
            said[f"{path.stem} {name}"] = [f"{error}; {error.next_step}", "", time.monotonic() - before]
    call("discover", discover.run)
    call("bucket --dry-run", bucket.run, True)
    call("bucket", bucket.run)
    call("preview --plan", preview.run, plan=True, items=1)
    call("status", status.run)
    call("encode-text --dry-run", encode_text.run, True)
    call("encode-latents --dry-run", encode_latents.run, True)
    call("index", index.run)
print(json.dumps([said, tried]))
"""


def configurations(folder: Path, revision: str | None) -> list[str]:
    """One for each flavour; those of the same media share a root. An image, its source, and a clip."""
    (folder / "media").mkdir()
    (folder / "sources").mkdir()
    for at in ("media", "sources"):
        pixels = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / at / "one.png")
    frames = [Image.new("RGB", (96, 64), (9 * number, 0, 0)) for number in range(12)]
    (folder / "clips").mkdir()
    frames[0].save(folder / "clips" / "one.gif", save_all=True, append_images=frames[1:], duration=80)
    for at in ("media", "clips"):
        (folder / at / "one.txt").write_text("a picture")
    paths = []
    for family, flavour in FLAVOURS:
        chosen = FAMILIES[family]
        dataset = {"id": "a", "instance_data_dir": "media", "allow_upscale": True}
        if chosen.flavours[flavour].task == "i2i":
            dataset["conditioning_data"] = "sources"
        if chosen.video:
            video = {"num_frames": 5, "min_frames": 5, "frame_rate": 10.0}
            dataset |= {"dataset_type": "video", "instance_data_dir": "clips", "animations": "video", "video": video}
        task = chosen.flavours[flavour].task
        settings = {"root": f"work-{task if task == 'i2i' else family}", "output": "output", "datasets": [dataset]}
        settings["model"] = {"family": family, "flavour": flavour, "revision": revision}
        paths.append(folder / f"{flavour}.json")
        paths[-1].write_text(json.dumps(settings))
    return list(map(str, paths))


@pytest.mark.slow
@pytest.mark.parametrize(("offline", "revision"), [("0", None), ("1", COMMIT)], ids=["main", "offline, a commit"])
def test_no_program_before_encoding_asks_the_network(tmp_path: Path, offline: str, revision: str | None) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE"))}
    environment |= {"HF_HOME": str(tmp_path / "empty"), "HF_HUB_OFFLINE": offline}
    command = [sys.executable, "-c", LOOK, *configurations(tmp_path, revision)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said, tried = json.loads(done.stdout.splitlines()[-1])
    assert not tried and len(said) == 8 * len(FLAVOURS)
    for name, (problem, details, _) in said.items():
        program = name.partition(" ")[2]
        if revision is None and program in ("encode-text --dry-run", "encode-latents --dry-run", "index"):
            assert "is not known yet" in problem and "set model.revision to a full commit" in problem, (name, problem)
        else:
            assert not problem, (name, problem)
        if program == "status" and revision is None:
            assert "is not known yet" in details, name


def cached(home: Path, repo: str, **transformer) -> None:
    """A repository of that name in a Hugging Face cache, as far as planning and pinning read it."""
    folder = home / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots" / COMMIT / "transformer").mkdir(parents=True)
    (folder / "snapshots" / COMMIT / "model_index.json").write_text("{}")
    (folder / "snapshots" / COMMIT / "transformer" / "config.json").write_text(json.dumps(transformer))


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_what_the_catalogue_says_of_attention_shapes_the_plan_and_is_compared(home, tmp_path) -> None:
    memo = Store(tmp_path / "root")
    for flavour in FAMILIES["kandinsky5-video"].flavours.values():
        model = Model(family="kandinsky5-video", flavour=flavour.name)
        assert bucket_side_multiple(model) == (128 if flavour.sparse else 16)
        asks = {"attention_type": "regular" if flavour.sparse else "nabla"}  # other than it was known to be
        cached(home, flavour.repo, **asks)
        assert bucket_side_multiple(model) == (128 if flavour.sparse else 16), "on every machine alike"
        if flavour.sparse:
            assert pin_revision(model, memo).revision == COMMIT
            continue
        with pytest.raises(CheckpointMismatch, match=r"asks for NABLA .* multiples of 128") as caught:
            pin_revision(model, memo)
        assert "model.path" in caught.value.next_step
    assert {flavour.sparse for flavour in FAMILIES["kandinsky5-video"].flavours.values()} == {True, False}


def test_an_unknown_checkpoint_is_asked(home) -> None:
    cached(home, "someone/video", attention_type="nabla")
    assert bucket_side_multiple(Model(family="kandinsky5-video", path="someone/video")) == 128
    with pytest.raises(WeightsError, match="can't be reached"):
        bucket_side_multiple(Model(family="kandinsky5-video", path="someone/else"))


def test_a_commit_that_an_encoding_stage_was_told_is_known_where_nothing_was_downloaded(home, tmp_path) -> None:
    model, memo = Model(family="sana"), Store(tmp_path / "root")
    with pytest.raises(WeightsError, match="is not known yet"):
        fingerprint_weights(model.source, ("vae",), None, memo)
    cached(home, model.source)
    assert pin_revision(model, memo).revision == COMMIT
    home.rename(tmp_path / "on another machine")
    assert fingerprint_weights(model.source, ("vae",), None, memo)["commit"] == COMMIT
    [file] = (tmp_path / "root" / "weights").iterdir()
    file.write_bytes(b"\xff{")
    with pytest.raises(WeightsError, match="is not known yet"):
        fingerprint_weights(model.source, ("vae",), None, memo)
