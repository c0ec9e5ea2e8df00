"""A source for a local folder or the objects below a URL: media at any depth, with caption files next to them."""

from collections.abc import Iterator

import pyarrow as pa

from stages.discovery.sources.base import Source
from stages.discovery.sources.captions import add_caption_files
from stages.discovery.sources.columns import Columns
from stages.discovery.sources.object_store import file_below
from stages.discovery.sources.walk import extensions_of_dataset, walk
from stages.media.files import MediaPath


class FolderSource(Source):
    def items(self, known_rows: pa.Table | None) -> Iterator[Columns]:
        dataset, kinds = self._dataset, extensions_of_dataset(self._dataset)
        key = f"datasets.{dataset.id}.{'media_root' if dataset.media_root else 'instance_data_dir'}"
        links = dataset.follow_links
        for files in walk(dataset.root, kinds, self.ignored, key=key, follow_links=links, texts=self._in_files):
            columns = files.columns()
            if self._in_files:
                texts = [files.texts.get(path.rpartition(".")[0], (None, None)) for path in files.paths]
                add_caption_files(columns, *(pa.array([text[part] for text in texts], pa.string()) for part in (0, 1)))
            yield columns

    def open(self, path: str) -> MediaPath:
        return file_below(self._dataset.root, path, self._dataset.identity)
