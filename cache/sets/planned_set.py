"""A training set whose shards are made while it is trained on. Its index is made from the plan alone, so that its rows
and their order are those of the same set with a full cache, where nothing is set aside.

A member that its stage sets aside is known only once its unit is encoded, and later than that the order may not change.
So it stays in the set: wherever its turn comes, it is left out. Rows count as in the plan; a shard without some of its
members has fewer, and is looked into for its rows' ids.
"""

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.order.schedule import Ints
from cache.order.set_columns import IntColumn
from cache.sets.draws import NO_TEXT
from cache.sets.table_checks import PLANNED
from cache.sets.trainset import SetError, TrainSet
from cache.shards.shard import RejectedMember
from cache.shards.shard_supply import ShardSupply
from cache.store.layout import ENCODE_PROGRAMS
from cache.store.store import Store
from schemas.errors import INCOMPLETE

MISSING_STEP = (
    "Put it back (mount the disk, or correct media_root) and run the same command again; or, to train without it: "
    "`latentpress discover`, `bucket` and `index`."
)


class MissingMedia(SetError):
    """A sample can't be trained on, as its file was not there when it was encoded."""

    exit_code = INCOMPLETE


class ShardMembers:
    """The members of a shard that lacks some. rows: row in the plan -> row in the shard. aside: row in the plan -> the
    member that was set aside."""

    def __init__(self, planned: dict[int, str], ids: list[str], set_aside: list[RejectedMember]) -> None:
        places, members = {id: row for row, id in enumerate(ids)}, {member.id: member for member in set_aside}
        self.rows = {row: places[id] for row, id in planned.items() if id in places}
        self.aside = {row: members[id] for row, id in planned.items() if id in members}


class PlannedSet(TrainSet):
    """sets/<id> of a store, of which set.json has {"tensors": those that samples have, "bytes": the most of each shard}
    as PLANNED."""

    def __init__(self, store: Store, set_id: str, meta: dict[str, Any]):
        super().__init__(store, set_id, meta)
        self._members: dict[int, ShardMembers | None] = {}
        self._members_lock, self._aside = threading.Lock(), dict[str, RejectedMember]()
        self.report: Callable[[str, RejectedMember], object] = lambda program, member: None

    def use_supply(self, supply: ShardSupply) -> None:
        super().use_supply(supply)
        supply.on_removal(self._forget)

    def _forget(self, number: int) -> None:
        self._members.pop(number, None)

    def has_tensor(self, name: str) -> bool:
        return self.regularization > 0 if name == "regularization" else name in self.meta[PLANNED]["tensors"]

    def choose_eval_rows(self, count: int) -> tuple[list[int], str]:
        """Choose as of any set, without those that were set aside. SetError where none is left."""
        rows, what = super().choose_eval_rows(count)
        chosen = np.array(rows, np.int64)
        absent = self.find_set_aside(chosen, self.row_texts.first(chosen)) if rows else None
        if absent is not None:
            rows = chosen[~absent].tolist()
            if not rows:
                step = "Set validation.eval_samples to 0 or to more, or correct the files that rejects/ lists."
                raise SetError(f"every one of the {count} {what} of the eval loss was set aside", step)
        return rows, what

    def members(self, number: int) -> ShardMembers | None:
        """Return the members of shard `number`, for which this waits; None where it has all of its members."""
        if number not in self._members:
            with self.supply.open(number) as reader:
                meta = reader.meta
            shard_members = None
            if meta.set_aside:
                shard_members = ShardMembers(self._planned_ids(number), meta.ids, meta.set_aside)
            with self._members_lock:
                self._members[number] = shard_members
                new = [
                    member
                    for member in (shard_members.aside.values() if shard_members else ())
                    if member.id not in self._aside
                ]
                self._aside |= {member.id: member for member in new}
            for member in new:
                self.report(ENCODE_PROGRAMS[meta.kind], member)
        return self._members[number]

    def list_set_aside(self) -> list[dict[str, Any]]:
        """Return rows of a report, of the members that were found to be set aside."""
        return [
            {"item": member.id, "path": "", "reason": member.reason, "message": member.message}
            for member in self._aside.values()
        ]

    def _planned_ids(self, number: int) -> dict[int, str]:
        """Row in the plan -> id, of the members of a shard that the set has."""
        ids: dict[int, str] = {}
        index, texts = self.tables["index"], self.tables["texts"]
        prefixes = ["", *(f"{kind}_" for kind in self.kinds)]
        columns = [(index, f"{prefix}shard", f"{prefix}row", "sample_id") for prefix in prefixes]
        columns += [(index, f"{part}_shard", f"{part}_row", f"{part}_id") for part in self.references]
        for table, shard, row, id in (*columns, (texts, "shard", "row", "text_id")):
            members = table.filter(pc.equal(table.column(shard), number))
            ids |= dict(zip(members.column(row).to_pylist(), members.column(id).to_pylist(), strict=True))
        return ids

    def stored_row(self, shard: int, row: int) -> int:
        """Return the row as of any set. SetError for a member that was set aside."""
        members = self.members(shard)
        if members is None:
            return row
        if (member := members.aside.get(row)) is not None:
            what = f"{member.id}, which every run needs, could not be encoded: {member.message}"
            raise SetError(what, "Correct it, or run `latentpress discover`, `bucket` and `index` without it.")
        return members.rows.get(row, row)

    @cached_property
    def _places(self) -> tuple[list[tuple[IntColumn, IntColumn]], tuple[IntColumn, IntColumn]]:
        """The columns of shards and rows: of each part of samples, and of texts."""
        index, texts = self.tables["index"], self.tables["texts"]
        prefixes = ["", *(f"{part}_" for part in (*self.kinds, *self.references))]
        samples = [(IntColumn(index[f"{prefix}shard"]), IntColumn(index[f"{prefix}row"])) for prefix in prefixes]
        return samples, (IntColumn(texts["shard"]), IntColumn(texts["row"]))

    def find_set_aside(self, rows: Ints, texts: Ints) -> NDArray[np.bool_] | None:
        """(B,) whether a part of each draw was set aside; None where all their shards have all their members.
        rows, texts: (B,) each, as for `read_draw`. MissingMedia if a file was not there."""
        samples, (text_shards, text_rows) = self._places
        absent, lacking = np.zeros(len(rows), bool), False
        for number, (row, text) in enumerate(zip(rows.tolist(), texts.tolist(), strict=True)):
            at = np.array([row])
            places = [(int(shards.take(at)[0]), int(numbers.take(at)[0])) for shards, numbers in samples]
            places = [address for address in places if address[0] >= 0]  # where a sample has fewer references
            places += [(text_shards.get(text), text_rows.get(text))] if text != NO_TEXT else []
            for shard, member_row in places:
                if (members := self.members(shard)) is None:
                    continue
                lacking = True
                if (member := members.aside.get(member_row)) is not None:
                    if member.reason == "missing":
                        raise MissingMedia(f"set {self.id}: {member.message}", MISSING_STEP)
                    absent[number] = True
        return absent if lacking else None
