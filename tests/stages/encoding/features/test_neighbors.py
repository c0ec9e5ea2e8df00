"""Candidate pairs, clusters and outliers of vectors with known groups."""

from itertools import pairwise

import numpy as np
import pytest

from stages.encoding.features import comparison
from stages.encoding.features.comparison import (
    MIN_FEATURES_COSINE,
    NEIGHBORS,
    centered,
    default_clusters,
    find_clusters,
    find_layout_candidates,
    find_neighbors,
    find_outliers,
    likeliest,
)
from stages.encoding.features.measures import mirror_layouts

faiss = pytest.importorskip("faiss")
PARTS, NUMBERS = 3, 63


def unit(values: np.ndarray) -> np.ndarray:
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


@pytest.fixture
def layouts() -> np.ndarray:
    """Layouts of 40 items; 1 is a copy of 0, 3 a mirrored copy of 2, 5 a part of 4."""
    values = unit(np.random.default_rng(0).normal(size=(40, PARTS, NUMBERS)))
    values[1, 0] = unit(values[0, 0] + 0.05 * values[9, 0])
    values[3, 0] = mirror_layouts(values[2, 0])
    values[5, 0] = values[4, 2]
    return values.astype(np.float16)


def test_copies_mirrored_ones_and_parts_are_candidates_and_others_are_not(layouts: np.ndarray) -> None:
    assert sorted(find_layout_candidates(layouts).pairs.tolist()) == [[0, 1], [2, 3], [4, 5]]


def test_by_the_models_vectors_they_are_alike_beyond_what_all_have_in_common() -> None:
    common = np.zeros(32)
    common[0] = 5
    vectors = np.random.default_rng(1).normal(size=(40, 32)) + common
    vectors[20] = vectors[30] + 0.1
    nearest = find_neighbors(centered(unit(vectors).astype(np.float32)))
    assert likeliest(nearest, MIN_FEATURES_COSINE).pairs.tolist() == [[20, 30]]


def test_an_item_has_a_limited_number_of_candidates_and_their_group_still_holds_together() -> None:
    equal_layouts = np.repeat(unit(np.random.default_rng(2).normal(size=(1, PARTS, NUMBERS))), 60, axis=0)
    noise = 0.01 * np.random.default_rng(3).normal(size=equal_layouts.shape)
    pairs = find_layout_candidates(unit(equal_layouts + noise).astype(np.float16)).pairs
    assert 60 <= len(pairs) <= 60 * comparison.NEIGHBORS
    linked, before = {0}, 0
    while len(linked) > before:
        before = len(linked)
        linked |= {int(number) for pair in pairs if linked & {*pair.tolist()} for number in pair}
    assert len(linked) == 60


def test_many_are_found_by_an_index(layouts: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = sorted(find_layout_candidates(layouts).pairs.tolist())
    monkeypatch.setattr(comparison, "EXACT_ITEMS", 10)
    assert sorted(find_layout_candidates(layouts).pairs.tolist()) == exact


def test_each_pair_is_there_once_and_the_likeliest_first(layouts: np.ndarray) -> None:
    result = find_layout_candidates(layouts)
    assert sorted(result.pairs[:2].tolist()) == [[2, 3], [4, 5]] and result.pairs[2:].tolist() == [[0, 1]]
    assert (np.diff(result.likeness) <= 0).all() and result.likeness[2] < 0.9999  # 1 differs a little from 0


SIZES = (30, 12, 5)


@pytest.fixture
def vectors() -> np.ndarray:
    """Three groups around different directions, and the last item alone."""
    rng = np.random.default_rng(0)
    middles = np.repeat(np.eye(16)[: len(SIZES)], SIZES, axis=0)
    values = np.concatenate([middles + 0.05 * rng.normal(size=middles.shape), -np.ones((1, 16))])
    return (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)


def groups(centers: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(centers == center).tolist()) for center in centers.tolist()}


def test_each_group_is_a_cluster_named_by_the_item_nearest_to_its_center(vectors: np.ndarray) -> None:
    centers = find_clusters(vectors, 4)
    ends = np.cumsum((0, *SIZES, 1)).tolist()
    assert groups(centers) == {frozenset(range(*bounds)) for bounds in pairwise(ends)}
    for center in set(centers.tolist()):
        members = vectors[centers == center]
        middle = members.mean(0)
        assert center in np.flatnonzero(centers == center)[[int((members @ middle).argmax())]]


def test_clusters_are_the_same_for_any_number_of_threads(vectors: np.ndarray) -> None:
    many = np.random.default_rng(1).normal(size=(3000, 24)).astype(np.float32)
    many /= np.linalg.norm(many, axis=1, keepdims=True)
    before, result = faiss.omp_get_max_threads(), []
    try:
        for threads in (1, 2, 4):
            faiss.omp_set_num_threads(threads)
            result.append(find_clusters(many, None))
    finally:
        faiss.omp_set_num_threads(before)
    assert all(np.array_equal(result[0], second) for second in result)
    assert len(np.unique(result[0])) == default_clusters(3000) == 39
    assert find_clusters(vectors[:2], 9).tolist() == [0, 1] and find_clusters(vectors[:1], None).tolist() == [0]


def test_the_distance_from_the_rest_is_the_mean_cosine_distance_to_the_nearest(vectors: np.ndarray) -> None:
    outliers = find_outliers(find_neighbors(vectors), len(vectors))
    cosines = vectors @ vectors.T - 9 * np.eye(len(vectors))
    expected = 1 - np.sort(cosines, axis=1)[:, -NEIGHBORS:].mean(1)
    np.testing.assert_allclose(np.array(outliers, float), expected, atol=1e-5)
    assert int(np.argmax(outliers)) == len(vectors) - 1
    assert find_outliers(find_neighbors(vectors[:1]), 1) == [None]
    [equal_layouts, _] = find_outliers(find_neighbors(vectors[[0, 0]]), 2)
    assert equal_layouts == pytest.approx(0, abs=1e-6)
