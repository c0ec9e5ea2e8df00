"""The page of `latentpress preview`: encoded samples beside their originals. Pure.

Everything that comes from outside goes through `words` or `name` of the page, which escape it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.errors import LatentpressError
from stages.contactsheet import page as html
from stages.contactsheet.cached import Cached, Caption
from stages.contactsheet.comparing import GAIN, Comparison, Frame, psnr
from stages.contactsheet.page import Item, Picture, name, words
from stages.media.errors import MediaError

Row = dict[str, Any]
POSTERIORS = {
    "sample": "drawn from the posterior",
    "mode": "the posterior's mean",
    "moments": "the posterior's moments, of which the mean is shown",
}
WORST = 10  # samples of the lowest PSNR that are listed
DIFFERENCE = f"difference \N{MULTIPLICATION SIGN} {GAIN}"


@dataclass(frozen=True)
class Result:
    """A sample with what the plan and the cache say of it. comparison: None where its latents can't be decoded, which
    `damage` explains. unread: why there is no original to compare with."""

    item: Item
    captions: tuple[Caption, ...]
    comparison: Comparison | None
    unread: MediaError | None = None
    damage: LatentpressError | None = None

    @property
    def name(self) -> str:
        return f"{self.item.place['dataset']}/{self.item.path}"

    @property
    def bucket(self) -> str:
        return self.item.place["bucket"]

    @property
    def sample_id(self) -> str:
        return self.item.place["sample_id"]

    @property
    def mse(self) -> float | None:
        return None if self.comparison is None else self.comparison.mse

    @property
    def psnr(self) -> float | None:
        """dB over all pixels of all frames; None where there is nothing to compare, infinite where all are equal."""
        return None if self.mse is None else psnr(self.mse)


def lines(cached: Cached, found: Sequence[Result], buckets: Sequence[str]) -> list[Row]:
    """The table of buckets: what is encoded, what is shown, mean and lowest PSNR of what is shown."""
    table = []
    for bucket in buckets:
        mine = [one for one in found if one.bucket == bucket]
        values = [one.psnr for one in mine if one.psnr is not None]
        mean = sum(values) / len(values) if values else math.nan
        row = cached.line(bucket, len(mine)) | {"mean PSNR (dB)": round(mean, 2)}
        table.append(row | {"lowest PSNR (dB)": round(min(values, default=math.nan), 2)})
    return table


def page(cached: Cached, found: Sequence[Result], table: Sequence[Row]) -> Iterator[str]:
    """The page in pieces. table: see `lines`."""
    yield html.head(f"Latents of plan {cached.sheet.plan.name}", list(_about(cached)), table)
    yield _worst(found)
    for line in table:
        mine = [one for one in found if one.bucket == line["bucket"]]
        note = "Chosen by their identity, so the same ones each time; the lowest PSNR first."
        yield from html.bucket_section(line["bucket"], line, note, (_card(one) for one in mine), layout="rows")
    yield html.tail()


def _about(cached: Cached) -> Iterator[str]:
    config, aside = cached.sheet.config, int(cached.aside.sum())
    model = config.model
    kinds = {
        "sample": "drawn from the posterior",
        "mode": "the posterior's mean",
        "moments": "moments, shown by their mean",
    }
    drawn = f", {kinds[config.latents.posterior]}" if model.spec.posterior else ""
    yield f"{model.family}, {model.task}, {model.chosen.name}; {cached.folder}{drawn}"
    known = f"{int(cached.encoded.sum())} of {len(cached.encoded)} samples are encoded"
    known += f", {aside} were set aside" if aside else ""
    waiting = f"; {cached.missing} are not encoded yet: latentpress encode-latents" if cached.missing else ""
    yield known + waiting
    yield (
        "PSNR is 10 log10(255\N{SUPERSCRIPT TWO} / MSE) over the 8-bit pixels of all frames of a sample, as they went "
        "into the encoder and as they come back from the decoder, before they are made small for this page. The mean "
        "of a bucket is over the samples shown."
    )


def _worst(found: Sequence[Result]) -> str:
    """The samples of the lowest PSNR, each a link to its card."""
    worst = sorted((one.psnr, one.sample_id, one) for one in found if one.psnr is not None)[:WORST]
    rows = "".join(
        f'<tr><td class="n">{decibels(value)}</td><td>{words(one.bucket)}</td>'
        f'<td><a href="#{_anchor(one)}">{name(one.name)}</a></td></tr>\n'
        for value, _, one in worst
    )
    if not rows:
        return ""
    return f"""<section><h2>Lowest PSNR</h2>
<div class="wide"><table class="lowest"><tr><th>PSNR</th><th>bucket</th><th>sample</th></tr>
{rows}</table></div></section>
"""


def _card(one: Result) -> str:
    item = one.item
    value = "" if one.psnr is None else f'<p class="psnr">{decibels(one.psnr)}</p>'
    marks = "".join(f'<span class="mark">{words(mark)}</span>' for mark in html.marks(item))
    problems = [f"no original to compare with ({one.unread.reason}): {one.unread}"] if one.unread else []
    problems += [f"can't be decoded: {one.damage.message}; {one.damage.next_step}"] if one.damage else []
    said = "".join(f'<p class="problem">{name(problem)}</p>' for problem in problems)
    kind = ' class="unread"' if problems else ""
    return f"""<article{kind} id="{_anchor(one)}">
<div class="title"><h3>{name(one.name)}</h3>{value}<p>{marks}</p></div>
{said}<div class="beside">{_pictures(one)}
<div class="told"><p class="facts">{"<br>".join(map(name, html.facts(item)))}</p>
{"".join(map(_caption, one.captions))}</div></div></article>
"""


def _pictures(one: Result) -> str:
    if one.comparison is None:
        return ""
    frames, condition, path = one.comparison.frames, one.comparison.condition, one.item.path
    clip = frames[0].time is not None
    shown = _strip(frames, path) if clip else _row(frames[0], path)
    if condition:
        what = "first frame" if clip else "source"
        title = "The first frame, encoded alone:" if clip else "The i2i source:"
        shown += f'<p class="soft">{title}</p>{_row(condition, f"{what} of {path}")}'
    return f'<div class="{"clip" if clip else "still"}">{shown}</div>'


def _strip(frames: Sequence[Frame], path: str) -> str:
    order = f"original, reconstruction, {DIFFERENCE}" if frames[0].original else "reconstruction"
    stacks = "".join(_stack(frame, path) for frame in frames)
    return f'<p class="soft">From top to bottom: {order}.</p><div class="frames">{stacks}</div>'


def _parts(frame: Frame) -> list[tuple[Picture, str]]:
    found = ((frame.original, "original"), (frame.reconstruction, "reconstruction"), (frame.difference, DIFFERENCE))
    return [(picture, what) for picture, what in found if picture]


def _row(frame: Frame, of: str) -> str:
    """Original, reconstruction and difference side by side."""
    value = "" if frame.mse is None else f", {decibels(psnr(frame.mse))}"
    shown = (
        html.figure(picture, what + (value if what == "reconstruction" else ""), f"{what}: {of}")
        for picture, what in _parts(frame)
    )
    return f'<div class="pictures">{"".join(shown)}</div>'


def _stack(frame: Frame, of: str) -> str:
    """The same below each other, of one frame of a clip."""
    time = f"{frame.time:.2f} s"
    images = "".join(html.image(picture, f"{what}: {time} of {of}") for picture, what in _parts(frame))
    value = "" if frame.mse is None else f", {decibels(psnr(frame.mse))}"
    return f'<figure><div class="stack">{images}</div><figcaption>{time}{value}</figcaption></figure>'


def _caption(caption: Caption) -> str:
    kind = "facts" if caption.tokens is not None and not caption.truncated else "problem"
    said = f'<span class="{kind}">{name(caption.said)}</span>'
    return f'<p class="caption">{words(html.short(caption.text))}<br>{said}</p>'


def decibels(value: float) -> str:
    """A PSNR in words."""
    return "identical" if math.isinf(value) else f"{value:.2f} dB"


def _anchor(one: Result) -> str:
    return f"sample-{words(one.sample_id)}"
