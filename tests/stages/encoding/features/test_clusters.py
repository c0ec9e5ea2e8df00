"""Clusters and distances from the rest, of vectors with known groups."""

from itertools import pairwise

import numpy as np
import pytest

from schemas.errors import LatentpressError
from stages.encoding.features.clusters import default_clusters, find_clusters, find_outliers
from stages.encoding.features.neighbors import NEIGHBORS, find_neighbors

faiss = pytest.importorskip("faiss")
SIZES = (30, 12, 5)


@pytest.fixture
def vectors() -> np.ndarray:
    """Three groups around directions of their own, and the last item alone."""
    rng = np.random.default_rng(0)
    middles = np.repeat(np.eye(16)[: len(SIZES)], SIZES, axis=0)
    made = np.concatenate([middles + 0.05 * rng.normal(size=middles.shape), -np.ones((1, 16))])
    return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)


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
    before, found = faiss.omp_get_max_threads(), []
    try:
        for threads in (1, 2, 4):
            faiss.omp_set_num_threads(threads)
            found.append(find_clusters(many, None))
    finally:
        faiss.omp_set_num_threads(before)
    assert all(np.array_equal(found[0], other) for other in found)
    assert len(np.unique(found[0])) == default_clusters(3000) == 39
    assert find_clusters(vectors[:2], 9).tolist() == [0, 1] and find_clusters(vectors[:1], None).tolist() == [0]


def test_the_distance_from_the_rest_is_the_mean_cosine_distance_to_the_nearest(vectors: np.ndarray) -> None:
    outliers = find_outliers(find_neighbors(vectors), len(vectors))
    cosines = vectors @ vectors.T - 9 * np.eye(len(vectors))
    expected = 1 - np.sort(cosines, axis=1)[:, -NEIGHBORS:].mean(1)
    np.testing.assert_allclose(np.array(outliers, float), expected, atol=1e-5)
    assert int(np.argmax(outliers)) == len(vectors) - 1
    assert find_outliers(find_neighbors(vectors[:1]), 1) == [None]
    [same, _] = find_outliers(find_neighbors(vectors[[0, 0]]), 2)
    assert same == pytest.approx(0, abs=1e-6)


def test_without_faiss_the_extra_is_named(vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(LatentpressError, match="clusters need faiss") as caught:
        find_clusters(vectors, None)
    assert "features" in caught.value.next_step and "features.clusters: 0" in caught.value.next_step
