"""A small training set and its export; shards of a remote store."""

import shutil
from pathlib import Path

import pytest

from cache.store.store import Store
from tests.cache.sets.exports import export, make_source
from tests.cache.store.remote_place import Place


@pytest.fixture
def source(request, tmp_path: Path) -> Store:
    return make_source(Store(tmp_path / "root"), getattr(request, "param", "arrow"))


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    export(make_source(Store(folder / "root"), "arrow"), Store(folder / "export"))
    return folder / "export"


@pytest.fixture
def exported(whole: Path, tmp_path: Path) -> Store:
    return Store(shutil.copytree(whole, tmp_path / "export"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(Store(f"memory://{tmp_path.name}"), tmp_path / "copies")
