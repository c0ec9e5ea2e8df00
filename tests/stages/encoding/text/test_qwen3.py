"""Stored embeddings of families with Qwen3 against the installed pipelines."""

import pytest
import torch
from diffusers import ZImagePipeline
from transformers import AutoTokenizer, Qwen3Model

from cache.models.weights import WeightsError
from schemas.catalog import FAMILIES
from stages.encoding.text.base import TextRequest
from stages.encoding.text.qwen3 import Encoder

TEMPLATE = FAMILIES["z-image"].templates["t2i"]
CAPTIONS = [
    "",
    "A Small Grey Cat looks at the camera with green eyes.",
    "  Ünïcödé 猫は窓の外を見る 🐈‍⬛ — “quotes” &lt;b&gt; {braces} \n two lines ",
    "a red flower near the old stone wall of the house, " * 12,
    "words that go on " * 300,
]


@pytest.fixture(scope="module")
def folder(tiny):
    torch.set_num_threads(1)
    return tiny("z-image")


def encoder_of(folder, dtype=torch.float32):
    return Encoder(str(folder), None, TEMPLATE, TEMPLATE.max_length, dtype, torch.device("cpu"))


def pipe_of(folder, dtype=torch.float32):
    pipe = ZImagePipeline(*[None] * 5)
    pipe.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    pipe.text_encoder = Qwen3Model.from_pretrained(folder / "text_encoder", dtype=dtype).eval()
    return pipe


def encoded(encoder, captions):
    return encoder.encode(
        [encoder.prepare(TextRequest(TEMPLATE.cleaner.text(caption), negative=caption == "")) for caption in captions]
    )


@torch.no_grad()
def reference(pipe, caption):
    return pipe.encode_prompt(caption, device=torch.device("cpu"), do_classifier_free_guidance=False)[0][0]


@pytest.mark.slow
def test_embeddings_equal_the_pipelines(folder, record_property):
    """All captions in one batch; the last is cut, and its template's end with it."""
    pipe, largest = pipe_of(folder), 0.0
    for result, caption in zip(encoded(encoder_of(folder), CAPTIONS), CAPTIONS, strict=True):
        wanted = reference(pipe, caption)
        assert result.pooled is None and result.embeds.shape == wanted.shape and result.kept == len(wanted)
        assert (result.tokens > result.kept) == (caption == CAPTIONS[-1])
        largest = max(largest, (result.embeds - wanted).abs().max().item())
    record_property("largest difference", largest)
    assert largest <= 1e-5


@pytest.mark.slow
def test_bfloat16_is_as_near_as_the_pipelines(folder, near):
    half, pipe = pipe_of(folder, torch.bfloat16), pipe_of(folder)
    results = encoded(encoder_of(folder, torch.bfloat16), CAPTIONS)
    pairs = zip(results, CAPTIONS, strict=True)
    near("z-image", [(result.embeds, reference(half, text), reference(pipe, text)) for result, text in pairs])


def test_a_tokenizer_with_another_chat_template_is_refused(edited):
    folder = edited("z-image", "tokenizer", "unused", "unused")
    template = folder / "tokenizer" / "chat_template.jinja"
    template.unlink()  # a link to the file of all tests
    template.write_text("{{ messages[0].content }}")
    with pytest.raises(WeightsError, match="chat template makes 'a caption' of a prompt, and the template z-image"):
        encoder_of(folder)
    template.unlink()
    with pytest.raises(WeightsError, match="has no chat template"):
        encoder_of(folder)
