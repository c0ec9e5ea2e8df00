"""Pipes, devices and sockets where files of the user belong: refused by name, and never waited on."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cache.models.weights import WeightsError, hash_file, read_object
from cache.store.damage import DamageError
from cache.store.store import Store
from schemas.config.datasets import Dataset
from schemas.config.loading import ConfigError, load_config
from schemas.config.prompt_library import PromptLibraryError, read_prompts
from schemas.errors import LatentpressError
from schemas.json_records import Record, format_record
from stages.discovery.item_reader import probe_media
from stages.discovery.sources.base import open_source
from stages.maintenance.checks import UnmappedStore
from stages.media.files import MediaError, open_media
from trainer.adapters.header import AdapterError, find_adapter
from trainer.run.resume import read_checkpoint


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """The default action of SIGALRM ends the process, so a test that waits for ever fails."""
    signal.alarm(120)
    yield
    signal.alarm(0)


@pytest.fixture(params=["pipe", "device"])
def odd(request, tmp_path: Path) -> Callable[[str], Path]:
    """odd(name) -> a path that is no regular file."""

    def make(name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if request.param == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
        return path

    return make


def scan(path: Path) -> None:
    list(open_source(Dataset(id="d", instance_data_dir=str(path))).scan(None))


def caption_table(path: Path) -> None:
    (path.parent / "one.png").write_text("")
    strategy = {"caption_strategy": "csv", "caption_file": str(path), "source": "folder"}
    list(open_source(Dataset(id="d", instance_data_dir=str(path.parent), **strategy)).scan(None))


def checkpoint(path: Path) -> None:
    if path.name != "manifest.json":
        (path.parent / "manifest.json").write_bytes(format_record({"files": {}}))
    read_checkpoint(path.parent, verify=True)


def from_store(method: str, kind: type[Store] = Store) -> Callable[[Path], object]:
    return lambda path: getattr(kind(str(path.parent)), method)(path.name)


@pytest.mark.parametrize(
    ("name", "read", "error"),
    [
        ("set.json", lambda path: Store(str(path.parent)).read_record(path.name, Record), DamageError),
        ("provenance.json", from_store("read_bytes"), DamageError),
        ("index.arrow", from_store("read_table"), DamageError),
        ("index.arrow", from_store("read_table", UnmappedStore), DamageError),
        ("pipeline.yaml", load_config, ConfigError),
        ("prompts.json", lambda path: read_prompts(path, {}), PromptLibraryError),
        ("prompts.yaml", lambda path: read_prompts(path, {}), PromptLibraryError),
        ("table.csv", scan, LatentpressError),
        ("table.jsonl", scan, LatentpressError),
        ("table.parquet", scan, LatentpressError),
        ("captions.csv", caption_table, LatentpressError),
        ("media.png", open_media, MediaError),
        ("media.png", lambda path: probe_media(path, "image"), MediaError),
        ("media.mp4", lambda path: probe_media(path, "video"), MediaError),
        ("config.json", read_object, WeightsError),
        ("model.safetensors", lambda path: hash_file(path, None), WeightsError),
        ("adapter.safetensors", find_adapter, AdapterError),
        ("step-000001/manifest.json", checkpoint, ValueError),
        ("step-000001/state.json", checkpoint, ValueError),
    ],
)
def test_what_is_no_regular_file_is_refused(odd, name: str, read: Callable, error: type[Exception]) -> None:
    path = odd(name)
    with pytest.raises(error, match="is not a regular file") as caught:
        read(path)
    assert path.name in str(caught.value) or isinstance(caught.value, PromptLibraryError)  # which adds it itself
