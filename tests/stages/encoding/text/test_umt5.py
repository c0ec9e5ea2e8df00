"""Stored embeddings of Wan against the installed pipelines."""

import diffusers
import pytest
import torch
from transformers import AutoTokenizer, UMT5EncoderModel

from schemas.catalog import FAMILIES
from schemas.cleaning import folded
from stages.encoding.text.base import TextRequest
from stages.encoding.text.umt5 import Encoder
from tests.forms import long

TEMPLATE = FAMILIES["wan2.1"].templates["t2v"]
CAPTIONS = [
    "",
    "A small grey cat looks at the camera with green eyes.",
    "  Ünïcödé 猫は窓の外を見る 🐈‍⬛ — “quotes” &lt;b&gt; {braces} \n two lines ",
    "a red flower near the old stone wall of the house, " * 12,
    "words that go on " * 150,
]
LIMIT = 1e-5


@pytest.fixture(scope="module")
def folder(tiny):
    torch.set_num_threads(1)
    return tiny("wan2.1-t2v")


def encoder_of(folder, dtype=torch.float32, length=TEMPLATE.max_length):
    return Encoder(str(folder), None, TEMPLATE, length, dtype, torch.device("cpu"))


def pipe_of(folder, task="t2v", dtype=torch.float32):
    pipeline = getattr(diffusers, FAMILIES["wan2.2-5b"].pipelines[task])
    pipe = pipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=None)
    pipe.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    pipe.text_encoder = UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=dtype).eval()
    return pipe


@pytest.fixture(scope="module")
def encoder(folder):
    return encoder_of(folder)


@pytest.fixture(scope="module")
def pipe(folder):
    return pipe_of(folder)


def encoded(encoder, captions, negative=False):
    requests = [TextRequest(TEMPLATE.cleaner.text(caption), negative) for caption in captions]
    return encoder.encode([encoder.prepare(request) for request in requests])


@torch.no_grad()
def reference(pipe, caption, negative=False, length=TEMPLATE.max_length):
    """embeds_LD of all positions, as the pipeline hands them to its transformer."""
    prompts = ("", caption) if negative else (caption, "")
    both = pipe.encode_prompt(*prompts, device=torch.device("cpu"), max_sequence_length=length)
    return both[1 if negative else 0][0]


def padded(result, length=TEMPLATE.max_length):
    rows = torch.zeros(length, result.embeds.shape[1])
    rows[: result.kept] = result.embeds
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(("task", "negative"), [("t2v", False), long("t2v", True), long("i2v", False)])
def test_embeddings_equal_the_pipelines(folder, encoder, task, negative, record_property):
    """All captions in one batch, each against the pipeline's own, padding included."""
    pipe = pipe_of(folder, task)
    results = encoded(encoder, CAPTIONS, negative)
    pairs = [(padded(result), reference(pipe, text, negative)) for result, text in zip(results, CAPTIONS, strict=True)]
    largest = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    record_property("largest_difference", largest)
    print(f"wan {task}, negative={negative}: largest difference {largest:.2e} of {pairs[0][0].abs().max():.2f}")
    assert largest <= LIMIT
    assert [result.kept for result in results] == [int((theirs != 0).any(1).sum()) for _, theirs in pairs]


def test_cleaning_is_the_pipelines():
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean
    from diffusers.pipelines.wan.pipeline_wan_i2v import prompt_clean as prompt_clean_i2v

    for caption in CAPTIONS:
        assert TEMPLATE.cleaner.text(caption) == folded(caption) == prompt_clean(caption) == prompt_clean_i2v(caption)


def test_a_result_does_not_depend_on_what_it_is_batched_with(encoder, record_property):
    together = encoded(encoder, CAPTIONS)
    alone = [encoded(encoder, [caption])[0] for caption in CAPTIONS]
    largest = max((a.embeds - b.embeds).abs().max().item() for a, b in zip(together, alone, strict=True))
    record_property("largest_difference", largest)
    assert largest <= LIMIT


def test_overlong_captions_keep_their_end_token(encoder, folder, pipe):
    [result] = encoded(encoder, CAPTIONS[-1:])
    assert result.kept == 512 < result.tokens
    [short] = encoded(encoder_of(folder, length=64), CAPTIONS[3:4])
    assert short.kept == 64 and (short.embeds - reference(pipe, CAPTIONS[3], length=64)).abs().max() <= LIMIT


@pytest.mark.slow
def test_bfloat16_is_as_near_as_the_pipelines(folder, near, pipe):
    encoder, half = encoder_of(folder, torch.bfloat16), pipe_of(folder, dtype=torch.bfloat16)
    results = encoded(encoder, CAPTIONS)
    rows = [
        (result.embeds, reference(half, caption)[: result.kept], reference(pipe, caption)[: result.kept])
        for caption, result in zip(CAPTIONS, results, strict=True)
    ]
    near("wan", rows)
