"""What only Qwen-Image-Edit's texts have: several numbers of references in a batch, images on a grid of positions."""

from itertools import cycle

import numpy as np
import pytest
import torch
from PIL import Image

from stages.encoding.text.base import RequestError, TextRequest
from tests.conformance.flavours import ROWS
from tests.conformance.made import load_pipeline, picture
from tests.forms import long

CAPTIONS = [" ", "", "Make the cat of the first picture grey.", "  猫 “quotes” {braces} \n two lines ", "and on " * 90]
LIMIT = 1e-5
PICTURES = [picture(1, 640, 400), picture(2, 200, 304), picture(3, 512, 512)]


def tell_images(model, _, named):
    """A hook by which the model is told which tokens are images', as the processor knows and the pipelines do not
    say."""
    return (), named | {"mm_token_type_ids": (named["input_ids"] == model.config.image_token_id).int()}


def asked(encoder, caption, images) -> TextRequest:
    """With references as the reader resizes them."""
    shown = []
    for image in images:
        width, height, _ = encoder.template.image_size.fit(np.array([image.width]), np.array([image.height]))
        shown.append(image.resize((int(width[0]), int(height[0])), Image.Resampling.LANCZOS))
    return TextRequest(caption, negative=caption == " ", images=tuple(shown))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "counts", "positions"),
    [
        ("qwen-image-edit-plus", (1, 2), "pipeline"),
        long("qwen-image-edit-plus", (1, 3), "grid"),
        long("qwen-image-edit", (1,), "grid"),
    ],
)
def test_embeddings_equal_the_pipelines(make, tiny, record_property, kind, counts, positions):
    """All captions in one batch, with each number of references in turn; each picture goes through the vision model
    once. grid: of a pipeline that tells the model where the images are."""
    pipe, encoder, largest = load_pipeline(ROWS[kind], tiny(kind)), make(kind, positions=positions), 0.0
    if positions == "grid":
        pipe.text_encoder.register_forward_pre_hook(tell_images, with_kwargs=True)
    pairs = [(caption, PICTURES[:count]) for caption, count in zip(CAPTIONS, cycle(counts), strict=False)]
    results = encoder.encode([encoder.prepare(asked(encoder, *pair)) for pair in pairs])
    for result, pair in zip(results, pairs, strict=True):
        with torch.no_grad():
            wanted, _ = ROWS[kind].text(pipe, *pair, False)
        assert result.embeds.shape == wanted.shape and result.tokens == result.kept == len(wanted)
        largest = max(largest, (result.embeds - wanted).abs().max().item())
    record_property("largest difference", largest)
    assert largest <= LIMIT
    assert encoder.stats.prefixed_texts == len(pairs) and encoder.stats.images == max(counts)


def test_what_can_not_be_encoded_is_refused_by_name(make):
    kind = "qwen-image-edit-plus"
    whole = make(kind)
    fits = whole.prepare(asked(whole, "a cat", PICTURES[:1])).ids
    encoder = make(kind, max_length=len(fits) - whole.crop)
    with pytest.raises(RequestError, match=r"its references take \d+ tokens, and text.max_length is \d+"):
        encoder.prepare(asked(encoder, "a cat", PICTURES[:2]))
    with pytest.raises(RequestError, match="for media"):
        encoder.prepare(asked(encoder, "a <|image_pad|> cat", PICTURES[:1]))
    cut = encoder.prepare(asked(encoder, "and on " * 90, PICTURES[:1]))
    assert cut.untruncated > len(cut.ids) == len(fits)
