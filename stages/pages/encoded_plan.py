"""What of a plan is encoded, and where it lies: latents of samples, and how many tokens their captions have."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.damage import DamageError
from cache.shard import ShardRow as Encoded
from cache.shard_io import ReaderPool
from cache.store import Store
from schemas.errors import LatentpressError
from stages.encoding import stage_registry
from stages.encoding.stage import EncodingStage, StageState
from stages.pages.plan_table import PlanTable

TableRow = dict[str, Any]
MAX_OPEN_SHARDS = 16
NOT_ENCODED = "not encoded yet"


@dataclass(frozen=True)
class EncodedCaption:
    """A caption and what its encoding says of it: tokens before it was cut to the encoder's length, and those kept."""

    text: str
    tokens: int | None = None
    kept: int | None = None
    problem: str = ""  # why there are no tokens to count

    @property
    def truncated(self) -> bool:
        return self.tokens is not None and self.kept is not None and self.kept < self.tokens

    @property
    def whole(self) -> bool:
        return self.tokens is not None and not self.truncated

    @property
    def token_summary(self) -> str:
        """Its tokens in words."""
        if self.problem:
            return self.problem
        return f"truncated: {self.kept} of {self.tokens} tokens kept" if self.truncated else f"{self.tokens} tokens"


class StageShards:
    """The members of a plan that one stage has encoded: which they are, and in which row of which shard each lies."""

    def __init__(self, store: Store, work: StageState, readers: ReaderPool) -> None:
        units = [unit for unit in work.units if unit.unit_id in work.done]
        self.aside = {row["item"]: row for row in work.set_aside}
        self.names = pa.array(chain.from_iterable(unit.members for unit in units), pa.string())
        self._unit_indices = np.repeat(np.arange(len(units)), [len(unit.members) for unit in units])
        self._paths = [work.done[unit.unit_id] for unit in units]
        self._store, self._readers = store, readers

    def encoded(self, names: pa.ChunkedArray) -> np.ndarray:
        """(n,) whether each is encoded: its unit is done and it was not set aside."""
        aside = pa.array(list(self.aside), pa.string())
        there = pc.and_not(pc.is_in(names, value_set=self.names), pc.is_in(names, value_set=aside))
        return there.to_numpy()

    def read(self, names: Sequence[str]) -> dict[str, tuple[str, Encoded] | LatentpressError]:
        """name -> (path of its shard, its row), or why it can't be read, for those whose unit is done."""
        places = pc.index_in(pa.array(names, pa.string()), value_set=self.names).to_pylist()
        return {
            name: self._read(self._paths[self._unit_indices[place]], name)
            for name, place in zip(names, places, strict=True)
            if place is not None
        }

    def _read(self, path: str, name: str) -> tuple[str, Encoded] | LatentpressError:
        try:
            meta = self._readers.meta(path)
            if name in meta.ids:
                return self._store.path(path), self._readers.read(path, meta.ids.index(name))
        except DamageError as damage:
            return damage
        why = next((f": {member.message}" for member in meta.set_aside if member.id == name), "")
        return LatentpressError(f"it was set aside when its unit was encoded{why}")


@dataclass(frozen=True)
class EncodedPlan:
    """What of a sheet is encoded. encoded, aside: (n,) of each row of its `active`. folder: of the latents' shards."""

    sheet: PlanTable
    folder: str
    encoded: np.ndarray
    set_aside: np.ndarray
    latents: StageShards
    texts: StageShards

    @classmethod
    def of(cls, sheet: PlanTable) -> "EncodedPlan":
        readers, names = ReaderPool(sheet.store, MAX_OPEN_SHARDS), sheet.active.column("sample_id")
        places = {}
        for stage in (stage_registry.LATENTS, stage_registry.TEXT):
            places[stage.kind] = StageShards(sheet.store, _stage_state(stage, sheet), readers)
        latents = places["latents"]
        aside = pc.is_in(names, value_set=pa.array(list(latents.aside), pa.string())).to_numpy()
        folder = f"latents/{stage_registry.LATENTS.fingerprint(sheet.config)}"
        return cls(sheet, folder, latents.encoded(names), aside, latents, places["text"])

    @property
    def missing(self) -> int:
        """Samples that no shard has yet; those that were set aside are none of them."""
        return int((~self.encoded & ~self.set_aside).sum())

    def bucket_row(self, bucket: str, shown: int) -> TableRow:
        """A bucket's line of the table."""
        mine = pc.equal(self.sheet.active.column("bucket"), bucket).to_numpy()
        return {"bucket": bucket, "samples": int(mine.sum()), "encoded": int(self.encoded[mine].sum()), "shown": shown}

    def captions(self, names: Sequence[str]) -> list[EncodedCaption]:
        """The texts of these ids with their tokens."""
        rows = self.texts.read(names)
        return [self._caption(name, rows.get(name)) for name in names]

    def _caption(self, name: str, found: tuple[str, Encoded] | LatentpressError | None) -> EncodedCaption:
        text = self.sheet.plan.texts[name]["text"]
        if found is None:
            return EncodedCaption(text, problem=NOT_ENCODED)
        if isinstance(found, LatentpressError):
            return EncodedCaption(text, problem=found.message)
        info = found[1].info
        return EncodedCaption(text, info["tokens"], info["kept"])


def _stage_state(stage: EncodingStage, sheet: PlanTable) -> StageState:
    return stage.state(sheet.store, sheet.config, sheet.plan)
