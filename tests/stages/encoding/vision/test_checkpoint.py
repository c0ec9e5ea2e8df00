"""Which weights are taken, what names them, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest

from cache.models.weights import WeightsError
from stages.encoding.vision.checkpoint import fingerprint_weights, resolve_checkpoint


@pytest.fixture
def folder(tiny, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("dinov2"), tmp_path / "dino"))


def change(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_weights_are_named_by_their_content_alone(folder: Path) -> None:
    before = fingerprint_weights(str(folder), None)
    (folder / "README.md").write_text("other words")
    (folder / ".gitattributes").write_text("")
    moved = folder.rename(folder.with_name("elsewhere"))
    assert fingerprint_weights(str(moved), None) == before
    assert resolve_checkpoint(str(moved), None) == moved
    weights = moved / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert fingerprint_weights(str(moved), None) != before


def test_another_model_is_refused_by_name(folder: Path) -> None:
    change(folder, model_type="clip")
    for call in (fingerprint_weights, resolve_checkpoint):
        with pytest.raises(WeightsError, match="is a clip"):
            call(str(folder), None)


def test_another_size_of_patch_is_refused(folder: Path) -> None:
    change(folder, patch_size=16)
    with pytest.raises(WeightsError, match="patches of 16"):
        fingerprint_weights(str(folder), None)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="safetensors"):
        resolve_checkpoint(str(folder), None)


@pytest.mark.parametrize("broken", ["", "{"])
def test_a_config_that_is_none_is_named(folder: Path, broken: str) -> None:
    (folder / "config.json").write_text(broken)
    with pytest.raises(WeightsError, match=r"config\.json can't be read"):
        fingerprint_weights(str(folder), None)


def test_what_is_neither_folder_nor_repository_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="neither a directory nor a repository"):
        fingerprint_weights(str(tmp_path / "nowhere"), None)


def test_a_repository_that_cannot_be_had_is_named(monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsError, match="facebook/no-such-dino can't be reached"):
        fingerprint_weights("facebook/no-such-dino", None)
