"""Number of buckets of a collection of photographs with each bucket_step, and the share that crops cut off.

    python -m benchmarks.buckets [--resolutions 256 512 1024] [--steps 16 32 64]

The collection is synthetic: 200 photographs of 24 megapixels, a third of them upright: 80 of 3:2, 50 of 4:3, 20 of
16:9, 10 square, 6 of 5:4, and 34 with shapes up to 2.2:1, as if cropped by hand. Shapes differ between collections;
`latentpress bucket` reports these figures for your collection.
"""

import numpy as np

from benchmarks.common import make_parser, print_header, print_row
from cache.order.schedule import BatchSchedule, Span
from schemas.geometry import choose_buckets, cover_crop, cropped_share, resolution_buckets, workable_step

COMMON_SHAPES = {3 / 2: 80, 4 / 3: 50, 16 / 9: 20, 1.0: 10, 5 / 4: 6}  # width / height: photographs
CUT_BY_HAND, WIDEST = 34, 2.2
PIXELS = 24e6
STRIDE = 16  # side multiple of Kandinsky 5
BATCH_SIZE = 4


def photograph_sizes() -> tuple[np.ndarray, np.ndarray]:
    """(200,) widths and heights in pixels, the same on every machine."""
    common = [np.full(count, shape) for shape, count in COMMON_SHAPES.items()]
    aspects = np.concatenate([*common, np.exp(np.linspace(0, np.log(WIDEST), CUT_BY_HAND))])
    aspects[::3] = 1 / aspects[::3]
    height = np.round(np.sqrt(PIXELS / aspects))
    return np.round(height * aspects).astype(np.int64), height.astype(np.int64)


def measure(resolution: int, step: int) -> tuple[int, int, int, float, float]:
    """Returns (number of buckets, number of buckets with one photograph, number of photographs that an epoch repeats to
    fill micro-batches, mean and largest share of the area that is cut off)."""
    width, height = photograph_sizes()
    sizes = resolution_buckets(resolution, "pixel_area", STRIDE, step=step)
    index = choose_buckets(width, height, sizes)
    across, down = np.array(sizes)[index].T
    cropped = cropped_share(cover_crop(width, height, across, down), across, down)
    counts = {sizes[number]: int(count) for number, count in enumerate(np.bincount(index)) if count}
    spans = [Span(f"{size[0]}x{size[1]}@1", 0, count) for size, count in counts.items()]
    repeated = sum(bucket.fill for bucket in BatchSchedule(spans, 0, BATCH_SIZE, BATCH_SIZE).buckets)
    return len(counts), list(counts.values()).count(1), repeated, float(cropped.mean()), float(cropped.max())


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--resolutions", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--steps", type=int, nargs="+", default=[16, 32, 64])
    options = parser.parse_args()
    columns = "resolution", "bucket_step", "buckets", "with one photograph", f"repeated with batch_size: {BATCH_SIZE}"
    print_header(*columns, "mean cut off", "most cut off")
    for resolution in options.resolutions:
        for step in options.steps:
            used_step = workable_step(resolution, "pixel_area", STRIDE, step)
            buckets, alone, repeated, mean, most = measure(resolution, step)
            shares = f"{100 * mean:.1f} %", f"{100 * most:.1f} %"
            print_row(str(resolution), str(used_step), str(buckets), str(alone), str(repeated), *shares)


if __name__ == "__main__":
    main()
