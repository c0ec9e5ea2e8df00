"""Plan generations: plans/<generation>/, append-only, immutable once published.

A generation holds only the samples, texts and units that no earlier one had, and the whole list of what is
active. Its plan.json is written last: a folder without one does not exist. `key` is a hash of the settings that
made the plan, so a changed configuration finds no plan rather than a stale one, and an old one finds its own.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from cache.store import Store
from schemas.errors import LatentpressError
from schemas.identity import hash_bytes, hash_json
from schemas.tables import ACTIVE, FORMAT_VERSION, SAMPLES, TEXTS, UNITS

Row = dict[str, Any]


@dataclass(frozen=True)
class Unit:
    """One shard's worth of work: `members` are sample or text ids, in the order in which they are encoded."""

    unit_id: str
    kind: str
    bucket: str
    members: tuple[str, ...]
    estimated_bytes: int


@dataclass(frozen=True)
class Generation:
    """A published plan. `info` is plan.json: key, parent, validation, null text, counts."""

    store: Store
    name: str
    info: dict[str, Any]

    @cached_property
    def active(self) -> list[Row]:
        """Rows of schemas.tables.ACTIVE."""
        return _table(self.store, self.name, "active")

    @cached_property
    def active_samples(self) -> set[str]:
        return {row["sample_id"] for row in self.active}

    @cached_property
    def active_texts(self) -> set[str]:
        texts = {text for row in self.active for text in row["texts"]}
        texts |= {row["null_text"] for row in self.active if row["null_text"]}
        for prompt in self.info["validation"]:
            texts |= {prompt["text"], prompt["negative"]}
        return texts | ({self.info["null_text"]} if self.info["null_text"] else set())

    def units(self, kind: str) -> list[Unit]:
        """Units of this and all earlier generations with at least one active member, in plan order."""
        wanted = self.active_texts if kind == "text" else self.active_samples
        units = []
        for name in _up_to(self.store, self.name):
            for row in _table(self.store, name, "units"):
                if row["kind"] == kind and not wanted.isdisjoint(row["members"]):
                    units.append(Unit(**{**row, "members": tuple(row["members"])}))
        return units

    @cached_property
    def samples(self) -> dict[str, Row]:
        """sample_id -> row of schemas.tables.SAMPLES, over all generations up to this one."""
        return self._rows("samples", "sample_id")

    @cached_property
    def texts(self) -> dict[str, Row]:
        """text_id -> row of schemas.tables.TEXTS, over all generations up to this one."""
        return self._rows("texts", "text_id")

    def _rows(self, table: str, key: str) -> dict[str, Row]:
        rows: dict[str, Row] = {}
        for name in _up_to(self.store, self.name):
            for row in _table(self.store, name, table):
                rows.setdefault(row[key], row)
        return rows


def names(store: Store) -> list[str]:
    """Published generations, oldest first."""
    return sorted(name.split("/")[0] for name in store.names("plans") if name.endswith("/plan.json"))


def _table(store: Store, name: str, table: str) -> list[Row]:
    try:
        return store.read_table(f"plans/{name}/{table}.arrow").to_pylist()
    except FileNotFoundError as error:
        raise _broken(store, name, f"no {table}.arrow") from error


def _broken(store: Store, name: str, problem: str) -> LatentpressError:
    return LatentpressError(
        f"the plan {store.path(f'plans/{name}')} has {problem}",
        "remove that folder and run `latentpress bucket`; shards of the same units are found again",
    )


def _up_to(store: Store, name: str) -> list[str]:
    return [other for other in names(store) if other <= name]


def load(store: Store, name: str) -> Generation:
    rel = f"plans/{name}/plan.json"
    try:
        return Generation(store, name, json.loads(store.read_bytes(rel)))
    except ValueError as error:
        raise _broken(store, name, f"a plan.json that is no JSON ({error})") from error


def newest(store: Store, key: str) -> Generation | None:
    """The newest generation made by the settings that `key` stands for, or None."""
    for name in reversed(names(store)):
        generation = load(store, name)
        if generation.info["key"] == key:
            return generation
    return None


def planned(store: Store, kind: str) -> set[str]:
    """Ids of every text or sample that some unit of some generation holds."""
    ids: set[str] = set()
    for name in names(store):
        for row in _table(store, name, "units"):
            if row["kind"] == kind:
                ids.update(row["members"])
    return ids


def publish(
    store: Store,
    *,
    key: str,
    samples: list[Row],
    texts: list[Row],
    units: list[Row],
    active: list[Row],
    info: dict[str, Any],
) -> Generation:
    """Write a generation and return it; when the newest of this key says the same already, return that one.

    Names are <sequence>-<hash of content>: two machines that plan the same at the same time write the same
    files under the same name.
    """
    active = sorted(active, key=lambda row: (row["role"], row["dataset"], row["path"], row["sample_id"]))
    content = hash_json({"key": key, "active": active, "info": info})
    current = newest(store, key)
    if current is not None and current.info["content"] == content and not (samples or texts or units):
        return current
    existing = names(store)
    parent = existing[-1] if existing else None
    # After the newest, whatever older ones were removed.
    number = int(parent.partition("-")[0]) + 1 if parent else 1
    name = f"{number:06d}-{hash_bytes((parent or '').encode(), content.encode())[:12]}"
    for table, schema, rows in (
        ("samples", SAMPLES, samples),
        ("texts", TEXTS, texts),
        ("units", UNITS, units),
        ("active", ACTIVE, active),
    ):
        store.write_table(f"plans/{name}/{table}.arrow", pa.Table.from_pylist(rows, schema=schema))
    record = {"format_version": FORMAT_VERSION, "key": key, "parent": parent, "content": content, **info}
    store.publish_bytes(f"plans/{name}/plan.json", json.dumps(record, indent=1, sort_keys=True).encode())
    return load(store, name)
