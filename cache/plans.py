"""Plan generations: plans/<generation>/, append-only, immutable once published.

A generation holds only the samples, texts and units that no earlier one had, and the whole list of what is
active. Its plan.json is written last: a folder without one does not exist. `key` is a hash of the settings that
made the plan, so a changed configuration finds no plan rather than a stale one, and an old one finds its own.
Tables stay tables: a plan of a million samples is read and compared without a Python object for each.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from cache import json_checks, table_checks
from cache.damage import DamageError, read_or_damage
from cache.layout import is_project_file
from cache.row_lookup import RowLookup
from cache.store import Store
from schemas.identity import hash_bytes, hash_json
from schemas.tables import ACTIVE_SCHEMA, SAMPLES_SCHEMA, TABLES_VERSION, TEXTS_SCHEMA, UNITS_SCHEMA

_SCHEMAS = {"samples": SAMPLES_SCHEMA, "texts": TEXTS_SCHEMA, "units": UNITS_SCHEMA, "active": ACTIVE_SCHEMA}
PLAN_TABLES = tuple(_SCHEMAS)
_CHECKS = {
    "samples": table_checks.check_samples,
    "texts": table_checks.check_texts,
    "units": table_checks.check_units,
    "active": table_checks.check_active,
}


@dataclass(frozen=True)
class Unit:
    """One shard's worth of work: `members` are sample or text ids, in the order in which they are encoded."""

    unit_id: str
    kind: str
    bucket: str
    members: tuple[str, ...]
    estimated_bytes: int


@dataclass(frozen=True)
class Plan:
    """A published plan. `info` is plan.json: key, parent, validation, null text, counts."""

    store: Store
    name: str
    info: dict[str, Any]

    @cached_property
    def active(self) -> pa.Table:
        """Table of schemas.tables.ACTIVE_SCHEMA, in the order of role, dataset and path."""
        return read_plan_table(self.store, self.name, "active")

    @cached_property
    def active_sample_ids(self) -> pa.Array:
        """Ids of the samples that are active, each once."""
        return pc.unique(self.active.column("sample_id"))

    @cached_property
    def active_text_ids(self) -> pa.Array:
        """Ids of the texts that active samples and the validation prompts need, each once."""
        named = [text for prompt in self.info["validation"] for text in (prompt["text"], prompt["negative"])]
        named += [self.info["null_text"]] if self.info["null_text"] else []
        null = self.active.column("null_text").drop_null()
        captions = pc.list_flatten(self.active.column("texts"))
        return pc.unique(pa.chunked_array([*captions.chunks, *null.chunks, pa.array(named, pa.string())], pa.string()))

    def units(self, kind: str) -> list[Unit]:
        """Units of this and all earlier generations with at least one active member, in plan order."""
        wanted = self.active_text_ids if kind == "text" else self.active_sample_ids
        units = []
        for name in _names_up_to(self.store, self.name):
            mine = _filter_kind(read_plan_table(self.store, name, "units"), kind)
            needed = np.zeros(mine.num_rows, bool)
            members = mine.column("members").combine_chunks()
            parents = np.asarray(pc.list_parent_indices(members))
            needed[parents[np.asarray(pc.is_in(members.flatten(), value_set=wanted))]] = True
            for row in mine.filter(pa.array(needed)).to_pylist():
                units.append(Unit(**{**row, "members": tuple(row["members"])}))
        return units

    @property
    def sample_table(self) -> pa.Table:
        """Table of schemas.tables.SAMPLES_SCHEMA over all generations up to this one, whether active or not."""
        return self._all("samples")

    @property
    def text_table(self) -> pa.Table:
        """Table of schemas.tables.TEXTS_SCHEMA over all generations up to this one, whether active or not."""
        return self._all("texts")

    @cached_property
    def samples(self) -> RowLookup:
        """sample_id -> row of `sample_table`."""
        return RowLookup(self.sample_table, "sample_id")

    @cached_property
    def texts(self) -> RowLookup:
        """text_id -> row of `text_table`."""
        return RowLookup(self.text_table, "text_id")

    @cached_property
    def active_rows(self) -> RowLookup:
        """sample_id -> row of schemas.tables.ACTIVE_SCHEMA: where the sample's files lie as of this plan."""
        return RowLookup(self.active, "sample_id")

    def own_table(self, what: str) -> pa.Table:
        """Its own "samples", "texts", "units" or "active", without those of earlier generations."""
        return read_plan_table(self.store, self.name, what)

    @property
    def is_complete(self) -> bool:
        """Whether it and earlier generations hold all that is active in it: not where one of those is gone."""
        units = self._all("units")
        held = (
            (self.active_sample_ids, self._all("samples").column("sample_id")),
            (self.active_text_ids, self._all("texts").column("text_id")),
            (self.active_sample_ids, pc.list_flatten(_filter_kind(units, "latents").column("members"))),
            (self.active_text_ids, pc.list_flatten(_filter_kind(units, "text").column("members"))),
        )
        return all(not len(ids) or pc.all(pc.is_in(ids, value_set=pa.array(there))).as_py() for ids, there in held)

    def _all(self, what: str) -> pa.Table:
        # Generations of an older TABLES_VERSION lack columns; none of their ids is asked for.
        tables = [read_plan_table(self.store, name, what) for name in _names_up_to(self.store, self.name)]
        return pa.concat_tables(tables, promote_options="default")


def list_plans(store: Store) -> list[str]:
    """Published generations, oldest first."""
    listed = (name for name in store.list_names("plans") if is_project_file(f"plans/{name}"))
    return sorted(name.split("/")[0] for name in listed if name.endswith("/plan.json"))


def _filter_kind(units: pa.Table, kind: str) -> pa.Table:
    return units.filter(pc.equal(units.column("kind"), kind))


def read_plan_table(store: Store, name: str, what: str) -> pa.Table:
    """The table `what` of generation `name`: one of PLAN_TABLES. DamageError where it is not as it was written."""
    rel = f"plans/{name}/{what}.arrow"
    try:
        return store.read_table(rel, _CHECKS[what])
    except FileNotFoundError as error:
        raise DamageError(store.path(rel), "the file is missing") from error


def find_damage(store: Store, name: str) -> DamageError | None:
    """What is wrong with generation `name`, the first thing that is found."""
    try:
        load_plan(store, name)
        for what in PLAN_TABLES:
            read_plan_table(store, name, what)
    except DamageError as found:
        return found
    return None


def quarantine(store: Store, name: str) -> str:
    """Move a generation, the file that makes it exist first, to damaged/plans/; where it lies then."""
    taken, number = {kept.partition("/")[0] for kept in store.list_names("damaged/plans")}, 1
    while f"{name}.{number}" in taken:
        number += 1
    kept = f"damaged/plans/{name}.{number}"
    for file in sorted(store.list_names(f"plans/{name}"), key=lambda file: file != "plan.json"):
        if is_project_file(f"plans/{name}/{file}"):
            store.move(f"plans/{name}/{file}", f"{kept}/{file}")
    store.remove_empty_folders(f"plans/{name}")
    return kept


def _names_up_to(store: Store, name: str) -> list[str]:
    return [other for other in list_plans(store) if other <= name]


def load_plan(store: Store, name: str) -> Plan:
    rel = f"plans/{name}/plan.json"
    info = store.read_json(rel)
    read_or_damage(store.path(rel), lambda: _check_info(info), "its values can't be right")
    return Plan(store, name, info)


def _check_info(info: dict[str, Any]) -> None:
    """ValueError or KeyError where a plan.json lacks what is followed."""
    json_checks.check_name(info["key"], "key")
    texts = [] if info["null_text"] is None else [info["null_text"]]
    for entry in json_checks.check_list(info["validation"], "validation"):
        prompt = json_checks.check_object(entry, "a validation prompt")
        texts += [prompt["text"], prompt["negative"]]
        texts += [] if prompt["condition"] is None else [prompt["condition"]]
        for key in ("name", "prompt", "negative_prompt", "bucket"):
            json_checks.check_text(prompt[key], key)
    for id in texts:
        json_checks.check_checksum(id, "an id")


def newest_plan(store: Store, key: str) -> Plan | None:
    """The newest generation made by the settings that `key` stands for, or None."""
    for name in reversed(list_plans(store)):
        generation = load_plan(store, name)
        if generation.info["key"] == key:
            return generation
    return None


def all_units(store: Store) -> pa.Table:
    """Table of schemas.tables.UNITS_SCHEMA: the units of all sound generations, whatever settings made them."""
    sound = [name for name in list_plans(store) if find_damage(store, name) is None]
    tables = [UNITS_SCHEMA.empty_table(), *(read_plan_table(store, name, "units") for name in sound)]
    return pa.concat_tables(tables, promote_options="default")


def planned_ids(store: Store, kind: str) -> pa.Array:
    """Ids of every text or sample that some unit of some generation holds."""
    found = []
    for name in list_plans(store):
        found += pc.list_flatten(_filter_kind(read_plan_table(store, name, "units"), kind).column("members")).chunks
    return pc.unique(pa.chunked_array(found, pa.string()))


def publish_plan(
    store: Store,
    *,
    key: str,
    samples: pa.Table,
    texts: pa.Table,
    units: pa.Table,
    active: pa.Table,
    info: dict[str, Any],
) -> Plan:
    """Write a generation and return it; when the newest of this key says the same already, return that one.

    Names are <sequence>-<hash of content>: two machines that plan the same at the same time write the same
    files under the same name.
    """
    current = newest_plan(store, key)
    tables = {"samples": samples, "texts": texts, "units": units, "active": active}
    tables = {name: table.cast(_SCHEMAS[name]) for name, table in tables.items()}
    tables["active"] = tables["active"].combine_chunks()  # it is compared and hashed
    if current is not None and not (samples.num_rows or texts.num_rows or units.num_rows):
        same = all(current.info[name] == plain for name, plain in json.loads(json.dumps(info)).items())
        if same and current.active.equals(tables["active"]) and current.is_complete:
            return current
    existing = list_plans(store)
    parent = existing[-1] if existing else None
    content = hash_bytes(
        hash_json({"key": key, "info": info, "parent": parent}).encode(), _HashFile.of(tables["active"])
    )
    # After the newest, whatever older ones were removed.
    number = int(parent.partition("-")[0]) + 1 if parent else 1
    name = f"{number:06d}-{content[:12]}"
    for what, table in tables.items():
        store.write_table(f"plans/{name}/{what}.arrow", table)
    record = {"format_version": TABLES_VERSION, "key": key, "parent": parent, "content": content, **info}
    store.publish_json(f"plans/{name}/plan.json", record)
    return load_plan(store, name)


class _HashFile:
    """A file that keeps nothing but the hash of what is written to it."""

    closed = False

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        self._state.update(data)
        return len(data)

    def flush(self) -> None: ...

    def close(self) -> None: ...

    @classmethod
    def of(cls, table: pa.Table) -> bytes:
        file = cls()
        with pa.ipc.new_stream(pa.PythonFile(file, "w"), table.schema) as writer:
            writer.write_table(table)
        return file._state.digest()
