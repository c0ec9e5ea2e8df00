"""A copied set is read like the set it was copied from; tars for other programs have all of a sample."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from safetensors.torch import load

from cache.sets.export import TargetError, WebDatasetExport, copy_shard, has_copy, publish_copy, shard_paths
from cache.shards import shard_io
from cache.store.damage import DamageError
from cache.store.store import Store
from tests.cache.sets.small_set import FORMS, add_vision, content, make_source, opened

LIMIT = 1000.0


def copy(source: Store, target: Store) -> None:
    data = opened(source)
    for path in shard_paths(data):
        if not has_copy(data, target, path):
            copy_shard(data, target, path)
    publish_copy(data, target)
    data.close()


def write_tars(source: Store, target: Store) -> WebDatasetExport:
    export = WebDatasetExport(opened(source), target, LIMIT, captions=False)
    export.check_target()
    for part in export.parts:
        export.write(part)
    export.publish()
    return export


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_is_the_set(tmp_path: Path, form: str) -> None:
    source = make_source(Store(tmp_path / "root"), form)
    add_vision(source, form)
    copy(source, target := Store(tmp_path / "copy"))
    assert content(target) == content(source)
    names = [name for name in target.list_names() if not name.startswith("sets/current")]
    assert {name: target.read_bytes(name) for name in names} == {name: source.read_bytes(name) for name in names}


def test_through_an_object_store(tmp_path: Path) -> None:
    source = make_source(Store(tmp_path / "root"), "webdataset")
    far = Store(f"memory://{tmp_path.name}")
    copy(source, far)
    copy(far, second_copy := Store(tmp_path / "back"))
    assert content(second_copy) == content(source)


def test_damage_is_found_on_either_side(tmp_path: Path) -> None:
    source, target = make_source(Store(tmp_path / "root"), "arrow"), Store(tmp_path / "copy")
    copy(source, target)
    data = opened(source)
    path = shard_paths(data)[0]
    shard_bytes = (tmp_path / "copy" / path).read_bytes()
    (tmp_path / "copy" / path).write_bytes(shard_bytes[:200] + bytes([shard_bytes[200] ^ 1]) + shard_bytes[201:])
    assert not has_copy(data, target, path)
    copy(source, target)
    assert (tmp_path / "copy" / path).read_bytes() == shard_bytes
    damaged = bytearray(shard_bytes)
    damaged[len(shard_bytes) // 2] ^= 1
    (tmp_path / "root" / path).write_bytes(damaged)
    with pytest.raises(DamageError) as caught:
        copy_shard(data, target, path)
    assert caught.value.path == source.path(path) and not target.exists(path)
    (tmp_path / "root" / path).unlink()
    with pytest.raises(DamageError, match="missing"):
        has_copy(data, target, path)


def test_tars_have_every_part_of_every_sample(tmp_path: Path) -> None:
    source = make_source(Store(tmp_path / "root"), "arrow")
    add_vision(source, "arrow")
    export = write_tars(source, target := Store(tmp_path / "tars"))
    data, files = opened(source), sorted((tmp_path / "tars").rglob("*.tar"))
    assert len(files) == len(export.parts) > 2
    rows = [row for path in files for row in webdataset.WebDataset(str(path), shardshuffle=False)]
    assert len(rows) == data.tables["index"].num_rows
    for number, row in enumerate(rows):
        parts, tensors, info = data.part_rows(number), load(row["safetensors"]), json.loads(row["json"])
        assert info["parts"].keys() == parts.keys() and info["bucket"] == data.bucket(number)
        for part, stored in parts.items():
            for name, array in stored.tensors.items():
                exported = tensors[name if part == "sample" else f"{part}.{name}"]
                assert (
                    tuple(exported.shape) == array.shape and exported.numel() * exported.element_size() == array.nbytes
                )
                if array.nbytes:
                    assert exported.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == bytes(
                        np.frombuffer(array.data, np.uint8)
                    )
    for path in files:
        assert not shard_io.verify(target, path.relative_to(tmp_path / "tars").as_posix())
        assert tarfile.is_tarfile(path)


def test_other_options_need_another_place(tmp_path: Path) -> None:
    source = make_source(Store(tmp_path / "root"), "arrow")
    write_tars(source, target := Store(tmp_path / "tars"))
    with pytest.raises(TargetError, match="other options"):
        WebDatasetExport(opened(source), target, 2 * LIMIT, captions=False).check_target()
