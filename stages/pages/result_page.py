"""The page of `latentpress preview`: encoded samples with their originals. Pure."""

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
MAX_LOWEST = 10  # samples of the lowest PSNR that are listed
SECTION_NOTE = "The lowest PSNR comes first. Samples are chosen by their id, so each run shows the same ones."


@dataclass(frozen=True)
class SampleResult:
    """A sample compared with its original.

    comparison: None if its latents can't be decoded; `damage` says why. unreadable: why there is no original.
    """

    item: PageItem
    captions: tuple[EncodedCaption, ...]
    comparison: Comparison | None
    unreadable: MediaError | None = None
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
        """dB over all pixels of all frames; None without a comparison, infinite for identical pixels."""
        return None if self.comparison is None else self.comparison.psnr


def bucket_rows(encoded: EncodedPlan, results: Sequence[SampleResult], buckets: Sequence[str]) -> list[TableRow]:
    """The table of buckets: how much is encoded and shown, mean and lowest PSNR of what is shown."""
    rows = []
    for bucket in buckets:
        mine = [result for result in results if result.bucket == bucket]
        values = [result.psnr for result in mine if result.psnr is not None]
        mean = sum(values) / len(values) if values else math.nan
        row = encoded.bucket_row(bucket, len(mine)) | {"mean_psnr_db": round(mean, 2)}
        rows.append(row | {"lowest_psnr_db": round(min(values, default=math.nan), 2)})
    return rows


def render_result_page(
    encoded: EncodedPlan, results: Sequence[SampleResult], rows: Sequence[TableRow]
) -> Iterator[bytes]:
    """The page in pieces. rows: of `bucket_rows`."""
    compared = sorted((result.psnr, result.sample_id, result) for result in results if result.psnr is not None)
    sections = [
        BucketSection(row["bucket"], row, SECTION_NOTE, [one for one in results if one.bucket == row["bucket"]])
        for row in rows
    ]
    return render_template(
        "latents.html",
        title=f"Latents of plan {encoded.table.plan.name}",
        model=encoded.table.config.model,
        posterior=encoded.table.config.latents.posterior,
        encoded=encoded,
        buckets=rows,
        lowest=[result for _, _, result in compared[:MAX_LOWEST]],
        difference=f"difference \N{MULTIPLICATION SIGN} {DIFFERENCE_GAIN}",
        sections=sections,
    )
