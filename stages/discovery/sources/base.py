"""The contract of a source: it lists media, knows their captions and companions, and opens one item by its path.

Each source is a class in this folder. Listing must be cheap: names, sizes and versions come from directories, tables
and archive headers, and no item is opened. Listings are Arrow tables of bounded size, so a million items cost no more
memory than their table.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from schemas.config.datasets import Dataset, MediaKind
from stages.media.files import MediaPath

#: In the order in which a WebDataset key of several media is given the one that is its item.
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".avif", ".heic", ".heif", ".tif", ".tiff", ".bmp", ".gif")
VIDEO_EXTENSIONS = (".mp4", ".webm", ".mkv", ".mov", ".avi", ".m4v")
#: At most this many items are Python objects at a time.
CHUNK_ROWS = 16384

_str, _long = pa.string(), pa.int64()

#: One row an item. path, size, version, kind: as in schemas.tables.MEDIA_SCHEMA; size and version are null where
#: they are unknown until the item is opened. captions: the alternatives, where they are part of the listing (a table's
#: column, the file's name, a member of the archive); else null. captions_at, captions_version: path and version of the
#: caption file that must be read; null if there is none. source, mask: paths of the companions within their own place,
#: with their versions; null if none is configured or none was found. Further source images follow as source_2, ... with
#: their versions. problem, advice: why this item is set aside
#: without being opened ("no-caption: has no caption", the reason before ": "), else null. Extra columns follow as
#: "extra.<name>" (schemas.tables.EXTRA_PREFIX).
LISTING_SCHEMA = pa.schema(
    [("path", _str), ("kind", _str), ("size", _long), ("version", _str)]
    + [("captions", pa.list_(_str)), ("captions_at", _str), ("captions_version", _str)]
    + [(name, _str) for name in ("source", "source_version", "mask", "mask_version", "mask_kind", "problem", "advice")]
)


class Source(Protocol):
    """Made from a dataset's settings; picklable, so that every worker process can open items."""

    ignored: Counter[str]  # what `scan` left alone, by extension or reason

    def __init__(self, dataset: Dataset) -> None: ...

    def scan(self, known: pa.Table | None) -> Iterator[pa.Table]:
        """The listing in chunks of at most CHUNK_ROWS rows, in no order; each path once.

        known: the media table of the last discovery (with "extra." columns); a source may copy from it the rows of an
        archive that has not changed. Raises LatentpressError if the place can't be listed.
        """
        ...

    def open(self, path: str) -> MediaPath:
        """The item at `path`: a local file, or a Blob that is read like one (stages/media/files.py)."""
        ...

    def open_companion(self, role: str, path: str) -> MediaPath:
        """The companion at `path`; role: one of `Dataset.roles`."""
        ...

    def backing_file(self, role: str, path: str) -> MediaPath:
        """The file that holds the item at `path` (role: "") or its companion: itself, or its archive. Cheap, even
        where opening the item is not."""
        ...

    def read_captions(self, path: str) -> list[str]:
        """The alternatives in the caption file at `captions_at`. Raises MediaError."""
        ...


_SOURCE_CLASSES = {
    "folder": "folder.FolderSource",
    "remote": "folder.RemoteSource",
    "webdataset": "webdataset.WebDatasetSource",
    "huggingface": "huggingface.HuggingFaceSource",
    "manifest": "manifest.ManifestSource",
}


def open_source(dataset: Dataset) -> Source:
    """The source of a dataset; its libraries are imported now."""
    module, _, name = _SOURCE_CLASSES[dataset.resolved_source].partition(".")
    return getattr(import_module(f"stages.discovery.sources.{module}"), name)(dataset)


# -- shared by the sources -------------------------------------------------------------------------------------------


def extensions_of_kinds(kinds: Sequence[MediaKind]) -> dict[str, MediaKind]:
    """Extension with its dot, lower case -> kind, in the order of the kinds and of their extensions."""
    return {ending: kind for kind in kinds for ending in (IMAGE_EXTENSIONS if kind == "image" else VIDEO_EXTENSIONS)}


def extensions_of_dataset(dataset: Dataset) -> dict[str, MediaKind]:
    """The same for the media of a dataset: a video dataset may hold images too, which come second."""
    return extensions_of_kinds(("video", "image") if dataset.dataset_type == "video" else ("image",))


def companion_name(role: str) -> str:
    """The name of a companion in messages."""
    _, _, number = role.partition("_")
    return "mask" if role == "mask" else f"source image {number}".strip()


def add_problems(columns: dict[str, pa.Array], problems: pa.Array, advices: pa.Array | str) -> None:
    """Set "problem" and "advice" in the rows of a listing that have a new problem (null: none) and had none before."""
    null = pa.nulls(len(problems), _str)
    before, advice = columns.get("problem", null), columns.get("advice", null)
    columns["advice"] = pc.if_else(pc.and_(pc.is_null(before), pc.is_valid(problems)), advices, advice)
    columns["problem"] = pc.coalesce(before, problems)


def listing_table(columns: Mapping[str, pa.Array]) -> pa.Table:
    """A table of LISTING_SCHEMA from some of its columns ("path" among them) and "extra." ones; the others are null."""
    count = len(columns["path"])
    arrays = {field.name: columns.get(field.name, pa.nulls(count)).cast(field.type) for field in LISTING_SCHEMA}
    return pa.table(arrays | {name: column for name, column in columns.items() if name not in arrays})
