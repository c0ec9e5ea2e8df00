"""Time that the ranks of a run wait for each other, because their micro-batches have different costs.

    python -m benchmarks.waiting [--samples 40 400] [--ranks 2 8]

Computed from the order of training over an epoch: a micro-batch of one sample costs its pixels times its frames, and a
moment lasts as long as its most expensive micro-batch. The collections are synthetic: photographs with the shapes of
`benchmarks.buckets` at 1024 pixels, clips of these shapes at 512 pixels and 25 to 121 frames, and half of each.

waiting: the share of the ranks' time. In random order: the same with shuffled micro-batches. Repeated: if all ranks
compute the same bucket at each moment, no rank waits, but each bucket is filled to a multiple of the number of ranks;
the share of time that this takes.
"""

import numpy as np

from benchmarks.buckets import STRIDE, photograph_sizes
from benchmarks.common import make_parser, print_header, print_row
from cache.order.schedule import BatchSchedule, Span
from schemas.geometry import Bucket, choose_buckets, resolution_buckets

EPOCHS = 1


def photographs(count: int, random: np.random.Generator, resolution: int = 1024) -> list[str]:
    """The buckets of `count` photographs."""
    width, height = photograph_sizes()
    sizes = resolution_buckets(resolution, "pixel_area", STRIDE, step=64)
    choices = random.integers(0, len(width), count)
    return ["{}x{}@1".format(*sizes[index]) for index in choose_buckets(width[choices], height[choices], sizes)]


def clips(count: int, random: np.random.Generator) -> list[str]:
    frames = 1 + 4 * random.integers(6, 31, count)
    return [name.replace("@1", f"@{n}") for name, n in zip(photographs(count, random, 512), frames, strict=True)]


def photographs_and_clips(count: int, random: np.random.Generator) -> list[str]:
    return photographs(count - count // 2, random) + clips(count // 2, random)


def waiting(moments: np.ndarray) -> float:
    """The share of time that ranks wait. moments: (moments, ranks) costs."""
    return 1 - moments.sum() / (moments.max(1).sum() * moments.shape[1])


def measure(buckets: list[str], ranks: int) -> tuple[int, float, float, float]:
    """Returns (number of buckets, shares of time: waiting, waiting in random order, repeated with one bucket at a
    moment)."""
    names, counts = np.unique(buckets, return_counts=True)
    parsed = {str(name): Bucket.parse(str(name)) for name in names}
    costs = {name: bucket.width * bucket.height * bucket.frames for name, bucket in parsed.items()}
    schedule = BatchSchedule([Span(str(n), 0, int(c)) for n, c in zip(names, counts, strict=True)], 0, 1, ranks)
    steps = max(1, int(EPOCHS * schedule.steps_per_epoch))
    moments = np.array([[costs[each.bucket] for each in schedule.step(step)] for step in range(steps)])
    shuffled = np.random.default_rng(0).permutation(moments.ravel()).reshape(moments.shape)
    cost = np.array([*costs.values()])
    filled = (cost * -(-counts // ranks) * ranks).sum()
    return len(names), waiting(moments), waiting(shuffled), 1 - (cost * counts).sum() / filled


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[40, 400])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    options = parser.parse_args()
    columns = "waiting", "in random order", "repeated, with one bucket at a moment"
    print_header("collection", "samples", "buckets", "ranks", *columns)
    for kind in (photographs, clips, photographs_and_clips):
        for count in options.samples:
            for ranks in options.ranks:
                buckets, *shares = measure(kind(count, np.random.default_rng(0)), ranks)
                row = kind.__name__, str(count), str(buckets), str(ranks)
                print_row(*row, *(f"{100 * share:.1f} %" for share in shares))


if __name__ == "__main__":
    main()
