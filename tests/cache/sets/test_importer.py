"""Imports: the set of an export as it was, bit by bit."""

import json
from pathlib import Path
from typing import Any

import pytest

from cache.sets.exported_set import TargetError
from cache.sets.importer import Importer
from cache.shards import shard_io
from cache.store.damage import DamageError
from cache.store.layout import is_project_file, is_shard
from cache.store.store import Store
from tests.cache.sets.exports import FORMS, add_vision, content, export, files, import_, opened


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("source", FORMS, indirect=True)
@pytest.mark.parametrize("vision", [False, True])
def test_there_and_back_bit_by_bit(source: Store, tmp_path: Path, form: str, vision: bool) -> None:
    """The export, and its import in the other format, hold what the root holds; and what is exported from any of the
    three is one and the same file by file."""
    if vision:
        add_vision(source, form)
        assert "vision" in opened(source).sample(0).tensors
    exported, back = Store(tmp_path / "export"), Store(tmp_path / "back")
    export(source, exported, form)
    import_(exported, back, FORMS[form == "arrow"])
    expected = content(source)
    assert content(exported) == expected and content(back) == expected
    meta = back.read_json("sets/0123456789abcdef/set.json")
    assert {**meta, "validation": 0} == {**opened(source).meta, "validation": 0}
    for origin in (exported, back):
        again = Store(tmp_path / f"again-{origin is back}")
        export(origin, again, form)
        assert files(again) == files(exported)
    for store in (exported, back):
        paths = [name for name in store.list_names() if is_shard(name)]
        assert [name for name in store.list_names() if not is_project_file(name)] == []
        assert len(paths) >= 6 and not [damage for path in paths for damage in shard_io.verify(store, path)]


def test_an_interrupted_import_goes_on(source: Store, tmp_path: Path) -> None:
    export(source, exported := Store(tmp_path / "export"))
    import_(exported, whole := Store(tmp_path / "whole"))
    half = Store(tmp_path / "half")
    importer = Importer(opened(exported), half, "arrow")
    for part in importer.shards[:3]:
        importer.write(part)
    assert not importer.is_present()
    import_(exported, half)
    assert files(half) == files(whole)
    assert not Importer(opened(exported), half, "arrow").is_present()  # made by an import: it is checked again


def test_on_an_object_store(source: Store, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    export(source, Store(f"{url}/export"), "webdataset")
    import_(Store(f"{url}/export"), Store(f"{url}/back"))
    assert content(Store(f"{url}/export")) == content(source) == content(Store(f"{url}/back"))


@pytest.mark.parametrize("there", [[], {}, {"validation": 7}, {"validation": [7]}, {"validation": []}])
def test_another_description_in_the_target_is_not_taken_for_this_set(
    exported: Store, tmp_path: Path, there: Any
) -> None:
    target = Store(tmp_path / "target")
    target.publish_bytes("sets/0123456789abcdef/set.json", json.dumps(there).encode())
    with pytest.raises((TargetError, DamageError), match="0123456789abcdef"):
        Importer(opened(exported), target, "arrow").is_present()


def test_what_is_said_of_a_cache_does_not_rename_it(exported: Store, tmp_path: Path) -> None:
    rel = "sets/0123456789abcdef/set.json"
    meta = exported.read_json(rel) | {"provenance": {"text": {"fingerprint": "x"}, "latents": ["y"]}}
    exported.publish_json(rel, meta)
    import_(exported, back := Store(tmp_path / "back"))
    assert json.loads(back.read_bytes(f"text/{'f' * 24}/provenance.json")) == {"fingerprint": "f" * 24}
    assert not back.exists(f"latents/{'f' * 24}/provenance.json")
