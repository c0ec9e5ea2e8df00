"""A folder with a configuration, from which programs are called."""

import pytest

from tests.schemas.cli.programs import YAML


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a valid pipeline.yaml, which is the working directory."""
    (tmp_path / "pipeline.yaml").write_text(YAML)
    monkeypatch.chdir(tmp_path)
    return tmp_path
