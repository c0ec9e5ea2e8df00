"""From a caption to the exact text an encoder is given: cleaning and templates. No tokenizer, no model.

The cleaning is what the diffusers pipelines do (`prompt_clean` of pipelines/kandinsky5, `_text_preprocessing`
of pipelines/sana with `clean_caption=False`); tests compare both with the installed release.
"""

import html
import re
from collections.abc import Callable

import ftfy
import pyarrow as pa
import pyarrow.compute as pc

from schemas.catalogue import Template


def clean_kandinsky(text: str) -> str:
    """ftfy, html unescape twice, whitespace folded."""
    text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return re.sub(r"\s+", " ", text).strip()


def clean_sana(text: str) -> str:
    """Lower case, outer whitespace removed."""
    return text.lower().strip()


_CLEANERS = {"kandinsky": clean_kandinsky, "sana": clean_sana}

# ftfy takes 65 to 220 microseconds a caption. Captions of printable ASCII words with single spaces between them,
# and no "&" that could begin an entity, stay as they are. With the punctuation of typeset English besides, all that
# ftfy does is straighten the quotes. Both are tested against it.
_CLEAN = "^[!-%'-~]+( [!-%'-~]+)*$"
_PLAIN = "^[ -%'-~\u2013\u2014\u2018\u2019\u201c\u201d\u2026]*$"
_QUOTES = (("[\u2018\u2019]", "'"), ("[\u201c\u201d]", '"'))


def clean(text: str, template: Template) -> str:
    """The caption as the pipeline of this template would clean it before encoding."""
    return _CLEANERS[template.cleaning](text)


def clean_column(texts: pa.Array, template: Template) -> pa.Array:
    """`clean` of n captions at once (null stays null)."""
    if template.cleaning == "sana":
        return _distinct(texts, clean_sana)
    unclean = pc.invert(pc.match_substring_regex(texts, _CLEAN))
    return pc.replace_with_mask(texts, unclean, _mended(texts.filter(unclean)))


def _mended(texts: pa.Array) -> pa.Array:
    plain = pc.match_substring_regex(texts, _PLAIN)
    straight = texts
    for pattern, quote in _QUOTES:
        straight = pc.replace_substring_regex(straight, pattern, quote)
    wide = pc.match_substring(straight, "  ")
    folded = pc.replace_with_mask(straight, wide, pc.replace_substring_regex(straight.filter(wide), " +", " "))
    folded = pc.utf8_trim(folded, " ")
    others = pc.invert(plain)
    return pc.replace_with_mask(folded, others, _distinct(texts.filter(others), clean_kandinsky))


def _distinct(texts: pa.Array, function: Callable[[str], str]) -> pa.Array:
    coded = texts.dictionary_encode()
    return pa.array([function(text) for text in coded.dictionary.to_pylist()], pa.string()).take(coded.indices)


def render_column(cleaned: pa.Array, template: Template, *, negative: bool = False) -> pa.Array:
    """`render` of n texts at once."""
    if negative and not template.negative_uses_template:
        return cleaned
    before, after = template.text.split("{}", 1)
    return pc.binary_join_element_wise(before, cleaned, after, "")


def render(cleaned: str, template: Template, *, negative: bool = False) -> str:
    """The text that is tokenised. Sana's negative and null prompts go without the instruction."""
    if negative and not template.negative_uses_template:
        return cleaned
    return template.text.replace("{}", cleaned, 1)
