"""discover: what media there is, with captions and companions, or why a file was set aside.

Reads headers only, and every new file's bytes once, to name it by content. A file whose path, size and
modification time are known is not read again.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa

from cache import rejects
from cache.store import Store
from schemas.config import Config, Dataset
from schemas.console import Console, Options, Report, program
from schemas.errors import LatentpressError
from schemas.tables import MEDIA
from stages.media.errors import MediaError, require_file, unreadable
from stages.media.files import hash_file
from stages.sources import folder
from stages.stage import refuse_shard

Row = dict[str, Any]


def run(config: Config, options: Options, console: Console) -> Report:
    refuse_shard(options, "discover")
    store = Store(config.root)
    report = Report(program="discover", dry_run=options.dry_run)
    for dataset in config.datasets:
        if dataset.disabled:
            console.log(f"{dataset.id}: disabled, left alone")
            continue
        _discover(store, config, dataset, options, console, report)
    return report


def media_path(dataset: str) -> str:
    return f"media/{dataset}/media.arrow"


def read_media(store: Store, dataset: str) -> list[Row]:
    """The media table of a dataset as rows; empty before its first discovery."""
    path = media_path(dataset)
    return store.read_table(path).to_pylist() if store.exists(path) else []


def _discover(
    store: Store, config: Config, dataset: Dataset, options: Options, console: Console, report: Report
) -> None:
    listing = folder.scan(dataset)
    before = read_media(store, dataset.id)
    known = {row["path"]: row for row in before}
    if options.dry_run:
        listed = {row["path"] for row in rejects.read(store, "discover").get(dataset.id, [])}
        unread = [printable(item.path) for item in listing.items if not _unchanged(item, known.get(item.path))]
        new = sum(path not in listed for path in unread)
        report.remaining += new
        report.skipped += len(listing.items) - new
        console.log(
            f"{dataset.id}: {len(listing.items)} files, {new} to read, {len(unread) - new} set aside before and to be "
            f"tried again, {listing.ignored_text}"
        )
        return
    rows, aside = _read_all(dataset, listing.items, known, options, config, console)
    rows.sort(key=lambda row: row["path"])
    rejects.write(store, "discover", dataset.id, aside)
    _check_limit(store, config, dataset, rows, aside)
    if rows != before or not store.exists(media_path(dataset.id)):
        store.write_table(media_path(dataset.id), pa.Table.from_pylist(rows, schema=MEDIA))
    report.set_aside += aside
    reused = sum(_unchanged(item, known.get(item.path)) for item in listing.items)
    report.skipped += reused
    report.done += len(listing.items) - reused - len(aside)
    changed = sum(row["path"] in known and row["captions"] != known[row["path"]]["captions"] for row in rows)
    report.details[dataset.id] = {
        "images": sum(row["kind"] == "image" for row in rows),
        "videos": sum(row["kind"] == "video" for row in rows),
        "captions": sum(len(row["captions"]) for row in rows),
        "files whose captions changed": changed,
        "set aside": len(aside),
        "other files": listing.ignored_text,
    }


def _read_all(
    dataset: Dataset,
    items: list[folder.Item],
    known: dict[str, Row],
    options: Options,
    config: Config,
    console: Console,
) -> tuple[list[Row], list[Row]]:
    rows, aside = [], []
    workers = options.resources(config, "discover").workers
    companions = folder.Companions(dataset) if dataset.conditioning_data is not None else None
    with (
        ThreadPoolExecutor(max_workers=workers) as pool,
        console.progress(len(items), f"discover {dataset.id}", "files") as progress,
    ):
        outcomes = pool.map(lambda item: _attempt(dataset, item, known, companions), items)
        for item, outcome in zip(items, outcomes, strict=True):
            if isinstance(outcome, MediaError):
                name = printable(item.path)
                aside.append(
                    rejects.reject("discover", f"{dataset.id}/{name}", name, outcome.reason, printable(str(outcome)))
                )
            else:
                rows.append(outcome)
            progress.advance(1)
    return rows, aside


def _attempt(
    dataset: Dataset, item: folder.Item, known: dict[str, Row], companions: folder.Companions | None
) -> Row | MediaError:
    try:
        return _describe(dataset, item, known.get(item.path), companions)
    except MediaError as error:
        return error
    except OSError as error:
        return unreadable(item.path, error)


def _unchanged(item: folder.Item, row: Row | None) -> bool:
    return row is not None and (row["size"], row["mtime_ns"]) == (item.size, item.mtime_ns)


def printable(text: str) -> str:
    """`text` with the bytes of a file's name that are not UTF-8 shown as escapes."""
    return text.encode(errors="backslashreplace").decode()


def _describe(dataset: Dataset, item: folder.Item, row: Row | None, companions: folder.Companions | None) -> Row:
    """One row of the media table; captions are read anew each time, the media only when it changed."""
    if printable(item.path) != item.path:
        raise MediaError("name-not-utf8", item.path, "has a name that is not UTF-8", "rename it")
    captions = folder.captions(dataset, item)
    if _unchanged(item, row):
        assert row is not None
        media = {key: row[key] for key in MEDIA.names}
    else:
        media = dict.fromkeys(MEDIA.names)
        media.update(path=item.path, size=item.size, mtime_ns=item.mtime_ns, kind=item.kind)
        media.update(_probe(Path(dataset.root) / item.path, item.kind))
    media["captions"] = captions
    media.update(_source(dataset, item, media, companions))
    return media


def _probe(path: Path, kind: str) -> Row:
    require_file(path)
    if kind == "image":
        from stages.media.image import probe_image

        image = probe_image(path)
        found: Row = {"width": image.width, "height": image.height}
    else:
        from stages.media.video import probe_video

        video = probe_video(path)
        found = {name: getattr(video, name) for name in ("width", "height", "frames", "rate", "duration")}
    return {"media_id": hash_file(path), **found}


def _source(dataset: Dataset, item: folder.Item, media: Row, companions: folder.Companions | None) -> Row:
    """The i2i source image's columns, read only when that file changed."""
    if companions is None or dataset.conditioning_data is None:
        return dict.fromkeys(name for name in MEDIA.names if name.startswith("source"))
    source = companions.of(item)
    if (media["source"], media["source_size"], media["source_mtime_ns"]) == (
        source.path,
        source.size,
        source.mtime_ns,
    ):
        return {}
    found = _probe(Path(dataset.conditioning_data) / source.path, "image")
    return {
        "source": source.path,
        "source_size": source.size,
        "source_mtime_ns": source.mtime_ns,
        "source_id": found["media_id"],
        "source_width": found["width"],
        "source_height": found["height"],
    }


def _check_limit(store: Store, config: Config, dataset: Dataset, rows: list[Row], aside: list[Row]) -> None:
    total = len(rows) + len(aside)
    limit = config.stages.max_reject_fraction
    if total and len(aside) / total > limit:
        listed = "\n".join(f"  {row['path']}: {row['reason']}: {row['message']}" for row in aside[:10])
        raise LatentpressError(
            f"{dataset.id}: {len(aside)} of {total} files would be set aside, more than "
            f"stages.max_reject_fraction = {limit}:\n{listed}",
            "mend or remove them, or raise the limit with --set stages.max_reject_fraction=1.0; "
            f"the whole list: {store.path(f'rejects/discover/{dataset.id}.arrow')}",
        )


app = program("discover", "Find media and captions; read headers; name files by content.", run, extra="media")

if __name__ == "__main__":
    app()
