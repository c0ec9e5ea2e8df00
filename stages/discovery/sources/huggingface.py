"""A source for a Hugging Face dataset, read with the `datasets` library: local files, a saved dataset, or a Hub
dataset.

Images are not decoded. An item's path is the file in its row (below the folder, or "<split>/<name>" if the
table contains the bytes), so that rows may be inserted. If a row has no name, or a name that is not unique, the path is
"<split>/<row>". An item's version is the file's version if the row names a file. If the table contains the bytes, the
version is the dataset's fingerprint, so all rows are read again if any row changed. The library stores its copies in
its cache (HF_HOME) and reads HF_TOKEN from the environment.
"""

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.config.datasets import Dataset
from schemas.config.section import listed
from schemas.errors import LatentpressError
from stages.discovery.sources.base import Source
from stages.discovery.sources.captions import add_row_captions, normalize_paths
from stages.discovery.sources.columns import (
    CHUNK_ROWS,
    Columns,
    TextLookup,
    add_problems,
    extra_columns,
    kinds_by_extension,
    refuse_invalid_text,
    require_columns,
    simplify_column,
    take_rows,
)
from stages.discovery.sources.object_store import RemoteFile
from stages.discovery.sources.table_reader import USUAL_MEDIA_COLUMNS, check_for_datasets
from stages.discovery.sources.urls import scrub_secrets
from stages.media.files import RESTORE_ADVICE, Blob, MediaError, MediaPath

_text, _long = pa.string(), pa.int64()
#: Extension of a single file -> name of the library's builder.
_BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".json": "json", ".jsonl": "json"}


@dataclass(frozen=True)
class DatasetLocation:
    """A split of a dataset. root: folder, file or Hub name ("user/name" or "user/name:configuration")."""

    root: str
    split: str


class HuggingFaceSource(Source):
    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset)
        self._place = DatasetLocation(dataset.root, dataset.split)

    def items(self, known_rows: pa.Table | None) -> Iterator[Columns]:
        check_for_datasets(self._place.root)  # only when listing, not in each process that opens items
        rows, paths = load_rows(self._place), self._lookup.keys
        require_columns(list(rows.features), list(self._columns_by_role.values()), "the column of companions")
        for start in range(0, len(rows), CHUNK_ROWS):
            chunk: pa.Table = rows[start : start + CHUNK_ROWS]
            refuse_invalid_text(chunk, self._place.root)
            yield self._columns(chunk, paths.slice(start, len(chunk)).cast(_text))

    def open(self, path: str) -> MediaPath:
        return self._cell(path, self._media)

    def open_companion(self, role: str, path: str) -> MediaPath:
        column = self._columns_by_role.get(role)
        return self._cell(path, column) if column else super().open_companion(role, path)

    @cached_property
    def _media(self) -> str:
        """The name of the media column: the configured column, else the first column of images or videos, else the
        first of bytes, else the first with one of USUAL_MEDIA_COLUMNS as its name."""
        dataset, features = self._dataset, load_rows(self._place).features
        kinds = {name: type(feature).__name__ for name, feature in features.items()}
        column = dataset.media_column
        if column:
            require_columns(list(kinds), [column], "media_column", dataset.root)
        else:
            free = [name for name in kinds if name not in (*listed(dataset.conditioning_column), dataset.mask_column)]
            media = [name for name in free if kinds[name] in ("Image", "Video")]
            binary = [name for name in free if getattr(features[name], "dtype", "") in ("binary", "large_binary")]
            usual = [name for name in USUAL_MEDIA_COLUMNS if name in free]
            column = next(iter([*media, *binary, *usual]), None)
        if column is None:
            raise LatentpressError(
                f"{dataset.root}: it has no column of images, videos or bytes; its columns: {', '.join(kinds)}",
                "set media_column to the column of the media",
            )
        if kinds[column] == "Video" and dataset.dataset_type != "video":
            message = f"datasets.{dataset.id}.dataset_type: {column!r} is a column of videos"
            raise LatentpressError(message, "set dataset_type: video, or media_column to a column of images")
        return column

    @cached_property
    def _lookup(self) -> TextLookup:
        """A lookup of rows by item path. Paths are described at the top of this file."""
        rows = load_rows(self._place)
        cells, chunks = rows.select_columns([self._media]), []
        for start in range(0, len(rows), CHUNK_ROWS):
            part: pa.Table = cells[start : start + CHUNK_ROWS]
            refuse_invalid_text(part, self._place.root)
            column = part.column(self._media)
            _, files = _bytes_and_files(column)
            chunks.append(pa.nulls(len(column), _text) if files is None else _item_names(files, self._place))
        names = pa.chunked_array(chunks, _text).combine_chunks()
        _, counts = TextLookup(names).count(names)
        numbers = pc.utf8_lpad(pa.array(range(len(rows)), _long).cast(_text), 9, "0")
        numbered = pc.binary_join_element_wise(f"{self._place.split}/", numbers, "")
        unique = pc.and_(pc.equal(pa.array(counts, _long), 1), pc.is_valid(names))
        return TextLookup(pc.if_else(unique, names, numbered))

    def _cell(self, path: str, column: str) -> MediaPath:
        row = int(self._lookup.find(pa.array([path]))[0])
        if row < 0:
            raise MediaError("missing", path, "is not a row of the dataset", RESTORE_ADVICE)
        data, file = _bytes_and_files(load_rows(self._place)[row : row + 1].column(column))
        if data is not None and data[0].is_valid:
            return TableCell(self._place, column, row, path, len(data[0].as_buffer()))
        if file is None or not file[0].is_valid:
            raise MediaError("missing", path, f"has no value in column {column!r}", RESTORE_ADVICE)
        return _cell_file(self._place, file[0].as_py())

    def _columns(self, chunk: pa.Table, paths: pa.Array) -> Columns:
        """The columns of a listing for some rows, without the companions and captions that `scan` adds."""
        dataset, media = self._dataset, chunk.column(self._media)
        sizes, versions = self._sizes_and_versions(media)
        columns = {"path": paths, "kind": self._kinds(media), "size": sizes, "version": versions}
        for role, column in self._columns_by_role.items():
            present = _has_media(chunk.column(column))
            columns[role] = pc.if_else(present, paths, None)
            columns[f"{role}_version"] = pc.if_else(present, self._sizes_and_versions(chunk.column(column))[1], None)
            if role == "mask":
                columns["mask_kind"] = pc.if_else(present, "image", None)
        problem = f"no-media: has no value in {self._media!r}"
        add_problems(columns, pc.if_else(_has_media(media), None, problem), "add the value, or remove the row")
        captions = dataset.caption_column if self._own_captions else []
        used_names = [self._media, *self._columns_by_role.values(), *captions]
        columns |= extra_columns(
            _other_columns(chunk, load_rows(self._place).features, used_names), used_names, self.ignored
        )
        if self._own_captions:
            require_columns(chunk.column_names, captions, "caption_column", dataset.instance_data_dir)
            texts = _simplify_columns(chunk, captions)
            add_row_captions(columns, texts, np.arange(len(chunk)), dataset.instance_data_dir)
        return columns

    def _kinds(self, column: pa.ChunkedArray) -> pa.Array:
        """(rows,) "image" or "video": from the column's type, else the file's extension, else the dataset's type."""
        feature, default = (
            type(load_rows(self._place).features[self._media]).__name__.lower(),
            self._dataset.dataset_type,
        )
        if feature in ("image", "video"):
            return pa.repeat(feature, len(column))
        _, files = _bytes_and_files(column)
        return pa.repeat(default, len(column)) if files is None else kinds_by_extension(files, default)

    def _sizes_and_versions(self, column: pa.ChunkedArray) -> tuple[pa.Array, pa.Array]:
        """Size and version of each cell. For bytes: their length and the dataset's fingerprint. For a local file: the
        file's size and version. For a missing or remote file, both are null."""
        data, files = _bytes_and_files(column)
        # A private member: `datasets` has no public name for a dataset's fingerprint.
        fingerprint = str(load_rows(self._place)._fingerprint)
        sizes = [None] * len(column) if data is None else pc.binary_length(data).to_pylist()
        versions: list[str | None] = [fingerprint] * len(column)
        for row, name in enumerate(files.to_pylist() if files is not None else ()):
            if sizes[row] is None and name:
                versions[row], file = None, _cell_file(self._place, name)
                with suppress(OSError):  # opening the file fails again, and then the item is rejected
                    status = None if isinstance(file, Blob) else os.stat(file)
                    sizes[row], versions[row] = (status.st_size, str(status.st_mtime_ns)) if status else (None, None)
        return pa.array(sizes, _long), pa.array(versions, _text)


class TableCell(Blob):
    """The bytes in a single cell of a dataset."""

    def __init__(self, location: DatasetLocation, column: str, row: int, path: str, size: int) -> None:
        self._place, self._column, self._row, self._size = location, column, row, size
        self.name = f"{location.root}/{path}"

    def open(self) -> BinaryIO:
        data, _ = _bytes_and_files(load_rows(self._place)[self._row : self._row + 1].column(self._column))
        if data is None or not data[0].is_valid:
            step = "run `latentpress discover` and `latentpress bucket`"
            raise MediaError("changed", self.name, "differs from the discovered row", step)
        return cast(BinaryIO, io.BytesIO(data[0].as_buffer()))

    def size(self) -> int:
        return self._size


# -- loading ---------------------------------------------------------------------------------------------------------


@lru_cache(8)
def load_rows(location: DatasetLocation) -> Any:
    """The dataset in Arrow format with memory-mapped rows, cached in each process. Raises LatentpressError."""
    try:
        import datasets
    except ImportError as error:
        step = "pip install 'latentpress[huggingface]'"
        raise LatentpressError(f"{location.root}: the library `datasets` is missing ({error})", step) from None
    datasets.disable_progress_bars()
    try:
        rows = _load_uncached(datasets, location)
    except LatentpressError:
        raise
    except Exception as error:  # the library's builders and its HTTP client have their own exceptions
        raise _loading_error(location, error) from None
    return rows.with_format("arrow")


def _load_uncached(datasets: Any, location: DatasetLocation) -> Any:
    root, split = location.root, location.split
    if os.path.isfile(root):
        builder = _BUILDERS.get(os.path.splitext(root)[1].lower())
        if builder is None:
            raise LatentpressError(f"{root}: its format is unknown", f"valid endings: {', '.join(_BUILDERS)}")
        return datasets.load_dataset(builder, data_files={split.partition("[")[0]: root}, split=split)
    if any(os.path.isfile(os.path.join(root, name)) for name in ("dataset_dict.json", "state.json")):
        saved = datasets.load_from_disk(root)
        if not isinstance(saved, datasets.DatasetDict):
            return saved
        if split not in saved:
            raise LatentpressError(f"{root}: has no split {split!r}", f"set split to one of: {', '.join(saved)}")
        return saved[split]
    if os.path.isdir(root):
        return datasets.load_dataset(root, split=split)
    name, _, configuration = root.partition(":")
    if root.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        step = "correct instance_data_dir, or media_root; a hub name is user/name"
        raise LatentpressError(f"{root}: does not exist", step)
    return datasets.load_dataset(name, configuration or None, split=split)


def _loading_error(location: DatasetLocation, error: Exception) -> LatentpressError:
    message = scrub_secrets(f"{type(error).__name__}: {error}").strip().partition("\n")[0]
    step = "check its files and split; valid folders have parquet files, arrow files, or media with a metadata.csv"
    if not os.path.exists(location.root):
        step = (
            "check the name, the split, the configuration (user/name:configuration) and the network; a private or "
            "gated dataset needs HF_TOKEN in the environment; without a network, use a downloaded folder"
        )
    return LatentpressError(f"{location.root}: can't be loaded ({message})", step)


# -- columns ---------------------------------------------------------------------------------------------------------


def _bytes_and_files(column: pa.ChunkedArray) -> tuple[pa.ChunkedArray | None, pa.Array | None]:
    """Return (bytes, file names) of a media column; either is None if the column has none. The chunks of the bytes are
    not combined, because this would read them from disk."""
    kind = column.type
    if pa.types.is_struct(kind) and {"bytes", "path"} <= {kind.field(i).name for i in range(kind.num_fields)}:
        return pc.struct_field(column, "bytes"), take_rows(pc.struct_field(column, "path").cast(_text), None)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return column, None
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return None, take_rows(column.cast(_text), None)
    message = f"a column of {kind} does not contain media"
    raise LatentpressError(message, "choose a column of images, videos, bytes or file names")


def _has_media(column: pa.ChunkedArray) -> pa.Array:
    data, files = _bytes_and_files(column)
    masks = [take_rows(pc.is_valid(part), None) for part in (data, files) if part is not None]
    return masks[0] if len(masks) == 1 else pc.or_(*masks)


def _other_columns(chunk: pa.Table, features: Any, used: list[str]) -> pa.Table:
    """The columns that are not in `used`, with simplified types; class labels become their names."""
    simplified = _simplify_columns(chunk, [name for name in chunk.column_names if name not in used])
    for index, name in enumerate(simplified.column_names):
        names, column = getattr(features[name], "names", None), simplified.column(name)
        if names and pa.types.is_integer(column.type):
            labels = pc.if_else(pc.less(column, 0), None, column)  # -1: no label
            simplified = simplified.set_column(index, name, pa.chunked_array([pa.array(names, _text)]).take(labels))
    return simplified


def _simplify_columns(table: pa.Table, names: Sequence[str]) -> pa.Table:
    return pa.table({name: simplify_column(table.column(name)) for name in names})


def _item_names(files: pa.Array, location: DatasetLocation) -> pa.Array:
    """Item paths: the path below the folder, else "<split>/<name>" (for a file outside the folder, its base name)."""
    relative = files
    for root in dict.fromkeys((os.path.abspath(location.root), os.path.realpath(location.root))):
        relative = normalize_paths(relative, root)
    elsewhere = pc.or_(pc.match_substring(relative, "://"), pc.match_substring_regex(relative, r"^/|^\.\.(/|$)"))
    last = pc.replace_substring_regex(pc.replace_substring_regex(relative, r"(?s)\?.*", ""), r"(?s)^.*/", "")
    names = pc.if_else(elsewhere, last, relative)
    named = pc.binary_join_element_wise(f"{location.split}/", names, "")
    return pc.if_else(pc.not_equal(relative, files), relative, named)


def _cell_file(location: DatasetLocation, name: str) -> MediaPath:
    """The file that a cell names: a URL, or a path relative to the dataset's folder."""
    if "://" in name:
        return RemoteFile(name)
    folder = os.path.dirname(location.root) if os.path.isfile(location.root) else location.root
    return os.path.join(folder, name)
