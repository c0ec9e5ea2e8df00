"""Plan generations: plans/<generation>/, append-only, immutable once published.

A generation holds the complete list of active samples, and the samples, texts and units that earlier generations lack.
plan.json names the earlier generations, at most MAX_EARLIER; the next generation then holds everything, so that a plan
is read with a bounded number of requests. plan.json is written last: a folder without one is not a plan.
`key` is a hash of the settings that made the plan, so a changed configuration finds no stale plan, and a restored one
finds its own. Everything stays in tables: a plan of a million samples is read and compared without a Python object for
each sample."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import AfterValidator, Field

from cache.sets.table_checks import check_columns
from cache.store import json_checks
from cache.store.arrow_ipc import hash_table
from cache.store.damage import DamageError, as_damage
from cache.store.layout import is_project_file
from cache.store.store import Store
from schemas.errors import LatentpressError
from schemas.identity import hash_bytes, hash_json, id_prefixes
from schemas.tables import TABLES_VERSION, UNITS_SCHEMA, plan_schema

PLAN_TABLES = ("samples", "texts", "units", "active")
_CHECKS = {name: partial(check_columns, partial(plan_schema, name)) for name in PLAN_TABLES}
KINDS = {"items": ("items",), "samples": ("latents", "text")}  # kind of plans -> kinds of their units
MAX_EARLIER = 8  # earlier generations that are read with a plan


class RowLookup(Mapping[str, dict[str, Any]]):
    """Rows of `table` by the 32 hex digits in its column `key`; for equal ids, the first row. Rows are read one at
    a time: 16 bytes of memory a row and no Python objects."""

    def __init__(self, table: pa.Table, key: str) -> None:
        self._table, self._key = table, key
        prefixes = id_prefixes(table.column(key))
        self._order = np.argsort(prefixes, kind="stable")
        self._prefixes = prefixes[self._order]

    def __getitem__(self, name: str) -> dict[str, Any]:
        try:
            prefix = np.uint64(int(name[:16], 16))
        except ValueError as error:  # not an id
            raise KeyError(name) from error
        first, end = (np.searchsorted(self._prefixes, prefix, side) for side in ("left", "right"))
        for number in self._order[first:end].tolist():
            row = self._table.slice(number, 1)
            if row.column(self._key)[0].as_py() == name:
                return row.to_pylist()[0]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        """Every id in the table's order, repeated ids included."""
        for chunk in self._table.column(self._key).chunks:
            yield from chunk.to_pylist()

    def __len__(self) -> int:
        return self._table.num_rows


class PlanOutdated(LatentpressError):
    """Another plan was published after the tables of this plan were made, so the tables must be made again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "run `latentpress bucket` again, one at a time")


@dataclass(frozen=True)
class Unit:
    """The work of one shard. members: sample or text ids, in the order in which they are encoded."""

    unit_id: str
    kind: str
    bucket: str
    members: tuple[str, ...]
    estimated_bytes: int


@dataclass(frozen=True)
class Plan:
    """A published plan. info: plan.json."""

    store: Store
    name: str
    info: "PlanRecord"

    @cached_property
    def active(self) -> pa.Table:
        """Table of schemas.tables.ACTIVE_SCHEMA, sorted by role, dataset and path."""
        return read_plan_table(self.store, self.name, "active")

    @cached_property
    def active_sample_ids(self) -> pa.Array:
        """Distinct ids of the active samples."""
        return pc.unique(self.active.column("sample_id"))

    @cached_property
    def active_text_ids(self) -> pa.Array:
        """Distinct ids of the texts that active samples and the validation prompts need."""
        named = [text for prompt in self.info.validation for text in (prompt.text, prompt.negative)]
        named += [self.info.null_text] if self.info.null_text else []
        null = self.active.column("null_text").drop_null()
        captions = pc.list_flatten(self.active.column("texts"))
        return pc.unique(pa.chunked_array([*captions.chunks, *null.chunks, pa.array(named, pa.string())], pa.string()))

    def units(self, kind: str) -> list[Unit]:
        """Units of this and earlier generations with at least one active member, in plan order, without
        units that a later generation divided into smaller units."""
        replaced = pa.array(sorted(self.replaced_units), pa.string())
        active = self.active_text_ids if kind == "text" else self.active_sample_ids
        units = []
        units_of_kind = _filter_kind(self._all("units"), kind)
        remaining = units_of_kind.filter(pc.invert(pc.is_in(units_of_kind.column("unit_id"), value_set=replaced)))
        for batch in remaining.to_batches():
            needed, members = np.zeros(batch.num_rows, bool), batch.column("members")
            parents = np.asarray(pc.list_parent_indices(members))
            needed[parents[np.asarray(pc.is_in(members.flatten(), value_set=active))]] = True
            for row in batch.filter(pa.array(needed)).to_pylist():
                units.append(Unit(**{**row, "members": tuple(row["members"])}))
        return units

    @property
    def kind(self) -> str:
        return self.info.kind

    @property
    def unit_kinds(self) -> tuple[str, ...]:
        return KINDS[self.kind]

    @property
    def generations(self) -> dict[str, list[str]]:
        """For each of KINDS, the generations that hold everything planned up to this one."""
        return self.info.earlier | {self.kind: [*self.info.earlier[self.kind], self.name]}

    @cached_property
    def replaced_units(self) -> set[str]:
        """Ids of units whose members are in smaller units of this or an earlier generation."""
        return {unit for plan in (self, *self._earlier) for unit in plan.info.replaced_units}

    @cached_property
    def sample_table(self) -> pa.Table:
        """Table of schemas.tables.SAMPLES_SCHEMA over all generations up to this one, active or not."""
        return self._all("samples")

    @cached_property
    def text_table(self) -> pa.Table:
        """Table of schemas.tables.TEXTS_SCHEMA over all generations up to this one, active or not."""
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
        """sample_id -> row of schemas.tables.ACTIVE_SCHEMA, with the paths of the sample's files as of this plan."""
        return RowLookup(self.active, "sample_id")

    def own_table(self, table: str) -> pa.Table:
        """The rows of this generation, without earlier generations. table: a name in PLAN_TABLES."""
        return read_plan_table(self.store, self.name, table)

    @property
    def is_complete(self) -> bool:
        """Whether this and earlier generations hold everything that is active in the plan; False if an earlier
        generation was removed."""
        units = self._all("units")
        pairs = (
            (self.active_sample_ids, self.sample_table.column("sample_id")),
            (self.active_text_ids, self.text_table.column("text_id")),
            (self.active_sample_ids, pc.list_flatten(_filter_kind(units, self.unit_kinds[0]).column("members"))),
            (self.active_text_ids, pc.list_flatten(_filter_kind(units, "text").column("members"))),
        )
        return all(not len(ids) or pc.all(pc.is_in(ids, value_set=planned)).as_py() for ids, planned in pairs)

    def _all(self, table: str) -> pa.Table:
        """The rows of this and all earlier generations. table: a name in PLAN_TABLES."""
        # Texts have a column of references only in plans with references.
        tables = [*_read_tables(self._earlier, table), self.own_table(table)]
        return pa.concat_tables(tables, promote_options="default")

    @cached_property
    def _earlier(self) -> list["Plan"]:
        """The earlier generations of the same kind of plan, oldest first, without removed generations."""
        return _load_plans(self.store, self.info.earlier[self.kind])


def list_plans(store: Store) -> list[str]:
    """Published generations, oldest first."""
    listed = (name for name in store.list_names("plans") if is_project_file(f"plans/{name}"))
    return sorted(name.split("/")[0] for name in listed if name.endswith("/plan.json"))


def _filter_kind(units: pa.Table, kind: str) -> pa.Table:
    return units.filter(pc.equal(units.column("kind"), kind))


def read_plan_table(store: Store, name: str, table: str) -> pa.Table:
    """Return a table of generation `name`. table: a name in PLAN_TABLES. Raises DamageError if the table is damaged."""
    rel = f"plans/{name}/{table}.arrow"
    with as_damage(store.path(rel), "it can't be read"):
        return store.read_table(rel, _CHECKS[table])


def _check_plan_name(value: str) -> str:
    if not is_project_file(f"plans/{value}/plan.json"):
        raise ValueError("not a valid plan name")
    return value


PlanName = Annotated[str, AfterValidator(_check_plan_name)]


class PlannedPrompt(json_checks.ImagedPrompt):
    """A validation prompt. condition: the sample that it starts from. references: the samples of its references."""

    text: json_checks.Checksum
    negative: json_checks.Checksum
    condition: json_checks.Checksum | None
    references: list[json_checks.Checksum] = Field(default_factory=list)
    name: str
    prompt: str
    negative_prompt: str
    bucket: str


class PlanInfo(json_checks.Stored):
    """The part of plan.json that the planner supplies. items: the stage before `bucket` for which an item plan has the
    items of media tables. replaced_units: ids of units that this plan divides into smaller units. family, task,
    template: set in a plan of samples only."""

    validation: list[PlannedPrompt]
    null_text: json_checks.Checksum | None
    items: json_checks.EmptyName = ""
    replaced_units: list[str] = Field(default_factory=list)
    family: json_checks.EmptyName = ""
    task: json_checks.EmptyName = ""
    template: json_checks.EmptyName = ""

    @property
    def kind(self) -> str:
        return "items" if self.items else "samples"


class PlanRecord(PlanInfo):
    """plan.json. earlier: for each of KINDS, the generations that hold everything planned before this one."""

    version = TABLES_VERSION

    key: json_checks.Name
    parent: PlanName | None = None
    content: str = ""
    earlier: dict[Literal[*KINDS], list[PlanName]] = Field(min_length=len(KINDS))  # type: ignore[valid-type]


def load_plan(store: Store, name: str) -> Plan:
    """Return generation `name`. Raises the errors of `Store.read_record`."""
    return Plan(store, name, store.read_record(f"plans/{name}/plan.json", PlanRecord))


def _load_plans(store: Store, names: Sequence[str]) -> list[Plan]:
    """Load these generations, without removed generations."""
    plans = []
    for name in names:
        with suppress(FileNotFoundError):
            plans.append(load_plan(store, name))
    return plans


def _read_tables(plans: Sequence[Plan], name: str) -> list[pa.Table]:
    """Return the table `name` of each generation, without generations that `gc` removes during the call; they have no
    active rows, and `gc` removes their plan.json first."""
    tables = []
    for plan in plans:
        try:
            tables.append(plan.own_table(name))
        except DamageError:
            if plan.store.exists(f"plans/{plan.name}/plan.json"):
                raise
    return tables


def newest_plan(store: Store, key: str) -> Plan | None:
    """The newest plan whose settings hash to `key`, or None."""
    plans = (load_plan(store, name) for name in reversed(list_plans(store)))
    return next((plan for plan in plans if plan.info.key == key), None)


def planned_ids(store: Store, kind: str) -> pa.Array:
    """Ids of the members of every planned unit of a kind."""
    chunks, plan_kind = [], next(plan_kind for plan_kind, kinds in KINDS.items() if kind in kinds)
    plans = _load_plans(store, planned_generations(store, list_plans(store))[plan_kind])
    for units in _read_tables(plans, "units"):
        chunks += pc.list_flatten(_filter_kind(units, kind).column("members")).chunks
    return pc.unique(pa.chunked_array(chunks, pa.string()))


def planned_generations(store: Store, published: Sequence[str]) -> dict[str, list[str]]:
    """`Plan.generations` of the newest of the `published` generations."""
    return load_plan(store, max(published)).generations if published else {kind: [] for kind in KINDS}


def publish_plan(
    store: Store,
    key: str,
    tables: Mapping[str, pa.Table],
    info: PlanInfo,
    planned_on: Sequence[str] | None = None,
) -> Plan:
    """Write a generation and return it. If the newest generation of this key has the same content, return that
    generation instead.

    tables: table for each name in PLAN_TABLES. planned_on: the generations that existed when the tables were made; None
    for the current generations. Names of plans are <sequence>-<hash of content>: two machines that make the same plan
    at the same time write the same files. If they make different plans at the same time, items in both plans are in a
    unit of each plan, and later plans build on the plan with the greater name.
    """
    current, published = newest_plan(store, key), list_plans(store)
    if planned_on is not None and published != list(planned_on):
        raise PlanOutdated(
            f"another plan was published during planning: {', '.join(sorted({*published} ^ {*planned_on}))}"
        )
    cast = {name: tables[name].cast(plan_schema(name, tables[name].column_names)) for name in PLAN_TABLES}
    active = cast["active"] = cast["active"].combine_chunks()  # compared and hashed below
    if current is not None and not any(len(tables[name]) for name in ("samples", "texts", "units")):
        is_same_info = all(getattr(current.info, name) == getattr(info, name) for name in info.model_fields_set)
        if is_same_info and current.active.equals(active) and current.is_complete:
            return current
    parent = max(published, default=None)
    settings = hash_json({"key": key, "info": info.values(), "parent": parent})
    content = hash_bytes(settings.encode(), hash_table(active))
    earlier, values = planned_generations(store, published), info.values()
    if len(earlier[info.kind]) > MAX_EARLIER:
        earlier_plans = _load_plans(store, earlier[info.kind])
        for name in ("samples", "texts", "units"):
            parts = [*(plan.own_table(name) for plan in earlier_plans), cast[name]]
            table = pa.concat_tables(parts, promote_options="default")
            schema = plan_schema(name, table.column_names)
            cast[name] = table.select(schema.names).cast(schema)
        replaced = {*info.replaced_units, *(unit for plan in earlier_plans for unit in plan.info.replaced_units)}
        values |= {"replaced_units": sorted(replaced)} if replaced else {}
        earlier |= {info.kind: []}
    record = PlanRecord(key=key, parent=parent, content=content, earlier=earlier, **values)
    number = int(parent.partition("-")[0]) + 1 if parent else 1
    name = f"{number:06d}-{content[:12]}"
    for table_name, table in cast.items():
        store.write_table(f"plans/{name}/{table_name}.arrow", table)
    store.publish_record(f"plans/{name}/plan.json", record)
    return Plan(store, name, record)


# -- damage -----------------------------------------------------------------------------------------------------------


def find_damage(store: Store, name: str) -> DamageError | None:
    """The first damage found in generation `name`."""
    try:
        load_plan(store, name)
        for table_name in PLAN_TABLES:
            read_plan_table(store, name, table_name)
    except DamageError as damage:
        return damage
    return None


def quarantine(store: Store, name: str) -> str:
    """Move a generation to damaged/plans/, its plan.json first; returns its new folder."""
    used_names, number = {folder.partition("/")[0] for folder in store.list_names("damaged/plans")}, 1
    while f"{name}.{number}" in used_names:
        number += 1
    folder = f"damaged/plans/{name}.{number}"
    for file in ("plan.json", *(f"{table_name}.arrow" for table_name in PLAN_TABLES)):
        with suppress(FileNotFoundError):
            store.move(f"plans/{name}/{file}", f"{folder}/{file}")
    store.remove_empty_folders(f"plans/{name}")
    return folder


def quarantine_damaged(store: Store, warn: Callable[[str], object], dry_run: bool = False) -> None:
    """Move damaged plans away, so that their units are planned again; a dry run raises the damage. Unit ids are made
    from their members' ids, so the shards of units that are planned again stay in use."""
    for name in list_plans(store):
        if damage := find_damage(store, name):
            if dry_run:
                raise damage
            warn(f"{damage.message}; the plan was moved to {quarantine(store, name)} and is planned again")


def all_units(store: Store) -> pa.Table:
    """Table of schemas.tables.UNITS_SCHEMA: the units of all undamaged generations, of any settings."""
    names = [name for name in list_plans(store) if find_damage(store, name) is None]
    return pa.concat_tables([UNITS_SCHEMA.empty_table(), *(read_plan_table(store, name, "units") for name in names)])
