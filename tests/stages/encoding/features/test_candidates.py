"""Which pairs are worth a closer look."""

import numpy as np
import pytest

from schemas.errors import LatentpressError
from stages.encoding.features import neighbors
from stages.encoding.features.candidates import LEAST_FEATURES, find_candidates, likeliest
from stages.encoding.features.layouts import mirror_layouts
from stages.encoding.features.neighbors import centered, find_neighbors

PARTS, NUMBERS = 3, 63


def unit(values: np.ndarray) -> np.ndarray:
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


@pytest.fixture
def layouts() -> np.ndarray:
    """Of 40 items; 1 is a copy of 0, 3 a mirrored copy of 2, 5 a part of 4."""
    made = unit(np.random.default_rng(0).normal(size=(40, PARTS, NUMBERS)))
    made[1, 0] = unit(made[0, 0] + 0.05 * made[9, 0])
    made[3, 0] = mirror_layouts(made[2, 0])
    made[5, 0] = made[4, 2]
    return made.astype(np.float16)


def test_copies_mirrored_ones_and_parts_are_candidates_and_others_are_not(layouts: np.ndarray) -> None:
    assert sorted(find_candidates(layouts).pairs.tolist()) == [[0, 1], [2, 3], [4, 5]]


def test_by_the_models_vectors_they_are_alike_beyond_what_all_have_in_common() -> None:
    common = np.zeros(32)
    common[0] = 5
    vectors = np.random.default_rng(1).normal(size=(40, 32)) + common
    vectors[20] = vectors[30] + 0.1
    nearest = find_neighbors(centered(unit(vectors).astype(np.float32)))
    assert likeliest(nearest.above(LEAST_FEATURES)).pairs.tolist() == [[20, 30]]


def test_an_item_has_a_limited_number_of_candidates_and_their_group_still_holds_together() -> None:
    same = np.repeat(unit(np.random.default_rng(2).normal(size=(1, PARTS, NUMBERS))), 60, axis=0)
    noise = 0.01 * np.random.default_rng(3).normal(size=same.shape)
    pairs = find_candidates(unit(same + noise).astype(np.float16)).pairs
    assert 60 <= len(pairs) <= 60 * neighbors.NEIGHBORS
    linked, before = {0}, 0
    while len(linked) > before:
        before = len(linked)
        linked |= {int(number) for pair in pairs if linked & {*pair.tolist()} for number in pair}
    assert len(linked) == 60


def test_many_are_found_by_an_index(layouts: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faiss")
    exact = sorted(find_candidates(layouts).pairs.tolist())
    monkeypatch.setattr(neighbors, "EXACT_ITEMS", 10)
    assert sorted(find_candidates(layouts).pairs.tolist()) == exact


def test_each_pair_is_there_once_and_the_likeliest_first(layouts: np.ndarray) -> None:
    found = find_candidates(layouts)
    assert sorted(found.pairs[:2].tolist()) == [[2, 3], [4, 5]] and found.pairs[2:].tolist() == [[0, 1]]
    assert (np.diff(found.likeness) <= 0).all() and found.likeness[2] < 0.9999  # 1 differs a little from 0


def test_without_faiss_many_items_name_the_extra(layouts: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbors, "EXACT_ITEMS", 10)
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(LatentpressError, match="more than 10 items need faiss") as caught:
        find_candidates(layouts)
    assert "features" in caught.value.next_step
