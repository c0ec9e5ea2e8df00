"""The parts that all pages share: cards, galleries and figures, and the rendering of templates.

The pages of `latentpress preview` and `report` are HTML files with everything embedded. The pages of `latentpress ui`
share their frame, macros (templates/parts.html) and stylesheet. Names, captions and messages are untrusted: the
templates escape every value.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from schemas.cli.report import heading
from schemas.text_format import escape_unprintable, shorten
from stages.pages.pictures import Picture

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class PictureFile:
    """A picture or clip that a page links to. uri: address. width, height: 0, because the size is not known."""

    uri: str
    is_clip: bool
    width: int = 0
    height: int = 0


@dataclass(frozen=True)
class Figure:
    """Pictures in a column, with a caption.

    alts: alternative text of each picture. crop: (left, top, width, height) in pixels of the only picture, which is
    darkened outside of this rectangle. problem: reason to show if the figure does not have pictures. link: address that
    caption and pictures link to. has_separator: whether a line separates the figure from the next figure.
    """

    pictures: tuple[Picture | PictureFile, ...]
    alts: tuple[str, ...]
    caption: str
    crop: tuple[float, float, float, float] | None = None
    problem: str = ""
    link: str = ""
    has_separator: bool = False


@dataclass(frozen=True)
class Gallery:
    """Figures side by side. look: "pictures", which shrink to one row; "frames" of a clip; or "steps", which scroll."""

    figures: Sequence[Figure]
    look: str = "pictures"
    note: str = ""


@dataclass(frozen=True)
class Caption:
    """A sample's caption. tokens: number of tokens, None if not known. kept: number of tokens that the encoder
    kept, None if not known. problem: reason why the numbers are not known."""

    text: str
    tokens: int | None = None
    kept: int | None = None
    problem: str = ""

    @property
    def is_whole(self) -> bool:
        return not self.problem and self.tokens == self.kept

    @property
    def note(self) -> str:
        if self.problem or self.tokens is None:
            return self.problem
        if self.is_whole:
            return f"{self.tokens} tokens"
        return f"truncated: {self.kept} of {self.tokens} tokens kept"


@dataclass(frozen=True)
class Card:
    """A sample on a page. marks: short labels. facts: lines of text. more: text after the captions. is_full_width:
    whether the card has the width of the page."""

    title: str
    galleries: Sequence[Gallery] = ()
    marks: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    captions: tuple[Caption, ...] = ()
    more: str = ""
    problems: Sequence[str] = ()
    score: str = ""
    anchor: str = ""
    is_full_width: bool = False


@dataclass(frozen=True)
class Section:
    """A part of a page: facts by name, a note, a table and cards. cards: may be a generator, so that cards are made
    when they are rendered. look: style of the table, "texts" if its last column has sentences."""

    title: str
    anchor: str = ""
    facts: Mapping[str, Any] | None = None
    note: str = ""
    cards: Iterable[Card] = ()
    table: Sequence[Mapping[str, Any]] | None = None
    look: str = ""


@cache
def _environment() -> Environment:
    """The Jinja environment, in which every value is escaped and an undefined name is an error."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"heading": heading, "shortened": shorten, "visible": escape_unprintable}
    return environment


def render_template(template: str, **values: Any) -> Iterator[bytes]:
    """Render a page in pieces of UTF-8, so that only one card is in memory. Characters without a UTF-8 encoding are
    written as \\udcXX."""
    pieces = _environment().get_template(template).generate(values)
    return (piece.encode("utf-8", "backslashreplace") for piece in pieces)
