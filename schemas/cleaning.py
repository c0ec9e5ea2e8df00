"""How templates clean captions. FOLDED is the `prompt_clean` of the diffusers pipelines, LOWERCASE their
`_text_preprocessing` with `clean_caption=False`; tests compare both with the installed release. VERBATIM is that of
pipelines without cleaning.
"""

import html
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `--help` imports the catalog, and need not load pyarrow
    import pyarrow as pa

# ftfy takes 65 to 220 us a caption. It leaves printable ASCII words with single spaces between them alone, if there is
# no "&" that could begin an entity; where typographic punctuation is added, it straightens the quotes and nothing else.
# Tests compare both with ftfy.
_ALREADY_CLEAN = "^[!-%'-~]+( [!-%'-~]+)*$"
_ONLY_TYPOGRAPHY = "^[ -%'-~\u2013\u2014\u2018\u2019\u201c\u201d\u2026]*$"
_QUOTES = (("[\u2018\u2019]", "'"), ("[\u201c\u201d]", '"'))


@dataclass(frozen=True)
class Cleaner:
    """text: cleans one caption. fast: cleans n captions at once, with the same results."""

    text: Callable[[str], str]
    fast: "Callable[[pa.Array], pa.Array] | None" = None

    def column(self, texts: "pa.Array") -> "pa.Array":
        """n captions cleaned; null stays null."""
        return map_distinct(texts, self.text) if self.fast is None else self.fast(texts)


def map_distinct(texts: "pa.Array", function: Callable[[str], str]) -> "pa.Array":
    """Apply `function` to n texts, once for each distinct one."""
    import pyarrow as pa

    coded = texts.dictionary_encode()
    return pa.array([function(text) for text in coded.dictionary.to_pylist()], pa.string()).take(coded.indices)


def folded(text: str) -> str:
    """Apply ftfy, unescape HTML twice, make each run of whitespace one space."""
    import ftfy  # takes 0.2 s, which `--help` need not spend

    text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return re.sub(r"\s+", " ", text).strip()


def folded_column(texts: "pa.Array") -> "pa.Array":
    """`folded` of n captions."""
    import pyarrow.compute as pc

    is_unclean = pc.invert(pc.match_substring_regex(texts, _ALREADY_CLEAN))
    fixed = unclean = texts.filter(is_unclean)
    for pattern, quote in _QUOTES:
        fixed = pc.replace_substring_regex(fixed, pattern, quote)
    wide = pc.match_substring(fixed, "  ")
    fixed = pc.replace_with_mask(fixed, wide, pc.replace_substring_regex(fixed.filter(wide), " +", " "))
    others = pc.invert(pc.match_substring_regex(unclean, _ONLY_TYPOGRAPHY))
    fixed = pc.replace_with_mask(pc.utf8_trim(fixed, " "), others, map_distinct(unclean.filter(others), folded))
    return pc.replace_with_mask(texts, is_unclean, fixed)


def lowercase(text: str) -> str:
    return text.lower().strip()


def verbatim(texts: Any) -> Any:
    return texts


VERBATIM = Cleaner(verbatim, verbatim)
FOLDED = Cleaner(folded, folded_column)
LOWERCASE = Cleaner(lowercase)
