"""What only Kandinsky 5's texts have: cut by characters, an image after the caption, a crop that is not the prefix."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from stages.encoding.text.base import RequestError, TextRequest
from tests.conformance.flavours import ROWS
from tests.conformance.made import load_pipeline
from tests.forms import long
from tests.stages.encoding.text.conftest import gradient

I2I, LIMIT = "kandinsky5-image-i2i", 1e-5


def check(kind: str, encoder: Any, folder: Path, requests: list[TextRequest], captions: list[str]) -> list[Any]:
    """Our results, of one batch, which are the pipeline's."""
    pipe, results = load_pipeline(ROWS[kind], folder), encoder.encode([encoder.prepare(one) for one in requests])
    for request, result, caption in zip(requests, results, captions, strict=True):
        with torch.no_grad():
            wanted = ROWS[kind].text(pipe, caption, request.images, False)
        for found, expected in zip((result.embeds, result.pooled), wanted, strict=True):
            assert found.shape == expected.shape and (found - expected).abs().max() <= LIMIT
    return results


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kandinsky5-image-t2i", long("kandinsky5-video-t2v")])
def test_overlong_captions_are_cut_as_by_the_pipeline(make, tiny, kind):
    # The pipeline cuts characters: where tokens are long, it leaves a part of a word at the end.
    captions, encoder = ["relationships " * 1200, "A small grey cat, 猫 and schön; " * 120, "short"], make(kind)
    requests = [TextRequest(encoder.template.cleaner.text(caption)) for caption in captions]
    long, _, short = check(kind, encoder, tiny(kind), requests, captions)
    assert long.tokens > encoder.max_length >= long.kept
    assert short.tokens == short.kept


@pytest.mark.slow
def test_the_crop_is_the_pipelines_where_the_prefix_has_fewer_tokens(make, tiny):
    """Qwen's own vocabulary gives this template's prefix 49 tokens, and the pipeline crops 54 all the same."""
    folder, captions = tiny(f"{I2I}-prefix49"), ["", "A small grey cat.", "猫 " * 40]
    requests = [TextRequest(caption.strip(), images=(gradient(),)) for caption in captions]
    check(I2I, make(I2I, folder=folder), folder, requests, captions)


def test_overlong_i2i_captions_lose_their_end_and_keep_the_image(make, tiny):
    encoder, words = make(I2I, max_length=256), "red blue yellow brown " * 200
    [result] = encoder.encode([encoder.prepare(TextRequest(words.strip(), images=(gradient(),)))])
    assert result.kept == 256 < result.tokens

    # The same caption cut by hand fits, and gives the same embeddings by the pipeline.
    pipe = load_pipeline(ROWS[I2I], tiny(I2I))
    with torch.no_grad():
        ids = pipe.tokenizer.tokenizer(encoder.template.text.split("{}")[0] + words)["input_ids"]
        suffix = len(ROWS[I2I].text(pipe, "", [gradient()], False)[0])
        kept = pipe.tokenizer.tokenizer.decode(ids[encoder.crop : encoder.crop + 256 - suffix])
        embeds, _ = ROWS[I2I].text(pipe, kept, [gradient()], False)
    assert (result.embeds - embeds).abs().max() <= LIMIT


def test_what_cannot_be_encoded_is_refused_with_a_reason(make):
    def request(size: tuple[int, int] = (192, 128), caption: str = "a cat") -> TextRequest:
        return TextRequest(caption, images=(Image.new("RGB", size),))

    encoder = make(I2I, max_length=16)
    with pytest.raises(RequestError, match=r"image takes \d+ tokens and text.max_length is 16") as caught:
        encoder.prepare(request((512, 512)))
    assert caught.value.reason == "image-too-long"
    encoder = make(I2I)
    with pytest.raises(RequestError, match="for media") as caught:
        encoder.prepare(request(caption="a <|image_pad|> cat"))
    assert caught.value.reason == "placeholder-in-caption"
    with pytest.raises(RequestError, match="aspect ratio"):
        encoder.prepare(request((2048, 8)))
