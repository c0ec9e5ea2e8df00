"""Which weights are taken, what names them, what is refused; which patches DINOv2 gives, which grid is stored."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.models.weights import WeightsError
from schemas.catalog import FAMILIES
from schemas.geometry import Bucket
from stages.encoding.vision.features import (
    PATCH_SIZE,
    fingerprint_weights,
    patch_grid,
    resolve_checkpoint,
    stored_grid,
    token_grid,
)


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


VIDEO, SANA = FAMILIES["kandinsky5-video"], FAMILIES["sana"]
SIZES = st.sampled_from([224, 518])
BUCKETS = st.builds(Bucket, *[st.integers(1, 128).map(lambda n: 32 * n)] * 2, st.just(1))


@pytest.mark.parametrize(
    "bucket, size, patches",
    [
        ("512x512", 224, (16, 16)),
        ("768x512@61", 224, (13, 20)),
        ("512x768@61", 224, (20, 13)),
        ("1024x1024", 518, (37, 37)),
        ("1408x640", 518, (25, 55)),
    ],
)
def test_patches_of_usual_buckets(bucket: str, size: int, patches: tuple[int, int]) -> None:
    assert patch_grid(Bucket.parse(bucket), size) == patches


@given(BUCKETS, SIZES)
def test_patches_keep_the_proportions_and_the_count(bucket: Bucket, size: int) -> None:
    """Each side is within half a patch of its exact length."""
    rows, columns = patch_grid(bucket, size)
    exact = (size // PATCH_SIZE) * (bucket.height / bucket.width) ** 0.5
    assert rows == 1 or abs(rows - exact) <= 0.5
    assert columns == 1 or abs(columns - (size // PATCH_SIZE) ** 2 / exact) <= 0.5


@given(BUCKETS, SIZES, st.sampled_from([16, 32]))
def test_what_is_stored_is_never_finer_than_patches_or_tokens(bucket: Bucket, size: int, side: int) -> None:
    patches, tokens, stored = patch_grid(bucket, size), token_grid(bucket, side), stored_grid(bucket, size, side)
    for axis in range(2):
        assert stored[axis] <= min(patches[axis], tokens[axis])
        assert stored[axis] in (patches[axis], tokens[axis])


def test_tokens_are_those_of_the_transformer() -> None:
    """Kandinsky 5 puts 2x2 latents of stride 8 into one; Sana's autoencoder alone has stride 32."""
    assert token_grid(Bucket.parse("768x512@61"), VIDEO.side_multiple) == (32, 48)
    assert token_grid(Bucket.parse("1024x1024"), SANA.side_multiple) == (32, 32)
