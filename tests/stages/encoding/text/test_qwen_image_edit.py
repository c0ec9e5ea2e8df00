"""Stored embeddings of Qwen-Image-Edit, with one and with several references, compared with the installed pipelines."""

import importlib

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration

from schemas.catalog import FAMILIES
from schemas.config.encoding import Text
from stages.encoding.text.base import RequestError, TextRequest
from stages.encoding.text.qwen_image_edit import Encoder
from tests.forms import long
from tests.qwen_processor import Processor

CPU = torch.device("cpu")
CAPTIONS = [" ", "", "Make the cat of the first picture grey.", "  猫 “quotes” {braces} \n two lines ", "and on " * 90]
LIMIT = 1e-5


def picture(seed: int, width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height))


PICTURES = [picture(1, 640, 400), picture(2, 200, 304), picture(3, 512, 512)]


def encoder_of(folder, kind, length=None, share_prefix=True, positions="pipeline"):
    template = Text(positions=positions).stored_template(FAMILIES[kind].templates["i2i"])
    length = length or template.max_length
    return Encoder(str(folder), None, template, length, torch.float32, CPU, share_prefix=share_prefix)


def pipe_of(folder, kind):
    pipe = getattr(diffusers, FAMILIES[kind].pipelines["i2i"])(*[None] * 6)
    pipe.processor = Processor(folder / "tokenizer", folder / "processor")
    pipe.text_encoder = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder").eval()
    return pipe


def tell_images(model, _, named):
    """A hook that marks the image tokens, which the processor does and the pipelines do not."""
    return (), named | {"mm_token_type_ids": (named["input_ids"] == model.config.image_token_id).int()}


def asked(encoder, caption, images) -> TextRequest:
    """A request with references resized like the reader does."""
    images_resized = []
    for image in images:
        width, height, _ = encoder.template.image_size.fit(np.array([image.width]), np.array([image.height]))
        images_resized.append(image.resize((int(width[0]), int(height[0])), Image.Resampling.LANCZOS))
    return TextRequest(caption, negative=caption == " ", images=tuple(images_resized))


@torch.no_grad()
def reference(pipe, kind, caption, images):
    """The embeddings of one prompt, with images prepared as in the pipeline's call."""
    sizes = importlib.import_module(pipe.__module__)
    area = getattr(sizes, "CONDITION_IMAGE_SIZE", 1024 * 1024)
    resized = []
    for image in images:
        width, height = sizes.calculate_dimensions(area, image.width / image.height)[:2]
        resized.append(pipe.image_processor.resize(image, height, width))
    embeds, mask = pipe.encode_prompt(caption, image=resized if kind.endswith("plus") else resized[0], device=CPU)
    assert mask is None, "one prompt has no padding"
    return embeds[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "counts", "positions"),
    [
        ("qwen-image-edit-plus", (1, 2, 3), "pipeline"),
        long("qwen-image-edit-plus", (1, 3), "grid"),
        long("qwen-image-edit", (1,), "pipeline"),
        long("qwen-image-edit", (1,), "grid"),
    ],
)
def test_embeddings_equal_the_pipelines(tiny, record_property, kind, counts, positions):
    """All captions with each number of references in one batch; the vision model encodes each picture once. grid:
    whether the pipeline marks the image tokens."""
    torch.set_num_threads(1)
    folder, largest = tiny(kind), 0.0
    pipe, encoder = pipe_of(folder, kind), encoder_of(folder, kind, positions=positions)
    if positions == "grid":
        pipe.text_encoder.register_forward_pre_hook(tell_images, with_kwargs=True)
    pairs = [(caption, PICTURES[:count]) for count in counts for caption in CAPTIONS]
    results = encoder.encode([encoder.prepare(asked(encoder, *pair)) for pair in pairs])
    for result, pair in zip(results, pairs, strict=True):
        expected = reference(pipe, kind, *pair)
        assert result.pooled is None and result.embeds.shape == expected.shape
        assert result.tokens == result.kept == len(expected)
        largest = max(largest, (result.embeds - expected).abs().max().item())
    record_property("largest difference", largest)
    assert largest <= LIMIT
    assert encoder.stats.prefixed_texts == len(pairs) and encoder.stats.images == max(counts)
    [alone] = encoder.encode([encoder.prepare(asked(encoder, *pairs[2]))])
    unshared = encoder_of(folder, kind, share_prefix=False, positions=positions)
    [whole] = unshared.encode([unshared.prepare(asked(unshared, *pairs[2]))])
    assert max((each.embeds - results[2].embeds).abs().max() for each in (alone, whole)) <= LIMIT


def test_what_can_not_be_encoded_is_refused_by_name(tiny):
    kind = "qwen-image-edit-plus"
    whole = encoder_of(tiny(kind), kind)
    fits = whole.prepare(asked(whole, "a cat", PICTURES[:1])).ids
    encoder = encoder_of(tiny(kind), kind, length=len(fits) - whole.crop)
    with pytest.raises(RequestError, match=r"its references take \d+ tokens, and text.max_length is \d+"):
        encoder.prepare(asked(encoder, "a cat", PICTURES[:2]))
    with pytest.raises(RequestError, match=r"<\|image_pad\|>"):
        encoder.prepare(asked(encoder, "a <|image_pad|> cat", PICTURES[:1]))
    cut = encoder.prepare(asked(encoder, "and on " * 90, PICTURES[:1]))
    assert cut.untruncated > len(cut.ids) == len(fits)
