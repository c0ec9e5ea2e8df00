"""Stored embeddings of families with Qwen3 against the installed pipelines."""

import pytest
import torch
from diffusers import Flux2KleinPipeline, ZImagePipeline
from transformers import AutoTokenizer, Qwen3ForCausalLM, Qwen3Model

from cache.models.weights import WeightsError
from schemas.catalog import FAMILIES
from schemas.config.encoding import Text
from stages.encoding.text.base import OptionError, TextRequest
from stages.encoding.text.qwen3 import Encoder

TEMPLATES = {name: FAMILIES[name].templates["t2i"] for name in ("z-image", "flux2-klein")}
MODELS = {"z-image": (ZImagePipeline, Qwen3Model), "flux2-klein": (Flux2KleinPipeline, Qwen3ForCausalLM)}
REAL = Text(positions="real")
CAPTIONS = [
    "",
    "A Small Grey Cat looks at the camera with green eyes.",
    "  Ünïcödé 猫は窓の外を見る 🐈‍⬛ — “quotes” &lt;b&gt; {braces} \n two lines ",
    "a red flower near the old stone wall of the house, " * 12,
    "words that go on " * 300,
]


@pytest.fixture(scope="module", params=TEMPLATES)
def family(request):
    torch.set_num_threads(1)
    return request.param


@pytest.fixture(scope="module")
def folder(tiny, family):
    return tiny(family)


def encoder_of(folder, family, dtype=torch.float32, length=512, options=None):
    options = options or Text()
    template = options.stored_template(TEMPLATES[family])
    return Encoder(str(folder), None, template, length, dtype, torch.device("cpu"), options)


def pipe_of(folder, family, dtype=torch.float32):
    pipeline, model = MODELS[family]
    pipe = pipeline(*[None] * 5)
    pipe.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    pipe.text_encoder = model.from_pretrained(folder / "text_encoder", dtype=dtype).eval()
    return pipe


def encoded(encoder, captions):
    clean = encoder.template.cleaner.text
    return encoder.encode(
        [encoder.prepare(TextRequest(clean(caption), negative=caption == "")) for caption in captions]
    )


@torch.no_grad()
def reference(pipe, caption, **options):
    if isinstance(pipe, Flux2KleinPipeline):
        return pipe.encode_prompt(caption, device=torch.device("cpu"), **options)[0][0]
    return pipe.encode_prompt(caption, device=torch.device("cpu"), do_classifier_free_guidance=False)[0][0]


@pytest.mark.slow
def test_embeddings_equal_the_pipelines(folder, family, record_property):
    """All captions in one batch; the last is cut, and its template's end with it."""
    pipe, largest = pipe_of(folder, family), 0.0
    for result, caption in zip(encoded(encoder_of(folder, family), CAPTIONS), CAPTIONS, strict=True):
        wanted = reference(pipe, caption)
        assert result.pooled is None and result.embeds.shape == wanted.shape and result.kept == len(wanted)
        assert (result.tokens > result.kept) == (caption == CAPTIONS[-1])
        largest = max(largest, (result.embeds - wanted).abs().max().item())
    record_property("largest difference", largest)
    assert largest <= 1e-5


@pytest.mark.slow
def test_bfloat16_is_as_near_as_the_pipelines(folder, family, near):
    half, pipe = pipe_of(folder, family, torch.bfloat16), pipe_of(folder, family)
    results = encoded(encoder_of(folder, family, torch.bfloat16), CAPTIONS)
    pairs = zip(results, CAPTIONS, strict=True)
    rows = [(result.embeds, reference(half, text), reference(pipe, text)) for result, text in pairs]
    near(family, rows, **({"limit": 50} if family == "flux2-klein" else {}))  # it reads 27 layers


@pytest.mark.slow
def test_padding_is_stored_to_the_length_and_differs_by_text_and_place(tiny, record_property):
    """With each attention, at a length of its own, alone as in a batch."""
    folder, pipe, largest = tiny("flux2-klein"), pipe_of(tiny("flux2-klein"), "flux2-klein"), 0.0
    for attention in ("sdpa", "eager"):
        pipe.text_encoder.set_attn_implementation(attention)
        wanted = [reference(pipe, caption, max_sequence_length=48) for caption in CAPTIONS[:2]]
        encoder = encoder_of(folder, "flux2-klein", length=48, options=Text(attention=attention))
        together = [result.embeds for result in encoded(encoder, CAPTIONS[:2])]
        alone = encoded(encoder, CAPTIONS[1:2])[0].embeds
        pairs = [*zip(together, wanted, strict=True), (together[1], alone)]
        largest = max([largest, *((one - other).abs().max().item() for one, other in pairs)])
    assert (together[0][-1] - together[1][-1]).abs().max() > 1e-2 < (alone[-1] - alone[-2]).abs().max()
    record_property("largest difference", largest)
    assert largest <= 1e-5
    with pytest.raises(OptionError, match="flash_attention_2 computes nothing of padding"):
        encoder_of(folder, "flux2-klein", options=Text(attention="flash_attention_2"))


@pytest.mark.slow
def test_without_padding_the_real_tokens_are_the_pipelines(tiny):
    """`text.positions: real`, in one batch."""
    folder, pipe = tiny("flux2-klein"), pipe_of(tiny("flux2-klein"), "flux2-klein")
    for result, caption in zip(
        encoded(encoder_of(folder, "flux2-klein", options=REAL), CAPTIONS), CAPTIONS, strict=True
    ):
        wanted = reference(pipe, caption)
        assert len(result.embeds) == result.kept == min(result.tokens, 512)
        assert (result.embeds - wanted[: result.kept]).abs().max() <= 1e-5 * wanted.square().mean().sqrt()


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_tokenizer_with_another_chat_template_is_refused(edited, family):
    folder = edited(family, "tokenizer", "unused", "unused")
    template = folder / "tokenizer" / "chat_template.jinja"
    template.unlink()  # a link to the file of all tests
    template.write_text("{{ messages[0].content }}")
    with pytest.raises(WeightsError, match=f"chat template makes 'a caption' of a prompt, and the template {family}"):
        encoder_of(folder, family)
    template.unlink()
    with pytest.raises(WeightsError, match="has no chat template"):
        encoder_of(folder, family)
