"""train.local_cache: where the copies of a remote set's shards are on this machine, how many bytes they may have, and
whether that suits a run."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cache.order.schedule import BatchSchedule
from cache.sets.trainset import TrainSet
from cache.shards.shard_supply import SupplyError
from cache.store.files import check_folder
from cache.supply.fetched_shards import FetchedShards
from cache.supply.limited_folder import LimitedFolder
from cache.supply.remote_shards import ShardCopies
from cache.supply.step_needs import (
    FittingOrder,
    checked_steps,
    explain_order,
    largest_window,
    mean_bytes,
    needed_shards,
    round_up_gb,
)
from schemas.config.training import LocalCache, Train

DEFAULT_BYTES = 200 * 10**9  # unless half of the disk's free space is less


class Ranks(NamedTuple):
    """This process among those of the run. local: those on this machine."""

    rank: int = 0
    world: int = 1
    local: int = 1


def cache_folder(settings: LocalCache) -> Path:
    """train.local_cache.folder, by default latentpress/shards in the user's folder for caches."""
    if settings.folder is not None:
        return Path(settings.folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "latentpress" / "shards"


def free_bytes(folder: Path) -> int:
    """Return the bytes that its disk has for the copies; those that it has already count as free."""
    there = next(part for part in (folder, *folder.parents) if part.is_dir())
    present = 0
    for entry in os.scandir(folder) if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # another process has just removed it
            present += entry.stat().st_blocks * 512
    return shutil.disk_usage(there).free + present


def cache_limit(settings: LocalCache, folder: Path) -> int:
    """Bytes that the copies may have. SupplyError where the disk has less for them."""
    check_folder(folder)
    room = free_bytes(folder)
    if settings.max_gb is None:
        return min(DEFAULT_BYTES, room // 2)
    limit = round(settings.max_gb * 1e9)
    if limit > room:
        raise SupplyError(
            f"train.local_cache.max_gb is {settings.max_gb:g}, and the disk of {folder} has room for {room / 1e9:.3g}",
            "Lower it, free space there, or set train.local_cache.folder to a folder on another disk.",
        )
    return limit


def supply_from_copies(
    settings: Train,
    data: TrainSet,
    schedule: BatchSchedule,
    steps: range,
    ranks: Ranks,
    warn: Callable[[str], None],
) -> None:
    """Let a remote set read its shards through copies on this machine; nothing is done for a local one. `data.close`
    ends it. One listing of each folder of shards.

    steps: those of the run that remain. SupplyError where they can't be read ahead within the limit, as far as the
    first CHECKED_DRAWS samples tell; a warning where the whole set does not fit and the order needs all of it.
    """
    if data.store.root is not None:
        return
    copies = open_copies(settings.local_cache, data)
    data.use_supply(FetchedShards(copies, settings.local_cache.downloads))
    limit, sizes = copies.folder.limit, [shard.bytes for shard in copies.shards]
    checked = checked_steps(steps, schedule.global_batch)
    planned = schedule, settings.caption_dropout, checked.start, checked.stop, ranks.rank, ranks.world
    needs = [numbers.tolist() for numbers in needed_shards(data, *planned)]
    ahead = settings.reading.steps_ahead + 1
    if (most := largest_window(needs, sizes, ahead)) > limit // ranks.local:
        share = f", which {ranks.local} processes of this machine share" if ranks.local > 1 else ""
        raise SupplyError(
            f"train.local_cache.max_gb is {limit / 1e9:.3g}{share}: the shards of the {ahead} steps that are read at a "
            f"time and one more have up to {most / 1e9:.3g} GB",
            f"Raise it to {round_up_gb(ranks.local * most)} or more; or let a step need fewer shards, by a lower "
            "train.batch_size or train.accumulate, or by train.shuffle_shards.",
        )
    if sum(sizes) > limit and settings.shuffle_shards is None and ranks.rank == 0:
        orders, step = FittingOrder(settings, data, steps, ranks.world, sizes, ahead), mean_bytes(needs, sizes)
        fitting = orders.find(limit // ranks.local)
        least = limit if fitting else ranks.local * orders.least_bytes()
        warn(explain_order(data.id, limit, sum(sizes), ranks.local * step, fitting, least))


def open_copies(settings: LocalCache, data: TrainSet) -> ShardCopies:
    """The shards of a remote set, as listed, and the folder for their copies."""
    folder = cache_folder(settings)
    limited = LimitedFolder(folder, cache_limit(settings, folder))
    return ShardCopies(data.store, data.tables["shards"].column("path").to_pylist(), limited)
