"""Pairs of items that may be near-duplicates: those whose vectors are near each other.

Two kinds of vectors, so that no pair depends on one alone: those of the model, which say what a picture shows, and the
layouts, which find copies, cropped and mirrored ones too, without a model.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stages.encoding.features.layouts import mirror_layouts
from stages.encoding.features.neighbors import Floats, Ints, Neighbors, iter_nearest

LEAST_LAYOUT = 0.55  # cosine; of other photographs nearly all are below, of copies of two thirds of a side above
LEAST_FEATURES = 0.6  # cosine, once what all items have in common is taken away


class Candidates(NamedTuple):
    """(m, 2) pairs of items, each once, the smaller number first; and (m,) their cosines. The likeliest are first."""

    pairs: Ints
    likeness: Floats


def find_candidates(layouts: NDArray[np.float16]) -> Candidates:
    """Pairs of n items. layouts: (n, parts, numbers), the first part being the whole picture: each item's parts are
    compared with the whole of others."""
    whole = np.ascontiguousarray(layouts[:, 0], np.float32)

    def parts(begin: int, end: int) -> Floats:
        given = layouts[begin:end].astype(np.float32)
        return np.concatenate([given, mirror_layouts(given)], axis=1)

    return likeliest(Neighbors.joined(iter_nearest(whole, parts, 2 * layouts.shape[1], LEAST_LAYOUT)))


def likeliest(neighbors: Neighbors) -> Candidates:
    pairs = np.sort(np.stack([neighbors.items, neighbors.near], axis=1), axis=1)
    order = np.lexsort((pairs[:, 1], pairs[:, 0], -neighbors.likeness))
    _, first = np.unique(pairs[order], axis=0, return_index=True)
    kept = order[np.sort(first)]
    return Candidates(pairs[kept], neighbors.likeness[kept])
