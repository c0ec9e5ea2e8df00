"""The interface of engines and workers. An engine runs workers; each process creates one worker from a job, and the
worker encodes units into shards.

`stages.engine` names a module of this folder, which is imported only if it is selected. Each such module implements the
Protocol `Engine`.
"""

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol, cast

from cache.sets.plans import Unit
from cache.shards.shard import SUFFIXES, TruncatedText
from cache.store.store import Store
from schemas.cli.starting import install_command
from schemas.config.encoding import Encoding, EngineName
from schemas.config.pipeline import Config
from schemas.errors import UsageError


@dataclass(frozen=True)
class Job:
    """The job that each worker receives. It is small, because it is pickled.

    process_index: number of the worker's process, from 0. probed_members: members whose files are read to check that
    the media are available. stage: name of the stage, for messages. reencode: ids of units that are encoded although
    they have a shard. until: time.monotonic() after which workers of this machine begin no more units.
    """

    config: Config
    generation: str
    fingerprint: str
    resources: Encoding
    process_index: int = 0
    probed_members: tuple[str, ...] = ()
    stage: str = ""
    reencode: frozenset[str] = frozenset()
    until: float = math.inf

    def find_shard(self, store: Store, kind: str, unit: Unit) -> str | None:
        """The path of a unit's shard if it exists, so that the unit need not be encoded; else None. Makes one
        request."""
        path = f"{kind}/{self.fingerprint}/{unit.unit_id}{SUFFIXES[self.config.cache.format]}"
        return path if unit.unit_id not in self.reencode and store.exists(path) else None


@dataclass(frozen=True)
class RoundingError:
    """The rounding error of numbers that are stored in fewer bits. squares: sum of the squared numbers. error_squares:
    sum of the squared errors. largest: largest magnitude of an error."""

    squares: float = 0.0
    error_squares: float = 0.0
    largest: float = 0.0

    def __add__(self, other: "RoundingError") -> "RoundingError":
        squares, error_squares = self.squares + other.squares, self.error_squares + other.error_squares
        return RoundingError(squares, error_squares, max(self.largest, other.largest))

    def describe(self) -> dict[str, float]:
        """Values for a report. rms_share: the errors' root mean square divided by the numbers' root mean square.
        largest: the largest error."""
        share = math.sqrt(self.error_squares / self.squares) if self.squares else 0.0
        return {"rms_share": float(f"{share:.3g}"), "largest": float(f"{self.largest:.3g}")}


@dataclass
class UnitResult:
    """The result of a unit. shard_path: path of its shard; None if the unit failed. elsewhere: whether another job made
    the shard at the same time. rejects: rejected members, rows of schemas.tables.REJECTS_SCHEMA. fitting_batch: the
    batch size that fitted, if memory ran out. remarks: remark -> number of members. rounding: error of the tensors that
    were stored in fewer bits.
    """

    unit_id: str
    shard_path: str | None = None
    encoded: int = 0
    bytes: int = 0
    rejects: list[dict] = field(default_factory=list)
    truncated: list[TruncatedText] = field(default_factory=list)
    fitting_batch: str = ""
    error: str = ""
    remarks: Counter[str] = field(default_factory=Counter)
    elsewhere: bool = False
    rounding: RoundingError = RoundingError()


#: take(wait): returns the next unit; None if no unit is available (wait=False) or left (wait=True).
NextUnit = Callable[[bool], Unit | None]


class Worker(Protocol):
    """Created once per process. Publishes a shard for each unit that `take` returns, and calls `advance` with the
    number of members that it has encoded. At the time `job.until`, a worker finishes its unit and ends."""

    def run_units(self, take: NextUnit, advance: Callable[[int], None]) -> Iterator[UnitResult]: ...


Load = Callable[[Job], Worker]


class Engine(Protocol):
    """A module in this folder, named like a value of stages.engine."""

    def run_units(
        self,
        load: Load,
        job: Job,
        units: Iterator[Unit],
        advance: Callable[[int], None],
        warn: Callable[[str], object] = ...,
    ) -> Generator[UnitResult, None, None]:
        """Run the units, and yield their results in the order in which they end. A unit's result may be a failure. This
        process repeats the announcements of its workers (`schemas.activities`). If a worker dies, another worker
        retries its unit, a few times, and `warn` is called for each death. If the generator is closed before its end,
        it ends the workers, which drop their units.

        units: units to run, taken one at a time when a worker has room. advance: called with the number of finished
        members."""


def load_engine(name: EngineName) -> Engine:
    """Import the engine. Raises UsageError if Ray is not installed."""
    try:
        return cast(Engine, import_module(f"stages.engines.{name}"))
    except ModuleNotFoundError as error:
        if name != "ray" or (error.name or "").partition(".")[0] != "ray":
            raise
        raise UsageError(
            "stages.engine is ray, but the library 'ray' is not installed",
            f"install it on every machine of the cluster: {install_command('ray')}; or choose --engine local",
        ) from error
