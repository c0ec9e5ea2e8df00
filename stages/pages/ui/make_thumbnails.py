"""The program by which the page gets thumbnails: `python -m stages.pages.ui.make_thumbnails`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.compute as pc
import typer

from cache.store.files import explained, make_folders, replacing
from cache.store.store import Store
from schemas.cli.console import Console, Options, Report, make_app
from schemas.config.pipeline import Config
from stages.discovery.media_table import read_media_table
from stages.maintenance.set_aside import list_set_aside
from stages.pages.thumbnails import Located, read_thumbnails
from stages.pages.ui.child_programs import FOLDER
from stages.pages.ui.thumbnail_files import (
    MOST_MADE,
    NONE,
    PICTURE,
    ThumbnailFiles,
    can_have_thumbnail,
    thumbnail_id,
)


@dataclass(frozen=True)
class Item:
    dataset: str
    path: str


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    dataset: Annotated[str, typer.Option(metavar="NAME", help="Whose items have these media ids.")] = "",
    media_id: Annotated[list[str] | None, typer.Option(metavar="ID", help="Of an item. Repeatable.")] = None,
) -> Report:
    """Make those of the media ids, or of all that was set aside again, as its files may be others now."""
    report = Report(program="thumbnails", dry_run=options.dry_run)
    items = _find_media(config, dataset, media_id) if media_id else _find_set_aside(config)
    if options.dry_run:
        return report
    files, ids = ThumbnailFiles(Path(config.output) / FOLDER), list(items)
    made = set()
    with explained(str(files.folder)):
        make_folders(files.folder)
        for number, picture in read_thumbnails(config, list(items.values())):
            made.add(ids[number])
            with replacing(files.folder / f"{ids[number]}{PICTURE}") as temporary:
                temporary.write_bytes(picture.data)
            report.done += 1
        for name in ids:
            path = files.folder / f"{name}{NONE}"
            if name in made:
                path.unlink(missing_ok=True)
            else:
                path.touch()
                path.with_suffix(PICTURE).unlink(missing_ok=True)
        files.remove_old()
    return report


def _find_set_aside(config: Config) -> Mapping[str, Located]:
    items = list_set_aside(Store(config.root), config)[:MOST_MADE]
    return {thumbnail_id(item): item for item in items if can_have_thumbnail(item)}


def _find_media(config: Config, dataset: str, ids: list[str]) -> Mapping[str, Located]:
    table = read_media_table(Store(config.root), dataset).select(["media_id", "path"])
    rows = table.filter(pc.is_in(table["media_id"], value_set=pa.array(ids[:MOST_MADE], pa.string()))).to_pylist()
    items = {row["media_id"]: Item(dataset, row["path"]) for row in rows}
    return {media_id: item for media_id, item in items.items() if can_have_thumbnail(item)}


app = make_app("thumbnails", "Make thumbnails for `latentpress ui`.", run)

if __name__ == "__main__":
    app()
