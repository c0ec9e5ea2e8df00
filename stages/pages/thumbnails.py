"""Thumbnails of items (also rejected items) whose file can be read. Files are decoded in a sandboxed process, because
they may be damaged or hostile.

The report embeds thumbnails in its page. For `latentpress ui`, `python -m stages.pages.thumbnails` makes files, so that
the page never decodes a file and never reads the output of a decoder's process:

    <output>/.ui/thumbnails/<id>.webp   thumbnail of an item
    <output>/.ui/thumbnails/<id>.none   marks an item without a thumbnail, because none could be made

The id is the media id. A rejected item does not have a media id: its id is a hash of its dataset, path, reason and
message.
"""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated

import pyarrow as pa
import pyarrow.compute as pc
import typer
import xxhash

from cache.store.files import explained, make_folders, replacing
from cache.store.store import Store
from schemas.cli.console import Console, Options, Report, make_app
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from stages.discovery.media_table import read_media_table
from stages.discovery.sources.base import Source, open_source
from stages.maintenance.rejected_items import RejectedItem, list_rejected_items
from stages.media.files import MediaError, MediaPath
from stages.pages.pictures import Picture, shrink_file

FOLDER = ".ui"  # folder of `latentpress ui` in the output folder
MAX_FILES = 1000  # files, of at most 24 kB each
MAX_THUMBNAILS = 500  # thumbnails per start, for the first items of the list
PICTURE, NONE = ".webp", ".none"
BOX, MAX_BYTES = (96, 96), 4000  # pixels and bytes of a thumbnail in the report
LARGE_BOX, LARGE_BYTES = (384, 384), 24_000  # of a file for `latentpress ui`
TIMEOUT_S, MEMORY_MIB = 20.0, 4096
_ID = re.compile("[0-9a-f]{32}")


def thumbnail_id(item: RejectedItem) -> str:
    """The id of a rejected item's thumbnail. It changes when the file is rejected for another reason, so that the
    thumbnail of a replaced file is made again."""
    parts = (item.dataset, item.path, item.reason, item.message)
    return xxhash.xxh3_128_hexdigest("\0".join(parts).encode("utf-8", "surrogatepass"))


def can_have_thumbnail(path: str) -> bool:
    """Whether an item's path is relative and without "..", so that it leads to a place in its dataset: paths from a
    table are not trusted."""
    place = PurePosixPath(path)
    return bool(path) and not place.is_absolute() and ".." not in place.parts


class ThumbnailFiles:
    """The thumbnail files in an output folder."""

    def __init__(self, output: Path) -> None:
        self.folder = output / FOLDER / "thumbnails"

    def find(self, name: str) -> Path | None:
        """The path of an id's thumbnail; None if it does not exist or is not a regular file. name: the id."""
        path = self.folder / f"{name}{PICTURE}"
        return path if _ID.fullmatch(name) and path.is_file() and not path.is_symlink() else None

    def list_known(self) -> dict[str, bool]:
        """id -> whether the thumbnail exists; False if none could be made. Ids that were not tried are left out."""
        if not self.folder.is_dir():
            return {}
        return {path.stem: path.suffix == PICTURE for path in self.folder.iterdir() if path.suffix in (PICTURE, NONE)}

    def write(self, pictures: Mapping[str, Picture | None]) -> None:
        """Write pictures by their ids (None marks that no thumbnail could be made), and keep the newest MAX_FILES
        files."""
        with explained(str(self.folder)):
            make_folders(self.folder)
            for name, picture in pictures.items():
                file, none = self.folder / f"{name}{PICTURE}", self.folder / f"{name}{NONE}"
                if picture is None:
                    none.touch()
                    file.unlink(missing_ok=True)
                else:
                    none.unlink(missing_ok=True)
                    with replacing(file) as temporary:
                        temporary.write_bytes(picture.data)
            files = sorted(self.folder.glob("*.*"), key=lambda path: path.stat().st_mtime_ns)
            for path in files[: max(0, len(files) - MAX_FILES)]:
                path.unlink(missing_ok=True)


def read_thumbnails(
    config: Config, items: Sequence[tuple[str, str]], box: tuple[int, int] = BOX, max_bytes: int = MAX_BYTES
) -> list[Picture | None]:
    """Make a thumbnail of each item. items: (id of the dataset or "" for any dataset, path below the dataset's root).
    box, max_bytes: largest size in pixels and bytes. Returns a picture for each item, None if the item's file can't be
    read."""
    from stages.engines.sandbox import SandboxPool

    sources = {dataset.id: open_source(dataset) for dataset in config.datasets if not dataset.disabled}
    files = [_open(sources, *item) for item in items]
    pictures: list[Picture | None] = [None] * len(items)
    numbers = [number for number, file in enumerate(files) if file is not None]
    if numbers:
        pool: SandboxPool[MediaPath, Picture | None] = SandboxPool(
            partial(_make_thumbnailer, box, max_bytes), workers=1, timeout_s=TIMEOUT_S, memory_mib=MEMORY_MIB
        )
        with pool:
            results = pool.map(file for file in files if file is not None)
            for number, (_, result) in zip(numbers, results, strict=True):
                pictures[number] = result if isinstance(result, Picture) else None
    return pictures


def _open(sources: dict[str, Source], dataset: str, path: str) -> MediaPath | None:
    for name in [dataset] if dataset else sources:
        with suppress(MediaError, LatentpressError, OSError, KeyError, ValueError):
            if os.path.exists(sources[name].backing_file("", path)):
                return sources[name].open(path)
    return None


def _make_thumbnailer(box: tuple[int, int], max_bytes: int) -> partial[Picture | None]:
    return partial(shrink_file, box=box, max_bytes=max_bytes)


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    dataset: Annotated[str, typer.Option(metavar="NAME", help="The dataset of the ids.")] = "",
    media_id: Annotated[list[str] | None, typer.Option(metavar="ID", help="Id of an item. Repeatable.")] = None,
) -> Report:
    """Make the thumbnails of the ids of items, rejected or not; without ids, of all rejected items again, because their
    files may have changed."""
    report = Report(program="thumbnails", dry_run=options.dry_run)
    store = Store(config.root)
    rejected = list_rejected_items(store, config)
    items = {thumbnail_id(item): (item.dataset, item.path) for item in rejected}
    if media_id:
        items = {name: item for name, item in items.items() if name in media_id}
        with suppress(LatentpressError):  # discovery may have rejected all items
            table = read_media_table(store, dataset).select(["media_id", "path"])
            is_requested = pc.is_in(table["media_id"], value_set=pa.array(media_id, pa.string()))
            items |= {row["media_id"]: (dataset, row["path"]) for row in table.filter(is_requested).to_pylist()}
    items = dict([*items.items()][:MAX_THUMBNAILS])
    items = {name: item for name, item in items.items() if can_have_thumbnail(item[1])}
    if not options.dry_run:
        pictures = dict(zip(items, read_thumbnails(config, list(items.values()), LARGE_BOX, LARGE_BYTES), strict=True))
        ThumbnailFiles(Path(config.output)).write(pictures)
        report.done = sum(picture is not None for picture in pictures.values())
    return report


app = make_app("thumbnails", "Make thumbnails for `latentpress ui`.", run)

if __name__ == "__main__":
    app()
