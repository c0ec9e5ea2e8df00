"""What a source is: something that lists media, knows captions and companions, and opens one item by its path.

A source is a file beside this one with a class of this shape. Listing must be cheap: names, sizes and versions from
directories, tables and archive headers; no item is opened. Everything it yields is columnar and bounded, so that a
million items cost what their table costs.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from schemas.datasets import Dataset, Kind
from stages.media.files import Media

IMAGES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif", ".heic", ".heif"))
VIDEOS = frozenset((".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v"))
#: Of a million items, this many are Python objects at a time.
CHUNK = 16384

_str, _long = pa.string(), pa.int64()

#: One row an item. path, size, version, kind: as in schemas.tables.MEDIA; size and version are null where nothing
#: is known without opening the item. captions: where they come with the listing (a table's column, the file's
#: name, a member of the archive), already as alternatives; null otherwise. captions_at: the path of the caption
#: file, with its version, where it must be read; null where there is none. source, mask: paths of the companions
#: within their own place, with their versions; null where none was found (and none is asked for, or it is missing).
#: problem, advice: why this item is set aside without being opened ("no-caption: has no caption"), else null; the
#: part before ": " is the reason. Extra columns follow as "extra.<name>" (schemas.tables.EXTRA).
LISTING = pa.schema(
    [
        ("path", _str),
        ("kind", _str),
        ("size", _long),
        ("version", _str),
        ("captions", pa.list_(_str)),
        ("captions_at", _str),
        ("captions_version", _str),
        ("source", _str),
        ("source_version", _str),
        ("mask", _str),
        ("mask_version", _str),
        ("mask_kind", _str),
        ("problem", _str),
        ("advice", _str),
    ]
)


class Source(Protocol):
    """Made from a dataset's settings; picklable, so that every worker process can open items."""

    ignored: Counter[str]  # what `scan` left alone, by extension or reason

    def __init__(self, dataset: Dataset) -> None: ...

    def scan(self, known: pa.Table | None) -> Iterator[pa.Table]:
        """The listing in chunks of at most CHUNK rows, in no order; each path once.

        known: the media table of the last discovery (with "extra." columns), for sources that can take from it what
        lies in an archive that has not changed. Raises LatentpressError where the place itself can't be listed.
        """
        ...

    def open(self, path: str) -> Media:
        """The item at `path`: a local file, or a Blob that is read like one (stages/media/files.py)."""
        ...

    def open_companion(self, role: str, path: str) -> Media:
        """The companion at `path`; role: "source" or "mask"."""
        ...

    def holder(self, role: str, path: str) -> Media:
        """What must be there for the item at `path` (role: "") or its companion to be there: the file, or the archive
        that it lies in. Cheap to make, even where opening the item is not."""
        ...

    def read_captions(self, path: str) -> list[str]:
        """The alternatives in the caption file at `captions_at`. Raises MediaError."""
        ...


_CLASSES = {
    "folder": "folder.Folder",
    "remote": "remote.Remote",
    "webdataset": "webdataset.Tars",
    "huggingface": "huggingface.Hub",
    "manifest": "manifest.Manifest",
}


def open_source(dataset: Dataset) -> Source:
    """The source of a dataset; its libraries are imported now."""
    module, _, name = _CLASSES[dataset.source_name].partition(".")
    return getattr(import_module(f"stages.sources.{module}"), name)(dataset)


# -- for the files beside this one ------------------------------------------------------------------------------------


def kinds_of(kinds: Sequence[Kind]) -> dict[str, Kind]:
    """Extension with its dot, lower case -> kind, of the media kinds asked for."""
    return {ending: kind for kind in kinds for ending in (IMAGES if kind == "image" else VIDEOS)}


def kinds_for(dataset: Dataset) -> dict[str, Kind]:
    """The same for the media of a dataset: one of videos may hold images too."""
    return kinds_of(("image", "video") if dataset.dataset_type == "video" else ("image",))


def add_problems(columns: dict[str, pa.Array], problems: pa.Array, advices: pa.Array) -> None:
    """Set "problem" and "advice" of a listing where there was none."""
    null = pa.nulls(len(problems), _str)
    before, advice = columns.get("problem", null), columns.get("advice", null)
    columns["advice"] = pc.if_else(pc.is_valid(before), advice, advices)
    columns["problem"] = pc.coalesce(before, problems)


def listing(columns: Mapping[str, pa.Array]) -> pa.Table:
    """A table of the LISTING schema from some of its columns ("path" among them) and "extra." ones; others null."""
    count = len(columns["path"])
    arrays = [columns.get(field.name, pa.nulls(count, field.type)).cast(field.type) for field in LISTING]
    further = {name: column for name, column in columns.items() if name not in LISTING.names}
    fields = [*LISTING, *(pa.field(name, column.type) for name, column in further.items())]
    return pa.Table.from_arrays([*arrays, *further.values()], schema=pa.schema(fields))
