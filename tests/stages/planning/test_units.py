"""Units of texts with an image: an image's texts are adjacent, so that it is read and encoded once."""

import random
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.identity import hash_json
from schemas.tables import ACTIVE_SCHEMA, TEXTS_SCHEMA
from stages.planning.units import text_tensor_bytes, text_units
from tests.stages.planning.draft_plans import edits

SIZES = ["64x64@1", "96x64@1", "64x96@1"]


def text(image: int, size: int, shift: int, length: int) -> dict[str, Any]:
    """A caption of an image, or its null prompt. shift: offset of the image's crop."""
    cut = {"bucket": SIZES[size], "resize_w": 96, "resize_h": 96, "x": shift, "y": 0}
    row = {"template": "i2i", "text": "w" * length, "negative": not length, "image_dataset": "a", "image_path": "p"}
    row |= {"image_id": hash_json(["image", image]), "image_geometry": cut}
    return row | {"text_id": hash_json([image, size, shift, length])}


def sizes_of(texts: pa.Table) -> np.ndarray:
    config = edits()
    return text_tensor_bytes(config.model, config.text, texts)


def units_of(texts: pa.Table, limit: int, active: pa.Table | None = None) -> pa.Table:
    return text_units(texts, ACTIVE_SCHEMA.empty_table() if active is None else active, sizes_of(texts), limit)


def shown(row: dict[str, Any]) -> str:
    return hash_json([row["image_id"], row["image_geometry"]])


images = st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 1), st.sets(st.integers(0, 400), max_size=4))


@pytest.mark.slow
@given(st.lists(images, min_size=1, max_size=30), st.floats(0.02, 4), st.randoms())
def test_the_texts_of_an_image_stand_together(found: list, unit_mib: float, shuffler: random.Random) -> None:
    rows = {row["text_id"]: row for *image, lengths in found for row in (text(*image, n) for n in {0, *lengths})}
    table = pa.Table.from_pylist([*rows.values()], schema=TEXTS_SCHEMA)
    units = units_of(table, int(unit_mib * 2**20))
    members = [[rows[name] for name in unit] for unit in units.column("members").to_pylist()]
    order = [row for unit in members for row in unit]
    assert len(order) == len(rows) == len({row["text_id"] for row in order})
    runs = [[*run] for _, run in groupby(order, shown)]
    assert len(runs) == len({*map(shown, order)})
    for run in runs:
        lengths = [len(row["text"]) for row in run]
        assert lengths == sorted(lengths)

    sizes = dict(zip(table["text_id"].to_pylist(), sizes_of(table), strict=True))
    limit = int(unit_mib * 2**20)
    for unit in members:
        assert len({row["image_geometry"]["bucket"] for row in unit}) == 1
        assert len(unit) == 1 or sum(sizes[row["text_id"]] for row in unit) <= limit
    for run in runs:
        cut = len({number for number, unit in enumerate(members) if any(row in unit for row in run)}) > 1
        assert not cut or sum(sizes[row["text_id"]] for row in run) > limit

    shuffled = [*rows.values()]
    shuffler.shuffle(shuffled)
    shuffled_table = pa.Table.from_pylist(shuffled, schema=TEXTS_SCHEMA)
    assert units_of(shuffled_table, int(unit_mib * 2**20)).equals(units)


def test_texts_without_an_image_are_cut_where_a_unit_is_full() -> None:
    blank = {"image_dataset": None, "image_path": None, "image_id": None, "image_geometry": None}
    rows = [text(number, 0, 0, 9) | blank for number in range(100)]
    table = pa.Table.from_pylist(rows, schema=TEXTS_SCHEMA)
    each = int(sizes_of(table)[0])
    units = units_of(table, int(each * 30.5))
    assert np.diff(units.column("members").combine_chunks().offsets).tolist() == [30, 30, 30, 10]


def active_rows(texts: list[dict[str, Any]], order: list[int]) -> pa.Table:
    """A sample for each text; `order` has their ranks by id. Every fifth has its text as its null prompt."""
    rows = []
    for number, row in enumerate(texts):
        text_columns = {"null_text": row["text_id"], "texts": []} if number % 5 == 0 else {"texts": [row["text_id"]]}
        names = {"sample_id": f"{order[number]:016x}{0:016x}", "role": "train", "dataset": "a", "path": str(number)}
        rows.append(
            {"bucket": "64x64@1", "repeats": 0, "weight": 1.0, "regularization": False, **names, **text_columns}
        )
    return pa.Table.from_pylist(rows, schema=ACTIVE_SCHEMA)


@pytest.mark.parametrize("with_image", [True, False])
def test_texts_are_in_the_order_of_the_samples_that_use_them(with_image: bool) -> None:
    """To four units; those that no sample uses, a validation prompt's, come first."""
    shuffled, lengths = random.Random(0), list(range(100, 340))
    shuffled.shuffle(lengths)
    order = shuffled.sample(range(239), 239)
    blank = {} if with_image else {"image_dataset": None, "image_path": None, "image_id": None, "image_geometry": None}
    rows = [text(number, 0, 0, length) | blank for number, length in enumerate(lengths)]
    active, table = active_rows(rows[:-1], order), pa.Table.from_pylist(rows, schema=TEXTS_SCHEMA)
    ranks = dict(zip((row["text_id"] for row in rows), [*order, -1], strict=True))
    limit = int(sizes_of(table).sum()) // 24
    units = units_of(table, limit, active)
    unit_ranks = [[ranks[name] for name in unit] for unit in units.column("members").to_pylist()]
    assert 24 <= len(unit_ranks) <= 32 and max(units.column("estimated_bytes").to_pylist()) <= limit
    members, groups, position = [rank for unit in unit_ranks for rank in unit], 0, 0
    if with_image:
        assert members == list(range(-1, 239))
        return
    while position < len(members):  # the shortest runs of units that have the ranks from `taken` on
        count = next(
            n for n in range(position + 1, 241) if sorted(members[position:n]) == list(range(position - 1, n - 1))
        )
        position, groups = count, groups + 1
    assert 6 <= groups <= 8, "groups of four units"
