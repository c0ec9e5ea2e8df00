"""Shapes and precisions of a shard's tensors, beside those that its bucket and its cache name."""

import numpy as np
import pytest

from cache.shards.shard import ShardRow
from cache.shards.tensors import Array
from stages.maintenance.checks import CacheSpec, TensorChecker

FLUX = CacheSpec.of({"stage": "encode-latents", "autoencoder": "flux", "precision": "float32"})


def row(**shapes: tuple[int, ...]) -> ShardRow:
    return ShardRow("a", {name: Array.from_numpy(np.zeros(shape, np.float32)) for name, shape in shapes.items()})


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"latent": (16, 1, 8, 12)}, None),
        ({"latent": (32, 1, 8, 12)}, None),  # mean and log-variance
        ({"latent": (16, 1, 8, 12), "condition": (16, 1, 8, 12)}, None),
        ({"latent": (16, 1, 12, 8)}, "of bucket 96x64@1 it is"),
        ({"latent": (4, 1, 8, 12)}, "of bucket 96x64@1 it is"),
        ({"latent": (16, 1, 8, 12), "mask": (1, 8, 12)}, None),
        ({"latent": (16, 1, 8, 12), "mask": (1, 12, 8)}, r"mask is of shape .* it is \(1, 8, 12\)"),
        ({"latent": (16, 1, 8, 12), "mask": (2, 8, 12)}, "mask is of shape"),
        ({"latent": (16, 1, 8, 12), "mask": (1, 64, 96)}, "mask is of shape"),
        ({"latent": (16, 1, 8, 12), "mask": (1, 1, 8, 12)}, "mask is of shape"),
        ({"latent": (16, 1, 8, 12), "condition": (16, 2, 8, 12)}, "condition is of shape"),
        ({"embeds": (0, 4)}, "embeds is of shape"),
        ({}, "no tensors"),
    ],
)
def test_shapes_are_those_of_the_bucket(tensors, problem) -> None:
    seen = TensorChecker(FLUX)
    seen.bucket = "96x64@1"
    if problem is None:
        seen.check(row(**tensors))
    else:
        with pytest.raises(ValueError, match=problem):
            seen.check(row(**tensors))


@pytest.mark.parametrize(("mask", "right"), [((3, 8, 12), True), ((1, 8, 12), False), ((9, 8, 12), False)])
def test_a_clips_mask_has_the_latents_frames(mask, right) -> None:
    """That of one frame for all of a clip's is stored for each latent frame, too."""
    seen = TensorChecker(CacheSpec("float32", (8, 4), 16))
    seen.bucket = "96x64@9"
    if right:
        seen.check(row(latent=(16, 3, 8, 12), mask=mask))
    else:
        with pytest.raises(ValueError, match=r"mask is of shape .* it is \(3, 8, 12\)"):
            seen.check(row(latent=(16, 3, 8, 12), mask=mask))


VISION = CacheSpec.of({"stage": "encode-vision", "size": 84, "token": [4, 16]})


@pytest.mark.parametrize(("shape", "right"), [((3, 4, 6, 8), True), ((9, 4, 6, 8), False), ((3, 6, 4, 8), False)])
def test_features_are_on_the_grid_of_their_bucket(shape, right) -> None:
    seen = TensorChecker(VISION)
    seen.bucket = "96x64@9"
    features = ShardRow("a", {"vision": Array.from_numpy(np.zeros(shape, "<u2"), "bfloat16")})
    if right:
        seen.check(features)
    else:
        with pytest.raises(ValueError, match=r"of bucket 96x64@9 \(3, 4, 6"):
            seen.check(features)


def test_rows_are_alike_and_of_the_precision_that_their_cache_names() -> None:
    seen = TensorChecker(CacheSpec())
    seen.check(row(embeds=(3, 4)))
    with pytest.raises(ValueError, match="in the first row float32 by 4"):
        seen.check(row(embeds=(3, 5)))
    with pytest.raises(ValueError, match=r"is float32, and provenance\.json says bfloat16"):
        TensorChecker(CacheSpec("bfloat16")).check(row(embeds=(3, 4)))
