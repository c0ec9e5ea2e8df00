"""The content of the pages of `latentpress preview`, and how their templates are rendered.

A page is one HTML file with its pictures embedded. It is rendered in pieces, so that only one item is in memory. Names,
captions and messages are untrusted: the templates escape every value.
"""

import base64
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from schemas.cli.tables import heading
from schemas.clips import clip_times
from schemas.geometry import Bucket
from schemas.text_format import escape_unprintable, shorten

TableRow = dict[str, Any]
TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class Picture:
    """An encoded picture (WebP) and its size in pixels."""

    data: bytes
    width: int
    height: int

    @property
    def uri(self) -> str:
        return f"data:image/webp;base64,{base64.b64encode(self.data).decode()}"


@dataclass(frozen=True)
class PreviewPictures:
    """Small pictures of an item.

    crops: frames as the encoder gets them. times: their seconds, none for an image. whole: the whole image or first
    frame. source: the cropped i2i source. masked: `crops` under the mask.
    """

    crops: tuple[Picture, ...]
    times: tuple[float, ...]
    whole: Picture
    source: Picture | None = None
    masked: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class PageItem:
    """One sample on a page.

    active_row, sample: its rows of ACTIVE_SCHEMA and SAMPLES_SCHEMA. size: of the item as displayed, in pixels; None if
    not known. cropped_share, stretched: shares. problem: why there is no preview.
    """

    active_row: TableRow
    sample: TableRow
    size: tuple[int, int] | None
    cropped_share: float
    stretched: float
    captions: tuple[str, ...] = ()
    more_captions: int = 0
    preview: PreviewPictures | None = None
    problem: str = ""

    @property
    def path(self) -> str:
        return self.active_row["path"]

    @property
    def times(self) -> list[float]:
        """Seconds of a clip's frames; none of an image."""
        if self.sample["kind"] != "video":
            return []
        return clip_times(self.sample["start"], self.sample["rate"], self.bucket.frames)

    @property
    def bucket(self) -> Bucket:
        return Bucket.parse(self.sample["geometry"]["bucket"])


@dataclass(frozen=True)
class BucketSection:
    """A bucket on a page. row: its row of the table. cards: objects of the type that the template needs."""

    bucket: str
    row: TableRow
    note: str
    cards: Iterable[Any]


def format_decibels(value: float) -> str:
    return "identical" if math.isinf(value) else f"{value:.2f} dB"


@cache
def template_environment(folder: Path) -> Environment:
    """Renders the HTML templates of a folder: every value is escaped, and an undefined name is an error."""
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "decibels": format_decibels,
        "heading": heading,
        "shortened": shorten,
        "visible": escape_unprintable,
    }
    return environment


def render_template(template: str, **values: Any) -> Iterator[bytes]:
    """A page in pieces, UTF-8. Characters without a UTF-8 encoding are written as \\udcXX."""
    pieces = template_environment(TEMPLATES).get_template(template).generate(values)
    return (piece.encode("utf-8", "backslashreplace") for piece in pieces)
