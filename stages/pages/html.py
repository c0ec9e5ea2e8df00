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

from schemas.cli.report import heading
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
    def crop_box(self) -> tuple[float, float, float, float]:
        """Left, top, width and height of the crop, as shares of the whole picture."""
        geometry = self.sample["geometry"]
        bucket, across, down = Bucket.parse(geometry["bucket"]), geometry["resize_w"], geometry["resize_h"]
        return geometry["x"] / across, geometry["y"] / down, bucket.width / across, bucket.height / down

    @property
    def outline(self) -> str:
        """The crop on the whole picture, as an SVG path."""
        assert self.preview is not None
        sides = (self.preview.whole.width, self.preview.whole.height) * 2
        x, y, width, height = (share * side for share, side in zip(self.crop_box, sides, strict=True))
        return f"M{x:.2f} {y:.2f}h{width:.2f}v{height:.2f}h-{width:.2f}z"

    @property
    def whole_caption(self) -> str:
        lost = 1 - self.crop_box[2] * self.crop_box[3]
        return f"whole picture, {lost:.1%} cut off" if lost else "whole picture, nothing cut off"

    @property
    def facts(self) -> Iterator[str]:
        """Lines with its geometry, times and companions."""
        sample, geometry = self.sample, self.sample["geometry"]
        bucket = Bucket.parse(geometry["bucket"])
        native = "{}x{}".format(*self.size) if self.size else "size no longer known"
        resized = f"resized to {geometry['resize_w']}x{geometry['resize_h']}"
        yield f"{native} \N{RIGHTWARDS ARROW} {bucket}: {resized}, cropped at ({geometry['x']}, {geometry['y']})"
        if self.size:
            yield f"{self.cropped_share:.1%} cut off, stretched by {self.stretched:.1%}"
        if sample["kind"] == "video":
            times = clip_times(sample["start"], sample["rate"], bucket.frames)
            frames = f"{bucket.frames} frames at {sample['rate']:g} per second"
            yield f"{frames}, from {times[0]:.2f} to {times[-1]:.2f} s"
        if sample["condition"] == "source":
            yield f"source: {self.active_row['source_path']}"
        if sample["mask_id"]:
            yield f"mask: {self.active_row['mask_path']}"

    @property
    def marks(self) -> list[str]:
        """Labels for what is particular about it."""
        row, geometry = self.active_row, self.sample["geometry"]
        labels = {
            "held out": row["role"] == "eval",
            "regularisation": row["regularisation"],
            f"repeats {row['repeats']}": row["repeats"],
            f"weight {row['weight']:g}": row["weight"] != 1,
            "starts from its first frame": self.sample["condition"] == "first-frame",
            "enlarged": self.size and (geometry["resize_w"] > self.size[0] or geometry["resize_h"] > self.size[1]),
        }
        return [label for label, applies in labels.items() if applies]


@dataclass(frozen=True)
class BucketSection:
    """A bucket on a page. row: its row of the table. cards: objects of the type that the template needs."""

    bucket: str
    row: TableRow
    note: str
    cards: Iterable[Any]


def format_known(value: Any) -> Any:
    return "not known" if isinstance(value, float) and math.isnan(value) else value


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
        "known": format_known,
        "shortened": shorten,
        "visible": escape_unprintable,
    }
    return environment


def render_template(template: str, **values: Any) -> Iterator[bytes]:
    """A page in pieces, UTF-8. Characters without a UTF-8 encoding are written as \\udcXX."""
    pieces = template_environment(TEMPLATES).get_template(template).generate(values)
    return (piece.encode("utf-8", "backslashreplace") for piece in pieces)
