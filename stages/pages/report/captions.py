"""Captions as a whole: how long they are, and which are most alike. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

MAX_COMPARED = 2000  # captions; all pairs of so many take a second
MAX_PAIRS = 6
BLOCK = 256  # rows of the matrix of pairs that are in memory
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class CaptionPair:
    """Two different captions, by number. similarity: of Jaccard, the share of their distinct words that both have."""

    first: int
    second: int
    similarity: float


def most_alike(captions: Sequence[str], count: int = MAX_PAIRS) -> list[CaptionPair]:
    """The `count` pairs of highest Jaccard similarity of their sets of words (Jaccard 1901, as used for near-duplicates
    by Broder 1997), exact, highest first. Case and order of words do not count. Captions without words are left out.

    Words of one caption alone are in no intersection, so they have no column; their number counts in the union.
    """
    words = [frozenset(_WORD.findall(caption.casefold())) for caption in captions]
    sizes = np.array([len(each) for each in words], np.float32)
    seen: dict[str, int] = {}
    for word in chain.from_iterable(words):
        seen[word] = seen.get(word, 0) + 1
    columns = {word: number for number, word in enumerate(word for word, times in seen.items() if times > 1)}
    present = np.zeros((len(words), len(columns)), np.float32)
    for row, each in enumerate(words):
        present[row, [columns[word] for word in each if word in columns]] = 1
    found: list[CaptionPair] = []
    for first in range(0, len(words), BLOCK):
        rows = np.arange(first, min(first + BLOCK, len(words)))
        both = present[rows] @ present.T
        union = sizes[rows, None] + sizes[None, :] - both
        similarity = np.where(union > 0, both / np.maximum(union, 1), 0)
        similarity[rows[:, None] >= np.arange(len(words))[None, :]] = 0  # each pair once
        flat = similarity.ravel()
        best: Sequence[int] | np.ndarray = (
            np.argpartition(-flat, min(count, len(flat) - 1))[:count] if len(flat) else []
        )
        found += [
            CaptionPair(int(rows[place // len(words)]), int(place % len(words)), float(flat[place]))
            for place in best
            if flat[place] > 0
        ]
    return sorted(found, key=lambda pair: (-pair.similarity, pair.first, pair.second))[:count]


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
