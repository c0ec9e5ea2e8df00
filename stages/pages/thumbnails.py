"""Thumbnails of items, also of those that were set aside, where the file can be read in spite of all: decoded in a
sandboxed process, as the files may be damaged or hostile."""

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from stages.discovery.sources.base import Source, open_source
from stages.engines.sandbox import SandboxPool, WorkerFailure
from stages.media.files import MediaError, MediaPath
from stages.pages.pictures import MAX_KEPT, Picture, file_version, shrink_file

THUMBNAIL_BOX, THUMBNAIL_BYTES = (96, 96), 4000
THUMBNAIL_TIMEOUT_S, THUMBNAIL_MEMORY_MIB = 20.0, 4096
_kept: dict[tuple[str, Hashable], Picture | None] = {}  # by path and version of a file


class Located(Protocol):
    """dataset: its id, "" where it may be any. path: below its root."""

    @property
    def dataset(self) -> str: ...
    @property
    def path(self) -> str: ...


def read_thumbnails(config: Config, items: Sequence[Located]) -> Iterator[tuple[int, Picture]]:
    """(number, picture) of the items that have one; what is read is kept in memory."""
    sources = {dataset.id: open_source(dataset) for dataset in config.datasets if not dataset.disabled}
    files = [(number, path) for number, item in enumerate(items) if (path := _open(sources, item)) is not None]
    keys = {number: (os.fspath(path), file_version(path)) for number, path in files}
    waiting = [(number, path) for number, path in files if keys[number][1] is None or keys[number] not in _kept]
    if waiting:
        pool: SandboxPool[MediaPath, Picture | None] = SandboxPool(
            _make_thumbnailer, workers=1, timeout_s=THUMBNAIL_TIMEOUT_S, memory_mib=THUMBNAIL_MEMORY_MIB
        )
        with pool:
            results = pool.map(path for _, path in waiting)
            for (number, _), (_, result) in zip(waiting, results, strict=True):
                _kept[keys[number]] = None if isinstance(result, WorkerFailure | MediaError) else result
    for number, _ in files:
        if (picture := _kept[keys[number]]) is not None:
            yield number, picture
    if len(_kept) > MAX_KEPT:
        _kept.clear()


def _open(sources: dict[str, Source], item: Located) -> MediaPath | None:
    for name in [item.dataset] if item.dataset else sources:
        with suppress(MediaError, LatentpressError, OSError, KeyError, ValueError):
            if os.path.exists(sources[name].backing_file("", item.path)):
                return sources[name].open(item.path)
    return None


def _make_thumbnailer() -> Callable[[MediaPath], Picture | None]:
    return partial(shrink_file, box=THUMBNAIL_BOX, max_bytes=THUMBNAIL_BYTES)
