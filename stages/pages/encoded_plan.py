"""The encoded samples and texts of a plan, read from the shards."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cache.shards.shard import ShardRow
from cache.shards.shard_io import ReaderPool
from cache.store.damage import DamageError
from schemas.errors import LatentpressError
from stages.encoding import stage_registry
from stages.encoding.stage import EncodingStage
from stages.pages.plan_table import PlanTable

TableRow = dict[str, Any]
StoredRow = tuple[str, ShardRow]  # path of the shard, row
MAX_OPEN_SHARDS = 16
NOT_ENCODED = "not encoded yet"


@dataclass(frozen=True)
class EncodedCaption:
    """A caption with its number of tokens, and how many of them the encoder kept. problem: why they are not known."""

    text: str
    tokens: int | None = None
    kept: int | None = None
    problem: str = ""

    @property
    def truncated(self) -> bool:
        return self.tokens is not None and self.kept is not None and self.kept < self.tokens

    @property
    def complete(self) -> bool:
        return self.tokens is not None and not self.truncated

    @property
    def token_summary(self) -> str:
        if self.problem:
            return self.problem
        return f"truncated: {self.kept} of {self.tokens} tokens kept" if self.truncated else f"{self.tokens} tokens"


class StageShards:
    """The shards of one stage. members: ids of the units that are encoded. set_aside: ids among them without a row."""

    def __init__(self, table: PlanTable, stage: EncodingStage, readers: ReaderPool) -> None:
        state = stage.state(table.store, table.config, table.plan)
        units = [unit for unit in state.units if unit.unit_id in state.done]
        self.members = pa.array((name for unit in units for name in unit.members), pa.string())
        self.set_aside = pa.array([row["item"] for row in state.set_aside], pa.string())
        self._paths = [state.done[unit.unit_id] for unit in units for _ in unit.members]
        self._store, self._readers = table.store, readers

    def read(self, names: Sequence[str]) -> dict[str, StoredRow | LatentpressError]:
        """name -> its stored row, or why it can't be read, for the names whose unit is encoded."""
        indices = pc.index_in(pa.array(names, pa.string()), value_set=self.members).to_pylist()
        return {
            name: self._read(self._paths[index], name)
            for name, index in zip(names, indices, strict=True)
            if index is not None
        }

    def _read(self, path: str, name: str) -> StoredRow | LatentpressError:
        try:
            meta = self._readers.meta(path)
            if name in meta.ids:
                return self._store.path(path), self._readers.read(path, meta.ids.index(name))
        except DamageError as damage:
            return damage
        why = next((f": {member.message}" for member in meta.set_aside if member.id == name), "")
        return LatentpressError(f"it was set aside when its unit was encoded{why}")


class EncodedPlan:
    """The encoded samples and texts of a plan.

    encoded, set_aside: (n,) bool for the rows of `table.active`. folder: of the latents' shards.
    """

    def __init__(self, table: PlanTable) -> None:
        readers, ids = ReaderPool(table.store, MAX_OPEN_SHARDS), table.active.column("sample_id")
        self.table = table
        self.folder = f"latents/{stage_registry.LATENTS.fingerprint(table.config)}"
        self.latents = StageShards(table, stage_registry.LATENTS, readers)
        self.texts = StageShards(table, stage_registry.TEXT, readers)
        self.set_aside = pc.is_in(ids, value_set=self.latents.set_aside).to_numpy()
        self.encoded = pc.is_in(ids, value_set=self.latents.members).to_numpy() & ~self.set_aside

    @property
    def missing(self) -> int:
        """The number of samples that are neither encoded nor set aside."""
        return int((~self.encoded & ~self.set_aside).sum())

    def bucket_row(self, bucket: str, shown: int) -> TableRow:
        """A bucket's row of the table."""
        in_bucket = pc.equal(self.table.active.column("bucket"), bucket).to_numpy()
        encoded = int(self.encoded[in_bucket].sum())
        return {"bucket": bucket, "samples": int(in_bucket.sum()), "encoded": encoded, "shown": shown}

    def captions(self, names: Sequence[str]) -> tuple[EncodedCaption, ...]:
        """The texts of these ids with their tokens."""
        rows, captions = self.texts.read(names), []
        for name in names:
            text, row = self.table.plan.texts[name]["text"], rows.get(name)
            if row is None or isinstance(row, LatentpressError):
                captions.append(EncodedCaption(text, problem=row.message if row else NOT_ENCODED))
            else:
                captions.append(EncodedCaption(text, row[1].info["tokens"], row[1].info["kept"]))
        return tuple(captions)
