"""A Hugging Face dataset as a source, through the `datasets` library: local files, a saved dataset, or one of the hub.

Nothing is decoded here. An item is named by the file that its row came from (below the folder, or "<split>/<name>"
where the bytes lie in the table), so that rows may be inserted; by "<split>/<row>" where it has no name of its own or
shares it. Its version is the file's, else the dataset's fingerprint: a table whose rows carry the bytes is read anew
as a whole when any of it changed. The library keeps its copies in its own cache (HF_HOME) and takes HF_TOKEN from the
environment.
"""

import io
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.config.datasets import Dataset
from schemas.errors import LatentpressError
from stages.discovery.sources.base import CHUNK_ROWS, add_problems, extensions_of_kinds
from stages.discovery.sources.captions import add_captions, captions_of_rows, make_caption_lookup, normalise_paths
from stages.discovery.sources.columns import TextLookup, extra_columns, require_columns, simplify_column, take_rows
from stages.discovery.sources.companions import companion_finders, complete_listing
from stages.discovery.sources.csv_checks import check_csv_files
from stages.discovery.sources.object_store import RemoteFile
from stages.discovery.sources.table_reader import USUAL_MEDIA_COLUMNS, raise_bad_json
from stages.discovery.sources.urls import scrub_secrets
from stages.media.errors import RESTORE_ADVICE, MediaError
from stages.media.files import Blob, MediaPath

_text, _long = pa.string(), pa.int64()
#: Ending of a single file -> the library's builder for it.
_BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".json": "json", ".jsonl": "json"}


@dataclass(frozen=True)
class DatasetLocation:
    """What is loaded: a folder, file or hub name ("user/name" or "user/name:configuration"), and the split of it."""

    root: str
    split: str

    @property
    def is_local(self) -> bool:
        return os.path.exists(self.root)


class HuggingFaceSource:
    """See stages/discovery/sources/base.py for what each method does."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset, self._place = dataset, DatasetLocation(dataset.root, dataset.split)
        self.ignored = Counter[str]()
        self._companions = companion_finders(dataset)
        self._columns = {"source": dataset.conditioning_column, "mask": dataset.mask_column}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_media", "_lookup")}

    def scan(self, known: pa.Table | None) -> Iterator[pa.Table]:
        self.ignored.clear()
        check_csv_files(self._place.root)  # here alone, not in every process that opens an item
        rows, media = load_rows(self._place), self._media
        known_columns = pa.table({name: pa.nulls(0) for name in rows.features})
        require_columns(known_columns, [c for c in self._columns.values() if c], "the column of companions")
        listed = make_caption_lookup(self._dataset)
        paths = self._lookup.keys.combine_chunks()
        for start in range(0, len(rows), CHUNK_ROWS):
            chunk: pa.Table = rows[start : start + CHUNK_ROWS]
            columns = self._items(chunk, media, paths.slice(start, len(chunk)))
            yield complete_listing(columns, listed, self._companions)

    def open(self, path: str) -> MediaPath:
        return self._cell(path, self._media)

    def open_companion(self, role: str, path: str) -> MediaPath:
        column = self._columns[role]
        return self._cell(path, column) if column else self._companions[role].open(path)

    def backing_file(self, role: str, path: str) -> MediaPath:
        return self.open_companion(role, path) if role else self.open(path)

    def read_captions(self, path: str) -> list[str]:
        raise AssertionError(f"{path}: captions of a table come with the listing")

    @cached_property
    def _media(self) -> str:
        return _find_media_column(load_rows(self._place).features, self._dataset)

    @cached_property
    def _lookup(self) -> TextLookup:
        """The rows by their paths."""
        return TextLookup(_item_paths(load_rows(self._place), self._media, self._place))

    def _cell(self, path: str, column: str) -> MediaPath:
        row = int(self._lookup.find(pa.array([path]))[0])
        if row < 0:
            raise MediaError("missing", path, "is no row of the dataset", RESTORE_ADVICE)
        data, file = _bytes_and_files(load_rows(self._place)[row : row + 1].column(column))
        if data is not None and data[0].is_valid:
            return TableCell(self._place, column, row, path, len(data[0].as_buffer()))
        if file is None or not file[0].is_valid:
            raise MediaError("missing", path, f"has nothing in column {column!r}", RESTORE_ADVICE)
        return _cell_file(self._place, file[0].as_py())

    def _items(self, chunk: pa.Table, media: str, paths: pa.Array) -> dict[str, pa.Array]:
        """The columns of a listing for some rows, without companions by name and captions from elsewhere."""
        dataset = self._dataset
        sizes, versions = self._sizes_and_versions(chunk.column(media))
        kinds = self._kinds(chunk.column(media))
        columns = {"path": paths, "kind": kinds, "size": sizes, "version": versions}
        for role, column in self._columns.items():
            if column:
                there = _has_media(chunk.column(column))
                null = pa.scalar(None, _text)
                columns[role] = pc.if_else(there, paths, null)
                columns[f"{role}_version"] = pc.if_else(there, self._sizes_and_versions(chunk.column(column))[1], null)
                if role == "mask":
                    columns["mask_kind"] = pc.if_else(there, "image", null)
        empty = pc.if_else(
            _has_media(chunk.column(media)), pa.scalar(None, _text), f"no-media: has nothing in {media!r}"
        )
        add_problems(columns, empty, pc.if_else(pc.is_valid(empty), "fill it in, or leave the row out", empty))
        other = [name for name in self._columns.values() if name]
        used = [media, *other, *(dataset.caption_column if self._own_captions else ())]
        columns |= extra_columns(_scalar_columns(chunk, load_rows(self._place).features, used), used, self.ignored)
        if self._own_captions:
            require_columns(chunk, dataset.caption_column, "caption_column", dataset.instance_data_dir)
            own = _simplify_columns(chunk, dataset.caption_column)
            where = dataset.instance_data_dir
            add_captions(
                columns, captions_of_rows(own, dataset.caption_column, np.arange(len(chunk)), len(chunk), where)
            )
        return columns

    @property
    def _own_captions(self) -> bool:
        return self._dataset.resolved_caption_strategy == "huggingface"

    def _kinds(self, column: pa.ChunkedArray) -> pa.Array:
        """image or video: as the column's type says, else by the file's ending, else as the dataset is set."""
        feature = type(load_rows(self._place).features[self._media]).__name__.lower()
        if feature in ("image", "video"):
            return pa.repeat(feature, len(column))
        endings = extensions_of_kinds(("image", "video"))
        _, files = _bytes_and_files(column)
        names = files.to_pylist() if files is not None else [None] * len(column)
        default = self._dataset.dataset_type
        return pa.array([endings.get(os.path.splitext(name or "")[1].lower(), default) for name in names], _text)

    def _sizes_and_versions(self, column: pa.ChunkedArray) -> tuple[pa.Array, pa.Array]:
        """Size and version of each cell: those of its file, or the length of its bytes and the dataset's own."""
        data, files = _bytes_and_files(column)
        fingerprint = load_rows(self._place)._fingerprint
        sizes = (
            take_rows(pc.binary_length(data).cast(_long), None) if data is not None else pa.nulls(len(column), _long)
        )
        versions = pa.repeat(str(fingerprint), len(column))
        if files is None or (data is not None and data.null_count == 0):
            return sizes, versions
        stated = [
            _stat_file(self._place, name) if length is None and name else (length, fingerprint)
            for name, length in zip(files.to_pylist(), sizes.to_pylist(), strict=True)
        ]
        return pa.array([size for size, _ in stated], _long), pa.array([version for _, version in stated], _text)


class TableCell(Blob):
    """The bytes in one cell of a dataset."""

    def __init__(self, place: DatasetLocation, column: str, row: int, path: str, size: int) -> None:
        self._place, self._column, self._row, self._size = place, column, row, size
        self.name = f"{place.root}/{path}"

    def open(self) -> BinaryIO:
        data, _ = _bytes_and_files(load_rows(self._place)[self._row : self._row + 1].column(self._column))
        if data is None or not data[0].is_valid:
            step = "run `latentpress discover` and `latentpress bucket`"
            raise MediaError("changed", self.name, "is not the row that was discovered", step)
        return cast(BinaryIO, io.BytesIO(data[0].as_buffer()))

    def size(self) -> int:
        return self._size


# -- loading --------------------------------------------------------------------------------------------------------


@lru_cache(8)
def load_rows(place: DatasetLocation) -> Any:
    """The dataset in Arrow form, once for each process; its rows are memory-mapped. Raises LatentpressError."""
    try:
        import datasets
    except ImportError as error:
        step = "pip install 'latentpress[huggingface]'"
        raise LatentpressError(f"{place.root}: the library `datasets` is missing ({error})", step) from None
    datasets.disable_progress_bars()
    try:
        found = _load_uncached(datasets, place)
    except LatentpressError:
        raise
    except Exception as error:  # the library passes on whatever its builders and its HTTP client raise
        raise _loading_error(place, error) from None
    return found.with_format("arrow")


def _load_uncached(datasets: Any, place: DatasetLocation) -> Any:
    root, split = place.root, place.split
    if os.path.isfile(root):
        builder = _BUILDERS.get(os.path.splitext(root)[1].lower())
        if builder is None:
            raise LatentpressError(f"{root}: is no table that is known", f"valid endings: {', '.join(_BUILDERS)}")
        return datasets.load_dataset(builder, data_files={split.partition("[")[0]: root}, split=split)
    if os.path.isfile(os.path.join(root, "dataset_dict.json")) or os.path.isfile(os.path.join(root, "state.json")):
        saved = datasets.load_from_disk(root)
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise LatentpressError(f"{root}: has no split {split!r}", f"set split to one of: {', '.join(saved)}")
            return saved[split]
        return saved
    if os.path.isdir(root):
        return datasets.load_dataset(root, split=split)
    name, _, configuration = root.partition(":")
    if root.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise LatentpressError(
            f"{root}: is not there", "correct instance_data_dir, or media_root; a hub name is user/name"
        )
    return datasets.load_dataset(name, configuration or None, split=split)


def _loading_error(place: DatasetLocation, error: Exception) -> LatentpressError:
    if os.path.splitext(place.root)[1].lower() == ".jsonl" and place.is_local:
        raise_bad_json(place.root)
    said = scrub_secrets(f"{type(error).__name__}: {error}").strip().partition("\n")[0]
    name = type(error).__name__
    if place.is_local:
        step = "look at its files and at split; a folder is one of parquet, arrow, images or videos with a metadata.csv"
    elif isinstance(error, ConnectionError) or "offline" in said.lower() or "Connection" in name:
        step = "download it where there is a network, without HF_HUB_OFFLINE, and set instance_data_dir to the folder"
    elif "split" in said.lower() or "config" in said.lower():
        step = "correct split, or the configuration in user/name:configuration"
    else:
        step = "check the name and the network; a private or gated dataset needs HF_TOKEN in the environment"
    return LatentpressError(f"{place.root}: can't be loaded ({said})", step)


# -- columns --------------------------------------------------------------------------------------------------------


def _find_media_column(features: Any, dataset: Dataset) -> str:
    """The column of the media: as set, else the first of images or videos, of bytes, or with a usual name."""
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    wanted = dataset.media_column
    if wanted:
        require_columns(pa.table({name: pa.nulls(0) for name in kinds}), [wanted], "media_column", dataset.root)
    else:
        others = (dataset.conditioning_column, dataset.mask_column)
        free = [name for name in kinds if name not in others]
        media = [name for name in free if kinds[name] in ("Image", "Video")]
        raw = [name for name in free if getattr(features[name], "dtype", "") in ("binary", "large_binary")]
        usual = [name for name in USUAL_MEDIA_COLUMNS if name in free]
        found = [*media, *raw, *usual]
        if not found:
            raise LatentpressError(
                f"{dataset.root}: no column is of images, videos or bytes; there are: {', '.join(kinds)}",
                "name the column of the media with media_column",
            )
        wanted = found[0]
    if kinds[wanted] == "Video" and dataset.dataset_type != "video":
        message = f"datasets.{dataset.id}.dataset_type: {wanted!r} is a column of videos"
        raise LatentpressError(message, "set dataset_type: video, or media_column to a column of images")
    return wanted


def _bytes_and_files(column: pa.ChunkedArray) -> tuple[pa.ChunkedArray | None, pa.Array | None]:
    """The bytes (in place, never combined: that would read them) and the files' names of a column of media; None for
    what it does not hold."""
    kind = column.type
    if pa.types.is_struct(kind):
        fields = {kind.field(i).name for i in range(kind.num_fields)}
        if {"bytes", "path"} <= fields:
            return pc.struct_field(column, "bytes"), take_rows(pc.struct_field(column, "path").cast(_text), None)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return column, None
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return None, take_rows(column.cast(_text), None)
    message = f"a column of {kind} holds no media"
    raise LatentpressError(message, "name one of images, videos, bytes or file names")


def _has_media(column: pa.ChunkedArray) -> pa.Array:
    data, files = _bytes_and_files(column)
    there = [take_rows(pc.is_valid(part), None) for part in (data, files) if part is not None]
    return there[0] if len(there) == 1 else pc.or_(*there)


def _scalar_columns(chunk: pa.Table, features: Any, used: list[str]) -> pa.Table:
    """The other columns, of few types; of class labels the names."""
    rest = _simplify_columns(chunk, [name for name in chunk.column_names if name not in used])
    for at, name in enumerate(rest.column_names):
        names, column = getattr(features[name], "names", None), rest.column(name)
        if names and pa.types.is_integer(column.type):
            known = pc.if_else(pc.less(column, 0), pa.scalar(None, column.type), column)  # -1: has none
            rest = rest.set_column(at, name, pa.chunked_array([pa.array(names, _text)]).take(known))
    return rest


def _simplify_columns(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Columns as whole numbers, numbers, texts and lists of texts; others as they are."""
    return pa.table({name: simplify_column(table.column(name)) for name in names})


def _item_paths(rows: Any, media: str, place: DatasetLocation) -> pa.ChunkedArray:
    """What names each row. See the head of this file."""
    named = rows.select_columns([media])
    chunks = []
    for start in range(0, len(rows), CHUNK_ROWS):
        column = named[start : start + CHUNK_ROWS].column(media)
        _, files = _bytes_and_files(column)
        names = _item_names(files, place) if files is not None else pa.nulls(len(column), _text)
        chunks.append(names)
    names = pa.chunked_array(chunks, _text)
    _, counts = TextLookup(names).count(names.combine_chunks()) if len(rows) else (None, [])
    numbers = pc.utf8_lpad(pa.array(range(len(rows)), _long).cast(_text), 9, "0")
    numbered = pc.binary_join_element_wise(f"{place.split}/", numbers, "")
    alone = pc.and_(pc.equal(pa.array(counts, _long), 1), pc.is_valid(names))
    return pa.chunked_array([pc.if_else(alone, names.combine_chunks(), numbered)], _text)


def _item_names(files: pa.Array, place: DatasetLocation) -> pa.Array:
    """Paths below the folder where they are, else "<split>/<name>" (of a place elsewhere the last part)."""
    below = files
    for root in dict.fromkeys((os.path.abspath(place.root), os.path.realpath(place.root))):
        below = normalise_paths(below, root)
    inside = pc.not_equal(below, files)
    far = pc.or_(pc.match_substring(below, "://"), pc.match_substring_regex(below, r"^/|^\.\.(/|$)"))
    last = pc.if_else(
        far, pc.replace_substring_regex(pc.replace_substring_regex(below, r"(?s)\?.*", ""), r"(?s)^.*/", ""), below
    )
    return pc.if_else(inside, below, pc.binary_join_element_wise(f"{place.split}/", last, ""))


def _cell_file(place: DatasetLocation, name: str) -> MediaPath:
    """The file that a cell names: a URL, or a path, relative to the dataset's folder."""
    if "://" in name:
        return RemoteFile(name)
    folder = os.path.dirname(place.root) if os.path.isfile(place.root) else place.root
    return os.path.join(folder, name)


def _stat_file(place: DatasetLocation, name: str) -> tuple[int | None, str | None]:
    """Size and version of a file; nothing where that is not known without asking a server, or it is not there."""
    file = _cell_file(place, name)
    try:
        status = None if isinstance(file, Blob) else os.stat(file)
    except OSError:  # opening it says so, and it is set aside by name
        status = None
    return (status.st_size, str(status.st_mtime_ns)) if status else (None, None)
