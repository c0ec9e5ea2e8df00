"""What texts of one family alone can have: a sliding window, captions that merge with the template, stored padding, a
chat template. The conformance suite compares every family's texts with its pipeline."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cache.models.weights import WeightsError
from schemas.catalog import FAMILIES
from schemas.family import folded
from stages.encoding.text.base import OptionError
from tests.conformance.flavours import ROWS
from tests.conformance.made import load_pipeline
from tests.forms import long

CAPTIONS = [
    "",
    "A Small Grey Cat looks at the camera with green eyes.",
    "  Ünïcödé 猫は窓の外を見る 🐈‍⬛ — “quotes” &lt;b&gt; {braces} \n two lines ",
    "a red flower near the old stone wall of the house, " * 12,
    "words that go on " * 300,
]
LIMIT, KLEIN = 1e-5, "flux2-klein"


@torch.no_grad()
def texts_of(kind: str, folder: Path, captions: list[str]) -> list[torch.Tensor]:
    """The pipeline's."""
    pipe = load_pipeline(ROWS[kind], folder)
    return [ROWS[kind].text(pipe, caption, [], False)[0] for caption in captions]


def check(results: list[Any], wanted: list[torch.Tensor]) -> None:
    for result, embeds in zip(results, wanted, strict=True):
        assert result.embeds.shape == embeds.shape and (result.embeds - embeds).abs().max() <= LIMIT


@pytest.mark.slow
def test_an_instruction_longer_than_the_sliding_window(make, encoded, edited) -> None:
    """Every second layer sees 64 of the instruction's 210 tokens, and long captions outgrow the window too. A caption
    that merges with the instruction's end is computed from its first token."""
    folder = edited("sana", "text_encoder", '"sliding_window": 4096', '"sliding_window": 64')
    encoder = make("sana", folder=folder)
    check(encoded(encoder, CAPTIONS), texts_of("sana", folder, CAPTIONS))
    assert encoder.stats.prefixed_texts == len(CAPTIONS)


MERGED = {"sana": ("<mask>", "Prompt: zebra"), "kandinsky5-video-t2v": ("<|quad_start|>", "user\\nzebra")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [long("sana"), "kandinsky5-video-t2v"])
def test_captions_that_merge_with_the_instruction(make, encoded, edited, kind: str) -> None:
    folder, captions = edited(kind, "tokenizer", *MERGED[kind]), ["a cat", "zebra and a small grey cat", ""]
    encoder = make(kind, folder=folder)
    check(encoded(encoder, captions), texts_of(kind, folder, captions))
    assert (encoder.stats.prefixed_texts, encoder.stats.full_texts) == (2, 1)


@pytest.mark.slow
def test_padding_is_stored_to_the_length_and_differs_by_text_and_place(make, encoded, tiny, often) -> None:
    """With each attention, at a length of its own, alone as in a batch; and `text.positions: real` stores none."""
    pipe, largest = load_pipeline(ROWS[KLEIN], tiny(KLEIN)), 0.0
    for attention in ("sdpa", "eager")[: often(1, 2)]:
        pipe.text_encoder.set_attn_implementation(attention)
        with torch.no_grad():
            wanted = [pipe.encode_prompt(caption, max_sequence_length=48)[0][0] for caption in CAPTIONS[:2]]
        encoder = make(KLEIN, max_length=48, attention=attention)
        together = [result.embeds for result in encoded(encoder, CAPTIONS[:2])]
        alone = encoded(encoder, CAPTIONS[1:2])[0].embeds
        pairs = [*zip(together, wanted, strict=True), (together[1], alone)]
        largest = max([largest, *((one - other).abs().max().item() for one, other in pairs)])
    assert (together[0][-1] - together[1][-1]).abs().max() > 1e-2 < (alone[-1] - alone[-2]).abs().max()
    assert largest <= LIMIT
    with pytest.raises(OptionError, match="flash_attention_2"):
        make(KLEIN, attention="flash_attention_2")
    captions = [CAPTIONS[0], CAPTIONS[1], CAPTIONS[-1]]
    exact_texts = texts_of(KLEIN, tiny(KLEIN), captions)
    for result, exact in zip(encoded(make(KLEIN, positions="real"), captions), exact_texts, strict=True):
        assert len(result.embeds) == result.kept == min(result.tokens, 512)
        assert (result.embeds - exact[: result.kept]).abs().max() <= LIMIT * exact.square().mean().sqrt()


@pytest.mark.slow
def test_a_text_is_stored_with_one_padding_token_unless_its_window_is_full(make, encoded, tiny) -> None:
    """In a batch of other lengths, at each side of a full window, and with a limit that cuts the text."""
    pipe, captions = load_pipeline(ROWS["flux3"], tiny("flux3")), {}
    encoder = make("flux3")
    for count in range(100):
        caption = "7" * count  # a token each
        captions[len(encoder._ids(encoder.template.render(caption)))] = caption
    lengths = [length for length in captions if length in (79, 80, 81)]
    assert len(lengths) == 3
    results = encoded(encoder, [captions[length] for length in lengths])
    results += encoded(make("flux3", max_length=80), [captions[max(captions)]])
    lengths.append(80)
    for length, result in zip(lengths, results, strict=True):
        assert len(result.embeds) == length + (length != 80)
        caption = captions[max(captions) if result is results[-1] else length]
        wanted = pipe.encode_prompt(caption, "", 80 if result is results[-1] else 8192)[0][0]
        repeated = result.embeds[[min(place, len(result.embeds) - 1) for place in range(len(wanted))]]
        assert len(wanted) == -(-length // 80) * 80 and (repeated - wanted).abs().max() <= LIMIT
    with pytest.raises(OptionError, match="100 is not a multiple of 80") as caught:
        make("flux3", max_length=100)
    assert "text.max_length to 80" in caught.value.next_step
    with pytest.raises(OptionError, match="flash_attention_2"):
        make("flux3", attention="flash_attention_2")


@pytest.mark.parametrize("kind", ["z-image", KLEIN])
def test_a_tokenizer_with_another_chat_template_is_refused(make, edited, kind: str) -> None:
    folder = edited(kind, "tokenizer", "unused", "unused")
    template = folder / "tokenizer" / "chat_template.jinja"
    template.unlink()  # a link to the file of all tests
    template.write_text("{{ messages[0].content }}")
    with pytest.raises(WeightsError, match=f"chat template.*{kind}"):
        make(kind, folder=folder)
    template.unlink()
    with pytest.raises(WeightsError, match="has no chat template"):
        make(kind, folder=folder)


def test_cleaning_is_that_of_wans_pipelines() -> None:
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean
    from diffusers.pipelines.wan.pipeline_wan_i2v import prompt_clean as prompt_clean_i2v

    cleaner = FAMILIES["wan2.1"].templates["t2v"].cleaner
    for caption in CAPTIONS:
        assert cleaner.text(caption) == folded(caption) == prompt_clean(caption) == prompt_clean_i2v(caption)
