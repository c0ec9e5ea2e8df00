"""A part of a checkpoint comes from its own place if the configuration names one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cache.models import weights
from cache.models.compatibility import pin_revision
from cache.models.places import fingerprint_parts, locate, read_part_config
from cache.models.weights import WeightsError, fetch_components
from cache.store.store import Store
from schemas.config.encoding import Model
from schemas.config.loading import ConfigError, load_config

COMMIT = "0" * 38 + "ab"
PARTS = ("text_encoder", "tokenizer", "vae", "transformer")


def checkpoint(folder: Path, content: str = "weights") -> Path:
    for part in PARTS:
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(json.dumps({"part": part}))
        (folder / part / "model.safetensors").write_text(content)
    (folder / "model_index.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face cache with the repository someone/vae at COMMIT."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home/hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repo = tmp_path / "home/hub/models--someone--vae"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs/main").write_text(COMMIT)
    checkpoint(repo / "snapshots" / COMMIT, "weights of the repository")
    return tmp_path / "home"


def z_image(folder: Path, **places: Any) -> Model:
    return Model(family="z-image", flavour="z-image", path=str(folder), **places)


def test_a_part_with_its_own_place_is_read_from_there(tmp_path: Path) -> None:
    base, other = checkpoint(tmp_path / "base"), checkpoint(tmp_path / "other", "other weights")
    model = z_image(base, vae=str(other), text_encoder=str(other))
    assert locate(model, ["transformer"]) == (str(base), None)
    assert locate(model, ["vae"]) == (str(other), None)
    joined = fetch_components(*locate(model, ["text_encoder", "tokenizer"]), ["text_encoder", "tokenizer"])
    assert [(joined / part / "model.safetensors").read_text() for part in ("text_encoder", "tokenizer")] == [
        "other weights",
        "weights",
    ]
    assert locate(model, ["text_encoder", "tokenizer"]) == (str(joined), None)  # linked once


def test_a_part_from_another_place_changes_the_fingerprint_of_this_part_only(tmp_path: Path) -> None:
    base, other = checkpoint(tmp_path / "base"), checkpoint(tmp_path / "other", "other weights")
    plain, mixed = z_image(base), z_image(base, text_encoder=str(other))
    texts = ("text_encoder", "tokenizer")
    assert fingerprint_parts(mixed, ["vae"]) == fingerprint_parts(plain, ["vae"])
    assert fingerprint_parts(mixed, texts) != fingerprint_parts(plain, texts)
    moved = z_image(base, text_encoder=str(shutil.copytree(other, tmp_path / "moved")))
    assert fingerprint_parts(moved, texts) == fingerprint_parts(mixed, texts)
    assert fingerprint_parts(z_image(other, vae=str(base)), ["vae"]) == fingerprint_parts(plain, ["vae"])


def test_a_part_from_a_repository_is_pinned_to_its_commit(tmp_path: Path) -> None:
    memo = Store(str(tmp_path / "root"))
    model = z_image(checkpoint(tmp_path / "base"), vae="someone/vae")
    pinned = pin_revision(model, memo)
    assert pinned.vae == f"someone/vae@{COMMIT}" and pinned.revision is None and pinned.transformer is None
    assert pin_revision(pinned, memo) == pinned
    fingerprint = {"repo": "someone/vae", "commit": COMMIT, "parts": ["vae"]}
    assert fingerprint_parts(model, ["vae"], memo) == fingerprint_parts(pinned, ["vae"]) == fingerprint
    assert fetch_components(*locate(pinned, ["vae"]), ["vae"]).name == COMMIT
    assert read_part_config(pinned, "vae") == {"part": "vae"}


def test_a_repository_that_a_stage_does_not_need_may_be_unreachable(tmp_path: Path) -> None:
    memo = Store(str(tmp_path / "root"))
    model = Model(family="z-image", flavour="z-image", path="someone/missing", vae="someone/vae")
    pinned = pin_revision(model, memo)
    assert fingerprint_parts(pinned, ["vae"], memo)["commit"] == COMMIT
    with pytest.raises(weights.UnknownCommit, match="someone/missing"):
        fingerprint_parts(pinned, ["text_encoder", "tokenizer"], memo)
    with pytest.raises(weights.HubError, match="someone/missing"):
        pin_revision(model.changed(vae=None), memo)


def test_a_place_that_does_not_exist_is_named(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base")
    for place in (tmp_path / "missing.safetensors", tmp_path / "missing"):
        with pytest.raises(weights.CheckpointNotFound, match=f"{place.name} is ") as caught:
            fetch_components(*locate(z_image(base, vae=str(place)), ["vae"]), ["vae"])
        assert "model.vae" in caught.value.next_step
    shutil.rmtree(base / "vae")
    with pytest.raises(WeightsError, match="lacks vae"):
        fetch_components(*locate(z_image(base, vae=str(base)), ["vae"]), ["vae"])


@pytest.mark.parametrize(
    ("model", "option", "words"),
    [
        ("{family: z-image, flavour: z-image, path: model.gguf}", "path", "GGUF"),
        ("{family: z-image, flavour: z-image, vae: ae.pt}", "vae", "pickle"),
        ("{family: z-image, transformer: a.safetensors}", "flavour", "z-image-turbo"),
        ("{family: z-image, path: a.safetensors}", "flavour", "z-image-turbo"),
        ("{family: z-image, transformer_2: a/b}", "transformer_2", "z-image has no transformer_2"),
        ("{family: wan2.2-a14b, flavour: t2v-a14b, path: a.safetensors}", "path", "model.transformer_2"),
    ],
)
def test_a_place_that_is_not_valid_is_refused_with_the_option(
    tmp_path: Path, model: str, option: str, words: str
) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(f"root: work\nmodel: {model}\ndatasets: [{{id: a, instance_data_dir: a}}]\n")
    with pytest.raises(ConfigError, match=rf"model\.{option}: .*{words}"):
        load_config(file)


def test_relative_places_are_relative_to_the_configuration(tmp_path: Path) -> None:
    checkpoint(tmp_path / "base")
    (tmp_path / "ae.safetensors").write_bytes(b"")
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        "root: work\n"
        "model: {family: z-image, flavour: z-image, vae: ae.safetensors, text_encoder: base, transformer: a/b}\n"
        "datasets: [{id: a, instance_data_dir: a}]\n"
    )
    model = load_config(file).model
    assert model.vae == str(tmp_path / "ae.safetensors") and model.text_encoder == str(tmp_path / "base")
    assert model.place("transformer") == ("a/b", None) and model.place("tokenizer").source == model.flavour_spec.repo
