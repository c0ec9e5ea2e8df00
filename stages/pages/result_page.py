"""The page of `latentpress preview`: encoded samples beside their originals. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.errors import LatentpressError
from stages.media.errors import MediaError
from stages.pages.clip_comparison import DIFFERENCE_GAIN, Comparison
from stages.pages.encoded_plan import EncodedCaption, EncodedPlan
from stages.pages.html import BucketSection, PageItem, render_template

TableRow = dict[str, Any]
POSTERIOR_LABELS = {
    "sample": "drawn from the posterior",
    "mode": "the posterior's mean",
    "moments": "moments, shown by their mean",
}
MAX_WORST = 10  # samples of the lowest PSNR that are listed
SECTION_NOTE = "Chosen by their identity, so the same ones each time; the lowest PSNR first."


@dataclass(frozen=True)
class SampleResult:
    """A sample with what the plan and the cache say of it. comparison: None where its latents can't be decoded, which
    `damage` explains. unread: why there is no original to compare with."""

    item: PageItem
    captions: tuple[EncodedCaption, ...]
    comparison: Comparison | None
    unread: MediaError | None = None
    damage: LatentpressError | None = None

    @property
    def name(self) -> str:
        return f"{self.item.active_row['dataset']}/{self.item.path}"

    @property
    def bucket(self) -> str:
        return self.item.active_row["bucket"]

    @property
    def sample_id(self) -> str:
        return self.item.active_row["sample_id"]

    @property
    def mse(self) -> float | None:
        return None if self.comparison is None else self.comparison.mse

    @property
    def psnr(self) -> float | None:
        """dB over all pixels of all frames; None where there is nothing to compare, infinite where all are equal."""
        return None if self.comparison is None else self.comparison.psnr

    @property
    def problems(self) -> list[str]:
        problems = [f"no original to compare with ({self.unread.reason}): {self.unread}"] if self.unread else []
        return problems + ([f"can't be decoded: {self.damage.message}; {self.damage.next_step}"] if self.damage else [])


def bucket_rows(cached: EncodedPlan, found: Sequence[SampleResult], buckets: Sequence[str]) -> list[TableRow]:
    """The table of buckets: what is encoded, what is shown, mean and lowest PSNR of what is shown."""
    table = []
    for bucket in buckets:
        mine = [one for one in found if one.bucket == bucket]
        values = [one.psnr for one in mine if one.psnr is not None]
        mean = sum(values) / len(values) if values else math.nan
        row = cached.bucket_row(bucket, len(mine)) | {"mean_psnr_db": round(mean, 2)}
        table.append(row | {"lowest_psnr_db": round(min(values, default=math.nan), 2)})
    return table


def render_result_page(
    cached: EncodedPlan, found: Sequence[SampleResult], table: Sequence[TableRow]
) -> Iterator[bytes]:
    """The page in pieces. table: see `lines`."""
    compared = sorted((one.psnr, one.sample_id, one) for one in found if one.psnr is not None)
    return render_template(
        "latents.html",
        title=f"Latents of plan {cached.sheet.plan.name}",
        facts=list(_page_facts(cached)),
        buckets=table,
        lowest=[one for _, _, one in compared[:MAX_WORST]],
        difference=f"difference \N{MULTIPLICATION SIGN} {DIFFERENCE_GAIN}",
        sections=[
            BucketSection(line["bucket"], line, SECTION_NOTE, [one for one in found if one.bucket == line["bucket"]])
            for line in table
        ],
    )


def _page_facts(cached: EncodedPlan) -> Iterator[str]:
    config, aside = cached.sheet.config, int(cached.set_aside.sum())
    model = config.model
    drawn = f", {POSTERIOR_LABELS[config.latents.posterior]}" if model.family_spec.posterior else ""
    yield f"{model.family}, {model.task}, {model.flavour_spec.name}; {cached.folder}{drawn}"
    known = f"{int(cached.encoded.sum())} of {len(cached.encoded)} samples are encoded"
    known += f", {aside} were set aside" if aside else ""
    waiting = f"; {cached.missing} are not encoded yet: latentpress encode-latents" if cached.missing else ""
    yield known + waiting
    yield (
        "PSNR is 10 log10(255\N{SUPERSCRIPT TWO} / MSE) over the 8-bit pixels of all frames of a sample, as they went "
        "into the encoder and as they come back from the decoder, before they are made small for this page. The mean "
        "of a bucket is over the samples shown."
    )
