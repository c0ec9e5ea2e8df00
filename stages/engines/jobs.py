"""Engines, and what they run: a worker, made once in each process from a job, which turns units into shards.

`stages.engine` names a module of this folder, which is imported when it is chosen; each is of the Protocol `Engine`.
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
    """A job as its workers get it; small, and pickled. process_index: its number, from 0. probed_members: members
    whose files show whether the media are there. stage: its name, for people. again: ids of units that are encoded
    although they have a shard. until: when workers of this machine begin no more units, by time.monotonic()."""

    config: Config
    generation: str
    fingerprint: str
    resources: Encoding
    process_index: int = 0
    probed_members: tuple[str, ...] = ()
    stage: str = ""
    again: frozenset[str] = frozenset()
    until: float = math.inf

    def find_shard(self, store: Store, kind: str, unit: Unit) -> str | None:
        """The shard of a unit that need not be encoded any more. One request."""
        path = f"{kind}/{self.fingerprint}/{unit.unit_id}{SUFFIXES[self.config.cache.format]}"
        return path if unit.unit_id not in self.again and store.exists(path) else None


@dataclass(frozen=True)
class RoundingError:
    """The error of numbers that were stored in fewer bits than they had. squares, error_squares: sums over the numbers
    and over their errors. largest: of the errors' magnitudes."""

    squares: float = 0.0
    error_squares: float = 0.0
    largest: float = 0.0

    def __add__(self, other: "RoundingError") -> "RoundingError":
        squares, error_squares = self.squares + other.squares, self.error_squares + other.error_squares
        return RoundingError(squares, error_squares, max(self.largest, other.largest))

    def describe(self) -> dict[str, float]:
        """For a report: the errors' root mean square as a share of the numbers', and the largest error."""
        share = math.sqrt(self.error_squares / self.squares) if self.squares else 0.0
        return {"rms_share": float(f"{share:.3g}"), "largest": float(f"{self.largest:.3g}")}


@dataclass
class UnitResult:
    """shard_path: None if the unit failed. elsewhere: whether another job has made the shard meanwhile. set_aside: rows
    of schemas.tables.REJECTS_SCHEMA. fitting_batch: if memory ran out, the batch size that fitted. remarks: the number
    of members for each. rounding: of what was stored in fewer bits.
    """

    unit_id: str
    shard_path: str | None = None
    encoded: int = 0
    bytes: int = 0
    set_aside: list[dict] = field(default_factory=list)
    truncated: list[TruncatedText] = field(default_factory=list)
    fitting_batch: str = ""
    error: str = ""
    remarks: Counter[str] = field(default_factory=Counter)
    elsewhere: bool = False
    rounding: RoundingError = RoundingError()


#: The next unit. None: none is available (for an argument of False) or left (True, which waits).
NextUnit = Callable[[bool], Unit | None]


class Worker(Protocol):
    """Made once in a process; publishes a shard for each unit that `take` gives, and calls `advance` after members. At
    the time `job.until` a worker finishes its unit and ends."""

    def run_units(self, take: NextUnit, advance: Callable[[int], None]) -> Iterator[UnitResult]: ...


Load = Callable[[Job], Worker]


class Engine(Protocol):
    """A module beside this one, named like a value of stages.engine."""

    def run_units(
        self,
        load: Load,
        job: Job,
        units: Iterator[Unit],
        advance: Callable[[int], None],
        warn: Callable[[str], object] = ...,
    ) -> Generator[UnitResult, None, None]:
        """Run the units, and yield their results in the order in which they end. A unit's result may be a failure.
        What a worker announces (`schemas.activities`) is announced by this process. Where a worker dies its unit is
        tried again by another, a few times; `warn` is called for each death. Closed before its end, it ends the
        workers, which drop their units.

        units: taken one at a time, when a worker has room."""


def load_engine(name: EngineName) -> Engine:
    """Raises UsageError if Ray is missing."""
    try:
        return cast(Engine, import_module(f"stages.engines.{name}"))
    except ModuleNotFoundError as error:
        if name != "ray" or (error.name or "").partition(".")[0] != "ray":
            raise
        raise UsageError(
            "stages.engine is ray, and the library 'ray' was not found",
            f"install it: {install_command('ray')}, on every machine of the cluster; or choose --engine local",
        ) from error
