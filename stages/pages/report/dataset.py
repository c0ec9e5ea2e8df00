"""The data of a run, in one glance: buckets, captions and what was cut off of them, and what was set aside."""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.sets.plans import Plan, list_plans, load_plan
from cache.sets.set_lookup import current_plan
from cache.shards.shard_io import ReaderPool
from cache.store.damage import DamageError
from cache.store.store import Store
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.text_format import shorten
from stages.discovery.media_locations import spread_evenly
from stages.encoding import stage_registry
from stages.maintenance.set_aside import SetAside, list_set_aside
from stages.pages.charts import Bars
from stages.pages.pictures import Picture
from stages.pages.thumbnails import read_thumbnails
from stages.planning.summary import only_trained

MAX_BUCKETS = 30  # bars
MAX_LISTED = 100  # rows of what was set aside
MAX_THUMBNAILS = 24
MAX_OPENED_SHARDS = 256  # of text, for captions that were cut off
MAX_CUT_SHOWN = 10
TableRow = dict[str, Any]
MAX_COMPARED = 2000  # captions; all pairs of so many take a second
MAX_PAIRS = 6
_WORD = re.compile(r"\w+")


def most_alike(captions: Sequence[str], count: int = MAX_PAIRS) -> list[tuple[float, str, str]]:
    """(similarity, caption, caption) of the `count` pairs of highest Jaccard similarity of their sets of words (Jaccard
    1901, as used for near-duplicates by Broder 1997), exact, highest first. Case and order of words do not count.
    Captions without words are left out.

    Words of one caption alone are in no intersection, so they have no column; their number counts in the union.
    """
    words = [frozenset(_WORD.findall(caption.casefold())) for caption in captions]
    uses = Counter(chain.from_iterable(words))
    columns = {word: number for number, word in enumerate(word for word, times in uses.items() if times > 1)}
    present = np.zeros((len(words), len(columns)), np.float32)
    for row, distinct in enumerate(words):
        present[row, [columns[word] for word in distinct if word in columns]] = 1
    shared = np.triu(present @ present.T, 1)  # each pair once
    first, second = np.nonzero(shared)
    sizes = np.array([len(distinct) for distinct in words], np.float32)
    both = shared[first, second]
    similarity = both / (sizes[first] + sizes[second] - both)
    best = np.lexsort((second, first, -similarity))[:count]
    return [(float(similarity[i]), captions[first[i]], captions[second[i]]) for i in best]


def length_bins(lengths: np.ndarray, most: int = 16) -> tuple[list[str], list[int]]:
    """Labels ("1-5") and counts of equal bins of whole numbers, at most `most`."""
    if not len(lengths):
        return [], []
    low, high = int(lengths.min()), int(lengths.max())
    width = max(1, -(-(high - low + 1) // most))
    starts = list(range(low, high + 1, width))
    counts = np.bincount((lengths.astype(np.int64) - low) // width, minlength=len(starts))
    labels = [f"{start}" if width == 1 else f"{start}-{start + width - 1}" for start in starts]
    return labels, counts.tolist()


@dataclass
class DataGlance:
    """facts: sentences. alike: pairs of captions. cut: captions that the encoder cut off. set_aside: with a thumbnail
    each, where there is one. missing: what can't be told, and why."""

    runs: list[str]
    source: str
    facts: list[str] = field(default_factory=list)
    bars: list[Bars] = field(default_factory=list)
    alike: list[tuple[float, str, str]] = field(default_factory=list)
    cut: list[TableRow] = field(default_factory=list)
    reasons: list[TableRow] = field(default_factory=list)
    set_aside: list[tuple[SetAside, Picture | None]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def glance_at_data(runs: Sequence[tuple[str, Config, Config]]) -> list[DataGlance]:
    """The data of each run (name, configuration, that which names its plan where no set does); runs of the same
    plan share an entry."""
    glances: dict[tuple[str, str], DataGlance] = {}
    for run, config, planned in runs:
        store = Store(config.root)
        try:
            plan = _find_plan(store, config, planned)
        except LatentpressError as error:
            glances[config.root, run] = DataGlance([run], config.root, missing=[f"{error.message}."])
            continue
        if (key := (config.root, plan.name)) in glances:
            glances[key].runs.append(run)
            continue
        glance = glances[key] = DataGlance([run], f"plan {plan.name} of {config.root}")
        for part in (_count_buckets, _measure_captions, _find_cuts, _show_set_aside):
            try:
                part(glance, store, config, plan)
            except LatentpressError as error:  # a damaged table, or a checkpoint that is not on this machine
                glance.missing.append(f"{error.message}.")
    return list(glances.values())


def _find_plan(store: Store, config: Config, planned: Config) -> Plan:
    """The plan of the set which the run was trained on, where it is there; else the newest of `planned`."""
    name = config.train.set
    if "/" not in name and store.exists(f"sets/{name}/set.json"):
        generation = store.read_json(f"sets/{name}/set.json").get("generation")
        if generation in list_plans(store):
            return load_plan(store, generation)
    return current_plan(store, planned)


def _count_buckets(glance: DataGlance, store: Store, config: Config, plan: Plan) -> None:
    active = only_trained(plan.active)
    counts = Counter(zip(active.column("bucket").to_pylist(), active.column("role").to_pylist(), strict=True))
    totals = Counter[str]()
    for (bucket, _), count in counts.items():
        totals[bucket] += count
    names = [bucket for bucket, _ in totals.most_common(MAX_BUCKETS)]
    roles = {"trained on": "train", "held out": "eval"}
    parts = {label: [counts[name, role] for name in names] for label, role in roles.items()}
    parts = {label: values for label, values in parts.items() if any(values) or label == "trained on"}
    glance.bars.append(Bars("Samples by bucket", names, parts))
    left = len(totals) - len(names)
    glance.facts.append(
        f"{sum(totals.values())} samples in {len(totals)} buckets"
        + (f", of which the {len(names)} largest are shown" if left else "")
        + "."
    )
    by_dataset = Counter(active.column("dataset").to_pylist())
    glance.facts.append("By dataset: " + ", ".join(f"{name} {count}" for name, count in by_dataset.most_common()) + ".")


def _measure_captions(glance: DataGlance, store: Store, config: Config, plan: Plan) -> None:
    ids = pc.list_flatten(only_trained(plan.active).column("texts"))
    uses = pc.value_counts(ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids)
    distinct = uses.field("values")
    if not len(distinct):
        glance.missing.append("No sample has a caption.")
        return
    table = plan.text_table.select(["text_id", "text"])
    texts = table.filter(pc.is_in(table.column("text_id"), value_set=distinct)).column("text")
    words = np.asarray(pc.list_value_length(pc.utf8_split_whitespace(texts)))
    labels, counts = length_bins(words)
    glance.bars.append(Bars("Captions by words", labels, {"captions": counts}))
    shared = int(pc.sum(pc.greater(uses.field("counts"), 1)).as_py() or 0)
    glance.facts.append(
        f"{len(distinct)} different captions of {int(words.min())} to {int(words.max())} words, median "
        f"{np.median(words):g}" + (f"; {shared} are of more than one sample." if shared else ", each of one sample.")
    )
    compared = spread_evenly(texts, MAX_COMPARED)
    glance.alike = most_alike(compared)
    if len(compared) < len(texts):
        glance.facts.append(f"{len(compared)} of {len(texts)} captions, spread evenly, were compared with each other.")


def _find_cuts(glance: DataGlance, store: Store, config: Config, plan: Plan) -> None:
    """Captions that had more tokens than the encoder takes, by the shards' own account."""
    state = stage_registry.TEXT.state(store, config, plan)
    paths = [state.done[unit.unit_id] for unit in state.units if unit.unit_id in state.done]
    readers, cut = ReaderPool(store), []
    opened = spread_evenly(pa.array(paths, pa.string()), MAX_OPENED_SHARDS) if paths else []
    wanted = set(plan.active_text_ids.to_pylist())
    for path in opened:
        with suppress(DamageError):
            cut += [row for row in readers.meta(path).truncated if row.id in wanted]
    readers.close()
    if not paths:
        glance.missing.append("What the encoder cuts off captions is not known: no text is encoded.")
        return
    among = "" if len(opened) == len(paths) else f" (in {len(opened)} of {len(paths)} shards)"
    glance.facts.append(f"{len(cut) or 'No'} captions and prompts were cut off by the encoder{among}.")
    cut.sort(key=lambda row: row.kept - row.tokens)
    glance.cut = [
        {"tokens": row.tokens, "kept": row.kept, "caption": shorten(plan.texts[row.id]["text"], 300)}
        for row in cut[:MAX_CUT_SHOWN]
    ]


def _show_set_aside(glance: DataGlance, store: Store, config: Config, plan: Plan) -> None:
    items = list_set_aside(store, config, plan)
    counts = Counter((item.stage, item.reason) for item in items)
    glance.reasons = [
        {"stage": stage, "reason": reason, "items": count} for (stage, reason), count in counts.most_common()
    ]
    listed = items[:MAX_LISTED]
    pictures = dict(read_thumbnails(config, listed[:MAX_THUMBNAILS]))
    glance.set_aside = [(item, pictures.get(number)) for number, item in enumerate(listed)]
    if not items:
        glance.facts.append("Nothing was set aside.")
    elif len(listed) < len(items):
        glance.facts.append(f"{len(listed)} of {len(items)} items set aside are listed; latentpress status --rejects.")
