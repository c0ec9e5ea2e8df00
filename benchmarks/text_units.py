"""Cost of text units that follow their samples: padding in encoding, and shards of texts that training reads.

    python -m benchmarks.text_units [--samples 50000] [--unit-mib 128] [--shuffle-shards 64] [--groups 1 2 4 8 0]

The plan has `--samples` images of about a megapixel with one caption each: lognormal numbers of words, median 70, sigma
0.5. Figures for each number of units among which texts are sorted by length (0: all units):

"padding": share of padding in batches of 4,096 tokens, by the plan's estimate of tokens. "cost": tokens that passes
compute, plus 256 for each pass (`stages.encoding.text.reader`), as a multiple of the texts' tokens. "latents at a
time", "texts at a time": number of shards that successive steps read while they use a quarter of `--shuffle-shards` of
latents: mean, maximum. "texts read": number of times that an epoch reads each shard of texts, if it is kept for a
section. All figures are counts, so a busy machine gives the same figures.
"""

import numpy as np
import pyarrow as pa

from benchmarks.common import make_parser, print_header, print_row
from benchmarks.planning import WORDS, make_media_table
from cache.order.schedule import BatchSchedule, Ints, Span
from cache.order.section_order import order_by_sections
from cache.order.set_columns import IntColumn
from schemas.config.pipeline import Config
from schemas.tables import MEDIA_SCHEMA
from stages.encoding.text.reader import PASS_OVERHEAD_TOKENS, split_by_length
from stages.planning import units
from stages.planning.plan_builder import DraftPlan, build_plan

BATCH_TOKENS, BATCH_SIZE, GLOBAL_BATCH = 4096, 4, 64
ALL = 10**6  # a number of units above any plan's


def make_plan(samples: int, unit_mib: float) -> tuple[Config, DraftPlan]:
    rng = np.random.default_rng(0)
    table, words = make_media_table(samples, "image", 0.0), np.array(WORDS, object)
    counts = np.clip(rng.lognormal(np.log(70), 0.5, samples), 3, 300).astype(int)
    captions = [" ".join(words[rng.integers(0, len(words), count)]) for count in counts]
    lists = pa.ListArray.from_arrays(np.arange(samples + 1, dtype=np.int32), pa.array(captions, pa.string()))
    table = table.set_column(MEDIA_SCHEMA.get_field_index("captions"), "captions", lists)
    dataset = {"id": "items", "instance_data_dir": "media", "resolution": 1024}
    model = {"family": "kandinsky5-image", "flavour": "t2i-lite-sft"}
    settings = {"root": "work", "model": model, "cache": {"unit_mib": unit_mib}, "datasets": [dataset]}
    config = Config.model_validate(settings)
    return config, build_plan(config.model, config.datasets, {"items": table}, 16)


def place(table: pa.Table) -> dict[str, int]:
    """Member -> number of its unit."""
    return {name: number for number, unit in enumerate(table.column("members").to_pylist()) for name in unit}


def measure_padding(table: pa.Table, tokens: dict[str, int]) -> tuple[float, float]:
    """(share of padding in batches, cost of the passes as a multiple of the texts' tokens)."""
    text_tokens = padded = cost = 0
    overhead = PASS_OVERHEAD_TOKENS["accelerator"]
    for unit in table.column("members").to_pylist():
        batch: list[int] = []
        for count in [*(tokens[name] for name in unit), 0]:
            if not count or max([*batch, count]) * (len(batch) + 1) > BATCH_TOKENS:
                text_tokens, padded = text_tokens + sum(batch), padded + len(batch) * max(batch, default=0)
                passes = [[batch[row] for row in rows] for rows in split_by_length(batch, overhead)] if batch else []
                cost += sum(len(rows) * max(rows) + overhead for rows in passes)
                batch = []
            batch.append(count)
    return 1 - text_tokens / padded, cost / text_tokens


def training_shards(plan: DraftPlan, latents: dict[str, int], texts: dict[str, int]) -> tuple[list[Span], Ints, Ints]:
    """(spans of training rows in the order of `index`, latents shard of each row, texts shard of each row)."""
    active = plan.active.sort_by([("bucket", "ascending"), ("sample_id", "ascending")])
    buckets = active.column("bucket").to_pylist()
    names, counts = np.unique(buckets, return_counts=True)
    starts = (np.cumsum(counts) - counts).tolist()
    spans = [Span(name, start, count) for name, start, count in zip(names, starts, counts.tolist(), strict=True)]
    latent_shards = [latents[name] for name in active.column("sample_id").to_pylist()]
    return spans, np.array(latent_shards), np.array([texts[names[0]] for names in active.column("texts").to_pylist()])


def count_windows(shards: Ints, window: int) -> tuple[float, int]:
    """Count distinct shards in `window` successive steps: (mean, maximum). shards: (steps, n)."""
    counts = [
        len(np.unique(shards[first : first + window])) for first in range(0, len(shards) - window, max(1, window // 2))
    ]
    return float(np.mean(counts)), max(counts)


def count_reads(shards: Ints, kept_steps: int) -> float:
    """The mean number of times that a shard is read, if it is dropped after `kept_steps` steps without a use. shards:
    (steps, n)."""
    steps = np.repeat(np.arange(len(shards)), shards.shape[1])
    order = np.lexsort((steps, shards.ravel()))
    number, step = shards.ravel()[order], steps[order]
    is_repeated = (np.diff(number) == 0) & (np.diff(step) <= kept_steps)
    return (len(number) - int(is_repeated.sum())) / len(np.unique(number))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--unit-mib", type=float, default=128)
    parser.add_argument("--shuffle-shards", type=int, default=32)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4, 8, 0])
    options = parser.parse_args()
    config, plan = make_plan(options.samples, options.unit_mib)
    sizes = units.sample_tensor_bytes(config.model, config.latents, plan.samples)
    limit = int(options.unit_mib * 2**20)
    latents = place(units.sample_units(plan.samples, sizes, limit))
    text_sizes = units.text_tensor_bytes(config.model, config.text, plan.texts)
    length = (8 + length // 4 for length in map(len, plan.texts.column("text").to_pylist()))
    tokens = dict(zip(plan.texts.column("text_id").to_pylist(), length, strict=True))
    print_header(
        *("sorted among", "units of latents, texts", "padding", "cost"),
        *("latents at a time", "texts at a time", "texts read"),
    )
    for group in options.groups:
        units.TEXT_GROUP = group or ALL
        table = units.text_units(plan.texts, plan.active, text_sizes, limit)
        spans, latent_shards, texts = training_shards(plan, latents, place(table))
        order = order_by_sections(
            IntColumn(pa.chunked_array([pa.array(latent_shards, pa.int32())])), options.shuffle_shards
        )
        schedule = BatchSchedule(spans, 0, BATCH_SIZE, GLOBAL_BATCH, order)
        steps = int(schedule.steps_per_epoch)
        rows = schedule.plan(0, steps)[3].reshape(steps, -1)
        section = max(2, options.shuffle_shards * len(latent_shards) // (latent_shards.max() + 1) // GLOBAL_BATCH)
        padding, cost = measure_padding(table, tokens)
        windows = [
            f"{mean:.0f}, {most}"
            for mean, most in (count_windows(of[rows], section // 2) for of in (latent_shards, texts))
        ]
        read = count_reads(texts[rows], section)
        counts = f"{latent_shards.max() + 1}, {table.num_rows}"
        print_row(group or "all", counts, f"{padding:.1%}", f"{cost:.3f}", *windows, f"{read:.2f}")


if __name__ == "__main__":
    main()
