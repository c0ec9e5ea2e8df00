"""WebDataset tars, and what a source finds in them."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from schemas.config.datasets import Dataset
from stages.discovery.sources.base import LISTING_SCHEMA
from stages.discovery.sources.webdataset import WebDatasetSource

wds = pytest.importorskip("webdataset")


def write(path: Path, samples: list[dict]) -> Path:
    with wds.TarWriter(str(path)) as sink:
        for sample in samples:
            sink.write(sample)
    return path


def dataset(place: Path | str, **options: Any) -> Dataset:
    return Dataset(id="set", source="webdataset", instance_data_dir=str(place), **options)


def scan(source: WebDatasetSource, known: pa.Table | None = None) -> list[dict]:
    chunks = list(source.scan(known))
    assert all(chunk.schema.names[: len(LISTING_SCHEMA.names)] == LISTING_SCHEMA.names for chunk in chunks)
    table = pa.concat_tables(chunks, promote_options="permissive")
    return sorted(table.to_pylist(), key=lambda row: row["path"])
