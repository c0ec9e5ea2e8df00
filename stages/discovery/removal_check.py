"""Whether a listing shows what a dataset had before, or a place that has lost its media.

What discover does not find leaves the media table, and with the next plan the training set. That is right for what was
deleted, and wrong for a disk that is not mounted: so where most is gone, discover stops and asks.
"""

from collections import Counter
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from schemas.config.datasets import Dataset
from schemas.errors import LatentpressError
from schemas.tables import MEDIA_SCHEMA
from stages.discovery.media_locations import location_option
from stages.discovery.missing_media import MissingMediaError
from stages.discovery.sources.base import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from stages.discovery.sources.urls import display_location

ROLE_NAMES = {"media": "items", "source": "source images", "mask": "masks"}


def describe_ignored(counts: Counter[str]) -> str:
    """What was left alone, by extension or reason: "12: .json 3, .md 9"."""
    return f"{counts.total()}: " + ", ".join(
        f"{what or 'no extension'} {count}" for what, count in sorted(counts.items())
    )


@dataclass
class RemovalCheck:
    """How much of each role a listing shows, and how much the last discovery had found."""

    dataset: Dataset
    before: pa.Table | None
    now: Counter[str] = field(default_factory=Counter)

    def count(self, chunk: pa.Table) -> None:
        """Rows of a listing."""
        self.now["media"] += len(chunk)
        for role in ("source", "mask"):
            self.now[role] += len(chunk) - chunk[role].null_count

    def require_media(self, missing: int, fraction: float, accept_removed: bool, left_alone: Counter[str]) -> None:
        """Raise MissingMediaError where most is gone. missing: how many of the listed items are not there; fraction: of
        them that may be, where that is more than half (max_reject_fraction)."""
        listed = self.now["media"]
        if missing > max(0.5, fraction) * listed:
            step = "or raise stages.max_reject_fraction, if they are gone for good and the rest will do"
            raise self._error("media", f"{missing} of {listed} items that are listed are not there", step)
        if accept_removed:
            return
        if not listed and not len(self.before or ()):
            raise self._empty(left_alone)
        asked = {
            "media": True,
            "source": bool(self.dataset.conditioning_data or self.dataset.conditioning_column),
            "mask": bool(self.dataset.mask_data or self.dataset.mask_column),
        }
        for role in (role for role, wanted in asked.items() if wanted):
            column = (MEDIA_SCHEMA.empty_table() if self.before is None else self.before)[
                "path" if role == "media" else role
            ]
            was, now = len(column) - column.null_count, self.now[role] - (missing if role == "media" else 0)
            if 2 * now < was:
                alone = f"; other files: {describe_ignored(left_alone)}" if left_alone and not now else ""
                problem = f"{now} {ROLE_NAMES[role]} are there, and the last discovery found {was}{alone}"
                step = "if they were removed on purpose: `latentpress discover --accept-removed`"
                raise self._error(role, problem, step)

    def _error(self, role: str, problem: str, step: str) -> MissingMediaError:
        key, place = location_option(self.dataset, role)
        option = key.rpartition(".")[2]
        where = "media_root (where the media lie on this machine)" if role == "media" else option
        return MissingMediaError(
            f"{key}: {display_location(place)}: {problem}. Nothing was changed",
            f"mount the disk, or correct {where}; {step}",
        )

    def _empty(self, left_alone: Counter[str]) -> LatentpressError:
        key, place = location_option(self.dataset, "media")
        video = self.dataset.dataset_type == "video"
        kinds = "images or videos" if video else "images"
        if not left_alone:
            step = "mount the disk, correct the place or media_root, or set disabled: true for this dataset"
            return LatentpressError(f"{key}: {display_location(place)} holds no {kinds}: it is empty", step)
        formats = ", ".join(
            sorted(ending[1:] for ending in (IMAGE_EXTENSIONS | VIDEO_EXTENSIONS if video else IMAGE_EXTENSIONS))
        )
        step = f"convert them to a format that is read ({formats}), or correct the place"
        if not video and any(ending in VIDEO_EXTENSIONS for ending in left_alone):
            step = f"set dataset_type: video for the videos; {step}"
        return LatentpressError(
            f"{key}: {display_location(place)} holds no {kinds}; left alone: {describe_ignored(left_alone)}", step
        )


def count_missing(aside: list[pa.Table]) -> int:
    """How many rows of schemas.tables.REJECTS_SCHEMA are of items that are not there."""
    return sum(pc.sum(pc.equal(rows["reason"], "missing")).as_py() or 0 for rows in aside)
