"""What an engine runs: a worker, made once in each process from a job, which makes a shard of each unit it is given."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from cache.plans import Unit
from cache.shard import TruncatedText
from schemas.config.encoding import Encoding
from schemas.config.pipeline import Config


@dataclass(frozen=True)
class Job:
    """What a worker process needs to know; small, and sent to it as it is. process: its number, from 0. watched:
    members whose files tell whether the media are there."""

    config: Config
    generation: str
    fingerprint: str
    resources: Encoding
    process_index: int = 0
    probed_members: tuple[str, ...] = ()


@dataclass(frozen=True)
class UnitResult:
    """What became of a unit. shard: its path, None if it failed. set_aside: rows of schemas.tables.REJECTS_SCHEMA.

    smaller: where memory ran out, the size of batches that fitted. remarks: how many members each of them is true of.
    """

    unit_id: str
    shard_path: str | None
    encoded: int = 0
    bytes: int = 0
    set_aside: tuple[dict, ...] = ()
    truncated: tuple[TruncatedText, ...] = ()
    fitting_batch: str = ""
    error: str = ""
    remarks: dict[str, int] = field(default_factory=dict)


class Worker(Protocol):
    """Loaded once in a process; publishes a shard for each unit that `take` gives, and calls `advance` after each
    member. take: the next unit; None where there is none yet, or with True, which waits, no more."""

    def run_units(
        self, take: Callable[[bool], Unit | None], advance: Callable[[int], None]
    ) -> Iterator[UnitResult]: ...


Load = Callable[[Job], Worker]
