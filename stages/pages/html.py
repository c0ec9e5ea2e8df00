"""What stands on the pages of `latentpress preview`, and how their templates are rendered.

A page is one HTML file that needs nothing else, with its pictures inside. It is rendered in pieces, so that whoever
writes it holds one item at a time. Names, captions and messages come from outside: the templates escape every value.
"""

import base64
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from schemas.cli.report import heading
from schemas.clips import clip_times
from schemas.geometry import Bucket
from schemas.text_format import escape_unprintable, shorten

TableRow = Mapping[str, Any]
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
    """What was read of an item. crops: its frames as the encoder gets them, scaled down. times: their seconds, none
    for an image. whole: the whole picture, or the first frame. masked: as crops, with the mask laid over them."""

    crops: tuple[Picture, ...]
    times: tuple[float, ...]
    whole: Picture
    source: Picture | None = None
    masked: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class PageItem:
    """One sample: its rows of ACTIVE_SCHEMA (place) and SAMPLES_SCHEMA, the item's size as shown in
    pixels (None where it is not known), the shares cut off and stretched by, and what was seen or why nothing was."""

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
    def crop_box(self) -> tuple[float, float, float, float]:
        """Left, top, width and height of what is kept, as shares of the whole picture."""
        geometry = self.sample["geometry"]
        bucket, across, down = Bucket.parse(geometry["bucket"]), geometry["resize_w"], geometry["resize_h"]
        return geometry["x"] / across, geometry["y"] / down, bucket.width / across, bucket.height / down

    @property
    def outline(self) -> str:
        """What is kept of the whole picture, as an SVG path."""
        assert self.preview is not None
        sides = (self.preview.whole.width, self.preview.whole.height) * 2
        x, y, width, height = (share * side for share, side in zip(self.crop_box, sides, strict=True))
        return f"M{x:.2f} {y:.2f}h{width:.2f}v{height:.2f}h-{width:.2f}z"

    @property
    def whole_caption(self) -> str:
        lost = 1 - self.crop_box[2] * self.crop_box[3]
        return f"whole picture, {lost:.1%} cut off" if lost else "whole picture, nothing cut off"

    @property
    def facts(self) -> list[str]:
        """What the plan says of it, one line each."""
        return list(_item_facts(self))

    @property
    def marks(self) -> list[str]:
        """What is particular about it, a few words each."""
        place, cut = self.active_row, self.sample["geometry"]
        enlarged = self.size and (cut["resize_w"] > self.size[0] or cut["resize_h"] > self.size[1])
        found = {
            "held out": place["role"] == "eval",
            "regularisation": place["regularisation"],
            f"repeats {place['repeats']}": place["repeats"],
            f"weight {place['weight']:g}": place["weight"] != 1,
            "starts from its first frame": self.sample["condition"] == "first-frame",
            "enlarged": enlarged,
        }
        return [mark for mark, holds in found.items() if holds]


def _item_facts(item: PageItem) -> Iterator[str]:
    sample, cut = item.sample, item.sample["geometry"]
    bucket = Bucket.parse(cut["bucket"])
    native = "{}x{}".format(*item.size) if item.size else "size no longer known"
    resized = f"resized to {cut['resize_w']}x{cut['resize_h']}"
    yield f"{native} \N{RIGHTWARDS ARROW} {bucket}: {resized}, cut at ({cut['x']}, {cut['y']})"
    if item.size:
        yield f"{item.cropped_share:.1%} cut off, stretched by {item.stretched:.1%}"
    if sample["kind"] == "video":
        times = clip_times(sample["start"], sample["rate"], bucket.frames)
        frames = f"{bucket.frames} frames at {sample['rate']:g} per second"
        yield f"{frames}, from {times[0]:.2f} to {times[-1]:.2f} s"
    if sample["condition"] == "source":
        yield f"source: {item.active_row['source_path']}"
    if sample["mask_id"]:
        yield f"mask: {item.active_row['mask_path']}"


@dataclass(frozen=True)
class BucketSection:
    """A bucket on a page. line: its line of the table. cards: its items, whose type is the template's."""

    bucket: str
    line: TableRow
    note: str
    cards: Iterable[Any]


def format_known(value: Any) -> Any:
    return "not known" if isinstance(value, float) and math.isnan(value) else value


def format_decibels(value: float) -> str:
    """A PSNR in words."""
    return "identical" if math.isinf(value) else f"{value:.2f} dB"


@cache
def template_environment(folder: Path) -> Environment:
    """Renders the HTML templates of a folder: every value is escaped, and a name that is not given is an error."""
    found = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "decibels": format_decibels,
        "heading": heading,
        "known": format_known,
        "shortened": shorten,
        "visible": escape_unprintable,
    }
    return found


def render_template(template: str, **values: Any) -> Iterator[bytes]:
    """A page in pieces, UTF-8. What UTF-8 has no bytes for is written as \\udcXX."""
    pieces = template_environment(TEMPLATES).get_template(template).generate(values)
    return (piece.encode("utf-8", "backslashreplace") for piece in pieces)
