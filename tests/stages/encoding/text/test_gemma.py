"""Stored embeddings of Sana against the installed pipeline, and what its transformer makes of both."""

import inspect

import pytest
import torch
from diffusers import SanaPipeline
from transformers import AutoTokenizer, Gemma2Model

from schemas.catalog import FAMILIES
from stages.encoding.text.base import TextRequest
from stages.encoding.text.gemma import Encoder
from tests.forms import long

TEMPLATE = FAMILIES["sana"].templates["t2i"]
INSTRUCTION = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
CAPTIONS = [
    "",
    "A Small Grey Cat looks at the camera with green eyes.",
    "  Ünïcödé 猫は窓の外を見る 🐈‍⬛ — “quotes” &lt;b&gt; {braces} \n two lines ",
    "a red flower near the old stone wall of the house, " * 12,
    "words that go on " * 150,
]
LIMIT = 1e-5


@pytest.fixture(scope="module")
def folder(tiny):
    torch.set_num_threads(1)
    return tiny("sana")


@pytest.fixture(scope="module")
def encoder(folder):
    return encoder_of(folder)


@pytest.fixture(scope="module")
def pipe(folder):
    return pipe_of(folder)


def encoder_of(folder, dtype=torch.float32):
    return Encoder(str(folder), None, TEMPLATE, TEMPLATE.max_length, dtype, torch.device("cpu"))


def pipe_of(folder, dtype=torch.float32):
    pipe = SanaPipeline(*[None] * 5)
    pipe.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    pipe.text_encoder = Gemma2Model.from_pretrained(folder / "text_encoder", dtype=dtype).eval()
    return pipe


def asked(caption: str, negative: bool = False) -> TextRequest:
    return TextRequest(TEMPLATE.cleaner.text(caption), negative=negative)


def encoded(encoder, requests):
    return encoder.encode([encoder.prepare(request) for request in requests])


@torch.no_grad()
def reference(pipe, caption, negative):
    """(embeds_BLD, mask_BL) of 300 rows, as the pipeline hands them to its transformer."""
    result = pipe.encode_prompt(
        "" if negative else caption,
        negative_prompt=caption if negative else "",
        device=torch.device("cpu"),
        complex_human_instruction=INSTRUCTION,
    )
    return result[2:] if negative else result[:2]


def padded(embeds_LD, length=300):
    """(embeds_BLD, mask_BL): zeros behind the stored rows."""
    rows = torch.zeros(1, length, embeds_LD.shape[1])
    rows[0, : len(embeds_LD)] = embeds_LD
    return rows, (torch.arange(length) < len(embeds_LD)).long()[None]


def differences(encoder, pipe, captions, negative=False) -> float:
    """Encodes all captions in one batch and compares each with the pipeline; the largest difference."""
    largest = 0.0
    results = encoded(encoder, [asked(caption, negative) for caption in captions])
    for result, caption in zip(results, captions, strict=True):
        embeds_BLD, mask_BL = reference(pipe, caption, negative)
        stored_BLD, stored_mask_BL = padded(result.embeds)
        assert torch.equal(mask_BL, stored_mask_BL)
        assert result.pooled is None and result.kept == len(result.embeds) == mask_BL.sum()
        real = mask_BL.bool()
        largest = max(largest, (embeds_BLD[real] - stored_BLD[real]).abs().max().item())
    return largest


@pytest.mark.slow
@pytest.mark.parametrize("negative", [False, True])
def test_embeddings_equal_the_pipelines_real_rows(encoder, pipe, negative, record_property):
    largest = differences(encoder, pipe, CAPTIONS, negative)
    record_property("largest_difference", largest)
    print(f"sana, negative={negative}: largest difference {largest:.2e}")
    assert largest <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("negative", [False, long(True)])
def test_bfloat16_is_as_near_as_the_pipelines(edited, near, negative):
    """A batch, with a caption that merges with the instruction, against the pipeline's own float32 and bfloat16."""
    folder = edited("sana", "tokenizer", "<mask>", "Prompt: zebra")
    encoder, half, pipe = encoder_of(folder, torch.bfloat16), pipe_of(folder, torch.bfloat16), pipe_of(folder)
    captions = [*CAPTIONS, "zebra and a small grey cat"]
    results = encoded(encoder, [asked(caption, negative) for caption in captions])
    assert (encoder.stats.shared, encoder.stats.whole) == ((0, 6) if negative else (5, 1))
    rows = []
    for caption, result in zip(captions, results, strict=True):
        (theirs, mask), (exact, _) = (reference(one, caption, negative) for one in (half, pipe))
        rows.append((result.embeds, theirs[mask.bool()], exact[mask.bool()]))
    near(f"sana, negative={negative}", rows)


@pytest.mark.slow
def test_an_instruction_longer_than_the_sliding_window(encoder, edited, record_property):
    """Every second layer sees 64 of the instruction's 210 tokens, and long captions outgrow the window too."""
    folder = edited("sana", "text_encoder", '"sliding_window": 4096', '"sliding_window": 64')
    windowed = encoder_of(folder)
    largest = differences(windowed, pipe_of(folder), CAPTIONS)
    record_property("largest_difference", largest)
    assert windowed.stats.shared == len(CAPTIONS)
    assert largest <= LIMIT
    full, other = (encoded(one, [asked("a cat")])[0].embeds for one in (encoder, windowed))
    assert (full - other).abs().max() > 1e-2, "the window changes nothing"


def test_a_result_does_not_depend_on_what_it_is_batched_with(encoder):
    requests = [asked(caption, negative) for caption in CAPTIONS for negative in (False, True)]
    for together, one in zip(encoded(encoder, requests), requests, strict=True):
        assert (together.embeds - encoded(encoder, [one])[0].embeds).abs().max() <= LIMIT
