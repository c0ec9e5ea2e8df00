"""Captions as a whole: how long they are, and which are most alike. Pure."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

MAX_COMPARED = 2000  # captions; all pairs of so many take a second
MAX_PAIRS = 6
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class CaptionPair:
    """Two different captions, by number. similarity: Jaccard's, the share of their distinct words that both have."""

    first: int
    second: int
    similarity: float


def most_alike(captions: Sequence[str], count: int = MAX_PAIRS) -> list[CaptionPair]:
    """The `count` pairs of highest Jaccard similarity of their sets of words (Jaccard 1901, as used for near-duplicates
    by Broder 1997), exact, highest first. Case and order of words do not count. Captions without words are left out.

    Words of one caption alone are in no intersection, so they have no column; their number counts in the union.
    """
    words = [frozenset(_WORD.findall(caption.casefold())) for caption in captions]
    uses = Counter(chain.from_iterable(words))
    columns = {word: number for number, word in enumerate(word for word, times in uses.items() if times > 1)}
    present = np.zeros((len(words), len(columns)), np.float32)
    for row, distinct in enumerate(words):
        present[row, [columns[word] for word in distinct if word in columns]] = 1
    shared = np.triu(present @ present.T, 1)  # each pair once
    first, second = np.nonzero(shared)
    sizes = np.array([len(distinct) for distinct in words], np.float32)
    both = shared[first, second]
    similarity = both / (sizes[first] + sizes[second] - both)
    best = np.lexsort((second, first, -similarity))[:count]
    return [CaptionPair(int(first[i]), int(second[i]), float(similarity[i])) for i in best]


def length_bins(lengths: np.ndarray, most: int = 16) -> tuple[list[str], list[int]]:
    """Labels ("1-5") and counts of equal bins of whole numbers, at most `most`."""
    if not len(lengths):
        return [], []
    low, high = int(lengths.min()), int(lengths.max())
    width = max(1, -(-(high - low + 1) // most))
    starts = list(range(low, high + 1, width))
    counts = np.bincount((lengths.astype(np.int64) - low) // width, minlength=len(starts))
    labels = [f"{start}" if width == 1 else f"{start}-{start + width - 1}" for start in starts]
    return labels, counts.tolist()
