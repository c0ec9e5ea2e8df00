"""The page of `latentpress preview`: one HTML file that needs nothing else, with its pictures inside. Pure.

A page is an iterator of pieces, so that whoever writes it holds one item at a time. Everything that comes from outside
(names, captions, messages) goes through `words` or `name`, which escape it.
"""

import base64
import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.clips import clip_times
from schemas.geometry import Bucket

Row = Mapping[str, Any]
CAPTION_LENGTH = 400  # characters of a caption that are shown

STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --soft: #57606a; --line: #d0d7de; --back: #fff; --pane: #f6f8fa;
  --mark: #0969da; --bad: #b42318; --bad-back: #fff1f0 }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --soft: #9aa4af; --line: #363d46; --back: #0d1117;
  --pane: #161b22; --mark: #6cb6ff; --bad: #ff9a8f; --bad-back: #2d1614 } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 1.5rem auto; padding: 0 1rem;
  color: var(--text); background: var(--back); overflow-wrap: anywhere }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .3rem } p { margin: .3rem 0 }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .6rem; border-bottom: 1px solid var(--line); padding-bottom: .3rem }
h3 { font-size: .95rem; margin: 0; font-weight: 600 }
a { color: var(--mark) } .soft, figcaption, .facts { color: var(--soft); font-size: .85rem }
.wide { overflow-x: auto; margin: .8rem 0 }
table { border-collapse: collapse; font-size: .85rem; overflow-wrap: normal }
td, th { padding: .25rem .6rem; border: 1px solid var(--line); text-align: left; vertical-align: top }
th { background: var(--pane); white-space: nowrap }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
table.rules td:last-child { min-width: 18rem; overflow-wrap: anywhere } td > p { margin: 0 0 .2rem }
dl { display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; margin: 0 0 .8rem; font-size: .85rem }
dt { display: inline; color: var(--soft) } dd { display: inline; margin: 0; font-variant-numeric: tabular-nums }
.items { display: grid; gap: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)) }
article { border: 1px solid var(--line); border-radius: 6px; padding: .8rem; background: var(--pane); min-width: 0 }
article.clip { grid-column: 1 / -1 } article.unread { background: var(--bad-back) }
article.clip > .about { display: flex; flex-wrap: wrap; gap: 0 1.2rem }
article.clip > .about > div + div { flex: 1 1 20rem; min-width: 0 }
figure { margin: 0; min-width: 0 } figcaption { line-height: 1.3; margin-top: .15rem }
.pictures { display: flex; gap: .6rem; align-items: flex-start; margin-bottom: .6rem }
@media (max-width: 30rem) { article > .pictures, .still > .pictures { display: grid; grid-template-columns: 1fr 1fr } }
.strip { display: grid; gap: .4rem; grid-template-columns: repeat(auto-fit, minmax(7rem, 1fr)); margin-top: .6rem }
.strip figure { max-width: 208px }
img, svg { display: block; max-width: 100%; height: auto; background: var(--line) } .strip img { width: 100% }
.caption { margin: .3rem 0 0; padding-left: .6rem; border-left: 3px solid var(--line); white-space: pre-line }
.mark { display: inline-block; border: 1px solid var(--mark); color: var(--mark); border-radius: 9px; padding: 0 .5rem;
  font-size: .75rem; margin: 0 .3rem .2rem 0 }
.problem { color: var(--bad); margin: .3rem 0 }
.items.rows { grid-template-columns: minmax(0, 1fr) } table.lowest td:last-child { overflow-wrap: anywhere }
.title { display: flex; flex-wrap: wrap; gap: 0 .8rem; align-items: baseline; margin-bottom: .5rem }
.title p { margin: 0 } .title .psnr { font-weight: 600; font-variant-numeric: tabular-nums }
.beside { display: flex; flex-wrap: wrap; gap: 0 1.2rem } .clip { flex: 1 1 100% } .still { max-width: 100% }
.told { flex: 1 1 18rem; min-width: 0 } .stack { display: grid; gap: 2px } .stack img { width: 100% }
.frames { display: grid; gap: .4rem; grid-template-columns: repeat(auto-fit, minmax(7.5rem, 1fr)); margin: .6rem 0 }
.frames figure { max-width: 208px }
@media (max-width: 30rem) { .frames { grid-template-columns: 1fr 1fr 1fr } }
"""


@dataclass(frozen=True)
class Picture:
    """An encoded picture (WebP) and its size in pixels."""

    data: bytes
    width: int
    height: int


@dataclass(frozen=True)
class Look:
    """What was read of an item. crops: its frames as the encoder gets them, scaled down. times: their seconds, none
    for an image. whole: the whole picture, or the first frame. masked: as crops, with the mask laid over them."""

    crops: tuple[Picture, ...]
    times: tuple[float, ...]
    whole: Picture
    source: Picture | None = None
    masked: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Item:
    """One sample: its rows of ACTIVE (place) and SAMPLES, the item's size as shown in pixels (None where it is not
    known), the shares cut off and stretched by, and either what was seen or what was the matter."""

    place: Row
    sample: Row
    size: tuple[int, int] | None
    lost: float
    stretched: float
    captions: tuple[str, ...] = ()
    more_captions: int = 0
    look: Look | None = None
    problem: str = ""

    @property
    def path(self) -> str:
        return self.place["path"]

    @property
    def cut(self) -> tuple[float, float, float, float]:
        """Left, top, width and height of what is kept, as shares of the whole picture."""
        geometry = self.sample["geometry"]
        bucket, across, down = Bucket.parse(geometry["bucket"]), geometry["resize_w"], geometry["resize_h"]
        return geometry["x"] / across, geometry["y"] / down, bucket.width / across, bucket.height / down


def words(text: Any) -> str:
    """Text as HTML. What UTF-8 has no bytes for is written as \\udcXX."""
    return html.escape(str(text).encode("utf-8", "backslashreplace").decode("utf-8"))


def name(text: str) -> str:
    """A file's name as HTML; line breaks and characters that can't be seen are written as escapes."""
    seen = (letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    return words("".join(seen))


def head(title: str, facts: Sequence[str], buckets: Sequence[Row]) -> str:
    """The beginning of the page: what it is of, and the table of buckets, each a link to its section."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{words(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>
<h1>{words(title)}</h1>
{"".join(f'<p class="soft">{words(fact)}</p>' for fact in facts)}
{table(buckets, link="bucket")}
"""


def tail() -> str:
    return "</body></html>\n"


def bucket_section(bucket: str, line: Row, note: str, items: Iterable[str], *, layout: str = "") -> Iterator[str]:
    """A bucket's line of the table and its items, each a card. layout: another class of how they stand."""
    shown = {key: value for key, value in line.items() if key != "bucket"}
    values = "".join(f"<div><dt>{words(key)}</dt> <dd>{_value(value)}</dd></div>" for key, value in shown.items())
    yield f'<section id="{anchor(bucket)}"><h2>{words(bucket)}</h2>\n<dl>{values}</dl>\n'
    yield f'<p class="soft">{words(note)}</p>\n<div class="items {layout}">\n'
    yield from items
    yield "</div></section>\n"


def rules_section(title: str, note: str, rows: Sequence[Row]) -> str:
    """What was excluded by which rule; a value that is a list is shown one line each."""
    shown = table(rows, kind="rules") or "<p>Nothing.</p>"
    return f'<section><h2>{words(title)}</h2>\n<p class="soft">{words(note)}</p>\n{shown}</section>\n'


def card(item: Item) -> str:
    """One item: its pictures, or why there are none, and what the plan says of it."""
    about = f"""<h3>{words(item.place["dataset"])}/{name(item.path)}</h3>
{"".join(f'<span class="mark">{words(mark)}</span>' for mark in marks(item))}
<p class="facts">{"<br>".join(map(name, facts(item)))}</p>"""
    captions = "".join(f'<p class="caption">{words(short(caption))}</p>' for caption in item.captions)
    if item.more_captions:
        captions += f'<p class="soft">and {item.more_captions} more</p>'
    if item.look is None:
        return f'<article class="unread">{about}<p class="problem">{name(item.problem)}</p>{captions}</article>\n'
    if item.look.times:
        drawn = f'<div class="pictures">{_whole(item, item.look)}</div>'
        body = f'<div class="about">{drawn}<div>{about}{captions}</div></div>{_strips(item, item.look)}'
        return f'<article class="clip">{body}</article>\n'
    return f'<article><div class="pictures">{_pictures(item, item.look)}</div>{about}{captions}</article>\n'


def facts(item: Item) -> Iterator[str]:
    sample, cut = item.sample, item.sample["geometry"]
    bucket = Bucket.parse(cut["bucket"])
    native = "{}x{}".format(*item.size) if item.size else "size no longer known"
    resized = f"resized to {cut['resize_w']}x{cut['resize_h']}"
    yield f"{native} \N{RIGHTWARDS ARROW} {bucket}: {resized}, cut at ({cut['x']}, {cut['y']})"
    if item.size:
        yield f"{item.lost:.1%} cut off, stretched by {item.stretched:.1%}"
    if sample["kind"] == "video":
        times = clip_times(sample["start"], sample["rate"], bucket.frames)
        frames = f"{bucket.frames} frames at {sample['rate']:g} per second"
        yield f"{frames}, from {times[0]:.2f} to {times[-1]:.2f} s"
    if sample["condition"] == "source":
        yield f"source: {item.place['source_path']}"
    if sample["mask_id"]:
        yield f"mask: {item.place['mask_path']}"


def marks(item: Item) -> Iterator[str]:
    place, cut = item.place, item.sample["geometry"]
    if place["role"] == "eval":
        yield "held out"
    if place["regularisation"]:
        yield "regularisation"
    if place["repeats"]:
        yield f"repeats {place['repeats']}"
    if place["weight"] != 1:
        yield f"weight {place['weight']:g}"
    if item.sample["condition"] == "first-frame":
        yield "starts from its first frame"
    if item.size and (cut["resize_w"] > item.size[0] or cut["resize_h"] > item.size[1]):
        yield "enlarged"


def _pictures(item: Item, look: Look) -> str:
    """An image as it will be cut, its i2i source or mask beside it, and what is cut away."""
    shown = [figure(look.source, "i2i source, as cut", f"source of {item.path}")] if look.source else []
    bucket = item.sample["geometry"]["bucket"]
    shown += [figure(look.crops[0], f"as cut to {bucket}", f"{item.path} as cut to {bucket}")]
    shown += [figure(picture, "trained where not red", f"mask of {item.path}") for picture in look.masked]
    return "".join([*shown, _whole(item, look)])


def _strips(item: Item, look: Look) -> str:
    """A clip's chosen frames with their seconds, and once more under their mask where there is one."""
    strips = ""
    for pictures, what in ((look.crops, ""), (look.masked, "mask at ")):
        frames = "".join(
            figure(picture, f"{what}{time:.2f} s", f"{what}{time:.2f} s of {item.path}")
            for picture, time in zip(pictures, look.times, strict=False)
        )
        strips += f'<div class="strip">{frames}</div>' if frames else ""
    return strips


def figure(picture: Picture, caption: str, alt: str) -> str:
    return f"<figure{_basis(picture)}>{image(picture, alt)}<figcaption>{words(caption)}</figcaption></figure>"


def image(picture: Picture, alt: str) -> str:
    return f'<img src="{uri(picture)}" width="{picture.width}" height="{picture.height}" alt="{name(alt)}">'


def _basis(picture: Picture) -> str:
    """Pictures of a row give way in proportion to their widths where there is no room for all."""
    return f' style="flex: 0 1 {picture.width}px"'


def _whole(item: Item, look: Look) -> str:
    """The whole picture, darkened where it is cut away."""
    picture = look.whole
    across, down = picture.width, picture.height
    x, y, width, height = (share * side for share, side in zip(item.cut, (across, down) * 2, strict=True))
    frame = f"M{x:.2f} {y:.2f}h{width:.2f}v{height:.2f}h-{width:.2f}z"
    lost = 1 - item.cut[2] * item.cut[3]
    said = f"whole picture, {lost:.1%} cut off" if lost else "whole picture, nothing cut off"
    label = f"{name(item.path)}: {words(said)}"
    size = f'viewBox="0 0 {across} {down}" width="{across}" height="{down}"'
    return f"""<figure{_basis(picture)}><svg {size} role="img" aria-label="{label}">
<image href="{uri(picture)}" width="{across}" height="{down}"/>
<path d="M0 0h{across}v{down}h-{across}z{frame}" fill="#000" fill-opacity=".62" fill-rule="evenodd"/>
<path d="{frame}" fill="none" stroke="#ffd33d" stroke-width="2"/></svg>
<figcaption>{words(said)}</figcaption></figure>"""


def uri(picture: Picture) -> str:
    return f"data:image/webp;base64,{base64.b64encode(picture.data).decode()}"


def short(caption: str) -> str:
    if not caption:
        return "(empty)"
    return caption if len(caption) <= CAPTION_LENGTH else f"{caption[: CAPTION_LENGTH - 1]}…"


def anchor(bucket: str) -> str:
    return "bucket-" + words(bucket).replace("@", "-")


def table(rows: Sequence[Row], *, link: str = "", kind: str = "") -> str:
    if not rows:
        return ""
    keys = list(rows[0])
    titles = "".join(f"<th>{words(key)}</th>" for key in keys)
    lines = "".join("<tr>" + "".join(_cell(row[key], key == link) for key in keys) + "</tr>\n" for row in rows)
    return f'<div class="wide"><table class="{kind}"><tr>{titles}</tr>\n{lines}</table></div>'


def _cell(value: Any, is_link: bool) -> str:
    if is_link:
        return f'<td><a href="#{anchor(value)}">{words(value)}</a></td>'
    if isinstance(value, list):
        return f"<td>{''.join(f'<p>{name(line)}</p>' for line in value)}</td>"
    return f'<td class="n">{_value(value)}</td>' if isinstance(value, int | float) else f"<td>{words(value)}</td>"


def _value(value: Any) -> str:
    unknown = isinstance(value, float) and math.isnan(value)
    return "not known" if unknown else words(value)
