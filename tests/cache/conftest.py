"""A small training set; shards of a remote store."""

from pathlib import Path

import pytest

from cache.store.store import Store
from tests.cache.sets.remote_place import Place
from tests.cache.sets.small_set import make_source


@pytest.fixture
def source(request, tmp_path: Path) -> Store:
    return make_source(Store(tmp_path / "root"), getattr(request, "param", "arrow"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(Store(f"memory://{tmp_path.name}"), tmp_path / "copies")
