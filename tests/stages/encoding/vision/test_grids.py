"""Which patches DINOv2 gives of a frame, and which of grids is stored."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.catalogue import FAMILIES
from schemas.geometry import Bucket
from stages.encoding.vision.grids import PATCH_SIZE, patch_grid, stored_grid, token_grid

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
