"""The last step of `features`: one table of all items. Near-duplicates are found, confirmed and grouped.

faiss finds candidate pairs by two kinds of stored vectors, so that no pair depends on one kind alone: the model's
vectors describe the content of a picture; the layouts find copies, including cropped and mirrored copies, without a
model.

This step is not divided: a process that finds no remaining unit makes the table. The table is a function of the shards
and of the media, so several processes make the same table.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from networkx.utils import UnionFind
from numpy.typing import NDArray

from cache.sets.item_rows import item_table_path, iter_item_rows
from cache.sets.plans import Plan
from cache.store.store import Store
from schemas.cli.console import Console
from schemas.cli.starting import install_command
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.tables import FEATURES_SCHEMA, MEASURES
from stages.discovery.media_locations import MediaLocations
from stages.discovery.media_table import read_configured_media
from stages.encoding.features.confirmation import LocalFeatures, are_near_duplicates, make_reader
from stages.encoding.features.measures import mirror_layouts
from stages.encoding.member_reader import ReadRequest
from stages.encoding.stage_state import StageState
from stages.engines.sandbox import SandboxPool, WorkerFailure
from stages.media.files import MediaError

_PAIRS_AT_ONCE = 500  # pairs whose local features are in memory at once: about 300 MiB
#: Checking stops after this number of successive pairs, most similar first, that are not duplicates. Among many items
#: most candidates are similar by chance, and confirming one takes tens of milliseconds.
MAX_MISSES = 5000


NEIGHBORS = 10  # per item, at most
MIN_LAYOUT_COSINE = 0.55  # nearly all pairs of different photographs are below, crops to 2/3 of a side are above
MIN_FEATURES_COSINE = 0.6  # of vectors from which the mean of all items is subtracted
EXACT_ITEMS = 50_000  # up to this number all pairs are compared; above it, an index searches its nearest lists
_LISTS = 4  # that index has this number of lists times the root of the number of vectors
_PROBES = 16  # lists that a query searches
_QUERIES_AT_ONCE = 65_536
_ITERATIONS, _SEED = 20, 20_011  # of k-means

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class Neighbors(NamedTuple):
    """m pairs of an item and one of its nearest items, sorted by item, nearest first. items, near: row numbers (m,).
    likeness: cosines (m,)."""

    items: Ints
    near: Ints
    likeness: Floats


class Candidates(NamedTuple):
    """m pairs of items, each once, the most similar first. pairs: row numbers (m, 2), the smaller first. likeness:
    cosines (m,)."""

    pairs: Ints
    likeness: Floats


def import_faiss() -> Any:
    """Import faiss. Raises LatentpressError if faiss is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise LatentpressError(
            "near-duplicates, outliers and clusters need faiss, which is not installed",
            f"{install_command('features')}; or set features.duplicates: false and features.model: null",
        ) from error
    return faiss


def centered(vectors: Floats) -> Floats:
    """Vectors (n, width) of length one, after the mean of all n is subtracted."""
    moved = vectors - vectors.mean(0, keepdims=True)
    moved /= np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), 1e-9)
    return moved


def find_neighbors(vectors: Floats) -> Neighbors:
    """Neighbors of each vector. vectors: (n, width), of length one."""
    return _search(vectors, lambda begin, end: vectors[begin:end, None], 1)


def find_layout_candidates(layouts: NDArray[np.float16]) -> Candidates:
    """Candidate pairs of n items. layouts: (n, parts, numbers), of which part 0 is the whole picture. Each item's
    parts, and their mirror images, are compared with the whole pictures of all items."""
    pictures = np.ascontiguousarray(layouts[:, 0], np.float32)

    def parts(begin: int, end: int) -> Floats:
        block = layouts[begin:end].astype(np.float32)
        return np.concatenate([block, mirror_layouts(block)], axis=1)

    return likeliest(_search(pictures, parts, 2 * layouts.shape[1]), MIN_LAYOUT_COSINE)


def likeliest(neighbors: Neighbors, threshold: float) -> Candidates:
    """Pairs of neighbors with a cosine of at least `threshold`."""
    alike = neighbors.likeness >= threshold
    pairs = np.sort(np.stack([neighbors.items[alike], neighbors.near[alike]], axis=1), axis=1)
    likeness = neighbors.likeness[alike]
    order = np.lexsort((pairs[:, 1], pairs[:, 0], -likeness))
    _, first = np.unique(pairs[order], axis=0, return_index=True)
    first_rows = order[np.sort(first)]
    return Candidates(pairs[first_rows], likeness[first_rows])


def _search(base: Floats, queries: Callable[[int, int], Floats], item_queries: int) -> Neighbors:
    """For each item, at most NEIGHBORS other items of `base`, ranked by the best of the item's queries. base: vectors
    (n, width). queries(begin, end): query vectors (end - begin, item_queries, width). item_queries: number of
    queries per item."""
    index, size, blocks = _build_index(base), max(1, _QUERIES_AT_ONCE // item_queries), list[Neighbors]()
    for begin in range(0, len(base), size):
        block = queries(begin, min(begin + size, len(base)))
        likeness, near = index.search(np.ascontiguousarray(block.reshape(-1, base.shape[1])), NEIGHBORS + 1)
        rows = begin + np.repeat(np.arange(len(block)), item_queries * (NEIGHBORS + 1))
        near, likeness = near.ravel(), likeness.ravel()
        hits = pa.table({"item": rows, "near": near, "likeness": likeness})
        hits = hits.filter(pa.array((near >= 0) & (near != rows)))  # faiss returns -1 for missing neighbors
        hits = hits.group_by(["item", "near"]).aggregate([("likeness", "max")])  # the best query
        hits = hits.sort_by([("item", "ascending"), ("likeness_max", "descending"), ("near", "ascending")])
        rows = np.asarray(hits["item"])
        first = np.arange(len(rows)) - np.searchsorted(rows, rows) < NEIGHBORS
        blocks.append(Neighbors(rows[first], np.asarray(hits["near"])[first], np.asarray(hits["likeness_max"])[first]))
    return Neighbors(*map(np.concatenate, zip(*blocks, strict=True)))


def _build_index(base: Floats) -> Any:
    faiss = import_faiss()
    index = faiss.IndexFlatIP(base.shape[1])
    if len(base) > EXACT_ITEMS:
        lists = max(1, round(_LISTS * len(base) ** 0.5))
        index = faiss.IndexIVFFlat(index, base.shape[1], lists, faiss.METRIC_INNER_PRODUCT)
        index.train(base)
        index.nprobe = min(lists, _PROBES)
    index.add(base)
    return index


# -- an item among all -----------------------------------------------------------------------------------------------


def find_outliers(neighbors: Neighbors, count: int) -> list[float | None]:
    """Each item's mean cosine distance, 0 to 2, to its NEIGHBORS nearest items; None for an item without neighbors. The
    weight of Angiulli, Pizzuti 2002, Fast Outlier Detection in High Dimensional Spaces, divided by the number of
    neighbors."""
    distance = 1 - np.clip(neighbors.likeness.astype(np.float64), -1, 1)
    counts = np.bincount(neighbors.items, minlength=count)
    sums = np.bincount(neighbors.items, weights=distance, minlength=count)
    means = (float(f"{value:.6g}") for value in sums / np.maximum(counts, 1))  # rounded like the measures
    return [mean if has else None for mean, has in zip(means, counts, strict=True)]


def default_clusters(items: int) -> int:
    """The root of half the number of items (Mardia, Kent, Bibby 1979, Multivariate Analysis)."""
    return max(1, round((items / 2) ** 0.5))


def find_clusters(vectors: Floats, clusters: int | None) -> Ints:
    """(n,) for each item, the row number of the item nearest to the center of its cluster; of equally near items, the
    first.

    Uses faiss' spherical k-means (Dhillon, Modha 2001) on vectors of length one, initialized by k-means++. With more
    than 256 items per cluster, the centers are computed on a sample of that size, drawn with a seed. The result is a
    function of the vectors and their order. clusters: number of clusters; None for `default_clusters`.
    """
    faiss = import_faiss()
    count, width = vectors.shape
    cluster_count = min(count, clusters or default_clusters(count))
    options = {"seed": _SEED, "spherical": True, "init_method": faiss.ClusteringInitMethod_KMEANS_PLUS_PLUS}
    means = faiss.Kmeans(width, cluster_count, niter=_ITERATIONS, min_points_per_centroid=1, **options)
    means.train(vectors)
    likeness, cluster = (nearest[:, 0] for nearest in means.index.search(vectors, 1))
    order = np.lexsort((np.arange(count), -likeness, cluster))
    _, begins, member = np.unique(cluster[order], return_index=True, return_inverse=True)
    centers = np.empty(count, np.int64)
    centers[order] = order[begins[member]]
    return centers


@dataclass(frozen=True)
class ComparedItems:
    """n items, sorted by media id. measures: (n, len(MEASURES)), NaN for a missing measure. vectors: the model's
    vectors (n, width) after the mean is subtracted; None without a model. layouts: (n, parts, numbers). is_clip:
    (n,)."""

    sample_ids: Sequence[str]
    media_ids: Sequence[str]
    measures: NDArray[np.float64]
    vectors: NDArray[np.float32] | None
    layouts: NDArray[np.float16]
    is_clip: NDArray[np.bool_]


def read_items(store: Store, state: StageState) -> ComparedItems:
    """The items of the plan that have a row. If an item was read in two ways, the row with the greater id counts."""
    wanted_ids = set(state.wanted_ids.to_pylist())
    shard_paths = [state.shard_paths[unit.unit_id] for unit in state.units if unit.unit_id in state.shard_paths]
    rows = dict[str, tuple[str, list[float], dict[str, np.ndarray]]]()  # by media id
    for _, _, row in iter_item_rows(store, f"features/{state.fingerprint}", shard_paths):
        media_id = row.info["media_id"]
        if row.id in wanted_ids and (media_id not in rows or row.id > rows[media_id][0]):
            measures = [np.nan if (value := row.info["measures"][name]) is None else value for name in MEASURES]
            # The arrays are copied, because a view would keep the whole shard mapped.
            rows[media_id] = row.id, measures, {name: array.numpy().copy() for name, array in row.tensors.items()}
    media_ids = sorted(rows)
    sample_ids, tensors = [rows[name][0] for name in media_ids], [rows[name][2] for name in media_ids]
    vectors = None
    if tensors and "features" in tensors[0]:
        vectors = centered(np.stack([each["features"] for each in tensors]).astype(np.float32))
    clips = state.plan.sample_table.filter(pc.equal(state.plan.sample_table.column("kind"), "video"))
    is_clip = set(clips.column("sample_id").to_pylist())
    return ComparedItems(
        sample_ids,
        media_ids,
        np.array([rows[name][1] for name in media_ids]).reshape(-1, len(MEASURES)),
        vectors,
        np.stack([each["layouts"] for each in tensors]) if tensors else np.zeros((0, 1, 1), np.float16),
        np.array([name in is_clip for name in sample_ids], bool),
    )


def write_item_table(store: Store, config: Config, state: StageState, name: str, console: Console) -> pa.Table:
    """Make and publish the table of those items of the plan that have a row. Raises LatentpressError if media can't be
    read again."""
    features = config.features
    assert features is not None
    items = read_items(store, state)
    count = len(items.media_ids)
    measures = (pa.array(values, from_pandas=True) for values in items.measures.T)  # NaN is null
    columns: dict[str, Any] = dict(zip(MEASURES, measures, strict=True))
    columns |= {"media_id": items.media_ids, "outlier": [None] * count, "cluster": [None] * count}
    candidates = list[Candidates]()
    for clips in (False, True):
        rows = np.flatnonzero(items.is_clip == clips)
        if len(rows) < 2:
            continue
        selection: Any = rows if len(rows) < count else slice(None)  # a slice of all rows makes no copy
        neighbors = None
        if items.vectors is not None:
            neighbors = find_neighbors(items.vectors[selection])
            for row, outlier in zip(rows, find_outliers(neighbors, len(rows)), strict=True):
                columns["outlier"][row] = outlier
        if features.duplicates:
            proposals = [find_layout_candidates(items.layouts[selection])]
            if neighbors is not None:
                proposals.append(likeliest(neighbors, MIN_FEATURES_COSINE))
            candidates += [Candidates(rows[proposal.pairs], proposal.likeness) for proposal in proposals]
    if items.vectors is not None and features.clusters != 0:
        columns["cluster"] = [items.media_ids[row] for row in find_clusters(items.vectors, features.clusters)]
    groups = _find_groups(config, state.plan, items, candidates, console)
    best = _find_best(store, config, items, groups)
    columns["duplicate_group"] = best
    columns["duplicate_of"] = [None if first == id else first for id, first in zip(items.media_ids, best, strict=True)]
    table = pa.table([columns[field.name] for field in FEATURES_SCHEMA], schema=FEATURES_SCHEMA)
    store.write_table(item_table_path(name), table)
    return table


def _find_groups(
    config: Config, plan: Plan, items: ComparedItems, candidates: Sequence[Candidates], console: Console
) -> list[list[int]]:
    """Groups of row numbers: items that are copies of each other, directly or through a chain of copies."""
    if not (count := sum(len(pairs) for pairs, _ in candidates)):
        return []
    assert config.features is not None
    groups = UnionFind()
    locations, stages = MediaLocations(config, plan), config.stages
    with (
        console.progress(count, "near-duplicates", "pairs") as progress,
        SandboxPool.configured(make_reader, stages.features.readers_per_worker, stages) as pool,
    ):
        for pairs, likeness in candidates:
            # All sampled frames of a clip are read, so fewer clips than pictures are in memory at once.
            frames = config.features.frames if items.is_clip[pairs[:1, 0]].any() else 1
            at_once, misses = max(1, _PAIRS_AT_ONCE // frames), 0
            for begin in range(0, len(pairs), at_once):
                block = pairs[begin : begin + at_once].tolist()
                open_pairs = [pair for pair in block if groups[pair[0]] != groups[pair[1]]]
                numbers = sorted({number for pair in open_pairs for number in pair})
                names = {number: items.sample_ids[number] for number in numbers}
                local, misses = dict(_read_local(pool, config, locations, plan, names)), misses + len(open_pairs)
                for first, second in open_pairs:
                    if groups[first] != groups[second] and are_near_duplicates(local[first], local[second]):
                        groups.union(first, second)
                        misses = 0
                progress.advance(len(block))
                if misses >= MAX_MISSES and (remaining := len(pairs) - begin - len(block)):
                    progress.advance(remaining)
                    console.warn(
                        f"skipped {remaining} candidate pairs with similarity <= {likeness[-remaining]:.3f}: the last "
                        f"{misses} more similar pairs were not duplicates"
                    )
                    break
    return [sorted(group) for group in groups.to_sets() if len(group) > 1]


def _read_local(
    pool: SandboxPool[ReadRequest, tuple[LocalFeatures, ...]],
    config: Config,
    locations: MediaLocations,
    plan: Plan,
    names: Mapping[int, str],
) -> Iterator[tuple[int, tuple[LocalFeatures, ...]]]:
    """Local features of the frames of these items, with the item's row number. names: row number -> sample id."""
    requests = []
    try:
        for name in names.values():
            files = tuple(locations.planned_files("items", name))
            requests.append(ReadRequest(files, plan.samples[name], None, config.latents.decoder))
        for number, (request, result) in zip(names, pool.map(requests), strict=True):
            if isinstance(result, WorkerFailure):
                raise result.error(request.files[0][0])
            if isinstance(result, MediaError):
                raise result
            yield number, result
    except MediaError as error:
        raise LatentpressError(
            f"near-duplicates can't be confirmed: {error}",
            "then run `latentpress features` again; finished units are kept",
        ) from error


def _find_best(store: Store, config: Config, items: ComparedItems, groups: list[list[int]]) -> list[str | None]:
    """The media id of the best item of each item's group: the largest, then the longest, then the sharpest, then the
    first by media id; None for an item without near-duplicates."""
    best: list[str | None] = [None] * len(items.media_ids)
    if not groups:
        return best
    columns = ("media_id", "width", "height", "duration")
    datasets = [dataset for dataset in config.datasets if not dataset.disabled]
    media = pa.concat_tables([read_configured_media(store, dataset).select(columns) for dataset in datasets])
    row = pc.index_in(pa.array(items.media_ids, pa.string()), value_set=media["media_id"].combine_chunks())
    width, height, length = (pc.fill_null(media[name].take(row), 0).to_pylist() for name in columns[1:])

    def rank(number: int) -> tuple[float, float, float, str]:
        sharpness = items.measures[number, MEASURES.index("sharpness")]
        return -width[number] * height[number], -length[number], -sharpness, items.media_ids[number]

    for group in groups:
        first = items.media_ids[min(group, key=rank)]
        for number in group:
            best[number] = first
    return best
