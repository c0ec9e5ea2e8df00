"""A training set as the trainer reads it: the joined index over text and latent shards.

Tables are memory-mapped and shards are opened as they are needed, at most OPEN_SHARDS at a time, so what stays in
memory does not depend on how many samples there are. Every row read is checked against its checksum and against
the identity that the index expects there.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache import generations
from cache.plan import Ints, Span
from cache.shard import Readers, Row
from cache.store import Store
from cache.tensors import Array
from schemas.errors import USAGE, LatentpressError
from schemas.tables import TABLES_VERSION

ROLES = ("train", "eval")
OPEN_SHARDS = 32  # each holds a file handle, a memory map and its list of ids


class SetError(LatentpressError):
    """There is no such training set, or it is of another family, task or format."""

    exit_code = USAGE


@dataclass(frozen=True)
class Sample:
    """One sample. latent, condition: (C, T, h, w). text: "embeds" (L, D) and, with CLIP, "pooled" (D2,)."""

    id: str
    latent: Array
    condition: Array | None
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
        self._index, self._texts, self._shards = (
            store.read_table(f"sets/{set_id}/{name}.arrow") for name in ("index", "texts", "shards")
        )
        self._readers = Readers(store, OPEN_SHARDS)

    @classmethod
    def open(cls, store: Store, set_id: str, family: str, task: str) -> "TrainSet":
        """The set `set_id`, or the newest of this family and task for "current". Raises SetError otherwise."""
        if set_id == "current":
            set_id = _current(store, family, task)
        rel = f"sets/{set_id}/set.json"
        if not store.exists(rel):
            known = sorted({name.split("/")[0] for name in store.names("sets") if name.endswith("/set.json")})
            raise SetError(
                f"no training set {set_id!r} under {store.path('sets')}; there are: {', '.join(known) or 'none'}",
                "Correct train.set, or run `latentpress index`.",
            )
        meta = json.loads(store.read_bytes(rel))
        _check(meta, set_id, family, task)
        return cls(store, set_id, meta)

    def __len__(self) -> int:
        """Samples to train on."""
        return sum(span.count for span in self.spans)

    @cached_property
    def spans(self) -> list[Span]:
        """The rows to train on as `Plan` takes them: runs of one bucket, dataset, repeats and weight."""
        keys = ("role", "bucket", "dataset", "repeats", "weight")
        runs = _runs(self._index, keys)
        order = [(ROLES.index(role), *values) for (role, *values), _, _ in runs]
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

    def eval_choice(self, count: int) -> tuple[list[int], str]:
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

    def alternatives(self, rows: Ints) -> Ints:
        """(n,) how many captions each of `rows` has."""
        return np.array([len(self._index.column("texts")[int(row)]) for row in rows], dtype=np.int64)

    def sample(self, row: int, caption: int = 0, dropped: bool = False) -> Sample:
        """Row `row` with its caption number `caption`, or with the null prompt where it is `dropped`."""
        entry = self._entry(self._index, row)
        stored = self._read(entry["shard"], entry["row"], entry["sample_id"])
        text = self._null_text(entry) if dropped else entry["texts"][caption]
        tensors, words = stored.tensors, self._text(text)
        return Sample(stored.id, tensors["latent"], tensors.get("condition"), words, entry["regularisation"])

    @property
    def validation(self) -> list[ValidationPrompt]:
        """The validation prompts of the configuration that the set was made with, everything read and checked."""
        prompts = []
        for entry in self.meta["validation"]:
            given = entry["condition"]
            condition = self._read(given["shard"], given["row"], None).tensors["latent"] if given else None
            names = (entry["name"], entry["prompt"], entry["negative_prompt"], entry["bucket"])
            texts = (self._text(entry["text"]), self._text(entry["negative"]))
            prompts.append(ValidationPrompt(*names, *texts, condition))
        return prompts

    def newer_generation(self) -> str | None:
        """The newest plan of the settings this set was planned by, if the set is older; None where it is not."""
        mine, published = self.meta["generation"], generations.names(self.store)
        if mine not in published:
            return None  # the set was copied here without its plans
        newest = generations.newest(self.store, generations.load(self.store, mine).info["key"])
        return newest.name if newest is not None and newest.name > mine else None

    def close(self) -> None:
        self._readers.close()

    def _entry(self, table: pa.Table, row: int) -> dict[str, Any]:
        return {name: table.column(name)[row].as_py() for name in table.column_names}

    def _null_text(self, entry: dict[str, Any]) -> int:
        own = entry["null_text"]
        number = self.meta["null_text"] if own is None else own
        if number is None:
            raise SetError(f"set {self.id} has no null prompt for {entry['sample_id']}", "Run `latentpress index`.")
        return number

    def _text(self, number: int) -> dict[str, Array]:
        entry = self._entry(self._texts, number)
        tensors = self._read(entry["shard"], entry["row"], entry["text_id"]).tensors
        return {name: array for name, array in tensors.items() if array is not None}

    def _read(self, shard: int, row: int, expected: str | None) -> Row:
        """Row `row` of shard number `shard`, checksum verified; it must be the one named `expected`."""
        path = self._shards.column("path")[shard].as_py()
        stored = self._readers.read(path, row)
        if expected is not None and stored.id != expected:
            raise SetError(
                f"row {row} of {self.store.path(path)} is {stored.id}; set {self.id} expects {expected} there",
                "The shard was replaced after the set was made: run `latentpress index`.",
            )
        return stored


def _runs(table: pa.Table, keys: tuple[str, ...]) -> list[tuple[tuple, int, int]]:
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


def _current(store: Store, family: str, task: str) -> str:
    rel = f"sets/current-{family}-{task}.json"
    if not store.exists(rel):
        others = sorted(
            name.removeprefix("current-").removesuffix(".json")
            for name in store.names("sets")
            if name.startswith("current-")
        )
        raise SetError(
            f"no training set for {family} {task} under {store.path('sets')}; there are sets for: "
            f"{', '.join(others) or 'none'}",
            "Run `latentpress index` (or `latentpress run`, which does every stage before it).",
        )
    return json.loads(store.read_bytes(rel))["id"]


def _check(meta: dict[str, Any], set_id: str, family: str, task: str) -> None:
    if meta["format_version"] != TABLES_VERSION:
        raise SetError(
            f"set {set_id} has format version {meta['format_version']}; this release reads {TABLES_VERSION}",
            "Run `latentpress index` with this release.",
        )
    if (meta["family"], meta["task"]) != (family, task):
        raise SetError(
            f"set {set_id} was made for {meta['family']} {meta['task']}; the configuration trains {family} {task}",
            "Correct train.set or model.flavour.",
        )
