"""An item among all, by the model's vectors: its cluster, and its distance from the rest."""

import numpy as np

from stages.encoding.features.neighbors import Floats, Ints, Neighbors, import_faiss

ITERATIONS = 20
SEED = 20_011
INSTEAD = "features.clusters: 0"


def default_clusters(items: int) -> int:
    """The root of half the number of items (Mardia, Kent, Bibby 1979, Multivariate Analysis)."""
    return max(1, round((items / 2) ** 0.5))


def find_clusters(vectors: Floats, clusters: int | None) -> Ints:
    """(n,) of each item the number of the item that is nearest to the center of its cluster, of equal ones the first.

    By faiss' spherical k-means (Dhillon, Modha 2001) of vectors of length one, begun as k-means++; of many items the
    centers are found on 256 for each cluster, drawn by a seed. A function of the vectors and their order. clusters:
    None for `default_clusters`.
    """
    faiss = import_faiss("clusters", INSTEAD)
    count, width = vectors.shape
    wanted = min(count, clusters or default_clusters(count))
    chosen = {"seed": SEED, "spherical": True, "init_method": faiss.ClusteringInitMethod_KMEANS_PLUS_PLUS}
    means = faiss.Kmeans(width, wanted, niter=ITERATIONS, min_points_per_centroid=1, **chosen)
    means.train(vectors)
    likeness, cluster = (nearest[:, 0] for nearest in means.index.search(vectors, 1))
    order = np.lexsort((np.arange(count), -likeness, cluster))
    _, begins, member = np.unique(cluster[order], return_index=True, return_inverse=True)
    centers = np.empty(count, np.int64)
    centers[order] = order[begins[member]]
    return centers


def find_outliers(neighbors: Neighbors, count: int) -> list[float | None]:
    """Each item's mean cosine distance, 0 to 2, to its NEIGHBORS nearest others; None where there is no other. The
    weight of Angiulli, Pizzuti 2002, Fast Outlier Detection in High Dimensional Spaces, divided by their number."""
    distance = 1 - np.clip(neighbors.likeness.astype(np.float64), -1, 1)
    others = np.bincount(neighbors.items, minlength=count)
    sums = np.bincount(neighbors.items, weights=distance, minlength=count)
    means = (float(f"{value:.6g}") for value in sums / np.maximum(others, 1))  # as the measures
    return [mean if has else None for mean, has in zip(means, others, strict=True)]
