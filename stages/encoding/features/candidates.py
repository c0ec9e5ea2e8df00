"""Pairs of items that may be near-duplicates: those whose vectors are near each other.

Two kinds of vectors, so that no pair depends on one alone: those of the model, which say what a picture shows, and the
layouts, which find copies, cropped and mirrored ones too, without a model.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.cli.starting import install_command
from schemas.errors import LatentpressError
from stages.encoding.features.layouts import mirror_layouts

NEIGHBORS = 10  # of an item, at most, by each kind of vector: a larger group is found by the neighbors of these
LEAST_LAYOUT = 0.55  # cosine; of other photographs nearly all are below, of copies of two thirds of a side above
LEAST_FEATURES = 0.6  # cosine, once what all items have in common is taken away
EXACT_ITEMS = 50_000  # of which all are compared with all; of more those that faiss finds
_BLOCK_NUMBERS = 1 << 24  # likenesses computed at a time
_LISTS_OF = 4096  # vectors of one list of faiss' index, about
_PROBES = 32  # lists that are searched

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def find_candidates(features: Floats | None, layouts: NDArray[np.float16]) -> Ints:
    """(m, 2) pairs of the n items, the smaller number first, sorted.

    features: (n, width) of length one, None without a model. layouts: (n, parts, numbers), the first part being the
    whole picture, so that one item's parts are compared with the whole of others.
    """
    pairs = [np.zeros((0, 2), np.int64)]
    whole = np.ascontiguousarray(layouts[:, 0], np.float32)

    def parts(begin: int, end: int) -> Floats:
        given = layouts[begin:end].astype(np.float32)
        return np.concatenate([given, mirror_layouts(given)], axis=1)

    pairs += _near_pairs(whole, parts, 2 * layouts.shape[1], LEAST_LAYOUT)
    if features is not None:
        centered = features - features.mean(0, keepdims=True)
        centered /= np.maximum(np.linalg.norm(centered, axis=1, keepdims=True), 1e-9)
        pairs += _near_pairs(centered, lambda begin, end: centered[begin:end, None], 1, LEAST_FEATURES)
    ordered = np.sort(np.concatenate(pairs), axis=1)
    return np.unique(ordered, axis=0).astype(np.int64)


def _near_pairs(base: Floats, queries: Any, of_item: int, least: float) -> Iterator[Ints]:
    """(m, 2) an item and its NEIGHBORS of `base` at most, by the best of its `of_item` queries. queries(begin, end):
    (end - begin, of_item, width)."""
    count, search = len(base), partial(_exact, base)
    if count > EXACT_ITEMS:
        search, size = partial(_by_index, _build_index(base)), max(1, 65_536 // of_item)
    else:
        size = max(1, _BLOCK_NUMBERS // max(1, count * of_item))
    for begin in range(0, count, size):
        block = queries(begin, min(begin + size, count))
        rows, near, likeness = search(block)
        kept = (likeness >= least) & (rows + begin != near)
        rows, near, likeness = rows[kept] + begin, near[kept], likeness[kept]
        order = np.lexsort((near, -likeness, rows))
        rows, near = rows[order], near[order]
        place = np.arange(len(rows)) - np.searchsorted(rows, rows)  # among the neighbors of its item
        first = place < NEIGHBORS
        yield np.stack([rows[first], near[first]], axis=1)


def _exact(base: Floats, queries_BQW: Floats) -> tuple[Ints, Ints, Floats]:
    """Rows of the block, numbers of `base` and their likeness: the nearest of each row, each once."""
    size, of_item, width = queries_BQW.shape
    likeness = (queries_BQW.reshape(size * of_item, width) @ base.T).reshape(size, of_item, len(base)).max(1)
    most = min(NEIGHBORS + 1, len(base))  # and itself
    near = np.argpartition(-likeness, most - 1, axis=1)[:, :most]
    return np.repeat(np.arange(size), most), near.ravel(), np.take_along_axis(likeness, near, axis=1).ravel()


def _by_index(index: Any, queries_BQW: Floats) -> tuple[Ints, Ints, Floats]:
    """As `_exact`, of what the index finds."""
    size, of_item, width = queries_BQW.shape
    likeness, near = index.search(np.ascontiguousarray(queries_BQW.reshape(size * of_item, width)), NEIGHBORS + 1)
    rows = np.repeat(np.arange(size), of_item * (NEIGHBORS + 1))
    order = np.lexsort((-likeness.ravel(), near.ravel(), rows))
    rows, near, likeness = rows[order], near.ravel()[order], likeness.ravel()[order]
    again = np.zeros(len(rows), bool)
    again[1:] = (rows[1:] == rows[:-1]) & (near[1:] == near[:-1])
    known = ~again & (near >= 0)
    return rows[known], near[known], likeness[known]


def _build_index(base: Floats) -> Any:
    """faiss' index of lists of vectors near each other. LatentpressError where faiss is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise LatentpressError(
            f"near-duplicates among {len(base)} items need faiss, which is not installed; without it at most "
            f"{EXACT_ITEMS} are compared",
            f"{install_command('features')}; or set features.duplicates: false",
        ) from error
    lists = max(1, len(base) // _LISTS_OF)
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(base.shape[1]), base.shape[1], lists, faiss.METRIC_INNER_PRODUCT)
    index.train(base)
    index.add(base)
    index.nprobe = min(lists, _PROBES)
    return index
