"""Items near each other by their stored vectors, found by faiss: pairs that may be near-duplicates, clusters, outliers.

Two kinds of vectors propose near-duplicates, so that no pair depends on one alone: the model's vectors, which say what
a picture shows, and the layouts, which find copies, cropped and mirrored ones too, without a model.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.cli.starting import install_command
from schemas.errors import LatentpressError
from stages.encoding.features.measures import mirror_layouts

NEIGHBORS = 10  # of an item, at most
LEAST_LAYOUT = 0.55  # cosine; of other photographs nearly all are below, of copies of two thirds of a side above
LEAST_FEATURES = 0.6  # cosine, once what all items have in common is taken away
EXACT_ITEMS = 50_000  # of which all are compared with all; of more those of the nearest lists of an index
_LISTS = 4  # of that index, for each root of the number of vectors
_PROBES = 16  # lists that are searched
_QUERIES_AT_ONCE = 65_536
_ITERATIONS, _SEED = 20, 20_011  # of clusters

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class Neighbors(NamedTuple):
    """(m,) numbers of items, each with some of its nearest others and the cosine, by item and the nearest first."""

    items: Ints
    near: Ints
    likeness: Floats


class Candidates(NamedTuple):
    """(m, 2) pairs of items, each once, the smaller number first; and (m,) their cosines. The likeliest are first."""

    pairs: Ints
    likeness: Floats


def import_faiss() -> Any:
    """LatentpressError if faiss is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise LatentpressError(
            "near-duplicates, outliers and clusters need faiss, which is not installed",
            f"{install_command('features')}; or set features.duplicates: false and features.model: null",
        ) from error
    return faiss


def centered(vectors: Floats) -> Floats:
    """(n, width) of length one, without what all n have in common."""
    moved = vectors - vectors.mean(0, keepdims=True)
    moved /= np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), 1e-9)
    return moved


def find_neighbors(vectors: Floats) -> Neighbors:
    """Neighbors of each of these vectors of length one."""
    return _search(vectors, lambda begin, end: vectors[begin:end, None], 1)


def find_layout_candidates(layouts: NDArray[np.float16]) -> Candidates:
    """Pairs of n items. layouts: (n, parts, numbers), the first part being the whole picture: each item's parts, and
    their mirror images, are compared with the whole of others."""
    whole = np.ascontiguousarray(layouts[:, 0], np.float32)

    def parts(begin: int, end: int) -> Floats:
        given = layouts[begin:end].astype(np.float32)
        return np.concatenate([given, mirror_layouts(given)], axis=1)

    return likeliest(_search(whole, parts, 2 * layouts.shape[1]), LEAST_LAYOUT)


def likeliest(neighbors: Neighbors, least: float) -> Candidates:
    """Pairs of neighbors that are at least so much alike."""
    alike = neighbors.likeness >= least
    pairs = np.sort(np.stack([neighbors.items[alike], neighbors.near[alike]], axis=1), axis=1)
    likeness = neighbors.likeness[alike]
    order = np.lexsort((pairs[:, 1], pairs[:, 0], -likeness))
    _, first = np.unique(pairs[order], axis=0, return_index=True)
    kept = order[np.sort(first)]
    return Candidates(pairs[kept], likeness[kept])


def _search(base: Floats, queries: Callable[[int, int], Floats], of_item: int) -> Neighbors:
    """Of each item at most NEIGHBORS others of `base`, by the best of its `of_item` queries. queries(begin, end):
    (end - begin, of_item, width)."""
    index, size, blocks = _build_index(base), max(1, _QUERIES_AT_ONCE // of_item), list[Neighbors]()
    for begin in range(0, len(base), size):
        block = queries(begin, min(begin + size, len(base)))
        likeness, near = index.search(np.ascontiguousarray(block.reshape(-1, base.shape[1])), NEIGHBORS + 1)
        rows = begin + np.repeat(np.arange(len(block)), of_item * (NEIGHBORS + 1))
        near, likeness = near.ravel(), likeness.ravel()
        found = pa.table({"item": rows, "near": near, "likeness": likeness})
        found = found.filter(pa.array((near >= 0) & (near != rows)))  # faiss gives -1 if there are no more
        found = found.group_by(["item", "near"]).aggregate([("likeness", "max")])  # of the queries of an item the best
        found = found.sort_by([("item", "ascending"), ("likeness_max", "descending"), ("near", "ascending")])
        rows = np.asarray(found["item"])
        first = np.arange(len(rows)) - np.searchsorted(rows, rows) < NEIGHBORS
        blocks.append(
            Neighbors(rows[first], np.asarray(found["near"])[first], np.asarray(found["likeness_max"])[first])
        )
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
    """Each item's mean cosine distance, 0 to 2, to its NEIGHBORS nearest others; None if there is no other. The
    weight of Angiulli, Pizzuti 2002, Fast Outlier Detection in High Dimensional Spaces, divided by their number."""
    distance = 1 - np.clip(neighbors.likeness.astype(np.float64), -1, 1)
    others = np.bincount(neighbors.items, minlength=count)
    sums = np.bincount(neighbors.items, weights=distance, minlength=count)
    means = (float(f"{value:.6g}") for value in sums / np.maximum(others, 1))  # as the measures
    return [mean if has else None for mean, has in zip(means, others, strict=True)]


def default_clusters(items: int) -> int:
    """The root of half the number of items (Mardia, Kent, Bibby 1979, Multivariate Analysis)."""
    return max(1, round((items / 2) ** 0.5))


def find_clusters(vectors: Floats, clusters: int | None) -> Ints:
    """(n,) of each item the number of the item that is nearest to the center of its cluster, of equal ones the first.

    By faiss' spherical k-means (Dhillon, Modha 2001) of vectors of length one, begun as k-means++; of many items the
    centers are found on 256 for each cluster, drawn by a seed. A function of the vectors and their order. clusters:
    None for `default_clusters`.
    """
    faiss = import_faiss()
    count, width = vectors.shape
    wanted = min(count, clusters or default_clusters(count))
    chosen = {"seed": _SEED, "spherical": True, "init_method": faiss.ClusteringInitMethod_KMEANS_PLUS_PLUS}
    means = faiss.Kmeans(width, wanted, niter=_ITERATIONS, min_points_per_centroid=1, **chosen)
    means.train(vectors)
    likeness, cluster = (nearest[:, 0] for nearest in means.index.search(vectors, 1))
    order = np.lexsort((np.arange(count), -likeness, cluster))
    _, begins, member = np.unique(cluster[order], return_index=True, return_inverse=True)
    centers = np.empty(count, np.int64)
    centers[order] = order[begins[member]]
    return centers
