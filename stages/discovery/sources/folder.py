"""A local folder, or the objects below a URL, as a source: media at any depth, captions in files next to them."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from schemas.cli.report import printable
from stages.discovery.sources.base import Source
from stages.discovery.sources.captions import add_caption_files
from stages.discovery.sources.columns import CHUNK_ROWS, Columns
from stages.discovery.sources.object_store import file_below
from stages.discovery.sources.walk import FolderFiles, extensions_of_dataset, walk
from stages.media.files import MediaPath

_text, _long = pa.string(), pa.int64()


class FolderSource(Source):
    def items(self, known: pa.Table | None) -> Iterator[Columns]:
        dataset, kinds = self._dataset, extensions_of_dataset(self._dataset)
        key = f"datasets.{dataset.id}.{'media_root' if dataset.media_root else 'instance_data_dir'}"
        links, folders, count = dataset.follow_links, list[FolderFiles](), 0
        for folder in walk(dataset.root, kinds, self.ignored, key=key, follow_links=links, texts=self._in_files):
            folders.append(folder)
            count += len(folder.names)
            if count >= CHUNK_ROWS:
                yield self._columns(folders)
                folders, count = [], 0
        yield self._columns(folders)

    def open(self, path: str) -> MediaPath:
        return file_below(self._dataset.root, path, self._dataset.identity)

    def _columns(self, folders: list[FolderFiles]) -> Columns:
        paths = list[str]()
        texts = list[tuple[str, str | None] | None]()
        problems = dict[int, tuple[str, str]]()
        for folder in folders:
            problems |= {len(paths) + row: problem for row, problem in folder.problems.items()}
            if self._in_files:
                found = (folder.texts.get(name.rpartition(".")[0]) for name in folder.names)
                texts += [text and (folder.prefix + text[0], text[1]) for text in found]
            paths += [folder.prefix + name for name in folder.names]
        for row, path in enumerate(paths):
            # A path that is not UTF-8 can be in no table: it is replaced by its printable form, and rejected.
            if not path.isascii() and (printed := printable(path)) != path:
                paths[row] = printed
                problems[row] = "name-not-utf8: has a name that is not UTF-8", "rename it"
                texts[row : row + 1] = [None] if self._in_files else []

        def join(name: str, kind: pa.DataType) -> pa.Array:
            return pa.array([value for folder in folders for value in getattr(folder, name)], kind)

        columns: dict[str, Any] = {"path": pa.array(paths, _text), "kind": join("kinds", _text)}
        columns |= {"size": join("sizes", _long), "version": join("versions", _text)}
        if problems:
            rows = [problems.get(row, (None, None)) for row in range(len(paths))]
            columns["problem"], columns["advice"] = (pa.array(values, _text) for values in zip(*rows, strict=True))
        if self._in_files:
            files, versions = ([text and text[part] for text in texts] for part in (0, 1))
            add_caption_files(columns, pa.array(files, _text), pa.array(versions, _text))
        return columns
