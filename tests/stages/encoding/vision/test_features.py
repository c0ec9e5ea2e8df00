"""Weights and their fingerprint, refused models, DINOv2's patch grids and the stored grids."""

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


@given(BUCKETS, SIZES, st.sampled_from([16, 32]))
def test_what_is_stored_is_never_finer_than_patches_or_tokens(bucket: Bucket, size: int, side: int) -> None:
    patches, tokens, stored_size = patch_grid(bucket, size), token_grid(bucket, side), stored_grid(bucket, size, side)
    for axis in range(2):
        assert stored_size[axis] <= min(patches[axis], tokens[axis])
        assert stored_size[axis] in (patches[axis], tokens[axis])
