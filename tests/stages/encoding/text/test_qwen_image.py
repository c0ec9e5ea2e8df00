"""Stored embeddings of Qwen-Image against the installed pipeline."""

import pytest
import torch
from diffusers import QwenImagePipeline
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from schemas.catalog import FAMILIES
from stages.encoding.text.base import TextRequest
from stages.encoding.text.qwen_image import Encoder

TEMPLATE = FAMILIES["qwen-image"].templates["t2i"]
LONG = "words that go on " * 300
CAPTIONS = [
    " ",
    "",
    "A Small Grey Cat looks at the camera with green eyes.",
    "  Ünïcödé 猫は窓の外を見る 🐈‍⬛ — “quotes” &lt;b&gt; {braces} \n two lines ",
    "a red flower near the old stone wall of the house, " * 12,
    LONG,
]
LIMIT = 1e-5


@pytest.fixture(scope="module")
def folder(tiny):
    torch.set_num_threads(1)
    return tiny("qwen-image")


def encoder_of(folder, length=None, dtype=torch.float32, share_prefix=True):
    cpu = torch.device("cpu")
    options = {"share_prefix": share_prefix}
    return Encoder(str(folder), None, TEMPLATE, length or TEMPLATE.max_length, dtype, cpu, **options)


def pipe_of(folder, dtype=torch.float32):
    pipe = QwenImagePipeline(*[None] * 5)
    pipe.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    pipe.text_encoder = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=dtype).eval()
    return pipe


def encoded(encoder, captions):
    requests = [TextRequest(TEMPLATE.cleaner.text(caption), negative=caption == " ") for caption in captions]
    return encoder.encode([encoder.prepare(request) for request in requests])


@torch.no_grad()
def reference(pipe, caption, length=TEMPLATE.max_length):
    """As the pipeline's call encodes one prompt."""
    embeds, mask = pipe.encode_prompt(caption, device=torch.device("cpu"), max_sequence_length=length)
    assert mask is None, "one prompt has no padding"
    return embeds[0]


@pytest.mark.slow
@pytest.mark.parametrize("length", [TEMPLATE.max_length, 1024])
def test_embeddings_equal_the_pipelines(folder, record_property, length):
    """All captions in one batch, behind the shared prefix; the last one is cut, and its template's end with it."""
    pipe, encoder, largest = pipe_of(folder), encoder_of(folder, length), 0.0
    for result, caption in zip(encoded(encoder, CAPTIONS), CAPTIONS, strict=True):
        wanted = reference(pipe, caption, length)
        assert result.pooled is None and result.embeds.shape == wanted.shape and result.kept == len(wanted)
        assert (result.tokens > result.kept) == (caption == LONG)
        largest = max(largest, (result.embeds - wanted).abs().max().item())
    record_property("largest difference", largest)
    assert largest <= LIMIT
    assert encoder.stats.shared == len(CAPTIONS) and encoder.stats.whole == 0


@pytest.mark.slow
def test_bfloat16_is_as_near_as_the_pipelines(folder, near):
    half, pipe = pipe_of(folder, torch.bfloat16), pipe_of(folder)
    results = encoded(encoder_of(folder, dtype=torch.bfloat16), CAPTIONS)
    pairs = zip(results, CAPTIONS, strict=True)
    near("qwen-image", [(result.embeds, reference(half, text), reference(pipe, text)) for result, text in pairs])


def test_a_result_depends_neither_on_the_batch_nor_on_the_shared_prefix(folder):
    encoder, whole = encoder_of(folder), encoder_of(folder, share_prefix=False)
    for together, caption, other in zip(encoded(encoder, CAPTIONS), CAPTIONS, encoded(whole, CAPTIONS), strict=True):
        [alone] = encoded(encoder, [caption])
        assert (together.embeds - alone.embeds).abs().max() <= LIMIT
        assert (together.embeds - other.embeds).abs().max() <= LIMIT
    assert whole.stats.shared == 0
