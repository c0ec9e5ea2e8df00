"""No program before the encoding stages uses the network: planning for a published checkpoint needs no checkpoint."""

import io
import json
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cache.models.compatibility import CheckpointMismatch, bucket_side_multiple, check_distilled, pin_revision
from cache.models.weights import WeightsError, fingerprint_weights
from cache.store.store import Store
from schemas.catalog import FAMILIES
from schemas.cli.console import Console, Options, Report
from schemas.config.encoding import Model
from schemas.config.loading import load_config
from schemas.errors import LatentpressError
from stages import bucket, discover, encode_latents, encode_text, index, preview, status
from tests.forms import long

COMMIT = "1234567890abcdef1234567890abcdef12345678"
FLAVOURS = [(family.name, flavour.name) for family in FAMILIES.values() for flavour in family.flavours.values()]


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


#: One for every way in which flavours are planned.
PLANNED = {
    (family.name, flavour.task, flavour.sparse): (family.name, flavour.name)
    for family in FAMILIES.values()
    for flavour in family.flavours.values()
    if flavour.distilled_from is None
}


def configurations(folder: Path, revision: str | None) -> Iterator[tuple[str, Path]]:
    """(flavour, path) of configurations; configurations with the same media share a root. An image, its source, and a
    clip."""
    for name in ("media", "sources"):
        (folder / name).mkdir()
        pixels = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name / "one.png")
    frames = [Image.new("RGB", (96, 64), (9 * number, 0, 0)) for number in range(12)]
    (folder / "clips").mkdir()
    frames[0].save(folder / "clips" / "one.gif", save_all=True, append_images=frames[1:], duration=80)
    for name in ("media", "clips"):
        (folder / name / "one.txt").write_text("a picture")
    for (family, task, _), (_, flavour) in PLANNED.items():
        dataset: dict[str, Any] = {"id": "a", "instance_data_dir": "media", "allow_upscale": True}
        if task == "i2i":
            dataset["conditioning_data"] = "sources"
        if FAMILIES[family].video:
            video = {"num_frames": 5, "min_frames": 5, "frame_rate": 10.0}
            dataset |= {"dataset_type": "video", "instance_data_dir": "clips", "animations": "video", "video": video}
        root = str(folder / f"work-{task if task == 'i2i' else family}")
        settings = {"root": root, "output": str(folder / "output"), "datasets": [dataset]}
        settings["model"] = {"family": family, "flavour": flavour, "revision": revision}
        if FAMILIES[family].flavours[flavour].experts:
            settings["train"] = {"experts": "both"}
        if FAMILIES[family].flavours[flavour].assistant:  # training needs it or guidance
            settings["train"] = {"guidance": {"scale": 2.0}}
        path = folder / f"{flavour}.json"
        path.write_text(json.dumps(settings))
        yield flavour, path


PROGRAMS: dict[str, Callable[..., Report]] = {
    "discover": discover.run,
    "bucket --dry-run": bucket.run,
    "bucket": bucket.run,
    "preview --plan": partial(preview.run, plan=True, items=1),
    "status": status.run,
    "encode-text --dry-run": encode_text.run,
    "encode-latents --dry-run": encode_latents.run,
    "index": index.run,
}


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every address that was to be connected to or looked up. Each attempt is refused."""
    attempts: list[str] = []

    def block(owner: Any, name: str) -> None:
        allowed = getattr(owner, name)

        def refuse(*arguments: Any, **options: Any) -> Any:
            if isinstance(arguments[0], socket.socket) and arguments[0].family == socket.AF_UNIX:
                return allowed(*arguments, **options)
            attempts.append(str(arguments))
            raise OSError("the network is blocked")

        monkeypatch.setattr(owner, name, refuse)

    for owner, name in ((socket.socket, "connect"), (socket.socket, "connect_ex"), (socket, "getaddrinfo")):
        block(owner, name)
    return attempts


@pytest.mark.long
@pytest.mark.parametrize(
    ("offline", "revision"), [(False, None), long(True, COMMIT)], ids=["main", "offline, a commit"]
)
def test_no_program_before_encoding_asks_the_network(
    home: Path, tmp_path: Path, connections: list[str], monkeypatch, offline: bool, revision: str | None
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    for flavour, path in configurations(tmp_path, revision):
        for name, program in PROGRAMS.items():
            options = Options(path, (), dry_run="--dry-run" in name)
            if revision is None and name in ("encode-text --dry-run", "encode-latents --dry-run", "index"):
                with pytest.raises(LatentpressError, match=r"commit of .* is unknown") as caught:
                    program(load_config(path, ()), options, Console(stderr=io.StringIO()))
                assert "set model.revision to a full commit" in f"{caught.value} {caught.value.next_step}", (
                    flavour,
                    name,
                )
                continue
            report = program(load_config(path, ()), options, Console(stderr=io.StringIO()))
            if name == "status" and revision is None:
                assert "has not been downloaded yet" in json.dumps(report.details, default=str), flavour
            assert not connections, (flavour, name)


@pytest.mark.parametrize(("family", "flavour"), FLAVOURS)
def test_a_published_flavour_is_planned_without_its_checkpoint(home: Path, connections, family, flavour) -> None:
    assert bucket_side_multiple(Model(family=family, flavour=flavour)) in (16, 32, 128)
    assert not connections


def cached(home: Path, repo: str, **transformer) -> None:
    """A repository of that name in a Hugging Face cache, as far as planning and pinning read it."""
    folder = home / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots" / COMMIT / "transformer").mkdir(parents=True)
    (folder / "snapshots" / COMMIT / "model_index.json").write_text("{}")
    (folder / "snapshots" / COMMIT / "transformer" / "config.json").write_text(json.dumps(transformer))


def test_the_catalogues_attention_shapes_the_plan_and_is_compared(home, tmp_path) -> None:
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
        with pytest.raises(CheckpointMismatch, match=r"NABLA .* multiples of 128") as caught:
            pin_revision(model, memo)
        assert "model.path" in caught.value.next_step
    assert {flavour.sparse for flavour in FAMILIES["kandinsky5-video"].flavours.values()} == {True, False}


def test_a_commit_that_an_encoding_stage_recorded_is_known_where_nothing_was_downloaded(home, tmp_path) -> None:
    model, memo = Model(family="sana"), Store(tmp_path / "root")
    with pytest.raises(WeightsError, match=r"commit of .* is unknown"):
        fingerprint_weights(model.source, ("vae",), None, memo)
    cached(home, model.source)
    assert pin_revision(model, memo).revision == COMMIT
    home.rename(tmp_path / "on another machine")
    assert fingerprint_weights(model.source, ("vae",), None, memo)["commit"] == COMMIT
    [file] = (tmp_path / "root" / "weights").iterdir()
    file.write_bytes(b"\xff{")
    with pytest.raises(WeightsError, match=r"commit of .* is unknown"):
        fingerprint_weights(model.source, ("vae",), None, memo)


def test_a_distilled_checkpoint_is_known_by_flavour_and_repository(tmp_path):
    """A folder can't be checked, which causes a warning if the family has distilled checkpoints."""
    repo, remarks = "Tongyi-MAI/Z-Image-Turbo", list[str]()
    for model in (Model(family="z-image", flavour="z-image-turbo"), Model(family="z-image", path=repo)):
        with pytest.raises(CheckpointMismatch, match="z-image-turbo is distilled to few steps") as caught:
            check_distilled(model, remarks.append)
        assert "train z-image (Tongyi-MAI/Z-Image)" in caught.value.next_step
        assert "model.assistant to default (ostris/zimage_turbo_training_adapter)" in caught.value.next_step
        assert "train.guidance" in caught.value.next_step
        check_distilled(model, remarks.append, is_guided=True)
    check_distilled(Model(family="z-image"), remarks.append)
    check_distilled(Model(family="z-image", flavour="z-image-turbo", assistant="file.safetensors"), remarks.append)
    check_distilled(Model(family="sana", path=str(tmp_path)), remarks.append)
    assert remarks == []
    check_distilled(Model(family="z-image"), remarks.append, is_guided=True)
    assert remarks.pop().startswith("train.guidance: Tongyi-MAI/Z-Image is not distilled")
    check_distilled(Model(family="z-image", path=str(tmp_path)), remarks.append)
    assert len(remarks) == 1 and "whether it is z-image-turbo" in remarks[0]


def test_an_assistant_of_a_checkpoint_that_is_not_distilled_is_refused(tmp_path):
    """A folder can't be checked, which causes a warning."""
    assistant, remarks = "file.safetensors", list[str]()
    for model in (
        Model(family="z-image", assistant=assistant),
        Model(family="sana", assistant=assistant),
        Model(family="z-image", path="Tongyi-MAI/Z-Image", assistant=assistant),
    ):
        with pytest.raises(CheckpointMismatch, match=r"model\.assistant: .* is not distilled") as caught:
            check_distilled(model, remarks.append)
        assert "remove model.assistant" in caught.value.next_step
    assert remarks == []
    check_distilled(Model(family="sana", path=str(tmp_path), assistant=assistant), remarks.append)
    assert len(remarks) == 1 and remarks[0].startswith("model.assistant: ") and str(tmp_path) in remarks[0]
