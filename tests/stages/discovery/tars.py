"""WebDataset tars, and the listings of their sources."""

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image

from schemas.config.datasets import Dataset
from stages.discovery.sources.columns import LISTING_SCHEMA
from stages.discovery.sources.webdataset import WebDatasetSource
from stages.media import files

wds = pytest.importorskip("webdataset")


def picture(number: int, size: tuple[int, int] = (20, 10), kind: str = "JPEG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (number * 17 % 256, 40, 90)).save(out, kind)
    return out.getvalue()


def read(media: files.MediaPath) -> bytes:
    with files.open_media(media) as file:
        return file.read()


def write(path: Path, samples: list[dict]) -> Path:
    with wds.TarWriter(str(path)) as sink:
        for sample in samples:
            sink.write(sample)
    return path


def dataset(place: Path | str, **options: Any) -> Dataset:
    return Dataset(id="set", source="webdataset", instance_data_dir=str(place), **options)


def scan(source: WebDatasetSource, known: pa.Table | None = None) -> list[dict]:
    chunks = [LISTING_SCHEMA.empty_table(), *source.scan(known)]
    assert all(chunk.schema.names[: len(LISTING_SCHEMA.names)] == LISTING_SCHEMA.names for chunk in chunks)
    table = pa.concat_tables(chunks, promote_options="permissive")
    return sorted(table.to_pylist(), key=lambda row: row["path"])
