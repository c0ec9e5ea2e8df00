"""Whether the places that media are read from are there.

Missing media is not bad media: where a disk is not mounted, or `media_root` was forgotten, every file would be set
aside, and training would go on with the rest. So before a stage opens media, and again when a unit lacks files, some
files of each place are looked for; where most of them are missing the stage stops, and changes nothing.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.plans import Plan
from schemas.config.pipeline import VALIDATION
from schemas.errors import LatentpressError
from schemas.text_format import escape_unprintable
from stages.discovery.media_locations import MediaLocations, RequiredFile
from stages.discovery.sources.urls import display_location
from stages.media.errors import MediaError
from stages.media.files import Blob, MediaPath, media_size

MAX_PROBED_FILES = 16  # files of each dataset that are looked for


class MissingMediaError(LatentpressError):
    """Most of what was looked for in a place is not there."""


def spread_evenly(names: pa.Array | pa.ChunkedArray) -> list[str]:
    """At most MAX_PROBED_FILES of them, from the first to the last."""
    rows = np.linspace(0, len(names) - 1, min(MAX_PROBED_FILES, len(names))).astype(np.int64)
    return names.take(pa.array(rows)).to_pylist()


def select_probed_members(plan: Plan, kind: str, members: pa.Array) -> tuple[str, ...]:
    """Of `members` of this kind ("text", "latents", "vision") some of each dataset that have files."""
    if kind == "text":
        table, name, dataset = plan.text_table, "text_id", "image_dataset"
    else:
        table, name, dataset = plan.active, "sample_id", "dataset"
    table = table.select([name, dataset]).filter(pc.is_valid(table.column(dataset)))
    table = table.filter(pc.is_in(table.column(name), value_set=members))
    found: list[str] = []
    for one in pc.unique(table.column(dataset)).to_pylist():
        found += spread_evenly(table.filter(pc.equal(table.column(dataset), one)).column(name))
    return tuple(found)


def require_media(places: MediaLocations, kind: str, members: Iterable[str]) -> None:
    """Look for the files of some members; MissingMediaError where most of those of one place are missing."""
    groups: dict[tuple[str, str], dict[str, RequiredFile]] = {}
    for name in members:
        for need in places.required_files(kind, name):
            groups.setdefault((need.dataset, need.role), {})[need.path] = need
    for (dataset, role), needs in groups.items():
        missing = _find_missing(places, dataset, role, list(needs.values()))
        if 2 * len(missing) > len(needs):
            raise _missing_media_error(places, dataset, role, len(needs), missing)


def _find_missing(places: MediaLocations, dataset: str, role: str, needs: list[RequiredFile]) -> list[MediaError]:
    missing: list[MediaError] = []
    found: list[MediaPath] = []
    try:
        for need in needs:
            try:
                found.append(places.backing_file(need))
            except MediaError as error:
                missing.append(error)
    except LatentpressError as error:
        key, _ = places.location_option(dataset, role)
        raise MissingMediaError(f"{key}: {error.message}", _advice(places, dataset, role)) from error
    with ThreadPoolExecutor(MAX_PROBED_FILES) as pool:
        return missing + [error for error in pool.map(_absence_error, found) if error]


def _absence_error(file: MediaPath) -> MediaError | None:
    """Why a file is not there. A store that doesn't answer, or lets nobody in, has nothing either."""
    try:
        media_size(file)
    except MediaError as error:
        gone = ("missing", "unreadable") if isinstance(file, Blob) else ("missing",)
        return error if error.reason in gone else None
    return None


def _missing_media_error(
    places: MediaLocations, dataset: str, role: str, looked: int, missing: list[MediaError]
) -> MissingMediaError:
    key, place = places.location_option(dataset, role)
    state = ""
    if place and "://" not in place and not os.path.exists(place):
        state = " is not there"
    elif place and os.path.isdir(place) and not os.listdir(place):
        state = " is an empty folder"
    return MissingMediaError(
        f"{key}: {display_location(place)}{state}{': ' if place else ''}{len(missing)} of {looked} files that "
        f"were looked for are "
        f"missing; the first: {escape_unprintable(str(missing[0].path))}: {missing[0].problem}",
        _advice(places, dataset, role),
    )


def _advice(places: MediaLocations, dataset: str, role: str) -> str:
    key, _ = places.location_option(dataset, role)
    if dataset == VALIDATION:
        return "restore them, or correct validation.prompts and run `latentpress bucket`; nothing was set aside"
    name = key.rpartition(".")[2]
    where = f"--set datasets.{dataset}.{'media_root' if name == 'instance_data_dir' else name}=PLACE"
    return (
        f"mount the disk or restore the files, or say where they lie on this machine: {where}; nothing was set aside. "
        "What was deleted for good leaves the plan by `latentpress discover` and then `latentpress bucket`"
    )
