"""The end of `features`: all items together, as one table. Near-duplicates are found, confirmed and put into groups.

One job, which is not divided: who finds that no unit remains makes the table. It is a function of the shards and of the
media, so that several who do make the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.sets.item_rows import iter_item_rows
from cache.sets.item_table import item_table_path
from cache.sets.plans import Plan
from cache.store.store import Store
from schemas.cli.console import Console
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.tables import FEATURES_SCHEMA, MEASURES
from stages.discovery.media_locations import MediaLocations
from stages.discovery.media_table import read_configured_media
from stages.encoding.features.candidates import find_candidates
from stages.encoding.features.clusters import find_clusters, find_outliers
from stages.encoding.features.confirmation import LocalFeatures, are_copies, make_reader
from stages.encoding.features.neighbors import centered, find_neighbors
from stages.encoding.member_reader import ReadRequest
from stages.encoding.stage_state import StageState
from stages.engines.sandbox import SandboxPool, WorkerFailure
from stages.media.files import MediaError

_PAIRS_AT_ONCE = 500  # of which the local features are in memory: about 300 MiB


@dataclass(frozen=True)
class ComparedItems:
    """n items of the stage's shards, sorted by media id. vectors: (n, width) of the model, without what all have in
    common; None without a model. layouts: (n, parts, numbers). is_clip: (n,)."""

    sample_ids: Sequence[str]
    media_ids: Sequence[str]
    measures: Sequence[dict[str, Any]]
    vectors: NDArray[np.float32] | None
    layouts: NDArray[np.float16]
    is_clip: NDArray[np.bool_]


def write_item_table(store: Store, config: Config, state: StageState, name: str, console: Console) -> pa.Table:
    """Make and publish the table of the items of the plan whose rows are there. LatentpressError where media that have
    to be read again can't be."""
    features = config.features
    assert features is not None
    items = _read_items(store, state)
    count = len(items.media_ids)
    columns: dict[str, Any] = {name: [row[name] for row in items.measures] for name in MEASURES}
    columns |= {"media_id": items.media_ids, "outlier": [None] * count, "cluster": [None] * count}
    pairs: list[tuple[int, int]] = []
    for clips in (False, True):
        rows = np.flatnonzero(items.is_clip == clips)
        if len(rows) < 2:
            continue
        neighbors = None
        if items.vectors is not None:
            neighbors = find_neighbors(items.vectors[rows])
            for row, outlier in zip(rows, find_outliers(neighbors, len(rows)), strict=True):
                columns["outlier"][row] = outlier
        if features.duplicates:
            pairs += map(tuple, rows[find_candidates(neighbors, items.layouts[rows])].tolist())
    if items.vectors is not None and features.clusters != 0:
        columns["cluster"] = [items.media_ids[row] for row in find_clusters(items.vectors, features.clusters)]
    groups = _find_groups(config, state.plan, items, pairs, console)
    best = _find_best(store, config, items, groups)
    columns["duplicate_group"] = best
    columns["duplicate_of"] = [None if of == own else of for own, of in zip(items.media_ids, best, strict=True)]
    table = pa.table([columns[field.name] for field in FEATURES_SCHEMA], schema=FEATURES_SCHEMA)
    store.write_table(item_table_path(name), table)
    return table


def _read_items(store: Store, state: StageState) -> ComparedItems:
    wanted = set(state.wanted_ids.to_pylist())
    done = [state.done[unit.unit_id] for unit in state.units if unit.unit_id in state.done]
    rows = [row for _, _, row in iter_item_rows(store, f"features/{state.fingerprint}", done) if row.id in wanted]
    rows = list(
        {row.info["media_id"]: row for row in sorted(rows, key=lambda row: row.id)}.values()
    )  # read in two ways
    rows.sort(key=lambda row: row.info["media_id"])
    kinds = pc.equal(state.plan.sample_table.column("kind"), "video")
    clips = set(state.plan.sample_table.filter(kinds).column("sample_id").to_pylist())
    vectors = [row.tensors["features"].numpy() for row in rows if "features" in row.tensors]
    return ComparedItems(
        [row.id for row in rows],
        [row.info["media_id"] for row in rows],
        [row.info["measures"] for row in rows],
        centered(np.stack(vectors).astype(np.float32)) if vectors else None,
        np.stack([row.tensors["layouts"].numpy() for row in rows]) if rows else np.zeros((0, 1, 1), np.float16),
        np.array([row.id in clips for row in rows], bool),
    )


def _find_groups(
    config: Config, plan: Plan, items: ComparedItems, pairs: Sequence[tuple[int, int]], console: Console
) -> list[list[int]]:
    """Numbers of the items that are copies of each other, also by way of others. pairs: those that may be."""
    if not pairs:
        return []
    root = list(range(len(items.media_ids)))

    def find(number: int) -> int:
        while root[number] != number:
            root[number] = root[root[number]]
            number = root[number]
        return number

    remaining, stages = iter(pairs), config.stages
    with (
        console.progress(len(pairs), "near-duplicates", "pairs") as progress,
        SandboxPool.configured(make_reader, stages.features.readers_per_worker, stages) as pool,
    ):
        while block := list(islice(remaining, _PAIRS_AT_ONCE)):
            apart = [pair for pair in block if find(pair[0]) != find(pair[1])]
            local = dict(_read_local(pool, config, plan, items, sorted({number for pair in apart for number in pair})))
            for one, other in apart:
                if find(one) != find(other) and are_copies(local[one], local[other]):
                    root[max(find(one), find(other))] = min(find(one), find(other))
            progress.advance(len(block))
    groups: dict[int, list[int]] = {}
    for number in range(len(root)):
        groups.setdefault(find(number), []).append(number)
    return [group for group in groups.values() if len(group) > 1]


def _read_local(
    pool: SandboxPool[ReadRequest, LocalFeatures], config: Config, plan: Plan, items: ComparedItems, numbers: list[int]
) -> Iterator[tuple[int, LocalFeatures]]:
    """Local features of these items, by their number."""
    locations = MediaLocations(config, plan)
    requests = []
    try:
        for number in numbers:
            name = items.sample_ids[number]
            files = tuple(locations.planned_files("items", name))
            requests.append(ReadRequest(files, plan.samples[name], None, config.latents.decoder))
        for number, (request, result) in zip(numbers, pool.map(requests), strict=True):
            if isinstance(result, WorkerFailure):
                raise result.error(request.files[0][0])
            if isinstance(result, MediaError):
                raise result
            yield number, result
    except MediaError as error:
        raise LatentpressError(
            f"near-duplicates can't be confirmed: {error}",
            "then run `latentpress features` again, which goes on with what is done",
        ) from error


def _find_best(store: Store, config: Config, items: ComparedItems, groups: list[list[int]]) -> list[str | None]:
    """The media id of the best of each item's group: the largest, then the sharpest, then the longest, then the first
    by media id; None for an item without near-duplicates."""
    best: list[str | None] = [None] * len(items.media_ids)
    if not groups:
        return best
    columns = ("media_id", "width", "height", "duration")
    used = [dataset for dataset in config.datasets if not dataset.disabled]
    media = pa.concat_tables([read_configured_media(store, dataset).select(columns) for dataset in used])
    row = pc.index_in(pa.array(items.media_ids, pa.string()), value_set=media["media_id"].combine_chunks())
    width, height, length = (pc.fill_null(media[name].take(row), 0).to_pylist() for name in columns[1:])

    def rank(number: int) -> tuple[float, float, float, str]:
        sharpness = items.measures[number]["sharpness"]
        return -width[number] * height[number], -sharpness, -length[number], items.media_ids[number]

    for group in groups:
        first = items.media_ids[min(group, key=rank)]
        for number in group:
            best[number] = first
    return best
