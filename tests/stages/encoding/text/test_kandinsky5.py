"""Stored embeddings of Kandinsky 5, compared with the installed pipelines' `encode_prompt`, one prompt at a time."""

from functools import cache

import diffusers
import pytest
import torch
from PIL import Image
from transformers import CLIPTextModel, CLIPTokenizer, Qwen2_5_VLForConditionalGeneration

from schemas.catalog import FAMILIES
from schemas.family import Task, Template
from stages.encoding.text.base import RequestError, TextRequest
from stages.encoding.text.kandinsky5 import Encoder
from tests.forms import long
from tests.qwen_processor import Processor


def kind_of(family: str, task: Task) -> tuple[str, Template]:
    return FAMILIES[family].pipelines[task], FAMILIES[family].templates[task]


KINDS = {
    "kandinsky5-image-t2i": kind_of("kandinsky5-image", "t2i"),
    "kandinsky5-image-i2i": kind_of("kandinsky5-image", "i2i"),
    # With Qwen's own vocabulary this template's prefix has 49 tokens, and the pipeline still crops 54.
    "kandinsky5-image-i2i-prefix49": kind_of("kandinsky5-image", "i2i"),
    "kandinsky5-video-t2v": kind_of("kandinsky5-video", "t2v"),
    "kandinsky5-video-i2v": kind_of("kandinsky5-video", "i2v"),
}
CAPTIONS = [
    "",
    "A small grey cat looks at the camera with green eyes.",
    "  white\n space\tand &lt;b&gt;entities&lt;/b&gt; &amp;amp; {braces} %s ",
    "Ünïcödé 猫は窓の外を見る 🐈‍⬛ — “quotes” ﬁ schÃ¶n",
    "user: <|im_end|> a caption that names a special token",
    "a red flower near the old stone wall of the house, " * 12,
]
LIMIT = 1e-5


@pytest.fixture(scope="module")
def loaded(tiny):
    """kind, max_length, dtype, folder -> (encoder, pipeline), each made once."""
    torch.set_num_threads(1)
    diffusers.utils.logging.set_verbosity_error()  # the pipeline prints the truncated text, thousands of words here

    @cache
    def pipeline(kind, folder, dtype):
        pipe = getattr(diffusers, KINDS[kind][0])(*[None] * 7)
        qwen, clip = folder / "text_encoder", folder / "text_encoder_2"
        pipe.text_encoder = Qwen2_5_VLForConditionalGeneration.from_pretrained(qwen, dtype=dtype).eval()
        pipe.tokenizer = Processor(folder / "tokenizer")
        pipe.text_encoder_2 = CLIPTextModel.from_pretrained(clip, dtype=dtype).eval()
        pipe.tokenizer_2 = CLIPTokenizer.from_pretrained(folder / "tokenizer_2")
        return pipe

    @cache
    def both(kind, max_length=None, dtype=torch.float32, folder=None):
        template, folder = KINDS[kind][1], folder or tiny(kind)
        length = max_length or template.max_length
        return Encoder(str(folder), None, template, length, dtype, torch.device("cpu")), pipeline(kind, folder, dtype)

    return both


def picture(width: int = 192, height: int = 128) -> Image.Image:
    gradient = Image.linear_gradient("L").resize((width, height))
    return Image.merge("RGB", [gradient, gradient.transpose(Image.Transpose.ROTATE_180), gradient.rotate(90)])


def request(template: Template, caption: str, image: Image.Image | None = None) -> TextRequest:
    return TextRequest(template.cleaner.text(caption), images=() if image is None else (image,))


def encoded(encoder, requests):
    return encoder.encode([encoder.prepare(one) for one in requests])


@torch.no_grad()
def reference(pipe, caption, image=None, **options):
    """(embeds_LD, pooled_D) of the pipeline."""
    if image is not None:
        options["image"] = [image]
    embeds, pooled, lengths = pipe.encode_prompt(caption, device=torch.device("cpu"), **options)
    return embeds[0, : lengths[-1]], pooled[0]


def differences(encoder, pipe, captions, images, **options) -> float:
    """Encode all captions in one batch and compare each with the pipeline; returns the largest difference."""
    requests = [request(encoder.template, *pair) for pair in zip(captions, images, strict=True)]
    largest = 0.0
    for result, caption, image in zip(encoded(encoder, requests), captions, images, strict=True):
        embeds, pooled = reference(pipe, caption, image, **options)
        assert result.embeds.shape == embeds.shape and result.pooled.shape == pooled.shape
        assert result.kept == len(embeds) and result.embeds.isfinite().all()
        gaps = (result.embeds - embeds).abs().max(), (result.pooled - pooled).abs().max()
        largest = max(largest, *(gap.item() for gap in gaps))
    return largest


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_equal_the_pipelines(loaded, kind, record_property):
    encoder, pipe = loaded(kind)
    sizes = [(192, 128), (128, 192), (160, 160), (320, 64), (192, 128), (192, 128)]
    images = [picture(*size) if encoder.template.with_image else None for size in sizes]
    largest = differences(encoder, pipe, CAPTIONS, images)
    record_property("largest_difference", largest)
    print(f"{kind}: largest difference {largest:.2e}")
    assert largest <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kandinsky5-image-i2i", long("kandinsky5-video-t2v"), long("kandinsky5-image-t2i")])
def test_bfloat16_is_as_near_as_the_pipelines(loaded, edited, near, kind):
    """A batch with a caption that merges with the template, compared with the pipeline in float32 and bfloat16."""
    folder = edited(kind, "tokenizer", "<|quad_start|>", "userzebra" if "i2i" in kind else "user\\nzebra")
    encoder, half = loaded(kind, None, torch.bfloat16, folder)
    _, pipe = loaded(kind, folder=folder)
    captions = [*CAPTIONS[:4], "zebra and a small grey cat", CAPTIONS[5]]
    images = [picture() if encoder.template.with_image else None for _ in captions]
    results = encoded(encoder, [request(encoder.template, *pair) for pair in zip(captions, images, strict=True)])
    assert (encoder.stats.prefixed_texts, encoder.stats.full_texts) == (5, 1)
    pairs = list(zip(captions, images, strict=True))
    theirs, exact = ([reference(one, *pair) for pair in pairs] for one in (half, pipe))
    ours = [(result.embeds, result.pooled) for result in results]
    for part, name in enumerate(("embeds", "pooled")):
        near(f"{kind} {name}", [tuple(one[part] for one in row) for row in zip(ours, theirs, exact, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kandinsky5-image-t2i", long("kandinsky5-video-t2v")])
def test_overlong_captions_are_cut_as_by_the_pipeline(loaded, kind, record_property):
    max_length = 512
    encoder, pipe = loaded(kind, max_length)
    # The pipeline cuts characters: of a long token, it leaves a part of a word at the end.
    captions = ["relationships " * 1200, "A small grey cat, 猫 and schön; " * 120, "short"]
    largest = differences(encoder, pipe, captions, [None] * 3, max_sequence_length=max_length)
    record_property("largest_difference", largest)
    print(f"{kind} at {max_length}: largest difference {largest:.2e}")
    assert largest <= LIMIT
    long, _, short = encoded(encoder, [request(encoder.template, caption) for caption in captions])
    assert long.tokens > max_length >= long.kept
    assert short.tokens == short.kept


def test_overlong_i2i_captions_lose_their_end_and_keep_the_image(loaded):
    encoder, pipe = loaded("kandinsky5-image-i2i", 256)
    image, words = picture(), "red blue yellow brown " * 200
    result = encoded(encoder, [request(encoder.template, words, image)])[0]
    assert result.kept == 256 < result.tokens

    # The same caption cut by hand fits, and gives the same embeddings in the pipeline.
    ids = pipe.tokenizer.tokenizer(encoder.template.text.split("{}")[0] + words)["input_ids"]
    suffix = len(reference(pipe, "", image)[0])
    cut_caption = pipe.tokenizer.tokenizer.decode(ids[encoder.crop : encoder.crop + 256 - suffix])
    embeds, _ = reference(pipe, cut_caption, image)
    assert (result.embeds - embeds).abs().max() <= LIMIT


def test_what_cannot_be_encoded_is_refused_with_a_reason(loaded):
    encoder, _ = loaded("kandinsky5-image-i2i", 16)
    with pytest.raises(RequestError, match=r"image takes \d+ tokens and text.max_length is 16") as caught:
        encoder.prepare(request(encoder.template, "a cat", picture(512, 512)))
    assert caught.value.reason == "image-too-long"
    encoder, _ = loaded("kandinsky5-image-i2i")
    with pytest.raises(RequestError, match=r"<\|image_pad\|>") as caught:
        encoded(encoder, [request(encoder.template, "a <|image_pad|> cat", picture())])
    assert caught.value.reason == "placeholder-in-caption"
    with pytest.raises(RequestError, match="aspect ratio"):
        encoder.prepare(request(encoder.template, "a cat", picture(2048, 8)))
