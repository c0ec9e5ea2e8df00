"""verify finds and reports damage, and the printed command repairs it."""

import json
import os
import shlex
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cache.shards.shard import RejectedMember, ShardMeta, ShardRow
from cache.shards.shard_io import open_reader, open_writer
from cache.shards.tensors import Array
from cache.store.files import StoreError
from cache.store.store import Store
from schemas.json_records import format_record
from schemas.tables import SET_SHARDS_SCHEMA
from stages import bucket, discover, encode_latents, encode_text, export, index, verify
from stages.maintenance import checks
from tests.forms import long


def first(home, kind: str) -> str:
    return f"{kind}/{next(iter(home.shards(kind)))}"


def flip(home, kind: str) -> str:
    """Change one byte of a tensor in the first shard of a kind. Returns its path under the root."""
    name = first(home, kind)
    spoil(home.root, name)
    return name


def spoil(root, rel: str) -> None:
    with open_reader(Store(root), rel) as shard:
        tensor = bytes(next(iter(shard.read(0).tensors.values())).raw())
    data = bytearray((root / rel).read_bytes())
    data[data.index(tensor) + len(tensor) // 2] ^= 1
    (root / rel).write_bytes(data)


def rewrite(home, rel: str, change) -> None:
    """Write the shard again, with correct checksums, after `change(meta, rows)`."""
    store = Store(home.root)
    with open_reader(store, rel) as shard:
        meta, rows = shard.meta, [shard.read(i) for i in range(len(shard))]
    change(meta, rows)
    meta.ids = []  # written without a check of the plan
    columns = {name: array.dtype for row in rows for name, array in row.tensors.items()}
    with open_writer(store, rel.rpartition(".")[0], meta, columns) as out:
        for row in rows:
            out.add(row)
        out.finish()


def test_sound_shards_pass(encoded) -> None:
    report = encoded.run(verify.run)
    assert report.exit_code == 0
    assert report.done == len(encoded.shards("text")) + len(encoded.shards("latents"))
    assert encoded.run(verify.run, workers=3).to_dict() == report.to_dict()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["latents", long("text")])
def test_a_flipped_byte_is_found_and_the_printed_command_rebuilds_the_same_bytes(encoded, kind) -> None:
    shards = encoded.shards(kind)
    path = flip(encoded, kind)
    broken = (encoded.root / path).read_bytes()
    report = encoded.run(verify.run)
    assert report.exit_code == 4
    assert [damage["path"] for damage in report.damage] == [path]
    assert report.damage[0]["row"] is not None
    assert report.next_steps == ["latentpress verify --repair", "latentpress index"]
    repaired = encoded.run(verify.run, repair=True)
    assert (repaired.exit_code, repaired.details["encoded_again"]) == (0, 1)
    assert encoded.shards(kind) == shards
    (moved_shard,) = [row["moved_to"] for row in repaired.details["damaged_shards"]]
    assert (encoded.root / moved_shard).read_bytes() == broken
    assert encoded.run(verify.run).exit_code == 0


@pytest.mark.slow
def test_repair_encodes_the_damaged_units_alone_and_keeps_each_damaged_file(encoded) -> None:
    shards = sorted(encoded.shards("latents"))
    assert len(shards) > 1
    (encoded.root / "latents" / shards[-1]).unlink()  # not encoded yet, so verify does not report it
    for _ in range(2):
        flip(encoded, "latents")
        assert encoded.run(verify.run, repair=True).exit_code == 0
    assert sorted(encoded.shards("latents")) == shards[:-1]
    assert len(list((encoded.root / "damaged").rglob("*.arrow"))) == 2


def test_a_damaged_shard_of_another_configuration_is_only_moved(encoded) -> None:
    store, path = Store(encoded.root), first(encoded, "latents")
    for suffix in ("", "0"):
        meta = ShardMeta("latents", "f" * 24, f"64x64@1-0{suffix}", "64x64@1")
        with open_writer(store, f"latents/{meta.fingerprint}/{meta.unit}", meta, {"latent": "float32"}) as out:
            out.add(ShardRow("a", {"latent": Array.from_numpy(np.zeros((16, 1, 8, 8), np.float32))}))
            shard_path = out.finish()
    assert encoded.run(verify.run).exit_code == 0
    (encoded.root / shard_path).write_bytes((encoded.root / path).read_bytes())
    report = encoded.run(verify.run, repair=True)
    assert report.exit_code == 4
    assert "its name is wrong" in report.damage[0]["message"]
    assert report.details["damaged_shards"][0]["then"].startswith("not encoded again")
    assert not (encoded.root / shard_path).exists()
    assert encoded.run(verify.run).exit_code == 0


@pytest.mark.slow
def test_a_tar_is_moved_with_its_sidecar(project) -> None:
    home = project("sana", cache={"unit_mib": 0.02, "format": "webdataset"})
    home.image("0.png", (64, 64))
    for program in (discover, bucket, encode_latents):
        home.run(program.run)
    shards = home.shards("latents")
    flip(home, "latents")
    report = home.run(verify.run, repair=True)
    assert report.exit_code == 0
    assert home.shards("latents") == shards
    suffixes = sorted(path.suffix for path in (home.root / "damaged").rglob("*") if path.is_file())
    assert suffixes == [".json", ".tar"]


@pytest.fixture
def exported(encoded) -> tuple[Any, str]:
    """Returns (project with an exported set, override that makes the export the root)."""
    encoded.run(index.run)
    encoded.run(export.run, to=str(encoded.folder / "an export"))
    return encoded, f"root={encoded.folder / 'an export'}"


def test_a_flipped_byte_in_an_export_is_found_and_mended_by_the_advice(exported) -> None:
    home, override = exported
    root = home.folder / "an export"
    path = next(root.glob("latents/*/*.arrow"))
    rel, content = path.relative_to(root).as_posix(), path.read_bytes()
    spoil(root, rel)
    damaged = path.read_bytes()
    for repair in (False, True):
        report = home.run(verify.run, override, repair=repair)
        assert report.exit_code == 4 and [damage["path"] for damage in report.damage] == [rel]
        (step,) = report.next_steps
        command = shlex.split(step, comments=True)
        assert command == ["latentpress", "export", "--to", str(root)] and "latentpress export" in step
        assert path.read_bytes() == damaged and not (root / "damaged").exists()
    home.run(export.run, to=command[-1])
    assert path.read_bytes() == content and home.run(verify.run, override).exit_code == 0


@pytest.mark.parametrize("path", ["../secret.arrow", long("media/photos/media.arrow"), long(None)])
def test_what_a_set_names_outside_its_shards_is_not_moved(encoded, path) -> None:
    """Such as in a root that is a copy."""
    encoded.run(index.run)
    store = Store(encoded.root)
    [id] = {path.parent.name for path in (encoded.root / "sets").glob("*/set.json")}
    rows = store.read_table(f"sets/{id}/shards.arrow").to_pylist()
    rows[0]["path"] = path
    store.write_table(f"sets/{id}/shards.arrow", pa.Table.from_pylist(rows, SET_SHARDS_SCHEMA))
    secret = encoded.folder / "secret.arrow"
    secret.write_bytes(b"mine")
    for repair in (False, True):
        report = encoded.run(verify.run, repair=repair)
        (row,) = report.damage if not repair else [{"path": f"sets/{id}/shards.arrow", "message": "not a shard below"}]
        assert row["path"] == f"sets/{id}/shards.arrow"
        assert "not a shard below" in row["message"] or "path is missing" in row["message"]
        assert report.exit_code == (0 if repair else 4), "index replaces the set"
    assert secret.read_bytes() == b"mine" and (encoded.root / "media/photos/media.arrow").exists()


@pytest.mark.parametrize("id", ["../../x", long(None)])
def test_a_pointer_that_leads_nowhere_is_named(encoded, id) -> None:
    (encoded.root / "sets").mkdir()
    (encoded.root / "sets/current-sana-t2i.json").write_bytes(format_record({"id": id}))
    report = encoded.run(verify.run)
    assert report.exit_code == 4 and [row["path"] for row in report.damage] == ["sets/current-sana-t2i.json"]


@pytest.mark.slow
def test_a_shard_that_a_training_set_needs_is_missed_and_made_again(encoded) -> None:
    encoded.run(index.run)
    path = encoded.root / first(encoded, "text")
    content = path.read_bytes()
    path.unlink()
    report = encoded.run(verify.run)
    assert report.exit_code == 4 and "training set" in report.damage[0]["message"]
    assert encoded.run(verify.run, repair=True).exit_code == 0
    assert path.read_bytes() == content


def test_a_shard_is_compared_with_its_plan(encoded) -> None:
    path = first(encoded, "text")
    original = (encoded.root / path).read_bytes()

    def message(change) -> str:
        (encoded.root / path).write_bytes(original)
        rewrite(encoded, path, change)
        (damage,) = encoded.run(verify.run).damage
        return damage["message"]

    def lose(meta, rows) -> None:
        rows.pop()

    def invent(meta, rows) -> None:
        meta.rejects.append(RejectedMember("0" * 32, "missing", "x"))

    def add_and_reject(meta, rows) -> None:
        meta.rejects.append(RejectedMember(rows[0].id, "missing", "x"))

    def elsewhere(meta, rows) -> None:
        meta.bucket = "64x64@1"

    assert "lacks 1 of its unit's" in message(lose)
    assert "has 1 members" in message(invent)
    assert "both a row and rejected" in message(add_and_reject)
    assert "64x64@1" in message(elsewhere)


@pytest.mark.parametrize("bad", [np.nan, long(-np.inf)])
def test_a_number_that_is_not_finite_is_found_and_rejected_by_repair(encoded, bad) -> None:
    path = first(encoded, "latents")

    def spoil(meta, rows) -> None:
        latent = rows[0].tensors["latent"].numpy().copy()
        latent[-1, -1, -1, -1] = bad
        rows[0].tensors["latent"] = Array.from_numpy(latent)

    rewrite(encoded, path, spoil)
    (damage,) = encoded.run(verify.run).damage
    assert damage["path"] == path and "latent has numbers that are NaN or infinite" in damage["message"]


@pytest.mark.parametrize(
    "record",
    [b'{"autoencoder": "flux", "condition_frames": -1}', long(b'{"autoencoder": {}}')],
)
def test_a_provenance_with_impossible_values_is_damage(encoded, record) -> None:
    paths = sorted(str(path.relative_to(encoded.root)) for path in encoded.root.rglob("provenance.json"))
    for path in paths:
        (encoded.root / path).write_bytes(format_record(json.loads(record)))
    report = encoded.run(verify.run)
    assert report.exit_code == 4 and sorted(row["path"] for row in report.damage) == paths


@pytest.mark.parametrize("damage", ["flipped", "folder", *map(long, ("cut", "nested", "pipe"))])
def test_a_damaged_provenance_is_named_and_its_stage_writes_it_again(encoded, damage) -> None:
    [path] = encoded.root.glob("text/*/provenance.json")
    content, rel = path.read_bytes(), str(path.relative_to(encoded.root))
    path.unlink()
    if damage == "pipe":
        os.mkfifo(path)
    elif damage == "folder":
        path.mkdir()
    else:
        contents = {"cut": content[:-9], "nested": b"[" * 10**5}
        path.write_bytes(contents.get(damage) or content.replace(b'"encode-text"', b'"encode-texu"'))
    report = encoded.run(verify.run)
    if damage not in ("pipe", "folder"):  # these are not files of the cache
        assert [row["path"] for row in report.damage] == [rel] and report.next_steps == ["latentpress encode-text"]
    if damage == "folder":
        with pytest.raises(StoreError, match="folder"):
            encoded.run(encode_text.run)
        path.rmdir()
    encoded.run(encode_text.run)
    assert path.read_bytes() == content and encoded.run(verify.run).exit_code == 0


def test_a_shard_that_the_disk_can_not_read_is_no_damage(encoded, monkeypatch) -> None:
    path = first(encoded, "text")

    class Failing(checks.UnmappedStore):
        def open(self, rel):
            if rel == path:
                raise StoreError(self.path(rel), "input/output error", "look at the disk")
            return super().open(rel)

    monkeypatch.setattr(verify, "UnmappedStore", Failing)
    report = encoded.run(verify.run, repair=True)
    assert (report.exit_code, report.damage) == (3, [])
    assert report.failed[0]["path"] == path and "input/output error" in report.failed[0]["message"]
    assert (encoded.root / path).exists()
