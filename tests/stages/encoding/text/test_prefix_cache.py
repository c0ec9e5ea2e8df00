"""What texts share: passes of neighboring lengths, and the features of an image."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from stages.encoding.text import qwen_vl_images
from stages.encoding.text.reader import split_by_length


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
