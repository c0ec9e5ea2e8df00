"""The order in which a run reads, as a value that processes can tell each other, and the shards of each step."""

from dataclasses import asdict, dataclass
from typing import Any

from cache.order.schedule import Ints
from cache.sets.trainset import TrainSet
from cache.store.json_checks import check_count
from cache.supply.shard_needs import needed_shards
from schemas.config.training import Train

PLANNED_DRAWS = 1 << 14  # of steps that are looked at together
KEPT_BLOCKS = 64


@dataclass(frozen=True)
class ReadingOrder:
    """What determines which rows each step of a run reads. accumulate: micro-batches of a step, of all ranks together.
    steps: of the whole run."""

    seed: int
    batch_size: int
    accumulate: int
    shuffle_shards: int | None
    caption_dropout: float
    steps: int

    @classmethod
    def of(cls, settings: Train, world: int = 1) -> "ReadingOrder":
        batches = settings.batch_size, settings.accumulate * world
        return cls(settings.seed, *batches, settings.shuffle_shards, settings.caption_dropout, settings.steps)

    @classmethod
    def parse(cls, record: dict[str, Any]) -> "ReadingOrder":
        """The inverse of `to_dict`; ValueError, KeyError or TypeError where it can't be one."""
        counts = {name: check_count(record[name], name) for name in ("batch_size", "accumulate", "steps")}
        shards = record["shuffle_shards"]
        return cls(
            seed=int(record["seed"]),
            shuffle_shards=None if shards is None else check_count(shards, "shuffle_shards"),
            caption_dropout=float(record["caption_dropout"]),
            **counts,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class StepShards:
    """The shards of each step of a run, of all ranks together; those of the steps looked at last are kept."""

    def __init__(self, data: TrainSet, order: ReadingOrder) -> None:
        self._data, self.order = data, order
        settings = Train(
            seed=order.seed,
            batch_size=order.batch_size,
            accumulate=order.accumulate,
            shuffle_shards=order.shuffle_shards,
        )
        self._schedule = data.make_schedule(settings)
        self._block = max(1, min(PLANNED_DRAWS // self._schedule.global_batch, order.steps))
        self._blocks: dict[int, list[Ints]] = {}

    def step(self, number: int) -> Ints:
        """The numbers of the shards that step `number` reads, each once, in increasing order."""
        block, place = divmod(number, self._block)
        if block not in self._blocks:
            while len(self._blocks) >= KEPT_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            steps = block * self._block, (block + 1) * self._block
            self._blocks[block] = [*needed_shards(self._data, self._schedule, self.order.caption_dropout, *steps)]
        return self._blocks[block][place]
