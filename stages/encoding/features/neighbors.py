"""The nearest of many vectors of length one: by comparing all with all, or by faiss' index where they are many."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schemas.cli.starting import install_command
from schemas.errors import LatentpressError

NEIGHBORS = 10  # of an item, at most
EXACT_ITEMS = 50_000  # of which all are compared with all; of more those that faiss finds
_BLOCK_NUMBERS = 1 << 24  # likenesses computed at a time
_LISTS = 4  # of faiss' index, for each root of the number of vectors
_PROBES = 16  # lists that are searched

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class Neighbors(NamedTuple):
    """(m,) numbers of items, each with some of its nearest others and the cosine, by item and the nearest first."""

    items: Ints
    near: Ints
    likeness: Floats

    def above(self, least: float) -> "Neighbors":
        kept = self.likeness >= least
        return Neighbors(self.items[kept], self.near[kept], self.likeness[kept])

    @classmethod
    def joined(cls, blocks: Iterator["Neighbors"]) -> "Neighbors":
        none = Neighbors(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))
        return cls(*map(np.concatenate, zip(none, *blocks, strict=True)))


def centered(vectors: Floats) -> Floats:
    """(n, width) of length one, without what all n have in common."""
    moved = vectors - vectors.mean(0, keepdims=True)
    moved /= np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), 1e-9)
    return moved


def iter_nearest(
    base: Floats, queries: Callable[[int, int], Floats], of_item: int, least: float = -np.inf
) -> Iterator[Neighbors]:
    """Blocks of items, each with at most NEIGHBORS others of `base`, by the best of its `of_item` queries. least: of
    their cosine. queries(begin, end): (end - begin, of_item, width)."""
    count, search = len(base), partial(_exact, base)
    if count > EXACT_ITEMS:
        search, size = partial(_by_index, _build_index(base)), max(1, 65_536 // of_item)
    else:
        size = max(1, _BLOCK_NUMBERS // max(1, count * of_item))
    for begin in range(0, count, size):
        rows, near, likeness = search(queries(begin, min(begin + size, count)))
        kept = (likeness >= least) & (rows + begin != near)
        rows, near, likeness = rows[kept] + begin, near[kept], likeness[kept]
        order = np.lexsort((near, -likeness, rows))
        rows, near, likeness = rows[order], near[order], likeness[order]
        first = np.arange(len(rows)) - np.searchsorted(rows, rows) < NEIGHBORS
        yield Neighbors(rows[first], near[first], likeness[first])


def find_neighbors(vectors: Floats) -> Neighbors:
    """Neighbors of each of these vectors."""
    return Neighbors.joined(iter_nearest(vectors, lambda begin, end: vectors[begin:end, None], 1))


def import_faiss(wanted: str, instead: str) -> Any:
    """LatentpressError where it is not installed. wanted: what needs it. instead: what to set to do without."""
    try:
        import faiss
    except ImportError as error:
        raise LatentpressError(
            f"{wanted} need faiss, which is not installed", f"{install_command('features')}; or set {instead}"
        ) from error
    return faiss


def _exact(base: Floats, queries_BQW: Floats) -> tuple[Ints, Ints, Floats]:
    """Rows of the block, numbers of `base` and their likeness: the nearest of each row, each once."""
    size, of_item, width = queries_BQW.shape
    likeness = (queries_BQW.reshape(size * of_item, width) @ base.T).reshape(size, of_item, len(base)).max(1)
    most = min(NEIGHBORS + 1, len(base))  # and itself
    near = np.argpartition(-likeness, most - 1, axis=1)[:, :most]
    return np.repeat(np.arange(size), most), near.ravel(), np.take_along_axis(likeness, near, axis=1).ravel()


def _by_index(index: Any, queries_BQW: Floats) -> tuple[Ints, Ints, Floats]:
    """The same as `_exact`, by an index."""
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
    """faiss' index of lists of vectors near each other."""
    faiss = import_faiss(
        f"neighbors among more than {EXACT_ITEMS} items", "features.duplicates: false and features.model: null"
    )
    lists = max(1, round(_LISTS * len(base) ** 0.5))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(base.shape[1]), base.shape[1], lists, faiss.METRIC_INNER_PRODUCT)
    index.train(base)
    index.add(base)
    index.nprobe = min(lists, _PROBES)
    return index
