"""The text that a draw reads: a caption of its row, or the null prompt. Decided here alone, for every reader of a set.

Draws are the same on any rank: functions of the seed, the step, the position in the global batch and the row.
"""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.order.schedule import Ints
from cache.order.set_columns import IntColumn, ListColumn
from schemas.identity import derive_seed, mix_bits, to_unit_interval

NO_TEXT = -1  # in place of a text's number: a null prompt that the set does not have


class RowTexts:
    """The texts of a set's rows, as numbers of its table of texts.

    index: the set's table. null_text: the null prompt of rows that have none of their own; None where there is none.
    """

    def __init__(self, index: pa.Table, null_text: int | None) -> None:
        self._captions, self._null_texts = ListColumn(index["texts"]), IntColumn(index["null_text"])
        self._null_text = NO_TEXT if null_text is None else null_text

    def parts(self, row: int) -> dict[str, int]:
        """Part -> text: "text0", "text1", ..., the row's captions, and "null" where it has a null prompt."""
        parts = {f"text{number}": text for number, text in enumerate(self._captions.get(row))}
        null = int(self._null_texts.take(np.array([row]), self._null_text)[0])
        return parts if null == NO_TEXT else parts | {"null": null}

    def part(self, row: int, text: int) -> str:
        """The first part of a row that has this text; "null" for NO_TEXT."""
        return next((part for part, number in self.parts(row).items() if number == text), "null")

    def choose(self, rows: Ints, captions: Ints, dropped: NDArray[np.bool_]) -> Ints:
        """(n,) texts of rows: the caption of this number, or the null prompt, perhaps NO_TEXT, where it is dropped."""
        texts = self._captions.take(rows, captions)
        texts[dropped] = self._null_texts.take(rows[dropped], self._null_text)
        return texts

    def first(self, rows: Ints) -> Ints:
        """(n,) the first caption of each row."""
        return self._captions.take(rows, np.zeros_like(rows))

    def draw(self, seed: int, dropout: float, steps: int | Ints, positions: Ints, rows: Ints, passes: Ints) -> Ints:
        """(..., B) the text of each draw. steps: of all draws, or (M,) of each micro-batch. positions, rows, passes:
        (..., B), as of `cache.order.schedule.MicroBatchRows`. dropout: the share of null prompts."""
        flat = rows.ravel()
        captions = choose_captions(seed, flat, passes.ravel(), self._captions.lengths(flat))
        dropped = draw_caption_dropout(seed, steps, positions, dropout)
        return self.choose(flat, captions, dropped.ravel()).reshape(rows.shape)


def choose_captions(seed: int, rows: Ints, passes: Ints, alternatives: Ints) -> Ints:
    """The caption that each row uses in a pass: alternatives take turns, from a random start.

    Arrays are (n,). Over `alternatives[i]` consecutive passes row i uses each of its captions once.
    """
    offset = mix_bits(rows.astype(np.uint64) ^ np.uint64(derive_seed(str(seed), "captions")))
    return ((offset % alternatives.astype(np.uint64)).astype(np.int64) + passes) % alternatives


def draw_caption_dropout(seed: int, steps: int | Ints, positions: Ints, share: float) -> NDArray[np.bool_]:
    """(..., B) whether the null prompt replaces the caption at each position of a step's global batch. steps: of all
    positions, or (M,) of each micro-batch."""
    keys = np.array([derive_seed(f"{seed}/{step}", "dropout") for step in np.atleast_1d(steps).tolist()], np.uint64)
    drawn = to_unit_interval(mix_bits(positions.astype(np.uint64) ^ keys[:, None])) < share
    return drawn.reshape(positions.shape)
