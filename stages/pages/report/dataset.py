"""An overview of a run's data: buckets, captions, captions that the encoder truncated, and rejected items."""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.sets.plans import Plan, list_plans, load_plan
from cache.sets.set_lookup import current_plan
from cache.sets.table_checks import SetRecord
from cache.shards.shard_io import ReaderPool
from cache.store.damage import DamageError
from cache.store.store import Store
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.text_format import shorten
from stages.discovery.media_locations import spread_evenly
from stages.encoding import stage_registry
from stages.maintenance.rejected_items import RejectedItem, list_rejected_items
from stages.pages.charts import Bars
from stages.pages.pictures import Picture
from stages.pages.thumbnails import read_thumbnails
from stages.planning.summary import only_trained

MAX_BUCKETS = 30  # bars
MAX_LISTED = 100  # rows of rejected items
MAX_THUMBNAILS = 24
MAX_OPENED_SHARDS = 256  # text shards that are searched for truncated captions
MAX_TRUNCATED = 10
TableRow = dict[str, Any]
MAX_COMPARED = 2000  # captions; comparing all pairs of them takes a second
MAX_PAIRS = 6
_WORD = re.compile(r"\w+")


def find_similar_pairs(captions: Sequence[str], count: int = MAX_PAIRS) -> list[tuple[float, str, str]]:
    """Find the `count` pairs of captions with the highest Jaccard similarity of their sets of words (Jaccard 1901, used
    for near-duplicates by Broder 1997), exactly: (similarity, caption, caption), highest first. Case and order of words
    are ignored, and captions without words are left out.

    A word that only one caption has is never in an intersection, so it does not get a column; it counts in the union.
    """
    words = [frozenset(_WORD.findall(caption.casefold())) for caption in captions]
    uses = Counter(chain.from_iterable(words))
    columns = {word: number for number, word in enumerate(word for word, times in uses.items() if times > 1)}
    present = np.zeros((len(words), len(columns)), np.float32)
    for row, distinct in enumerate(words):
        present[row, [columns[word] for word in distinct if word in columns]] = 1
    shared_counts = np.triu(present @ present.T, 1)  # each pair once
    first, second = np.nonzero(shared_counts)
    sizes = np.array([len(distinct) for distinct in words], np.float32)
    intersection = shared_counts[first, second]
    similarity = intersection / (sizes[first] + sizes[second] - intersection)
    best = np.lexsort((second, first, -similarity))[:count]
    return [(float(similarity[i]), captions[first[i]], captions[second[i]]) for i in best]


def bin_lengths(lengths: np.ndarray, max_bins: int = 16) -> tuple[list[str], list[int]]:
    """Group integers into at most `max_bins` bins of equal width. Returns (labels such as "1-5", counts)."""
    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // max_bins)
    counts = np.bincount((lengths.astype(np.int64) - low) // width)
    starts = range(low, high + 1, width)
    return [f"{start}" if width == 1 else f"{start}-{start + width - 1}" for start in starts], counts.tolist()


class DataSummary:
    """The data of runs that share a plan. facts: sentences. similar_pairs: pairs of similar captions. truncated:
    captions that the encoder truncated. rejects: (rejected item, its thumbnail or None). gaps: sentences about
    information that is not available, with the reason."""

    def __init__(self, run: str, source: str) -> None:
        self.runs, self.source = [run], source
        self.facts, self.gaps, self.bars = list[str](), list[str](), list[Bars]()
        self.similar_pairs, self.truncated = list[tuple[float, str, str]](), list[TableRow]()
        self.reasons, self.rejects = list[TableRow](), list[tuple[RejectedItem, Picture | None]]()

    def add_plan(self, store: Store, config: Config, plan: Plan) -> None:
        active = only_trained(plan.active)
        parts = [
            lambda: self._count_buckets(active),
            lambda: self._measure_captions(active["texts"], plan),
            lambda: self._find_truncated(store, config, plan),
            lambda: self._list_rejects(store, config, plan),
        ]
        for part in parts:
            try:
                part()
            except LatentpressError as error:  # a damaged table, or a checkpoint that is not on this machine
                self.gaps.append(f"{error.message}.")

    def _count_buckets(self, active: pa.Table) -> None:
        counts = Counter(zip(active["bucket"].to_pylist(), active["role"].to_pylist(), strict=True))
        totals = Counter(active["bucket"].to_pylist())
        names = [bucket for bucket, _ in totals.most_common(MAX_BUCKETS)]
        parts = {"trained on": [counts[name, "train"] for name in names]}
        held_out = [counts[name, "eval"] for name in names]
        parts |= {"held out": held_out} if any(held_out) else {}
        self.bars.append(Bars("Samples by bucket", names, parts))
        limit_note = f", of which the {len(names)} largest are shown" if len(names) < len(totals) else ""
        self.facts.append(f"{len(active)} samples in {len(totals)} buckets{limit_note}.")
        datasets = Counter(active["dataset"].to_pylist()).most_common()
        self.facts.append("By dataset: " + ", ".join(f"{name} {count}" for name, count in datasets) + ".")

    def _measure_captions(self, ids: pa.ChunkedArray, plan: Plan) -> None:
        uses = pc.value_counts(pc.list_flatten(ids))
        if not len(uses):
            self.gaps.append("No sample has a caption.")
            return
        table = plan.text_table.select(["text_id", "text"])
        texts = table.filter(pc.is_in(table["text_id"], value_set=uses.field("values")))["text"]
        words = np.asarray(pc.list_value_length(pc.utf8_split_whitespace(texts)))
        labels, counts = bin_lengths(words)
        self.bars.append(Bars("Captions by words", labels, {"captions": counts}))
        shared_count = sum(count > 1 for count in uses.field("counts").to_pylist())
        self.facts.append(
            f"{len(uses)} different captions of {int(words.min())} to {int(words.max())} words, median "
            f"{np.median(words):g}"
            + (f"; {shared_count} belong to several samples." if shared_count else ", each of one sample.")
        )
        compared = spread_evenly(texts, MAX_COMPARED)
        self.similar_pairs = find_similar_pairs(compared)
        if len(compared) < len(texts):
            self.facts.append(f"{len(compared)} of {len(texts)} captions, spread evenly, were compared for similarity.")

    def _find_truncated(self, store: Store, config: Config, plan: Plan) -> None:
        """Find captions with more tokens than the encoder accepts, which the shards' metadata lists."""
        state = stage_registry.TEXT.state(store, config, plan)
        paths = [state.shard_paths[unit.unit_id] for unit in state.units if unit.unit_id in state.shard_paths]
        if not paths:
            self.gaps.append("No text is encoded yet, so truncated captions are not known.")
            return
        readers, truncated = ReaderPool(store), []
        opened_paths = spread_evenly(pa.array(paths), MAX_OPENED_SHARDS)
        text_ids = set(plan.active_text_ids.to_pylist())
        for path in opened_paths:
            with suppress(DamageError):
                truncated += [row for row in readers.meta(path).truncated if row.id in text_ids]
        readers.close()
        search_note = "" if len(opened_paths) == len(paths) else f" (in {len(opened_paths)} of {len(paths)} shards)"
        self.facts.append(f"{len(truncated) or 'No'} captions and prompts were truncated by the encoder{search_note}.")
        truncated.sort(key=lambda row: row.kept - row.tokens)
        self.truncated = [
            {"tokens": row.tokens, "kept": row.kept, "caption": shorten(plan.texts[row.id]["text"], 300)}
            for row in truncated[:MAX_TRUNCATED]
        ]

    def _list_rejects(self, store: Store, config: Config, plan: Plan) -> None:
        items = list_rejected_items(store, config, plan)
        counts = Counter((item.stage, item.reason) for item in items).most_common()
        self.reasons = [{"stage": stage, "reason": reason, "items": count} for (stage, reason), count in counts]
        listed = items[:MAX_LISTED]
        pictures = read_thumbnails(config, [(item.dataset, item.path) for item in listed[:MAX_THUMBNAILS]])
        self.rejects = list(zip_longest(listed, pictures))
        if not items:
            self.facts.append("No items were rejected.")
        elif len(listed) < len(items):
            self.facts.append(
                f"{len(listed)} of {len(items)} rejected items are listed; all: latentpress status --rejects."
            )


def summarize_data(runs: Sequence[tuple[str, Config, Config]]) -> list[DataSummary]:
    """The data of runs; runs with the same plan share an entry. runs: (name, configuration, configuration by which the
    plan is found if the run's training set does not name one)."""
    summaries: dict[tuple[str, str], DataSummary] = {}
    for run, config, plan_config in runs:
        store = Store(config.root)
        try:
            plan = _find_plan(store, config, plan_config)
        except LatentpressError as error:
            summaries[config.root, run] = summary = DataSummary(run, config.root)
            summary.gaps.append(f"{error.message}.")
            continue
        if (config.root, plan.name) in summaries:
            summaries[config.root, plan.name].runs.append(run)
        else:
            summaries[config.root, plan.name] = summary = DataSummary(run, f"plan {plan.name} of {config.root}")
            summary.add_plan(store, config, plan)
    return list(summaries.values())


def _find_plan(store: Store, config: Config, plan_config: Config) -> Plan:
    """The plan of the set that the run was trained on if it exists, else the current plan of `plan_config`."""
    name = config.train.set
    if "/" not in name and store.exists(f"sets/{name}/set.json"):
        generation = store.read_record(f"sets/{name}/set.json", SetRecord).generation
        if generation in list_plans(store):
            return load_plan(store, generation)
    return current_plan(store, plan_config)
