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

from cache.generations import Generation
from schemas.config.pipeline import VALIDATION
from schemas.errors import LatentpressError
from schemas.report import visible
from stages.discovery.places import Need, Places
from stages.media.errors import MediaError
from stages.media.files import Blob, Media, size_of
from stages.sources.urls import shown

LOOKED = 16  # files of each dataset that are looked for


class MissingMedia(LatentpressError):
    """Most of what was looked for in a place is not there."""


def spread(names: pa.Array | pa.ChunkedArray) -> list[str]:
    """At most LOOKED of them, from the first to the last."""
    rows = np.linspace(0, len(names) - 1, min(LOOKED, len(names))).astype(np.int64)
    return names.take(pa.array(rows)).to_pylist()


def watched(plan: Generation, kind: str, members: pa.Array) -> tuple[str, ...]:
    """Of `members` of this kind ("text", "latents", "vision") some of each dataset that have files."""
    if kind == "text":
        table, name, dataset = plan.text_table, "text_id", "image_dataset"
    else:
        table, name, dataset = plan.active, "sample_id", "dataset"
    table = table.select([name, dataset]).filter(pc.is_valid(table.column(dataset)))
    table = table.filter(pc.is_in(table.column(name), value_set=members))
    found: list[str] = []
    for one in pc.unique(table.column(dataset)).to_pylist():
        found += spread(table.filter(pc.equal(table.column(dataset), one)).column(name))
    return tuple(found)


def require(places: Places, kind: str, members: Iterable[str]) -> None:
    """Look for the files of some members; MissingMedia where most of those of one place are missing."""
    groups: dict[tuple[str, str], dict[str, Need]] = {}
    for name in members:
        for need in places.needs(kind, name):
            groups.setdefault((need.dataset, need.role), {})[need.path] = need
    for (dataset, role), needs in groups.items():
        missing = _missing(places, dataset, role, list(needs.values()))
        if 2 * len(missing) > len(needs):
            raise _not_there(places, dataset, role, len(needs), missing)


def _missing(places: Places, dataset: str, role: str, needs: list[Need]) -> list[MediaError]:
    missing: list[MediaError] = []
    found: list[Media] = []
    try:
        for need in needs:
            try:
                found.append(places.holder(need))
            except MediaError as error:
                missing.append(error)
    except LatentpressError as error:
        key, _ = places.location(dataset, role)
        raise MissingMedia(f"{key}: {error.message}", _advice(places, dataset, role)) from error
    with ThreadPoolExecutor(LOOKED) as pool:
        return missing + [error for error in pool.map(_absent, found) if error]


def _absent(file: Media) -> MediaError | None:
    """Why a file is not there. A store that doesn't answer, or lets nobody in, has nothing either."""
    try:
        size_of(file)
    except MediaError as error:
        gone = ("missing", "unreadable") if isinstance(file, Blob) else ("missing",)
        return error if error.reason in gone else None
    return None


def _not_there(places: Places, dataset: str, role: str, looked: int, missing: list[MediaError]) -> MissingMedia:
    key, place = places.location(dataset, role)
    state = ""
    if place and "://" not in place and not os.path.exists(place):
        state = " is not there"
    elif place and os.path.isdir(place) and not os.listdir(place):
        state = " is an empty folder"
    return MissingMedia(
        f"{key}: {shown(place)}{state}{': ' if place else ''}{len(missing)} of {looked} files that were looked for are "
        f"missing; the first: {visible(str(missing[0].path))}: {missing[0].problem}",
        _advice(places, dataset, role),
    )


def _advice(places: Places, dataset: str, role: str) -> str:
    key, _ = places.location(dataset, role)
    if dataset == VALIDATION:
        return "restore them, or correct validation.prompts and run `latentpress bucket`; nothing was set aside"
    name = key.rpartition(".")[2]
    where = f"--set datasets.{dataset}.{'media_root' if name == 'instance_data_dir' else name}=PLACE"
    return (
        f"mount the disk or restore the files, or say where they lie on this machine: {where}; nothing was set aside. "
        "What was deleted for good leaves the plan by `latentpress discover` and then `latentpress bucket`"
    )
