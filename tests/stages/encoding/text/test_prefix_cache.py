"""The template's prefix computed once gives what computing it for every caption gives, in every template."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from stages.encoding.text import qwen_vl_images
from stages.encoding.text.reader import split_by_length
from tests.forms import long

KINDS = [
    "kandinsky5-image-t2i",
    "kandinsky5-image-i2i",
    "kandinsky5-image-i2i-prefix49",
    "kandinsky5-video-t2v",
    "kandinsky5-video-i2v",
    "sana",
]
CAPTIONS = [
    "",
    "a",
    "sunset over the sea",
    "A small grey cat looks at the camera with green eyes.",
    "1234 猫 (quoted) “signs”",
    "a red flower near the old stone wall of the house, " * 12,
    "relationships " * 20,
]


def distance(results, others) -> float:
    """The largest |difference| of any caption's embeddings, relative to their root mean square."""
    pairs = [(one.embeds.float(), other.embeds.float()) for one, other in zip(results, others, strict=True)]
    return max(((one - other).abs().max() / other.square().mean().sqrt()).item() for one, other in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [long(kind) if kind in KINDS[2:4] else kind for kind in KINDS])
def test_shared_equals_whole(make, encoded, kind, record_property):
    """float32: to 1e-4. bfloat16: the shared prefix moves results by no more than bfloat16 itself does."""
    shared, whole = make(kind), make(kind, share_prefix=False)
    exact = encoded(whole, CAPTIONS)
    results = encoded(shared, CAPTIONS)
    assert (shared.stats.shared, shared.stats.whole) == (len(CAPTIONS), 0)
    assert (whole.stats.shared, whole.stats.whole) == (0, len(CAPTIONS))
    assert [(one.kept, one.tokens) for one in results] == [(one.kept, one.tokens) for one in exact]
    gap = distance(results, exact)

    half_shared = encoded(make(kind, torch.bfloat16), CAPTIONS)
    half_whole = encoded(make(kind, torch.bfloat16, share_prefix=False), CAPTIONS)
    rounding = distance(half_whole, exact)
    half_gap = distance(half_shared, half_whole)
    record_property("differences", (gap, half_gap, rounding))
    print(f"{kind}: float32 {gap:.1e}; bfloat16 {half_gap:.1e}, where bfloat16 is {rounding:.1e} from float32")
    assert gap <= 1e-4
    assert half_gap <= 1.5 * rounding and distance(half_shared, exact) <= 1.5 * rounding


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(0, 300))
def test_a_batch_is_divided_with_the_least_padding(costs, overhead):
    passes = split_by_length(costs, overhead)
    assert sorted(row for rows in passes for row in rows) == list(range(len(costs)))

    def tokens(passes):
        return sum(overhead + len(rows) * max(costs[row] for row in rows) for rows in passes)

    order = sorted(range(len(costs)), key=costs.__getitem__)
    cuts = [[order], [[row] for row in order], *([order[:cut], order[cut:]] for cut in range(1, len(order)))]
    assert all(tokens(passes) <= tokens(other) for other in cuts)
    assert len(split_by_length(costs, 300 * 40)) == 1


def test_an_image_passes_the_vision_model_once(make, encoded, monkeypatch):
    encoder = make("kandinsky5-image-i2i")
    red, blue = (Image.new("RGB", (96, 96), colour) for colour in ("red", "blue"))
    first = encoded(encoder, ["a cat", "a dog", ""], red)
    encoded(encoder, ["a cat"], red.copy())
    encoded(encoder, ["a cat"], blue)
    encoded(encoder, ["a cat"], Image.new("RGB", (48, 192), "red"))
    assert (encoder.stats.images, encoder.stats.reused) == (3, 3)

    # No more are kept than the limit says; what was forgotten is computed again, to the same bytes.
    monkeypatch.setattr(qwen_vl_images, "MAX_CACHED_FEATURES", 1)
    monkeypatch.setattr(qwen_vl_images, "MAX_CACHED_IMAGES", 1)
    encoded(encoder, ["a cat"], blue)
    again = encoded(encoder, ["a cat", "a dog", ""], red)
    assert (encoder.stats.images, encoder.stats.reused) == (4, 6)
    assert all(torch.equal(one.embeds, other.embeds) for one, other in zip(first, again, strict=True))
