"""The program by which the page gets thumbnails of what was set aside: `python -m stages.pages.ui.make_thumbnails`."""

from pathlib import Path

from cache.store.files import explained, replacing
from cache.store.store import Store
from schemas.cli.console import Console, Options, Report, make_app
from schemas.config.pipeline import Config
from stages.maintenance.set_aside import list_set_aside
from stages.pages.thumbnails import read_thumbnails
from stages.pages.ui.thumbnail_files import (
    MOST_MADE,
    NONE,
    PICTURE,
    ThumbnailFiles,
    can_have_thumbnail,
    thumbnail_id,
)


def run(config: Config, options: Options, console: Console) -> Report:
    """Make those of all items again, as their files may be others now."""
    report = Report(program="thumbnails", dry_run=options.dry_run)
    items = list_set_aside(Store(config.root), config)[:MOST_MADE]
    items = [item for item in items if can_have_thumbnail(item)]
    if options.dry_run:
        return report
    files = ThumbnailFiles(Path(config.output))
    pictures = {}
    with explained(str(files.folder)):
        files.folder.mkdir(parents=True, exist_ok=True)
        for number, picture in read_thumbnails(config, items):
            pictures[number] = files.folder / f"{thumbnail_id(items[number])}{PICTURE}"
            with replacing(pictures[number]) as temporary:
                temporary.write_bytes(picture.data)
            report.done += 1
        for number, item in enumerate(items):
            path = files.folder / f"{thumbnail_id(item)}{NONE}"
            if number in pictures:
                path.unlink(missing_ok=True)
            else:
                path.touch()
                path.with_suffix(PICTURE).unlink(missing_ok=True)
        files.remove_old()
    return report


app = make_app("thumbnails", "Make thumbnails of what was set aside, for `latentpress ui`.", run)

if __name__ == "__main__":
    app()
