"""Join a plan with its shards: the shard rows and texts of each sample, as columns.

A million samples are matched, sorted and numbered in arrays. Only omitted samples are processed one at a time. Opens no
file, except that `find_encoded` reads the shards' metadata.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.sets.plans import Plan, PlannedPrompt
from cache.sets.table_checks import SetPrompt
from cache.shards.shard import RejectedMember, TruncatedText
from cache.shards.shard_io import ReaderPool
from schemas.errors import LatentpressError
from schemas.family import REFERENCE_PARTS
from schemas.tables import SET_SHARDS_SCHEMA, SET_TEXTS_SCHEMA, TRAINED_ROLES, index_schema

INDEXED_ROLES = TRAINED_ROLES  # the index is sorted in this order
GROUP_COLUMNS = ("bucket", "dataset", "repeats", "weight")  # the index is sorted by role, these columns, and sample id

TableRow = dict[str, Any]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


def find_ids(names: pa.Array | pa.ChunkedArray, ids: pa.Array) -> IntArray:
    """(m,) the index of each name in `ids`, the lowest index for equal ids; -1 for an unknown name and for null."""
    return _to_int64(pc.index_in(names, value_set=ids, skip_nulls=True))


def _to_int64(values: pa.Array | pa.ChunkedArray) -> IntArray:
    return np.asarray(pc.fill_null(values, -1)).astype(np.int64)


@dataclass(frozen=True)
class EncodedMembers:
    """The members of a plan that one encoding stage has encoded.

    wanted_ids: (n,) ids that the plan needs. paths: paths of shards. shard: (n,) index in `paths`; -1 for a member that
    was rejected or is missing. row: (n,) row in the shard. rejects: id -> rejected member. truncated: texts that were
    truncated. missing: (k,) wanted ids that were neither encoded nor rejected.
    """

    wanted_ids: pa.Array
    paths: list[str]
    shard: IntArray
    row: IntArray
    rejects: dict[str, RejectedMember]
    truncated: list[TruncatedText]
    missing: pa.Array

    def find(self, names: pa.Array | pa.ChunkedArray) -> IntArray:
        """(m,) indices of `names` in the wanted ids, which must contain all names; -1 for null."""
        indices = find_ids(names, self.wanted_ids)
        assert np.count_nonzero(indices < 0) == names.null_count, "the plan refers to ids that it does not contain"
        return indices

    def is_encoded(self, members: IntArray) -> BoolArray:
        """(m,) whether each member is encoded; False for -1. members: (m,) indices in the wanted ids."""
        return (members >= 0) & (self.shard[members] >= 0) if len(self.shard) else np.zeros(len(members), bool)


def find_encoded(readers: ReaderPool, paths: Sequence[str], wanted_ids: pa.Array) -> EncodedMembers:
    """Find ids in the shards at `paths`. If several shards have an id, the first shard is used. wanted_ids: (n,)
    distinct ids."""
    names, rejects, truncated = [pa.array([], pa.string())], dict[str, RejectedMember](), dict[str, TruncatedText]()
    for path in paths:
        meta = readers.meta(path)
        names.append(pa.array(meta.ids, pa.string()))
        rejects.update((member.id, member) for member in meta.rejects)
        truncated.update((row.id, row) for row in meta.truncated)
    ends = np.cumsum([len(ids) for ids in names])  # the first entry is for the empty array
    at = find_ids(wanted_ids, pa.concat_arrays(names))
    shard = np.where(at >= 0, np.searchsorted(ends, at, side="right") - 1, -1)
    is_missing = shard < 0
    index = find_ids(pa.array(list(rejects), pa.string()), wanted_ids)
    rejects = {
        name: member
        for (name, member), i in zip(rejects.items(), index.tolist(), strict=True)
        if i >= 0 and is_missing[i]
    }
    is_missing[index[index >= 0]] = False
    is_known_text = find_ids(pa.array(list(truncated), pa.string()), wanted_ids) >= 0
    cut = [row for row, is_known in zip(truncated.values(), is_known_text.tolist(), strict=True) if is_known]
    missing = wanted_ids.filter(pa.array(is_missing))
    return EncodedMembers(wanted_ids, list(paths), shard, at - ends[shard], rejects, cut, missing)


@dataclass(frozen=True)
class TrainingSetTables:
    """A training set before it is published. tables: name -> table of the set. left_out: report rows of the samples
    that are left out because a part of them was rejected. validation: the set's validation prompts. null_text: index of
    the null text in the table "texts"."""

    tables: dict[str, pa.Table]
    left_out: list[TableRow]
    validation: list[SetPrompt]
    null_text: int | None

    @property
    def train(self) -> int:
        return pc.sum(pc.equal(self.tables["index"].column("role"), "train")).as_py() or 0

    @property
    def held_out(self) -> int:
        return self.tables["index"].num_rows - self.train


def join_plan(plan: Plan, texts: EncodedMembers, samples: Mapping[str, EncodedMembers]) -> TrainingSetTables:
    """The training set of a plan without missing shards. Raises LatentpressError if no training sample remains, or if a
    prompt that every run needs was rejected.

    texts: the encoded texts. samples: kind of shard ("latents" and further kinds) -> encoded members of this kind.
    """
    prompts, null, latents = plan.info.validation, plan.info.null_text, samples["latents"]
    _require_prompts(prompts, null, texts, latents)
    active = plan.active.filter(pc.is_in(plan.active.column("role"), value_set=pa.array(INDEXED_ROLES)))
    rows, left_out = _select_encoded(active, texts, samples)
    if not pc.any(pc.equal(rows.column("role"), "train")).as_py():
        if pc.any(pc.equal(active.column("role"), "train")).as_py():
            cause, advice = "every sample was rejected", "see the reasons: latentpress status --rejects"
        else:
            cause = "every sample is held out for evaluation"
            advice = "set `eval: false`, or a smaller eval_fraction, for a dataset, then run `latentpress bucket`"
        raise LatentpressError(f"the training set would be empty: {cause}", advice)
    rows = rows.take(_sort_order(rows))
    prompt_ids = [name for prompt in prompts for name in (prompt.text, prompt.negative)]
    prompt_texts = texts.find(pa.array(prompt_ids + ([null] if null else []), pa.string()))
    # Texts are numbered by first use, so that the texts of neighboring samples are next to each other.
    captions, null_texts = np.asarray(pc.list_flatten(rows.column("texts"))), _to_int64(rows.column("null_text"))
    text_numbers = _Renumbering(len(texts.shard), [captions, null_texts, prompt_texts])
    kinds = {"latents": latents, "text": texts, **samples}
    files = [{"path": path, "kind": kind} for kind, encoded in kinds.items() for path in encoded.paths]
    starts = dict(zip(kinds, np.cumsum([0, *(len(encoded.paths) for encoded in kinds.values())]), strict=False))

    def find_shards(kind: str, members: IntArray) -> IntArray:
        """(n,) the index in `files` of each member's shard; -1 for the member -1."""
        return np.where(members < 0, -1, starts[kind] + kinds[kind].shard[members])

    parts = [part for part in ("latents", *samples, *REFERENCE_PARTS) if part in rows.column_names]
    members = {part: _to_int64(rows.column(part)) for part in dict.fromkeys(parts)}
    kind_of = {part: part if part in samples else "latents" for part in members}
    places = {part: find_shards(kind_of[part], at) for part, at in members.items()}
    text_shards = find_shards("text", text_numbers.used)
    images = [[prompt.condition] if prompt.condition else prompt.references for prompt in prompts]
    prompt_images = [latents.find(pa.array(ids, pa.string())) for ids in images]
    prompt_shards = [find_shards("latents", at) for at in prompt_images]
    conditions = [at for at, prompt in zip(prompt_shards, prompts, strict=True) if prompt.condition]
    used_shards = [places["latents"], *conditions, text_shards, *places.values(), *prompt_shards]
    shards, used_texts = _Renumbering(len(files), used_shards), text_numbers.used
    text_columns = [texts.wanted_ids.take(pa.array(used_texts)), shards.renumber(text_shards), texts.row[used_texts]]
    columns = {name: rows.column(name) for name in ("sample_id", "role", *GROUP_COLUMNS, "regularization")}
    for part, at in members.items():
        encoded, prefix, absent = samples[kind_of[part]], "" if part == "latents" else f"{part}_", at < 0
        columns[f"{prefix}shard"] = pa.array(shards.renumber(places[part]), pa.int32(), mask=absent)
        columns[f"{prefix}row"] = pa.array(encoded.row[at], pa.int32(), mask=absent)
        if part in REFERENCE_PARTS:
            columns[f"{prefix}id"] = encoded.wanted_ids.take(pa.array(at, mask=absent))
    offsets = pa.array(_list_offsets(rows.column("texts")), pa.int32())
    columns["texts"] = pa.ListArray.from_arrays(offsets, pa.array(text_numbers.renumber(captions), pa.int32()))
    absent = null_texts < 0
    columns["null_text"] = pa.array(np.where(absent, 0, text_numbers.renumber(null_texts)), mask=absent)
    schema = index_schema(sorted(samples.keys() - {"latents"}), len(members) - len(samples))
    tables = {
        "index": pa.table([columns[name] for name in schema.names], names=schema.names).cast(schema),
        "texts": pa.table(text_columns, names=SET_TEXTS_SCHEMA.names).cast(SET_TEXTS_SCHEMA),
        "shards": pa.Table.from_pylist([files[i] for i in shards.used.tolist()], SET_SHARDS_SCHEMA),
    }
    numbers = text_numbers.renumber(prompt_texts).tolist()
    entries = []
    for i, (prompt, ids, at) in enumerate(zip(prompts, images, prompt_images, strict=True)):
        numbered = shards.renumber(prompt_shards[i]).tolist()
        located = [
            {"id": id, "shard": shard, "row": row}
            for id, shard, row in zip(ids, numbered, latents.row[at].tolist(), strict=True)
        ]
        entries.append(_describe_prompt(prompt, numbers[2 * i], numbers[2 * i + 1], located))
    return TrainingSetTables(tables, left_out, entries, numbers[-1] if null else None)


def _describe_prompt(prompt: PlannedPrompt, text: int, negative: int, places: list[TableRow]) -> SetPrompt:
    """A validation prompt as stored in set.json. places: id, shard and row of the prompt's start image, or of each of
    its references."""
    stated = prompt.values() | {"text": text, "negative": negative, "condition": None}
    if prompt.condition:
        stated["condition"] = {key: places[0][key] for key in ("shard", "row")}
    if prompt.references:
        stated["references"] = places
    return SetPrompt.model_validate(stated)


class _Renumbering:
    """New numbers, from 0 in the order of first use, for the used numbers in range(size); -1 stays -1. size: end of the
    range. used: arrays of used numbers."""

    def __init__(self, size: int, used: Sequence[IntArray]) -> None:
        values = np.concatenate(used)
        values = values[values >= 0]
        first = np.empty(size, np.int64)
        first[values[::-1]] = np.arange(len(values))[::-1]  # for a repeated index, the last assignment wins
        self.used = values[first[values] == np.arange(len(values))]
        self._number = np.full(size + 1, -1, np.int64)
        self._number[self.used] = np.arange(len(self.used))

    def renumber(self, values: IntArray) -> IntArray:
        return self._number[values]


def _select_encoded(
    active: pa.Table, texts: EncodedMembers, samples: Mapping[str, EncodedMembers]
) -> tuple[pa.Table, list[TableRow]]:
    """The active samples that are encoded, and report rows for the samples that are left out.

    The table's "texts" and "null_text" are indices in the wanted texts (-1: no text). For each kind in `samples`, the
    table has a column with indices in the kind's wanted ids. Rejected texts are not in the lists of texts. A sample is
    left out if none of its texts remains, or if its null text, a reference, or its row of any kind was rejected.
    """
    lists = active.column("texts")
    null_texts, captions = texts.find(active.column("null_text")), texts.find(pc.list_flatten(lists))
    members = {kind: encoded.find(active.column("sample_id")) for kind, encoded in samples.items()}
    encoded = texts.is_encoded(captions)
    offsets = np.concatenate([[0], np.cumsum(encoded)])[_list_offsets(lists)]
    is_complete = ((null_texts < 0) | texts.is_encoded(null_texts)) & (np.diff(offsets) > 0)
    for kind, ids in members.items():
        is_complete &= samples[kind].is_encoded(ids)
    references = _find_references(active, samples["latents"])
    for ids in references.values():
        is_complete &= (ids < 0) | samples["latents"].is_encoded(ids)
    names = ("role", *GROUP_COLUMNS)
    columns = {name: active.column(name).combine_chunks().dictionary_encode() for name in names}
    columns |= {name: active.column(name).combine_chunks() for name in ("sample_id", "regularization")}
    columns["texts"] = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(captions[encoded]))
    columns |= {name: pa.array(ids) for name, ids in {"null_text": null_texts, **members, **references}.items()}
    left_out = []
    for row in active.filter(pa.array(~is_complete)).to_pylist():
        causes = [encoded.rejects.get(row["sample_id"]) for encoded in samples.values()]
        causes += [samples["latents"].rejects.get(id) for id in row.get("references") or ()]
        causes.append(texts.rejects.get(row["null_text"]))
        cause = next(filter(None, causes), None) or texts.rejects[row["texts"][0]]
        left_out.append(
            {"item": row["sample_id"], "path": row["path"], "reason": cause.reason, "message": cause.message}
        )
    return pa.table(columns).filter(pa.array(is_complete)), left_out


def _find_references(active: pa.Table, latents: EncodedMembers) -> dict[str, IntArray]:
    """Part -> (n,) indices of the active samples' references in the wanted ids; -1 if a sample has fewer references."""
    if "references" not in active.column_names or not len(active):
        return {}
    lists = active.column("references").combine_chunks()
    count = pc.max(pc.list_value_length(lists)).as_py()
    padded = pc.list_slice(lists, 0, count, return_fixed_size_list=True)
    return dict(zip(REFERENCE_PARTS, latents.find(padded.flatten()).reshape(-1, count).T, strict=False))


def _sort_order(rows: pa.Table) -> pa.Array:
    """(n,) row numbers in the order of the index. Equal samples keep the plan's order, which is by path."""
    group = np.zeros(rows.num_rows, np.int64)
    for name in ("role", *GROUP_COLUMNS):
        column = rows.column(name).combine_chunks()
        values = column.dictionary.to_pylist()
        ranks = {value: rank for rank, value in enumerate(INDEXED_ROLES if name == "role" else sorted(values))}
        group = group * len(ranks) + np.array([ranks[value] for value in values])[np.asarray(column.indices)]
    keys = pa.table({"group": group, "id": rows.column("sample_id")})
    return pc.sort_indices(keys, sort_keys=[("group", "ascending"), ("id", "ascending")])


def _require_prompts(
    prompts: list[PlannedPrompt], null: str | None, texts: EncodedMembers, latents: EncodedMembers
) -> None:
    """Raise LatentpressError if the null prompt or a validation prompt was rejected, because every run needs them."""
    needed: list[tuple[str, list[str], list[str]]] = [("the null prompt", [null], [])] if null else []
    for p in prompts:
        images = [p.condition] if p.condition else p.references
        needed.append((f"validation prompt {p.name}", [p.text, p.negative], images))
    for prompt, names, images in needed:
        rejects = [texts.rejects[name] for name in names if name in texts.rejects]
        rejects += [latents.rejects[name] for name in images if name in latents.rejects]
        if rejects:
            raise LatentpressError(
                f"{prompt} could not be encoded: {rejects[0].message}",
                "correct the prompt, then run `latentpress bucket` and the encoding stages with --retry-rejects",
            )


def _list_offsets(lists: pa.ChunkedArray | pa.Array) -> IntArray:
    """(n + 1,) offsets of n lists in their flattened values."""
    return np.concatenate([[0], np.cumsum(_to_int64(pc.list_value_length(lists)))])
