"""Training beside the stages that encode its shards: these are waited for, and the stages are told where the run is."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from cache.sets.planned_set import PlannedSet
from cache.sets.trainset import TrainSet
from cache.supply.encoded_folder import EncodedFolder, Position, ReadingOrder, check_room
from cache.supply.encoded_shards import EncodedShards
from cache.supply.limited_shards import SupplyError
from schemas.cli.console import Console
from schemas.config.encoding import CACHE_LIMIT
from schemas.config.pipeline import Config
from trainer.run.interruption import StopRequest

SPENT = "the shards that were there being used up"


@contextmanager
def follow_encoding(
    config: Config, data: TrainSet, step: int, world: int, main: bool, console: Console, stop: StopRequest
) -> Iterator[None]:
    """In the body a set whose shards are encoded meanwhile is read as they appear; any other set as it is. step: the
    first one. SupplyError where the configuration has no limited cache, or too small a limit, or another run uses the
    root's."""
    limit = config.cache.limit
    if not isinstance(data, PlannedSet):
        if limit is not None:
            console.warn(f"set {data.id} was made of shards that are all there: {CACHE_LIMIT} is without effect")
        yield
        return
    if limit is None:
        raise SupplyError(
            f"set {data.id} is of a limited cache, whose shards are encoded while it is trained on",
            f"Set {CACHE_LIMIT}, or run `latentpress run`, which encodes everything and makes a set of it.",
        )
    if limit.alternate and world > 1:
        raise SupplyError(
            f"{CACHE_LIMIT}.alternate is for one process, and these are {world}: each would find at another step that "
            "the shards are used up",
            f"Set {CACHE_LIMIT}.alternate: false, and let the encoding stages run beside training.",
        )
    order = ReadingOrder.of(config.train, world)
    check_room(data, order, config.validation.eval_samples, limit.max_gb)
    folder = EncodedFolder(data.store, data, limit.max_gb)
    with folder.working("train") if main else nullcontext():
        # A rank that takes a step's batches has ended the step before, which no rank does alone; others may still read.
        behind = int(world > 1)
        position = Position(set=data.id, run=config.train.run, order=order, step=step)
        supply = EncodedShards(folder, position, main, console.log, behind)
        supply.on_wait = lambda: stop.check_waiting(SPENT if limit.alternate else "")
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
    return data.list_set_aside() if isinstance(data, PlannedSet) else []
