"""A training set as the trainer reads it: the joined index over text and latent shards.

Tables are memory-mapped and shards are opened as they are needed, at most MAX_OPEN_SHARDS at a time, so what stays in
memory does not depend on how many samples there are. Every row read is checked against its checksum and against
the identity that the index expects there.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache import json_checks, plans, table_checks
from cache.damage import DamageError, read_or_damage
from cache.json_checks import check_object
from cache.schedule import Ints, Span
from cache.shard import ShardRow
from cache.shard_io import ReaderPool
from cache.store import Store
from cache.table_checks import SET_ROLES
from cache.tensor_checks import SAMPLE, find_tensor_problem, kind_of
from cache.tensors import Array
from schemas.config.section import NAME_PATTERN
from schemas.errors import INCOMPLETE, USAGE, LatentpressError
from schemas.tables import further_kinds

TABLE_CHECKS = {
    "index": table_checks.check_index,
    "texts": table_checks.check_set_texts,
    "shards": table_checks.check_set_shards,
}
PROMPT_NAME_PATTERN = re.compile(NAME_PATTERN, re.ASCII)  # files are called by it
MAX_OPEN_SHARDS = 32  # each holds a file handle, a memory map and its list of ids


class SetError(LatentpressError):
    """There is no such training set, or it is of another family, task or format."""

    exit_code = USAGE


class SetNotFound(SetError):
    """The set is still to be made."""

    exit_code = INCOMPLETE


@dataclass(frozen=True)
class Sample:
    """One sample. tensors, text: its own and those of one caption, by the names that the encoding stages give them:
    "latent", "condition" (C, T, h, w), "embeds" (L, D), "pooled" (D2,), and whatever else a stage writes."""

    id: str
    tensors: dict[str, Array]
    text: dict[str, Array]
    regularisation: bool = False  # there to keep the model as it was, not to teach it


@dataclass(frozen=True)
class ValidationPrompt:
    """A prompt to denoise while training. bucket: "WxH@F" of the result. condition: (C, 1, h, w) or None."""

    name: str
    prompt: str
    negative_prompt: str
    bucket: str
    text: dict[str, Array]
    negative: dict[str, Array]
    condition: Array | None


class TrainSet:
    """sets/<id> of a store. `meta` is set.json. Rows below `len` are trained on, `eval_rows` are held out.

    Reading a damaged row, or a missing shard, raises DamageError, which names shard, row and what rebuilds it.
    Several threads may read, in turn.
    """

    def __init__(self, store: Store, set_id: str, meta: dict[str, Any]):
        self.store, self.id, self.meta = store, set_id, meta
        self.recipe_differences: list[str] = []  # how it differs from what the configuration that names it would make
        #: Of texts, as the transformer reads them. Once they are given, `sample` and `validation` check that what they
        #: give can be trained on.
        self.text_widths: dict[str, int] | None = None
        self._index, self._texts, self._shards = (read_set_table(store, set_id, name) for name in TABLE_CHECKS)
        self._attempt("index.arrow", lambda: table_checks.check_set_references(self._index, self._texts, self._shards))
        self._attempt("set.json", lambda: check_set_json(meta, self._texts.num_rows, self._shards.num_rows))
        self._readers = ReaderPool(store, MAX_OPEN_SHARDS)

    def _attempt(self, file: str, check: Callable[[], object]) -> None:
        read_or_damage(self.store.path(f"sets/{self.id}/{file}"), check, "its values can't be right")

    def __len__(self) -> int:
        """Samples to train on."""
        return sum(span.count for span in self.spans)

    @cached_property
    def spans(self) -> list[Span]:
        """The rows to train on as `BatchSchedule` takes them: runs of one bucket, dataset, repeats and weight."""
        keys = ("role", "bucket", "dataset", "repeats", "weight")
        runs = _find_runs(self._index, keys)
        order = [(SET_ROLES.index(role), *values) for (role, *values), _, _ in runs]
        if any(later <= earlier for earlier, later in pairwise(order)):
            raise SetError(f"the index of set {self.id} is not sorted by {', '.join(keys)}", "Run `latentpress index`.")
        return [
            Span(bucket, start, stop - start, repeats, weight)
            for (role, bucket, _, repeats, weight), start, stop in runs
            if role == "train"
        ]

    @property
    def buckets(self) -> dict[str, range]:
        """bucket -> its row numbers, of those to train on."""
        found: dict[str, range] = {}
        for span in self.spans:
            first = found.get(span.bucket, range(span.start, 0)).start
            found[span.bucket] = range(first, span.start + span.count)
        return found

    @property
    def eval_rows(self) -> range:
        """The rows that are held out for evaluation."""
        return range(len(self), self._index.num_rows)

    @property
    def regularisation(self) -> int:
        """How many samples to train on are regularisation data."""
        return pc.sum(self._index.column("regularisation").slice(0, len(self))).as_py() or 0

    def choose_eval_rows(self, count: int) -> tuple[list[int], str]:
        """At most `count` rows to measure a loss on, always the same, and what they are: "held-out samples", no
        sample twice, or, where the set has none, "training samples", spread evenly over the index.

        Of held-out samples they are those with the smallest ids. Ids are hashes, so these lie evenly among all, and
        data that is added displaces few of them.
        """
        if not self.eval_rows:
            count = min(count, len(self))
            return [(2 * number + 1) * len(self) // (2 * count) for number in range(count)], "training samples"
        held_out = self._index.column("sample_id").slice(len(self)).combine_chunks()
        ids = held_out.unique()
        chosen = ids.take(pc.select_k_unstable(ids, min(count, len(ids)), [("", "ascending")]))
        rows = pc.index_in(chosen, value_set=held_out).to_pylist()
        return sorted(len(self) + row for row in rows), "held-out samples"

    def caption_counts(self, rows: Ints) -> Ints:
        """(n,) how many captions each of `rows` has."""
        return np.array([len(self._index.column("texts")[int(row)]) for row in rows], dtype=np.int64)

    @cached_property
    def kinds(self) -> list[str]:
        """Kinds of shards that hold more of each sample than its latents, such as "vision"."""
        return further_kinds(self._index.column_names)

    def sample(self, row: int, caption: int = 0, dropped: bool = False) -> Sample:
        """Row `row` with its caption number `caption`, or with the null prompt where it is `dropped`."""
        text = "null" if dropped else f"text{caption}"
        parts = self.part_rows(row, (SAMPLE, *self.kinds, text))
        self._check(parts, self._index.column("bucket")[row].as_py(), partial(self._place, row))
        tensors = dict(parts[SAMPLE].tensors)
        for kind in self.kinds:
            if both := tensors.keys() & parts[kind].tensors.keys():
                raise SetError(
                    f"{', '.join(sorted(both))} of {parts[kind].id} stands in several kinds of shards, {kind} the last",
                    "Name the tensors of each encoding stage differently, and encode again.",
                )
            tensors |= parts[kind].tensors
        regularisation = self._index.column("regularisation")[row].as_py()
        return Sample(parts[SAMPLE].id, tensors, parts[text].tensors, regularisation)

    def _check(self, parts: Mapping[str, ShardRow], bucket: str, place: Callable[[str], tuple[int, int]]) -> None:
        """DamageError where a part can't be trained on, once `widths` are given. place: its shard and row."""
        for name, part in parts.items() if self.text_widths is not None else ():
            if found := find_tensor_problem(name, part, bucket, self.meta, self.text_widths or {}):
                shard, row = place(name)
                raise DamageError(self._path(shard), found, row, part.id)

    @property
    def validation(self) -> list[ValidationPrompt]:
        """The validation prompts of the configuration that the set was made with, everything read and checked."""
        prompts = []
        for number, entry in enumerate(self.meta["validation"]):
            parts = self.prompt_rows(number)
            self._check(parts, entry["bucket"], partial(self._prompt_place, number))
            condition = parts["condition"].tensors["latent"] if "condition" in parts else None
            names = (entry["name"], entry["prompt"], entry["negative_prompt"], entry["bucket"])
            prompts.append(ValidationPrompt(*names, parts["text"].tensors, parts["negative"].tensors, condition))
        return prompts

    def part_names(self, row: int) -> list[str]:
        """What belongs to row `row`: "sample", further kinds, "text0", "text1", ... and, where there is a null prompt,
        "null"."""
        entry = self._entry(self._index, row)
        texts = [f"text{i}" for i in range(len(entry["texts"]))]
        return [SAMPLE, *self.kinds, *texts, *(["null"] if self._null(entry) is not None else [])]

    def part_rows(self, row: int, names: Collection[str] | None = None, verify: bool = False) -> dict[str, ShardRow]:
        """Rows of shards, checksums verified, that belong to row `row`: those in `names`, by default all of them.
        verify: check again what an export says of each part of a row; in a root each is a row of its own."""
        names = self.part_names(row) if names is None else names
        return {name: self._read(*self._place(row, name), self.part_id(row, name)) for name in names}

    def part_id(self, row: int, name: str) -> str:
        """The id of a part of row `row`: of the sample, or of a text."""
        entry = self._entry(self._index, row)
        return self.text_id(self._text_number(entry, name)) if kind_of(name) == "text" else entry["sample_id"]

    def _place(self, row: int, name: str) -> tuple[int, int]:
        """Shard and row of a part of row `row`."""
        entry = self._entry(self._index, row)
        if kind_of(name) == "text":
            return self._text_place(self._text_number(entry, name))
        kind = "" if name == SAMPLE else f"{name}_"
        return entry[f"{kind}shard"], entry[f"{kind}row"]

    def prompt_rows(self, number: int, verify: bool = False) -> dict[str, ShardRow]:
        """The rows of validation prompt `number`: "text", "negative" and, where it has an image, "condition"."""
        entry = self.meta["validation"][number]
        ids: dict[str, str | None] = {name: self.text_id(entry[name]) for name in ("text", "negative")}
        ids |= {"condition": None} if entry["condition"] else {}
        return {name: self._read(*self._prompt_place(number, name), id) for name, id in ids.items()}

    def _prompt_place(self, number: int, name: str) -> tuple[int, int]:
        """Shard and row of a part of validation prompt `number`."""
        place = self.meta["validation"][number][name]
        return (place["shard"], place["row"]) if name == "condition" else self._text_place(place)

    @property
    def groups(self) -> list[tuple[str, str, int, int]]:
        """(role, bucket, first row, row after the last) of the runs of rows that agree in role and bucket."""
        return [
            (role, bucket, start, stop) for (role, bucket), start, stop in _find_runs(self._index, ("role", "bucket"))
        ]

    @property
    def tables(self) -> dict[str, pa.Table]:
        """index, texts and shards, as schemas.tables has them."""
        return {"index": self._index, "texts": self._texts, "shards": self._shards}

    def find_newer_plan(self) -> str | None:
        """The newest plan of the settings this set was planned by, if the set is older; None where it is not."""
        mine, published = self.meta["generation"], plans.list_plans(self.store)
        if mine not in published:
            return None  # the set was copied here without its plans
        newest = plans.newest_plan(self.store, plans.load_plan(self.store, mine).info["key"])
        return newest.name if newest is not None and newest.name > mine else None

    def close(self) -> None:
        self._readers.close()

    def _entry(self, table: pa.Table, row: int) -> dict[str, Any]:
        return {name: table.column(name)[row].as_py() for name in table.column_names}

    def _null(self, entry: dict[str, Any]) -> int | None:
        return self.meta["null_text"] if entry["null_text"] is None else entry["null_text"]

    def _text_number(self, entry: dict[str, Any], name: str) -> int:
        """Which text the part `name` of a row is: "null", "text0", "text1", ..."""
        number = self._null(entry) if name == "null" else entry["texts"][int(name[4:])]
        if number is None:
            raise SetError(f"set {self.id} has no null prompt for {entry['sample_id']}", "Run `latentpress index`.")
        return number

    def text_id(self, number: int) -> str:
        return self._texts.column("text_id")[number].as_py()

    def _text_place(self, number: int) -> tuple[int, int]:
        return self._texts.column("shard")[number].as_py(), self._texts.column("row")[number].as_py()

    def _path(self, shard: int) -> str:
        return self.store.path(self._shards.column("path")[shard].as_py())

    def _read(self, shard: int, row: int, expected: str | None) -> ShardRow:
        """Row `row` of shard number `shard`, checksum verified; it must be the one named `expected`."""
        stored = self._readers.read(self._shards.column("path")[shard].as_py(), row)
        if expected is not None and stored.id != expected:
            raise SetError(
                f"row {row} of {self._path(shard)} is {stored.id}; set {self.id} expects {expected} there",
                "The shard was replaced after the set was made: run `latentpress index`.",
            )
        return stored


def read_set_table(store: Store, id: str, name: str) -> pa.Table:
    """The table `name` of a set, its values checked: "index", "texts" or "shards"."""
    rel = f"sets/{id}/{name}.arrow"
    try:
        return store.read_table(rel, TABLE_CHECKS[name])
    except FileNotFoundError as error:
        raise DamageError(store.path(rel), "the file is missing") from error


def check_set_json(meta: Mapping[str, Any], texts: int, shards: int) -> None:
    """Raises ValueError, or another of PARSE_ERRORS, where set.json refers to texts or shards that the set can't have.

    texts, shards: how many of them the set has.
    """
    numbers = [] if meta["null_text"] is None else [meta["null_text"]]
    for entry in json_checks.check_list(meta["validation"], "validation"):
        prompt = check_object(entry, "a validation prompt")
        if not PROMPT_NAME_PATTERN.fullmatch(json_checks.check_name(prompt["name"], "the name of a validation prompt")):
            raise ValueError(f"a validation prompt is called {prompt['name']!r}")
        json_checks.check_name(prompt["bucket"], "the bucket of a validation prompt")
        numbers += [prompt["text"], prompt["negative"]]
        for key in ("prompt", "negative_prompt"):
            json_checks.check_text(prompt[key], key)
        if prompt["condition"] is not None:
            place = check_object(prompt["condition"], "a condition")
            json_checks.check_count(place["row"], "the row of a condition")
            if json_checks.check_count(place["shard"], "the shard of a condition") >= shards:
                raise ValueError(f"a condition in shard {place['shard']} of {shards}")
    if any(json_checks.check_count(number, "the number of a text") >= texts for number in numbers):
        raise ValueError(f"it names texts beyond the {texts} that there are")


def _find_runs(table: pa.Table, keys: tuple[str, ...]) -> list[tuple[tuple, int, int]]:
    """(values of `keys`, first row, row after the last) of each run of rows that agree in them."""
    bounds = {0, table.num_rows}
    for key in keys:
        begin = 0
        for chunk in table.column(key).chunks:
            bounds.update(begin + end for end in pc.run_end_encode(chunk).run_ends.to_pylist())
            begin += len(chunk)
    runs: list[tuple[tuple, int, int]] = []
    for start, stop in pairwise(sorted(bounds)):
        values = tuple(table.column(key)[start].as_py() for key in keys)
        if runs and runs[-1][0] == values:  # a chunk ended within the run
            start = runs.pop()[1]
        runs.append((values, start, stop))
    return runs
