"""Time, memory and recall of the comparison at the end of `features` for many items.

    python -m benchmarks.features_scale --items 200000

In one process, without media: shards with layouts and vectors are written, then read like in the program, compared, and
clustered. Layouts belong to random pictures, whose spectrum falls like in photographs (1/f), and to copies of a
hundredth of them: cropped, mirrored, with noise. Vectors come from a mixture of clusters; vectors of copies are near
each other.

Recall: share of the pairs of a picture and its copy that are candidates; and for a random choice of items, share of the
candidates of a comparison with all items that are found, for all candidates and for candidates with a similarity of at
least 0.8. Memory is the peak of the process so far; the first line has its value at the start. The confirmation reads
media and is not measured.
"""

import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.common import cpu_seconds, make_parser, print_header, print_row, write_shard
from cache.sets.plans import Unit
from cache.shards.shard import ShardMeta, ShardRow
from cache.shards.tensors import Array
from cache.store.store import Store
from schemas.tables import MEASURES
from stages.encoding.features.comparison import (
    MIN_FEATURES_COSINE,
    MIN_LAYOUT_COSINE,
    NEIGHBORS,
    ComparedItems,
    find_clusters,
    find_layout_candidates,
    find_neighbors,
    find_outliers,
    likeliest,
    read_items,
)
from stages.encoding.features.measures import LAYOUT_NUMBERS, PARTS, WAVES, mirror_layouts

PICTURE_WAVES = 20  # waves of a random picture, across and down
DECAY = 1.2  # exponent of the fall of wave heights with the frequency
EDGE = 32
IN_SHARD = 256
COPY_SIDES = (1.0, 0.9, 0.8, 0.7)  # side of a copy as a share of the original's side
NOISE = 0.03


def part_waves(start: float, side: float) -> np.ndarray:
    """(WAVES, PICTURE_WAVES) matrix from the picture's waves to the waves of a part, along one axis."""

    def basis(waves: int, places: np.ndarray) -> np.ndarray:
        rows = np.cos(np.pi * np.arange(waves)[:, None] * places) * np.sqrt(2 / EDGE)
        rows[0] /= np.sqrt(2)
        return rows

    places = (np.arange(EDGE) + 0.5) / EDGE
    return basis(WAVES, places) @ basis(PICTURE_WAVES, start + side * places).T


def layouts_of(waves: np.ndarray, crop: tuple[float, float, float] = (0.0, 0.0, 1.0)) -> np.ndarray:
    """float16 layouts (n, parts, numbers) of a crop of n pictures. waves: (n, W, W). crop: (left, top, side)."""
    layouts = np.empty((len(waves), len(PARTS), LAYOUT_NUMBERS), np.float16)
    for number, (x, y, side) in enumerate(PARTS):
        across, down = (part_waves(crop[axis] + crop[2] * at, crop[2] * side) for axis, at in ((0, x), (1, y)))
        matrix = np.kron(down, across).astype(np.float32)
        heights = waves.reshape(len(waves), -1) @ matrix[1:].T
        roots = np.sign(heights) * np.sqrt(np.abs(heights))
        layouts[:, number] = roots / np.linalg.norm(roots, axis=1, keepdims=True)
    return layouts


def unit(values: np.ndarray) -> np.ndarray:
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


def make_items(count: int, width: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (layouts, vectors) of blocks of items. The last hundredth of a block are copies of its first items."""
    rng = np.random.default_rng(0)
    axis = np.arange(PICTURE_WAVES)
    heights = 1 / np.maximum(1, np.hypot(axis[:, None], axis)) ** DECAY
    middles = unit(rng.normal(size=(max(2, count // 200), width)))
    for begin in range(0, count, 10_000):
        size = min(10_000, count - begin)
        copies = size // 100
        waves = (rng.normal(size=(size, PICTURE_WAVES, PICTURE_WAVES)) * heights).astype(np.float32)
        layouts = layouts_of(waves)
        for number in range(copies):
            side = COPY_SIDES[number % len(COPY_SIDES)]
            at = rng.random(2) * (1 - side)
            copy_layouts = layouts_of(waves[number : number + 1], (*at, side))
            copy_layouts = mirror_layouts(copy_layouts) if number // len(COPY_SIDES) % 2 else copy_layouts
            noise = rng.normal(size=copy_layouts.shape) * NOISE
            layouts[size - copies + number] = unit(copy_layouts + noise)[0]
        vectors = unit(middles[rng.integers(len(middles), size=size)] + 0.06 * rng.normal(size=(size, width)))
        vectors[size - copies :] = unit(vectors[:copies] + 0.02 * rng.normal(size=(copies, width)))
        yield layouts, vectors.astype(np.float16)


def write_items(store: Store, count: int, width: int) -> tuple[Any, list[tuple[str, str]]]:
    """Write shards. Returns (a state for `read_items`, pairs of sample ids of pictures and their copies)."""
    shards, ids, copies = {}, list[str](), list[tuple[str, str]]()
    measures = dict.fromkeys(MEASURES, 0.5) | {"motion": None}
    for layouts, vectors in make_items(count, width):
        size, first = len(layouts), len(ids)
        rows = [
            ShardRow(
                f"{first + number:032x}",
                {"layouts": Array.from_numpy(layouts[number]), "features": Array.from_numpy(vectors[number])},
                {"measures": measures, "media_id": f"{first + number:032x}"},
            )
            for number in range(size)
        ]
        ids += [row.id for row in rows]
        copies += [(ids[first + number], ids[first + size - size // 100 + number]) for number in range(size // 100)]
        for begin in range(0, size, IN_SHARD):
            name = f"{first + begin:032x}"
            meta = ShardMeta(kind="features", fingerprint="bench", unit=name, bucket="448x448@1")
            shards[name] = write_shard(store, meta, rows[begin : begin + IN_SHARD])
    plan = SimpleNamespace(sample_table=pa.table({"sample_id": ids, "kind": ["image"] * len(ids)}))
    units = [Unit(name, "items", "448x448@1", (), 0) for name in shards]
    return SimpleNamespace(
        wanted_ids=pa.array(ids), units=units, shard_paths=shards, fingerprint="bench", plan=plan
    ), copies


def measure(name: str, work: Callable[[], Any]) -> Any:
    start, cpu_s = time.perf_counter(), cpu_seconds()
    result = work()
    seconds, cpu_s = time.perf_counter() - start, cpu_seconds() - cpu_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print_row(name, f"{seconds:.1f}", f"{cpu_s:.1f}", f"{peak:.2f}")
    return result


def exact_pairs(layouts: np.ndarray, rows: np.ndarray) -> list[tuple[int, int, float]]:
    """Find candidates for items by comparing their layouts with all layouts: (row, row of the candidate,
    similarity)."""
    all_layouts, pairs = layouts[:, 0].astype(np.float32), []
    for row in rows.tolist():
        queries = layouts[row].astype(np.float32)
        likeness = np.concatenate([queries, mirror_layouts(queries)]) @ all_layouts.T
        best = likeness.max(0)
        best[row] = -1
        near = np.argpartition(-best, NEIGHBORS)[:NEIGHBORS]
        pairs += [
            (row, int(neighbor), float(best[neighbor])) for neighbor in near if best[neighbor] >= MIN_LAYOUT_COSINE
        ]
    return pairs


def print_recall(items: ComparedItems, copies: list[tuple[str, str]], ways: dict[str, np.ndarray], sample: int) -> None:
    place = {name: number for number, name in enumerate(items.sample_ids)}
    rows = np.random.default_rng(1).choice(len(items.sample_ids), min(sample, len(items.sample_ids)), replace=False)
    exact = exact_pairs(items.layouts, rows)
    print_header(
        "candidates by", "pairs", *(f"copies of {side} of a side" for side in COPY_SIDES), "exact", "exact >= 0.8"
    )
    for name, pairs in ways.items():
        found_pairs = set(map(tuple, pairs.tolist()))
        cells = [str(len(found_pairs))]
        for case in range(len(COPY_SIDES)):
            copy_pairs = [tuple(sorted((place[a], place[b]))) for a, b in copies[case :: len(COPY_SIDES)]]
            cells.append(f"{sum(pair in found_pairs for pair in copy_pairs) / max(1, len(copy_pairs)):.3f}")
        for least in (MIN_LAYOUT_COSINE, 0.8):
            expected_pairs = [tuple(sorted((a, b))) for a, b, likeness in exact if likeness >= least]
            count = len(expected_pairs)
            cells.append(f"{sum(pair in found_pairs for pair in expected_pairs) / max(1, count):.3f} of {count}")
        print_row(name, *cells)


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__, root=True)
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--sample", type=int, default=300)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=options.root) as folder:
        store = Store(Path(folder))
        state, copies = write_items(store, options.items, options.width)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{options.items} items, vectors of {options.width} numbers; {before:.2f} GiB at the start")
        print_header("step", "s", "processor s", "peak GiB")
        items = measure("read", lambda: read_items(store, state))
    assert items.vectors is not None
    neighbors = measure("neighbors by vectors", lambda: find_neighbors(items.vectors))
    measure("outliers", lambda: find_outliers(neighbors, options.items))
    by_layouts = measure("candidates by layouts", lambda: find_layout_candidates(items.layouts))
    measure("clusters", lambda: find_clusters(items.vectors, None))
    by_vectors = likeliest(neighbors, MIN_FEATURES_COSINE)
    print_recall(items, copies, {"layouts": by_layouts.pairs, "vectors": by_vectors.pairs}, options.sample)


if __name__ == "__main__":
    main()
