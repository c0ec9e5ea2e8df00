"""Cleaning and rendering against the installed pipelines' own functions."""

import pytest
from diffusers import SanaPipeline
from diffusers.pipelines.kandinsky5 import (
    pipeline_kandinsky,
    pipeline_kandinsky_i2i,
    pipeline_kandinsky_i2v,
    pipeline_kandinsky_t2i,
)
from hypothesis import example, given
from hypothesis import strategies as st

from schemas.catalogue import FAMILIES
from schemas.prompts import clean, clean_kandinsky, clean_sana, render

PIPELINES = (pipeline_kandinsky, pipeline_kandinsky_i2i, pipeline_kandinsky_i2v, pipeline_kandinsky_t2i)
# Text with what cleaning is about: entities, mojibake, spaces of many kinds, quotes, ligatures.
TEXTS = st.lists(
    st.sampled_from(["&amp;amp;", "&lt;", "&#8217;", "schÃ¶n", "ﬁ", "“a”", "\u00a0", "\u2003", "\n\t", "\x1c", " "])
    | st.text(max_size=8)
).map("".join)


@given(TEXTS)
@example("")
@example("  A  &amp;amp; B\n\n “C” schÃ¶n  ")
@example("a\x1cb\x85c\u2028d\u200be")
def test_kandinsky_cleaning_is_the_pipelines(text):
    assert [clean_kandinsky(text)] * len(PIPELINES) == [module.prompt_clean(text) for module in PIPELINES]


@given(TEXTS)
@example("  ÄÖÜ İstanbul ")
def test_sana_cleaning_is_the_pipelines(text):
    assert [clean_sana(text)] == SanaPipeline._text_preprocessing(None, text)


@given(TEXTS)
def test_kandinsky_rendering_is_format(text):
    for name in ("kandinsky5-image", "kandinsky5-video"):
        for template in FAMILIES[name].templates.values():
            for negative in (False, True):
                assert render(text, template, negative=negative) == template.text.format(text)


@pytest.mark.parametrize("caption", ["", "a {} cat", "{0}", "50 % {"])
def test_sanas_negative_prompts_go_without_instruction(caption):
    template = FAMILIES["sana"].templates["t2i"]
    assert render(caption, template, negative=True) == caption
    assert render(caption, template) == template.text[: -len("{}")] + caption


def test_cleaning_follows_the_template():
    assert clean(" A  B ", FAMILIES["sana"].templates["t2i"]) == "a  b"
    assert clean(" A  B ", FAMILIES["kandinsky5-image"].templates["t2i"]) == "A B"
