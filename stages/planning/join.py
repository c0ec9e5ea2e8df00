"""The join of a plan with its shards: which row of each kind of shard, and which captions, each sample has, as columns.

A million samples are matched, sorted and numbered in arrays; nothing is done sample by sample but to say why one
was left out. Pure but for `collect`, which reads the shards' descriptions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.plans import Plan
from cache.shard import RejectedMember, TruncatedText
from cache.shard_io import ReaderPool
from schemas.errors import LatentpressError
from schemas.tables import SET_SHARDS_SCHEMA, SET_TEXTS_SCHEMA, index_schema

INDEXED_ROLES = ("train", "eval")  # in the order of the index
GROUP_COLUMNS = (
    "bucket",
    "dataset",
    "repeats",
    "weight",
)  # what it is sorted by, after the role and before the sample id
HASH_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)

TableRow = dict[str, Any]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class IdLookup:
    """Where ids, of 32 hex digits, stand in an array of them.

    Both sides are sorted by 64-bit sums and walked through once. Arrow's `index_in` builds a hash table of the strings
    at every call, and takes three times as long for two million. Memory: 48 bytes an id.
    """

    def __init__(self, ids: pa.Array) -> None:
        self.ids = ids
        self._words = _id_words(ids)
        sums = _hash_ids(self._words)
        self._order = np.argsort(sums, kind="stable")
        self._sums = sums[self._order]

    def find(self, names: pa.Array | pa.ChunkedArray) -> IntArray:
        """(m,) the place of each name, of equal ids the first; -1 for one that is not there, and for null."""
        if not len(self.ids) or not len(names):
            return np.full(len(names), -1)
        words = _id_words(names)
        sums = _hash_ids(words)
        questions = np.argsort(sums)
        at = np.empty(len(names), np.int64)
        at[questions] = np.searchsorted(self._sums, sums[questions])
        at = np.minimum(at, len(self.ids) - 1)
        place, same = self._order[at], np.asarray(pc.is_valid(names)).copy()
        unsure = same & (self._sums[at] == sums)
        for word in range(4):
            same &= self._words[place, word] == words[:, word]
        unsure &= ~same  # another id of the same sum: the right one may stand behind it
        place[~same] = -1
        if unsure.any():
            place[unsure] = _to_int64(pc.index_in(names.filter(pa.array(unsure)), value_set=self.ids))
        return place


def _id_words(ids: pa.Array | pa.ChunkedArray) -> NDArray[np.uint64]:
    """(n, 4): the 32 characters of each id; anything for null, and for what is no id."""
    whole = ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids
    whole = pc.if_else(pc.equal(pc.binary_length(whole), 32), whole, None).cast(pa.binary(32))
    return np.frombuffer(whole.buffers()[1], "<u8").reshape(-1, 4)[whole.offset :][: len(whole)]


def _hash_ids(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    total = np.zeros(len(words), np.uint64)
    for word, odd in enumerate(HASH_MULTIPLIERS):
        total += words[:, word] * np.uint64(odd)
    return total


def _to_int64(found: pa.Array | pa.ChunkedArray) -> IntArray:
    return np.asarray(pc.fill_null(found, -1)).astype(np.int64)


@dataclass(frozen=True)
class EncodedMembers:
    """What one encoding stage has made of a plan.

    wanted: n ids that the plan wants. shard, row: (n,) where each lies, as a number in `paths` and a row there; shard
    is -1 where it lies nowhere: it was set aside or is missing.
    """

    wanted_ids: IdLookup
    paths: list[str]
    shard: IntArray
    row: IntArray
    set_aside: dict[str, RejectedMember]
    truncated: list[TruncatedText]
    missing: pa.Array

    def find(self, names: pa.Array | pa.ChunkedArray) -> IntArray:
        """(m,) places of `names` among what is wanted; -1 for null. The plan wants all of them."""
        found = self.wanted_ids.find(names)
        assert np.count_nonzero(found < 0) == names.null_count, "the plan names what it does not want"
        return found

    def is_encoded(self, places: IntArray) -> BoolArray:
        """(m,) whether what stands at each of `places` is encoded; False for -1."""
        return (places >= 0) & (self.shard[places] >= 0) if len(self.shard) else np.zeros(len(places), bool)


def find_encoded(readers: ReaderPool, paths: Sequence[str], wanted: pa.Array) -> EncodedMembers:
    """Find each wanted id, all of which differ, in the shards at `paths`; of several the first that has it."""
    names, aside, truncated = [pa.array([], pa.string())], dict[str, RejectedMember](), dict[str, TruncatedText]()
    for path in paths:
        meta = readers.meta(path)
        names.append(pa.array(meta.ids, pa.string()))
        aside.update((member.id, member) for member in meta.set_aside)
        truncated.update((row.id, row) for row in meta.truncated)
    ends = np.cumsum([len(part) for part in names])  # the first is that of no shard
    at = IdLookup(pa.concat_arrays(names)).find(wanted)
    shard = np.where(at >= 0, np.searchsorted(ends, at, side="right") - 1, -1)
    lookup, lost = IdLookup(wanted), shard < 0
    place = lookup.find(pa.array(list(aside), pa.string()))
    aside = {
        name: member for (name, member), i in zip(aside.items(), place.tolist(), strict=True) if i >= 0 and lost[i]
    }
    lost[place[place >= 0]] = False
    known = lookup.find(pa.array(list(truncated), pa.string())) >= 0
    shorter = [row for row, here in zip(truncated.values(), known.tolist(), strict=True) if here]
    return EncodedMembers(lookup, list(paths), shard, at - ends[shard], aside, shorter, wanted.filter(pa.array(lost)))


@dataclass(frozen=True)
class TrainingSetTables:
    """A training set before it is published. left_out: what was set aside, as a report lists it."""

    tables: dict[str, pa.Table]
    left_out: list[TableRow]
    validation: list[TableRow]
    null_text: int | None

    @property
    def train(self) -> int:
        return pc.sum(pc.equal(self.tables["index"].column("role"), "train")).as_py() or 0

    @property
    def held_out(self) -> int:
        return self.tables["index"].num_rows - self.train


def join_plan(plan: Plan, texts: EncodedMembers, samples: Mapping[str, EncodedMembers]) -> TrainingSetTables:
    """The set of a plan of which nothing is missing. LatentpressError where nothing is left to train on, or a prompt
    that every run needs was set aside.

    samples: kind of shard -> what was encoded of samples: "latents", and further kinds.
    """
    prompts, null, latents = plan.info["validation"], plan.info["null_text"], samples["latents"]
    _require_prompts(prompts, null, texts, latents)
    active = plan.active.filter(pc.is_in(plan.active.column("role"), value_set=pa.array(INDEXED_ROLES)))
    rows, left_out = _select_encoded(active, texts, samples)
    if not pc.any(pc.equal(rows.column("role"), INDEXED_ROLES[0])).as_py():
        raise _empty_set_error(active)
    rows = rows.take(_sort_order(rows))
    named = [name for prompt in prompts for name in (prompt["text"], prompt["negative"])] + ([null] if null else [])
    places = texts.find(pa.array(named, pa.string()))
    images = latents.find(pa.array([prompt["condition"] for prompt in prompts], pa.string()))
    # Numbers are given as they are first used, so that samples which stand together find their texts together.
    own = _to_int64(rows.column("null_text"))
    number = _Renumbering(len(texts.shard), [_flatten_lists(rows.column("texts")), own[own >= 0], places])
    held = {kind: _to_int64(rows.column(kind)) for kind in samples}
    first, files = dict[str, int](), list[dict[str, str]]()  # of every kind the first of its shards, among all
    for kind, encoded in {"latents": latents, "text": texts, **samples}.items():
        first[kind] = len(files)
        files += [{"path": path, "kind": kind} for path in encoded.paths]
    of_texts, shown = first["text"] + texts.shard[number.used], latents.shard[images[images >= 0]]
    of_samples = {kind: first[kind] + samples[kind].shard[at] for kind, at in held.items()}
    further = [of_samples[kind] for kind in samples if kind != "latents"]
    shard = _Renumbering(len(files), [of_samples["latents"], shown, of_texts, *further])
    words = [texts.wanted_ids.ids.take(pa.array(number.used)), shard.of(of_texts), texts.row[number.used]]
    found = {kind: (shard.of(of_samples[kind]), samples[kind].row[at]) for kind, at in held.items()}
    tables = {
        "index": _index_table(rows, number, found),
        "texts": pa.table(words, names=SET_TEXTS_SCHEMA.names).cast(SET_TEXTS_SCHEMA),
        "shards": pa.Table.from_pylist([files[i] for i in shard.used.tolist()], SET_SHARDS_SCHEMA),
    }
    numbers = number.of(places).tolist()
    entries = [
        {key: prompt[key] for key in ("name", "prompt", "negative_prompt", "bucket")}
        | {"text": numbers[2 * i], "negative": numbers[2 * i + 1], "condition": None}
        for i, prompt in enumerate(prompts)
    ]
    for entry, place in zip(entries, images.tolist(), strict=True):
        if place >= 0:
            entry["condition"] = {"shard": int(shard.of(latents.shard[place])), "row": int(latents.row[place])}
    return TrainingSetTables(tables, left_out, entries, numbers[-1] if null else None)


class _Renumbering:
    """Numbers, from 0 on and in the order of first use, for those of range(size) that are used."""

    def __init__(self, size: int, used: Sequence[IntArray]) -> None:
        every = np.concatenate(used)
        first = np.empty(size, np.int64)
        first[every[::-1]] = np.arange(len(every))[::-1]  # of an index that stands twice the last value counts
        self.used = every[first[every] == np.arange(len(every))]
        self._number = np.full(size, -1, np.int64)
        self._number[self.used] = np.arange(len(self.used))

    def of(self, places: IntArray) -> IntArray:
        return self._number[places]


def _select_encoded(
    active: pa.Table, texts: EncodedMembers, samples: Mapping[str, EncodedMembers]
) -> tuple[pa.Table, list[TableRow]]:
    """The active samples that are encoded, and what is said of the others.

    In the table "texts" and "null_text" are places among the wanted texts (-1: none), and a column called like each
    kind in `samples` has those among what is wanted of it. Captions that were set aside are gone; a sample is out where
    no caption is left, or its null prompt, latent, or anything else of it was set aside.
    """
    lists = active.column("texts")
    own, captions = texts.find(active.column("null_text")), texts.find(pc.list_flatten(lists))
    held = {kind: encoded.find(active.column("sample_id")) for kind, encoded in samples.items()}
    encoded = texts.is_encoded(captions)
    offsets = np.concatenate([[0], np.cumsum(encoded)])[_list_offsets(lists)]
    fine = ((own < 0) | texts.is_encoded(own)) & (np.diff(offsets) > 0)
    for kind, places in held.items():
        fine &= samples[kind].is_encoded(places)
    columns = {
        name: active.column(name).combine_chunks() for name in ("role", *GROUP_COLUMNS, "sample_id", "regularisation")
    }
    columns |= {name: columns[name].dictionary_encode() for name in ("role", *GROUP_COLUMNS)}
    columns["texts"] = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(captions[encoded]))
    columns |= {name: pa.array(places) for name, places in {"null_text": own, **held}.items()}
    left_out = [_reject_row(row, texts, samples) for row in active.filter(pa.array(~fine)).to_pylist()]
    return pa.table(columns).filter(pa.array(fine)), left_out


def _sort_order(rows: pa.Table) -> pa.Array:
    """(n,) the rows as the index has them. Equal samples keep the plan's order, which is that of their paths."""
    group = np.zeros(rows.num_rows, np.int64)
    for name in ("role", *GROUP_COLUMNS):
        column = rows.column(name).combine_chunks()
        values = column.dictionary.to_pylist()
        ranks = {value: rank for rank, value in enumerate(INDEXED_ROLES if name == "role" else sorted(values))}
        group = group * len(ranks) + np.array([ranks[value] for value in values])[np.asarray(column.indices)]
    keys = pa.table({"group": group, "id": rows.column("sample_id")})
    return pc.sort_indices(keys, sort_keys=[("group", "ascending"), ("id", "ascending")])


def _reject_row(row: TableRow, texts: EncodedMembers, samples: Mapping[str, EncodedMembers]) -> TableRow:
    """Why an active sample can't be in the set: what was set aside is its latent or another row of it, its null text
    or all its captions."""
    asides = [encoded.set_aside.get(row["sample_id"]) for encoded in samples.values()]
    member = next(filter(None, [*asides, texts.set_aside.get(row["null_text"])]), None)
    member = member or texts.set_aside[row["texts"][0]]
    return {"item": row["sample_id"], "path": row["path"], "reason": member.reason, "message": member.message}


def _empty_set_error(active: pa.Table) -> LatentpressError:
    if pc.any(pc.equal(active.column("role"), "train")).as_py():
        return LatentpressError(
            "the training set would be empty: every sample was set aside",
            "see the rejects of each stage: latentpress status",
        )
    return LatentpressError(
        "the training set would be empty: every sample is held out for evaluation",
        "set `eval: false`, or a smaller eval_fraction, for some dataset, then run `latentpress bucket`",
    )


def _require_prompts(prompts: list[TableRow], null: str | None, texts: EncodedMembers, latents: EncodedMembers) -> None:
    """Every run needs the null prompt and the validation prompts: LatentpressError where one was set aside."""
    needed: list[tuple[str, list[str], str | None]] = [("the null prompt", [null], None)] if null else []
    needed += [(f"validation prompt {p['name']}", [p["text"], p["negative"]], p["condition"]) for p in prompts]
    for what, names, condition in needed:
        lost = [texts.set_aside[name] for name in names if name in texts.set_aside]
        lost += [latents.set_aside[condition]] if condition and condition in latents.set_aside else []
        if lost:
            raise LatentpressError(
                f"{what} could not be encoded: {lost[0].message}",
                "correct it, then run `latentpress bucket` and the encoding stages with --retry-set-aside",
            )


def _index_table(rows: pa.Table, number: _Renumbering, places: Mapping[str, tuple[IntArray, IntArray]]) -> pa.Table:
    """schemas.tables.index_schema of rows as `_select_encoded` gives them. places: shards and rows of them, by kind."""
    own, lists = _to_int64(rows.column("null_text")), rows.column("texts")
    captions = pa.array(number.of(_flatten_lists(lists)), pa.int32())
    columns = {name: rows.column(name) for name in ("sample_id", "role", *GROUP_COLUMNS, "regularisation")}
    for kind, (shard, row) in places.items():
        before = "" if kind == "latents" else f"{kind}_"
        columns |= {f"{before}shard": pa.array(shard), f"{before}row": pa.array(row)}
    columns["texts"] = pa.ListArray.from_arrays(pa.array(_list_offsets(lists), pa.int32()), captions)
    columns["null_text"] = pa.array(np.where(own < 0, 0, number.of(own)), mask=own < 0)
    schema = index_schema(sorted(places.keys() - {"latents"}))
    return pa.table([columns[name] for name in schema.names], names=schema.names).cast(schema)


def _list_offsets(lists: pa.ChunkedArray) -> IntArray:
    """(n + 1,) where each list begins among all their values."""
    return np.concatenate([[0], np.cumsum(_to_int64(pc.list_value_length(lists)))])


def _flatten_lists(lists: pa.ChunkedArray) -> IntArray:
    return np.asarray(pc.list_flatten(lists))
