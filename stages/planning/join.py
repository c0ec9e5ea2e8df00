"""The join of a plan with its shards: the shard rows and texts of each sample, as columns.

A million samples are matched, sorted and numbered in arrays; only samples that are left out are handled one at a time.
Pure, except that `find_encoded` reads the shards' metadata.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.sets.plans import Plan
from cache.shards.shard import RejectedMember, TruncatedText
from cache.shards.shard_io import ReaderPool
from schemas.errors import LatentpressError
from schemas.family import REFERENCE_PARTS
from schemas.tables import SET_SHARDS_SCHEMA, SET_TEXTS_SCHEMA, TRAINED_ROLES, index_schema

INDEXED_ROLES = TRAINED_ROLES  # in the order of the index
GROUP_COLUMNS = ("bucket", "dataset", "repeats", "weight")  # the index is sorted by role, these, and sample id

TableRow = dict[str, Any]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


def find_ids(names: pa.Array | pa.ChunkedArray, ids: pa.Array) -> IntArray:
    """(m,) the index of each name in `ids`, the first of equal ids; -1 for an unknown name and for null."""
    return _to_int64(pc.index_in(names, value_set=ids, skip_nulls=True))


def _to_int64(values: pa.Array | pa.ChunkedArray) -> IntArray:
    return np.asarray(pc.fill_null(values, -1)).astype(np.int64)


@dataclass(frozen=True)
class EncodedMembers:
    """The members of a plan that one encoding stage has encoded.

    wanted_ids: n ids that the plan needs. shard, row: (n,) index in `paths` and row in that shard; shard is -1 for what
    was set aside or is missing.
    """

    wanted_ids: pa.Array
    paths: list[str]
    shard: IntArray
    row: IntArray
    set_aside: dict[str, RejectedMember]
    truncated: list[TruncatedText]
    missing: pa.Array

    def find(self, names: pa.Array | pa.ChunkedArray) -> IntArray:
        """(m,) indices of `names` in the wanted ids, which contain all of them; -1 for null."""
        indices = find_ids(names, self.wanted_ids)
        assert np.count_nonzero(indices < 0) == names.null_count, "the plan refers to ids that it does not contain"
        return indices

    def is_encoded(self, members: IntArray) -> BoolArray:
        """(m,) whether each of these members, indices in the wanted ids, is encoded; False for -1."""
        return (members >= 0) & (self.shard[members] >= 0) if len(self.shard) else np.zeros(len(members), bool)


def find_encoded(readers: ReaderPool, paths: Sequence[str], wanted: pa.Array) -> EncodedMembers:
    """Find the wanted ids, which are distinct, in the shards at `paths`; the first shard with an id counts."""
    names, aside, truncated = [pa.array([], pa.string())], dict[str, RejectedMember](), dict[str, TruncatedText]()
    for path in paths:
        meta = readers.meta(path)
        names.append(pa.array(meta.ids, pa.string()))
        aside.update((member.id, member) for member in meta.set_aside)
        truncated.update((row.id, row) for row in meta.truncated)
    ends = np.cumsum([len(ids) for ids in names])  # the first is that of no shard
    at = find_ids(wanted, pa.concat_arrays(names))
    shard = np.where(at >= 0, np.searchsorted(ends, at, side="right") - 1, -1)
    missing = shard < 0
    index = find_ids(pa.array(list(aside), pa.string()), wanted)
    aside = {
        name: member for (name, member), i in zip(aside.items(), index.tolist(), strict=True) if i >= 0 and missing[i]
    }
    missing[index[index >= 0]] = False
    known = find_ids(pa.array(list(truncated), pa.string()), wanted) >= 0
    cut = [row for row, is_known in zip(truncated.values(), known.tolist(), strict=True) if is_known]
    return EncodedMembers(wanted, list(paths), shard, at - ends[shard], aside, cut, wanted.filter(pa.array(missing)))


@dataclass(frozen=True)
class TrainingSetTables:
    """A training set before it is published. left_out: samples without what was set aside, as a report lists them."""

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
    """The training set of a plan of which nothing is missing.

    samples: kind of shard -> what is encoded of samples: "latents", and further kinds. Raises LatentpressError if no
    sample remains to train on, or if a prompt that every run needs was set aside.
    """
    prompts, null, latents = plan.info["validation"], plan.info["null_text"], samples["latents"]
    _require_prompts(prompts, null, texts, latents)
    active = plan.active.filter(pc.is_in(plan.active.column("role"), value_set=pa.array(INDEXED_ROLES)))
    rows, left_out = _select_encoded(active, texts, samples)
    if not pc.any(pc.equal(rows.column("role"), "train")).as_py():
        if pc.any(pc.equal(active.column("role"), "train")).as_py():
            why, advice = "every sample was set aside", "see the rejects of each stage: latentpress status"
        else:
            why = "every sample is held out for evaluation"
            advice = "set `eval: false`, or a smaller eval_fraction, for some dataset, then run `latentpress bucket`"
        raise LatentpressError(f"the training set would be empty: {why}", advice)
    rows = rows.take(_sort_order(rows))
    prompt_ids = [name for prompt in prompts for name in (prompt["text"], prompt["negative"])]
    prompt_texts = texts.find(pa.array(prompt_ids + ([null] if null else []), pa.string()))
    images = latents.find(pa.array([prompt["condition"] for prompt in prompts], pa.string()))
    # Texts are numbered by first use, so that neighboring samples find their texts together.
    null_texts = _to_int64(rows.column("null_text"))
    used_texts = [np.asarray(pc.list_flatten(rows.column("texts"))), null_texts[null_texts >= 0], prompt_texts]
    text_numbers = _Renumbering(len(texts.shard), used_texts)
    members = {kind: _to_int64(rows.column(kind)) for kind in samples}
    first, files = dict[str, int](), list[dict[str, str]]()  # first: of each kind the index in `files` of its first
    for kind, encoded in {"latents": latents, "text": texts, **samples}.items():
        first[kind] = len(files)
        files += [{"path": path, "kind": kind} for path in encoded.paths]
    text_shards = first["text"] + texts.shard[text_numbers.used]
    sample_shards = {kind: first[kind] + samples[kind].shard[at] for kind, at in members.items()}
    further = [sample_shards[kind] for kind in samples if kind != "latents"]
    image_shards = latents.shard[images[images >= 0]]
    references = {part: _to_int64(rows.column(part)) for part in REFERENCE_PARTS if part in rows.column_names}
    reference_shards = [first["latents"] + latents.shard[at[at >= 0]] for at in references.values()]
    listed = [latents.find(pa.array(prompt.get("references", []), pa.string())) for prompt in prompts]
    prompt_shards = [first["latents"] + latents.shard[at] for at in listed]
    used = [image_shards, text_shards, *further, *reference_shards, *prompt_shards]
    shards = _Renumbering(len(files), [sample_shards["latents"], *used])
    text_ids = texts.wanted_ids.take(pa.array(text_numbers.used))
    text_columns = [text_ids, shards.of(text_shards), texts.row[text_numbers.used]]
    locations = {kind: (shards.of(sample_shards[kind]), samples[kind].row[at]) for kind, at in members.items()}
    tables = {
        "index": _add_references(_index_table(rows, text_numbers, locations), references, latents, shards),
        "texts": pa.table(text_columns, names=SET_TEXTS_SCHEMA.names).cast(SET_TEXTS_SCHEMA),
        "shards": pa.Table.from_pylist([files[i] for i in shards.used.tolist()], SET_SHARDS_SCHEMA),
    }
    numbers = text_numbers.of(prompt_texts).tolist()
    entries = []
    for i, (prompt, image) in enumerate(zip(prompts, images.tolist(), strict=True)):
        entry = {key: prompt[key] for key in ("name", "prompt", "negative_prompt", "bucket")}
        entry |= {"text": numbers[2 * i], "negative": numbers[2 * i + 1], "condition": None}
        if "image" in prompt:
            entry["image"] = prompt["image"]
        if image >= 0:
            entry["condition"] = {"shard": int(shards.of(latents.shard[image])), "row": int(latents.row[image])}
        if "references" in prompt:
            places = zip(prompt["references"], shards.of(prompt_shards[i]), latents.row[listed[i]], strict=True)
            entry["references"] = [{"id": id, "shard": int(shard), "row": int(row)} for id, shard, row in places]
        entries.append(entry)
    return TrainingSetTables(tables, left_out, entries, numbers[-1] if null else None)


class _Renumbering:
    """Numbers from 0 on, in the order of first use, for those of range(size) that are used."""

    def __init__(self, size: int, used: Sequence[IntArray]) -> None:
        values = np.concatenate(used)
        first = np.empty(size, np.int64)
        first[values[::-1]] = np.arange(len(values))[::-1]  # of a repeated index the last assignment counts
        self.used = values[first[values] == np.arange(len(values))]
        self._number = np.full(size, -1, np.int64)
        self._number[self.used] = np.arange(len(self.used))

    def of(self, values: IntArray) -> IntArray:
        return self._number[values]


def _select_encoded(
    active: pa.Table, texts: EncodedMembers, samples: Mapping[str, EncodedMembers]
) -> tuple[pa.Table, list[TableRow]]:
    """The active samples that are encoded, and report rows for the others.

    The table's "texts" and "null_text" are indices in the wanted texts (-1: none); for each kind in `samples` it has a
    column with indices in the ids wanted of it. Texts that were set aside are not in its lists. A sample is left out if
    none of its texts remains, or if its null text or its row of any kind was set aside.
    """
    lists = active.column("texts")
    null_texts, captions = texts.find(active.column("null_text")), texts.find(pc.list_flatten(lists))
    members = {kind: encoded.find(active.column("sample_id")) for kind, encoded in samples.items()}
    encoded = texts.is_encoded(captions)
    offsets = np.concatenate([[0], np.cumsum(encoded)])[_list_offsets(lists)]
    kept = ((null_texts < 0) | texts.is_encoded(null_texts)) & (np.diff(offsets) > 0)
    for kind, ids in members.items():
        kept &= samples[kind].is_encoded(ids)
    references = _find_references(active, samples["latents"])
    for ids in references.values():
        kept &= (ids < 0) | samples["latents"].is_encoded(ids)
    names = ("role", *GROUP_COLUMNS)
    columns = {name: active.column(name).combine_chunks().dictionary_encode() for name in names}
    columns |= {name: active.column(name).combine_chunks() for name in ("sample_id", "regularization")}
    columns["texts"] = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(captions[encoded]))
    columns |= {name: pa.array(ids) for name, ids in {"null_text": null_texts, **members, **references}.items()}
    left_out = []
    for row in active.filter(pa.array(~kept)).to_pylist():
        causes = [encoded.set_aside.get(row["sample_id"]) for encoded in samples.values()]
        causes += [samples["latents"].set_aside.get(id) for id in row.get("references") or ()]
        causes.append(texts.set_aside.get(row["null_text"]))
        cause = next(filter(None, causes), None) or texts.set_aside[row["texts"][0]]
        left_out.append(
            {"item": row["sample_id"], "path": row["path"], "reason": cause.reason, "message": cause.message}
        )
    return pa.table(columns).filter(pa.array(kept)), left_out


def _find_references(active: pa.Table, latents: EncodedMembers) -> dict[str, IntArray]:
    """Part -> (n,) indices in the wanted ids of the references of active samples, -1 where one has fewer."""
    if "references" not in active.column_names:
        return {}
    lists = active.column("references").combine_chunks()
    members, offsets = latents.find(pc.list_flatten(lists)), _list_offsets(lists)
    indices = {}
    for number, part in zip(range(int(np.diff(offsets).max(initial=0))), REFERENCE_PARTS, strict=False):
        at = offsets[:-1] + number
        indices[part] = np.where(at < offsets[1:], np.append(members, -1)[np.minimum(at, len(members))], -1)
    return indices


def _add_references(
    index: pa.Table, references: Mapping[str, IntArray], latents: EncodedMembers, shards: "_Renumbering"
) -> pa.Table:
    """The index with the columns of its samples' references. references: part -> (n,) indices in the wanted ids."""
    for part, at in references.items():
        absent = at < 0
        ids = latents.wanted_ids.take(pa.array(at, mask=absent))
        index = index.append_column(f"{part}_id", pa.chunked_array([ids]))
        shard = np.where(absent, -1, shards.of(latents.shard[at]))
        for name, numbers in (("shard", shard), ("row", latents.row[at])):
            index = index.append_column(f"{part}_{name}", pa.array(numbers, pa.int32(), mask=absent))
    return index


def _sort_order(rows: pa.Table) -> pa.Array:
    """(n,) rows in the order of the index. Equal samples keep the plan's order, which is that of their paths."""
    group = np.zeros(rows.num_rows, np.int64)
    for name in ("role", *GROUP_COLUMNS):
        column = rows.column(name).combine_chunks()
        values = column.dictionary.to_pylist()
        ranks = {value: rank for rank, value in enumerate(INDEXED_ROLES if name == "role" else sorted(values))}
        group = group * len(ranks) + np.array([ranks[value] for value in values])[np.asarray(column.indices)]
    keys = pa.table({"group": group, "id": rows.column("sample_id")})
    return pc.sort_indices(keys, sort_keys=[("group", "ascending"), ("id", "ascending")])


def _require_prompts(prompts: list[TableRow], null: str | None, texts: EncodedMembers, latents: EncodedMembers) -> None:
    """Every run needs the null prompt and the validation prompts: LatentpressError if one was set aside."""
    needed: list[tuple[str, list[str], list[str]]] = [("the null prompt", [null], [])] if null else []
    for p in prompts:
        images = [p["condition"]] if p["condition"] else p.get("references", [])
        needed.append((f"validation prompt {p['name']}", [p["text"], p["negative"]], images))
    for prompt, names, images in needed:
        aside = [texts.set_aside[name] for name in names if name in texts.set_aside]
        aside += [latents.set_aside[name] for name in images if name in latents.set_aside]
        if aside:
            raise LatentpressError(
                f"{prompt} could not be encoded: {aside[0].message}",
                "correct it, then run `latentpress bucket` and the encoding stages with --retry-set-aside",
            )


def _index_table(
    rows: pa.Table, text_numbers: _Renumbering, locations: Mapping[str, tuple[IntArray, IntArray]]
) -> pa.Table:
    """The index, of schemas.tables.index_schema, from rows of `_select_encoded`. locations: (shards, rows) by kind."""
    null_texts, lists = _to_int64(rows.column("null_text")), rows.column("texts")
    captions = pa.array(text_numbers.of(np.asarray(pc.list_flatten(lists))), pa.int32())
    columns = {name: rows.column(name) for name in ("sample_id", "role", *GROUP_COLUMNS, "regularization")}
    for kind, (shard, row) in locations.items():
        prefix = "" if kind == "latents" else f"{kind}_"
        columns |= {f"{prefix}shard": pa.array(shard), f"{prefix}row": pa.array(row)}
    columns["texts"] = pa.ListArray.from_arrays(pa.array(_list_offsets(lists), pa.int32()), captions)
    columns["null_text"] = pa.array(np.where(null_texts < 0, 0, text_numbers.of(null_texts)), mask=null_texts < 0)
    schema = index_schema(sorted(locations.keys() - {"latents"}))
    return pa.table([columns[name] for name in schema.names], names=schema.names).cast(schema)


def _list_offsets(lists: pa.ChunkedArray | pa.Array) -> IntArray:
    """(n + 1,) offsets of the lists in their flattened values."""
    return np.concatenate([[0], np.cumsum(_to_int64(pc.list_value_length(lists)))])
