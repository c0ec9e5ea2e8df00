"""Training on a rolling set: shards are waited for, and where the run is is told to the stages that encode them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from cache.sets.rolling_set import RollingSet
from cache.sets.trainset import TrainSet
from cache.supply.rolling import RollingCache, check_room
from cache.supply.rolling_files import Position, RollingError
from cache.supply.rolling_supply import RollingSupply
from cache.supply.step_shards import ReadingOrder
from schemas.cli.console import Console
from schemas.config.pipeline import Config
from trainer.run.interruption import StopRequest

SPENT = "the shards that were there being used up"


@contextmanager
def follow_encoding(
    config: Config, data: TrainSet, step: int, world: int, main: bool, console: Console, stop: StopRequest
) -> Iterator[None]:
    """In the body a rolling set is read as its shards appear; any other set as it is. step: the first one. RollingError
    where the configuration has no cache.rolling, or too small a limit, or another run uses the root's.
    """
    rolling = config.cache.rolling
    if not isinstance(data, RollingSet):
        if rolling is not None:
            console.warn(f"set {data.id} was made of shards that are all there: cache.rolling is without effect")
        yield
        return
    if rolling is None:
        raise RollingError(
            f"set {data.id} is of a rolling cache, whose shards are encoded while it is trained on",
            "Set cache.rolling, or run `latentpress run`, which encodes everything and makes a set of it.",
        )
    if rolling.alternate and world > 1:
        raise RollingError(
            f"cache.rolling.alternate is for one process, and these are {world}: each would find at another step that "
            "the shards are used up",
            "Set cache.rolling.alternate: false, and let the encoding stages run beside training.",
        )
    order = ReadingOrder.of(config.train, world)
    check_room(data, order, config.validation.eval_samples, rolling.max_gb)
    cache = RollingCache(data, rolling.max_gb)
    with cache.files.working("train") if main else nullcontext():
        # A rank that takes a step's batches has ended the step before, which no rank does alone; others may still read.
        behind = int(world > 1)
        supply = RollingSupply(cache, Position(data.id, config.train.run, order, step), main, console.log, behind)
        supply.on_wait = lambda: stop.check_waiting(SPENT if rolling.alternate else "")
        data.report = lambda program, member: console.warn(
            f"{member.id} was set aside by {program} ({member.message}): it is left out wherever its turn comes"
        )
        data.use_supply(supply)
        try:
            yield
        finally:
            supply.close()


def describe_set_aside(data: TrainSet) -> list[dict[str, Any]]:
    """Rows of a report: the members that this process has found to be set aside."""
    return data.list_set_aside() if isinstance(data, RollingSet) else []
