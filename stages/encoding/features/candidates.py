"""Pairs of items that may be near-duplicates: those whose vectors are near each other.

Two kinds of vectors, so that no pair depends on one alone: those of the model, which say what a picture shows, and the
layouts, which find copies, cropped and mirrored ones too, without a model.
"""

import numpy as np
from numpy.typing import NDArray

from stages.encoding.features.layouts import mirror_layouts
from stages.encoding.features.neighbors import Floats, Ints, Neighbors, iter_nearest

LEAST_LAYOUT = 0.55  # cosine; of other photographs nearly all are below, of copies of two thirds of a side above
LEAST_FEATURES = 0.6  # cosine, once what all items have in common is taken away


def find_candidates(features: Neighbors | None, layouts: NDArray[np.float16]) -> Ints:
    """(m, 2) pairs of the n items, the smaller number first, sorted.

    features: the nearest of each item by the model's vectors, None without a model. layouts: (n, parts, numbers), the
    first part being the whole picture, so that one item's parts are compared with the whole of others.
    """
    whole = np.ascontiguousarray(layouts[:, 0], np.float32)

    def parts(begin: int, end: int) -> Floats:
        given = layouts[begin:end].astype(np.float32)
        return np.concatenate([given, mirror_layouts(given)], axis=1)

    found = [Neighbors.joined(iter_nearest(whole, parts, 2 * layouts.shape[1], LEAST_LAYOUT))]
    if features is not None:
        found.append(features.above(LEAST_FEATURES))
    pairs = np.concatenate([np.stack([one.items, one.near], axis=1) for one in found])
    return np.unique(np.sort(pairs, axis=1), axis=0)
