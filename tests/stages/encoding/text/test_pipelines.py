"""Stored embeddings, compared with the installed pipelines' `encode_prompt`, one prompt at a time.

test_kandinsky5.py and test_qwen_image_edit.py test the encoders whose prompts have images.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from transformers import AutoTokenizer

from cache.models.weights import WeightsError
from schemas.catalog import FAMILIES
from schemas.config.encoding import Text
from schemas.family import folded
from stages.encoding.text import gemma, qwen3, qwen_image, umt5
from stages.encoding.text.base import OptionError, TextRequest, TextResult
from tests.forms import long

CPU = torch.device("cpu")
INSTRUCTION = inspect.signature(diffusers.SanaPipeline.__call__).parameters["complex_human_instruction"].default
CAPTIONS = [
    "",
    "A Small Grey Cat looks at the camera with green eyes.",
    "  Ünïcödé 猫は窓の外を見る 🐈‍⬛ — “quotes” &lt;b&gt; {braces} \n two lines ",
    "a red flower near the old stone wall of the house, " * 12,
    "words that go on " * 300,
]
LIMIT = 1e-5


@dataclass(frozen=True)
class Case:
    """module: module of the encoder. pipeline, model: names in diffusers and transformers. embeds: (pipe, caption) ->
    embeds_LD that the pipeline passes to its transformer, without padding that is not stored."""

    family: str
    module: Any
    pipeline: str
    model: str
    embeds: Callable[[Any, str], torch.Tensor]
    negative: bool = False
    task: str = "t2i"
    most_roundings: float = 25  # of the largest value, in bfloat16
    length: int | None = None

    @property
    def kind(self) -> str:
        return "wan2.1-t2v" if self.family == "wan2.1" else self.family

    def encoder(self, folder: Path, dtype: torch.dtype = torch.float32, share: bool = True, **options: Any) -> Any:
        text = Text(**options)
        template = text.stored_template(FAMILIES[self.family].templates[self.task])
        length = text.max_length or self.length or template.max_length
        return self.module.Encoder(str(folder), None, template, length, dtype, CPU, text, share)

    def pipe(self, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
        pipeline = getattr(diffusers, self.pipeline)
        names = inspect.signature(pipeline).parameters
        pipe = pipeline(**{name: None for name, one in names.items() if one.default is inspect.Parameter.empty})
        pipe.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        model = getattr(transformers, self.model)
        pipe.text_encoder = model.from_pretrained(folder / "text_encoder", dtype=dtype).eval()
        return pipe

    def encoded(self, encoder: Any, captions: list[str]) -> list[TextResult]:
        clean = encoder.template.cleaner.text
        requests = [TextRequest(clean(caption), self.negative or caption == " ") for caption in captions]
        return encoder.encode([encoder.prepare(request) for request in requests])

    @torch.no_grad()
    def wanted(self, pipe: Any, caption: str) -> torch.Tensor:
        return self.embeds(pipe, caption)


def sana(negative: bool) -> Callable[[Any, str], torch.Tensor]:
    def embeds(pipe: Any, caption: str) -> torch.Tensor:
        prompts = {"prompt": "", "negative_prompt": caption} if negative else {"prompt": caption}
        result = pipe.encode_prompt(**prompts, device=CPU, complex_human_instruction=INSTRUCTION)
        embeds_BLD, mask_BL = result[2:] if negative else result[:2]
        return embeds_BLD[mask_BL.bool()]

    return embeds


def wan(negative: bool, length: int = 512) -> Callable[[Any, str], torch.Tensor]:
    def embeds(pipe: Any, caption: str) -> torch.Tensor:
        prompts = ("", caption) if negative else (caption, "")
        all_LD = pipe.encode_prompt(*prompts, device=CPU, max_sequence_length=length)[1 if negative else 0][0]
        return all_LD[(all_LD != 0).any(1)]

    return embeds


def qwen(length: int) -> Callable[[Any, str], torch.Tensor]:
    def embeds(pipe: Any, caption: str) -> torch.Tensor:
        result, mask = pipe.encode_prompt(caption, device=CPU, max_sequence_length=length)
        assert mask is None, "one prompt has no padding"
        return result[0]

    return embeds


def klein(pipe: Any, caption: str, **options: Any) -> torch.Tensor:
    return pipe.encode_prompt(caption, device=CPU, **options)[0][0]


SANA = Case("sana", gemma, "SanaPipeline", "Gemma2Model", sana(False))
WAN = Case("wan2.1", umt5, "WanPipeline", "UMT5EncoderModel", wan(False), task="t2v")
KLEIN = Case("flux2-klein", qwen3, "Flux2KleinPipeline", "Qwen3ForCausalLM", klein, most_roundings=50)  # 27 layers
Z_IMAGE = Case(
    "z-image",
    qwen3,
    "ZImagePipeline",
    "Qwen3Model",
    lambda pipe, caption: pipe.encode_prompt(caption, device=CPU, do_classifier_free_guidance=False)[0][0],
)
QWEN = Case("qwen-image", qwen_image, "QwenImagePipeline", "Qwen2_5_VLForConditionalGeneration", qwen(512), length=512)
CASES = {"sana": SANA, "wan": WAN, "flux2-klein": KLEIN, "z-image": Z_IMAGE, "qwen-image": QWEN}
MORE = {
    "sana, negative": replace(SANA, embeds=sana(True), negative=True),
    "wan, negative": replace(WAN, embeds=wan(True), negative=True),
    "wan i2v": replace(WAN, pipeline="WanImageToVideoPipeline"),
    "wan, 64 tokens": replace(WAN, embeds=wan(False, 64), length=64),
    "qwen-image, 1024 tokens": replace(QWEN, embeds=qwen(1024), length=1024),
}
PARAMETERS = [*(pytest.param(case, id=name) for name, case in CASES.items())]
PARAMETERS += [pytest.param(case, id=name, marks=long(case).marks) for name, case in MORE.items()]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize("case", PARAMETERS)
def test_embeddings_equal_the_pipelines(tiny, case: Case, record_property) -> None:
    """All captions are in one batch, after a shared prefix if the model has one; the last caption is cut. Alone, and
    without the shared prefix, a caption has the same embeddings."""
    folder, largest = tiny(case.kind), 0.0
    pipe, encoder, unshared = case.pipe(folder), case.encoder(folder), case.encoder(folder, share=False)
    results = case.encoded(encoder, CAPTIONS)
    for result, unshared_result, caption in zip(results, case.encoded(unshared, CAPTIONS), CAPTIONS, strict=True):
        expected, [alone] = case.wanted(pipe, caption), case.encoded(encoder, [caption])
        assert result.pooled is None and result.embeds.shape == expected.shape and result.kept == len(expected)
        assert result.tokens > result.kept or caption != CAPTIONS[-1]
        gaps = [(result.embeds - each).abs().max().item() for each in (expected, alone.embeds, unshared_result.embeds)]
        largest = max(largest, *gaps)
    record_property("largest difference", largest)
    print(f"{case.family}, negative={case.negative}: largest difference {largest:.2e}")
    assert largest <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("case", [long(case) if case in (WAN, Z_IMAGE) else case for case in CASES.values()], ids=CASES)
def test_bfloat16_is_as_near_as_the_pipelines(tiny, near, case: Case) -> None:
    folder = tiny(case.kind)
    half, pipe = case.pipe(folder, torch.bfloat16), case.pipe(folder)
    results = case.encoded(case.encoder(folder, torch.bfloat16), CAPTIONS)
    rows = [
        (result.embeds, case.wanted(half, text), case.wanted(pipe, text))
        for result, text in zip(results, CAPTIONS, strict=True)
    ]
    near(case.family, rows, case.most_roundings)


@pytest.mark.slow
def test_an_instruction_longer_than_the_sliding_window(edited) -> None:
    """Every second layer sees 64 of the instruction's 210 tokens, and long captions exceed the window, too. A caption
    that merges with the instruction's end is computed from its first token."""
    folder = edited("sana", "text_encoder", '"sliding_window": 4096', '"sliding_window": 64')
    encoder, pipe = SANA.encoder(folder), SANA.pipe(folder)
    for result, caption in zip(SANA.encoded(encoder, CAPTIONS), CAPTIONS, strict=True):
        assert (result.embeds - SANA.wanted(pipe, caption)).abs().max() <= LIMIT
    assert encoder.stats.prefixed_texts == len(CAPTIONS)


@pytest.mark.slow
def test_captions_that_merge_with_the_instruction(edited) -> None:
    folder = edited("sana", "tokenizer", "<mask>", "Prompt: zebra")
    encoder, pipe, captions = SANA.encoder(folder), SANA.pipe(folder), ["a cat", "zebra and a small grey cat", ""]
    for result, caption in zip(SANA.encoded(encoder, captions), captions, strict=True):
        assert (result.embeds - SANA.wanted(pipe, caption)).abs().max() <= LIMIT
    assert (encoder.stats.prefixed_texts, encoder.stats.full_texts) == (2, 1)


@pytest.mark.slow
def test_padding_is_stored_to_the_length_and_differs_by_text_and_place(tiny) -> None:
    """With each attention and its own length, alone and in a batch; with `text.positions: real`, no padding is
    stored."""
    folder, pipe, largest = tiny("flux2-klein"), KLEIN.pipe(tiny("flux2-klein")), 0.0
    for attention in ("sdpa", "eager"):
        pipe.text_encoder.set_attn_implementation(attention)
        with torch.no_grad():
            expected = [klein(pipe, caption, max_sequence_length=48) for caption in CAPTIONS[:2]]
        encoder = KLEIN.encoder(folder, max_length=48, attention=attention)
        together = [result.embeds for result in KLEIN.encoded(encoder, CAPTIONS[:2])]
        alone = KLEIN.encoded(encoder, CAPTIONS[1:2])[0].embeds
        pairs = [*zip(together, expected, strict=True), (together[1], alone)]
        largest = max([largest, *((first - second).abs().max().item() for first, second in pairs)])
    assert (together[0][-1] - together[1][-1]).abs().max() > 1e-2 < (alone[-1] - alone[-2]).abs().max()
    assert largest <= LIMIT
    with pytest.raises(OptionError, match=r"text\.attention: flash_attention_2"):
        KLEIN.encoder(folder, attention="flash_attention_2")
    for result, caption in zip(KLEIN.encoded(KLEIN.encoder(folder, positions="real"), CAPTIONS), CAPTIONS, strict=True):
        exact = KLEIN.wanted(pipe, caption)
        assert len(result.embeds) == result.kept == min(result.tokens, 512)
        assert (result.embeds - exact[: result.kept]).abs().max() <= LIMIT * exact.square().mean().sqrt()


@pytest.mark.parametrize("case", [Z_IMAGE, KLEIN], ids=["z-image", "flux2-klein"])
def test_a_tokenizer_with_another_chat_template_is_refused(edited, case: Case) -> None:
    folder = edited(case.kind, "tokenizer", "unused", "unused")
    template = folder / "tokenizer" / "chat_template.jinja"
    template.unlink()  # a link to the file of all tests
    template.write_text("{{ messages[0].content }}")
    with pytest.raises(WeightsError, match=f"'a caption', and the template {case.kind}"):
        case.encoder(folder)
    template.unlink()
    with pytest.raises(WeightsError, match="has no chat template"):
        case.encoder(folder)


def test_cleaning_is_that_of_wans_pipelines() -> None:
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean
    from diffusers.pipelines.wan.pipeline_wan_i2v import prompt_clean as prompt_clean_i2v

    cleaner = FAMILIES["wan2.1"].templates["t2v"].cleaner
    for caption in CAPTIONS:
        assert cleaner.text(caption) == folded(caption) == prompt_clean(caption) == prompt_clean_i2v(caption)
