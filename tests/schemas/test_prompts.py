"""Cleaning and rendering against the installed pipelines' own functions."""

import pyarrow as pa
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

from schemas.catalog import FAMILIES
from schemas.family import folded, lowercase

PIPELINES = (pipeline_kandinsky, pipeline_kandinsky_i2i, pipeline_kandinsky_i2v, pipeline_kandinsky_t2i)
TEXTS = st.lists(
    st.sampled_from(["&amp;amp;", "&lt;", "&#8217;", "schÃ¶n", "ﬁ", "“a”", "\u00a0", "\u2003", "\n\t", "\x1c", " "])
    | st.text(max_size=8)
).map("".join)


@given(TEXTS)
@example("")
@example("  A  &amp;amp; B\n\n “C” schÃ¶n  ")
@example("a\x1cb\x85c\u2028d\u200be")
def test_kandinsky_cleaning_is_the_pipelines(text):
    assert [folded(text)] * len(PIPELINES) == [module.prompt_clean(text) for module in PIPELINES]


PLAIN = st.text(
    st.sampled_from("".join(map(chr, range(32, 127))) + "\u2013\u2014\u2018\u2019\u201c\u201d\u2026" * 6), max_size=30
)


@pytest.mark.slow
@given(st.lists(TEXTS | PLAIN | st.none(), max_size=12))
def test_a_column_is_cleaned_as_its_texts_are(texts):
    for template in {template for family in FAMILIES.values() for template in family.templates.values()}:
        cleaned = template.cleaner.column(pa.array(texts, pa.string()))
        assert cleaned.to_pylist() == [None if text is None else template.cleaner.text(text) for text in texts]
        rendered = template.render_column(cleaned, negative=True).to_pylist()
        expected = [None if text is None else template.render(text, negative=True) for text in cleaned.to_pylist()]
        assert rendered == expected


class Tokenizer:
    """Raises the cleaned prompt of the pipeline."""

    class Called(Exception):
        pass

    def __call__(self, prompts, **options):
        raise self.Called(*prompts)


SANA = SanaPipeline(Tokenizer(), None, None, None, None)


@given(TEXTS)
@example("  ÄÖÜ İstanbul ")
def test_sana_cleaning_is_the_pipelines(text):
    with pytest.raises(Tokenizer.Called) as caught:
        SANA.encode_prompt(text, do_classifier_free_guidance=False, device="cpu")
    assert caught.value.args == (lowercase(text),)


@given(TEXTS)
def test_kandinsky_rendering_is_format(text):
    for name in ("kandinsky5-image", "kandinsky5-video"):
        for template in FAMILIES[name].templates.values():
            for negative in (False, True):
                assert template.render(text, negative=negative) == template.text.format(text)


@pytest.mark.parametrize("caption", ["", "a {} cat", "{0}", "50 % {"])
def test_sanas_negative_prompts_go_without_instruction(caption):
    template = FAMILIES["sana"].templates["t2i"]
    assert template.render(caption, negative=True) == caption
    assert template.render(caption) == template.text[: -len("{}")] + caption


def test_cleaning_follows_the_template():
    assert FAMILIES["sana"].templates["t2i"].cleaner.text(" A  B ") == "a  b"
    assert FAMILIES["kandinsky5-image"].templates["t2i"].cleaner.text(" A  B ") == "A B"
