"""Reading exports: rows packed and unpacked, damage and hostile files refused."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.sets.exported_set import ExportedSet, pack_row, read_columns, unpack_row
from cache.sets.exporter import Exporter
from cache.sets.set_lookup import find_set, open_set
from cache.sets.trainset import SetError, SetNotFound, TrainSet
from cache.shards import shard, shard_io
from cache.shards.shard import ShardRow
from cache.shards.shard_io import open_writer
from cache.shards.tensors import Array
from cache.store.damage import PARSE_ERRORS, DamageError
from cache.store.files import StoreError
from cache.store.store import Store
from tests.cache.sets.exports import FAMILY, TASK, export, import_, name_of, opened


def test_a_set_is_named_by_its_place(source: Store, tmp_path: Path) -> None:
    export(source, Store(tmp_path / "export"))
    for place in (f"{tmp_path}/export", f"{tmp_path}/export/", f"{tmp_path}/root/sets/0123456789abcdef"):
        data = find_set("/nowhere", place, FAMILY, TASK)
        assert data.id == "0123456789abcdef" and isinstance(data, ExportedSet) == ("export" in place[-7:])
    with pytest.raises(SetError, match="no training set"):
        find_set(str(tmp_path / "export"), str(tmp_path), FAMILY, TASK)


def test_a_path_without_an_export_is_not_answered_with_a_stage(tmp_path: Path) -> None:
    for place, why in ((tmp_path / "typo", "there is no folder"), (tmp_path, "no training set for")):
        with pytest.raises(SetNotFound, match=why) as caught:
            find_set("/nowhere", str(place), FAMILY, TASK)
        assert caught.value.next_step.startswith("Correct the path: it is that of an export")


def test_damage_is_found_and_says_how_to_mend_it(source: Store, tmp_path: Path) -> None:
    export(source, target := Store(tmp_path / "export"))
    path = next(Path(target.url).glob("samples/*/000000.arrow"))
    raw = bytearray(path.read_bytes())
    raw[raw.index(bytes(opened(source).sample(0).tensors["latent"].raw())) + 3] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DamageError, match="latentpress export") as caught:
        opened(target).sample(0, "null")
    assert str(path) == caught.value.path and caught.value.row == 0
    with pytest.raises(DamageError, match="000000"):
        import_(target, Store(tmp_path / "back"))
    assert opened(target).sample(8).id


@pytest.mark.parametrize("device", [False, True])
def test_what_is_no_regular_file_is_not_read(source: Store, tmp_path: Path, device: bool) -> None:
    """A pipe, for which a reader would wait, and /dev/zero, which never ends."""
    export(source, target := Store(tmp_path / "export"))
    path = next(Path(target.url).glob("sets/*/set.json"))
    path.unlink()
    path.symlink_to("/dev/zero") if device else os.mkfifo(path)
    with pytest.raises(StoreError, match=r"set\.json: is no regular file"):
        opened(target)


#: What is in order; each case below changes one thing of it.
EXPORT = {"version": 1, "folders": {"text": "f" * 24, "latents": "f" * 24}, "made_with": []}
PROMPT = {"name": "one", "prompt": "a cat", "negative_prompt": "", "bucket": "32x32", "text": 10, "negative": 0}
PROMPT |= {"condition": None}
SAMPLE = {"id": "a", "info": {}, "checksum": "0" * 32}


def changed(store: Store, table: str, number: int, values: dict[str, Any]) -> None:
    rel = f"sets/0123456789abcdef/{table}.arrow"
    found = store.read_table(rel)
    rows = found.to_pylist()
    rows[number] |= values
    store.write_table(rel, pa.Table.from_pylist(rows, found.schema))


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ("shards", {"path": "../../secret/000000.arrow"}),
        ("shards", {"path": "samples/../000000.arrow"}),
        ("shards", {"path": "/etc/passwd"}),
        ("shards", {"path": None}),
        ("shards", {"kind": "latents"}),
        ("index", {"sample_id": "../x"}),
        ("index", {"sample_id": "a" * 200}),
        ("index", {"sample_id": None}),
        ("index", {"shard": -1}),
        ("index", {"shard": 99}),
        ("index", {"row": 5}),
        ("index", {"texts": [99]}),
        ("index", {"texts": [-1]}),
        ("index", {"texts": []}),
        ("index", {"texts": [None]}),
        ("index", {"null_text": 99}),
        ("index", {"role": "both"}),
        ("index", {"weight": float("nan")}),
        ("index", {"weight": 1e300}),
        ("index", {"repeats": -1}),
        ("texts", {"text_id": "a/b"}),
        ("texts", {"text_id": ""}),
        ("texts", {"text_id": "-a"}),
        ("texts", {"text_id": "a b"}),
        ("texts", {"text_id": "a\n"}),
        ("texts", {"text_id": "a" * 71}),
        ("texts", {"text_id": "\u0430"}),
        ("index", {"row": 1}),
    ],
)
def test_tables_that_are_no_exports_are_refused(exported: Store, table: str, values: dict[str, Any]) -> None:
    changed(exported, table, 0, values)
    with pytest.raises(DamageError, match=r"sets/0123456789abcdef/.*: its .*\n.*copy an export again"):
        opened(exported)


def test_an_index_without_a_row_is_refused(exported: Store) -> None:
    rel = "sets/0123456789abcdef/index.arrow"
    exported.write_table(rel, exported.read_table(rel).slice(0, 0))
    with pytest.raises(DamageError, match="the index has no row"):
        opened(exported)


def test_a_text_that_appears_twice_is_not_imported(exported: Store, tmp_path: Path) -> None:
    changed(exported, "texts", 0, {"text_id": name_of("a", 5)})
    with pytest.raises(DamageError, match=r"texts\.arrow: a text appears in it twice\n.*copy an export again"):
        import_(exported, Store(tmp_path / "home"))


@pytest.mark.parametrize(
    "change",
    [
        {"id": "../../x"},
        {"null_text": 99},
        {"null_text": "0"},
        {"validation": []},
        {"validation": [{}]},
        {"validation": 7},
        {"export": {}},
        {"export": {"version": 2}},
        {"export": [1]},
        {"export": EXPORT | {"folders": {"text": "..", "latents": "f" * 24}}},
        {"export": EXPORT | {"folders": {"text": "backup", "latents": "f" * 24}}},
        {"export": EXPORT | {"folders": {"text": "f" * 24}}},
        {"export": EXPORT | {"folders": EXPORT["folders"] | {"sets": "f" * 24}}},
        {"export": EXPORT | {"folders": ["text", "latents"]}},
        {"export": EXPORT | {"folders": {"text": None, "latents": ["f"]}}},
        {"export": EXPORT | {"made_with": [7]}},
        {"export": EXPORT | {"made_with": {}}},
        {"provenance": []},
        {"provenance": None},
        {"validation": [[], []]},
        {"validation": [None]},
        {"validation": {"0": {}}},
        {"validation": [PROMPT | {"name": "../../x"}]},
        {"validation": [PROMPT | {"name": ".hidden"}]},
        {"validation": [PROMPT | {"name": ["x"]}]},
        {"validation": [PROMPT | {"bucket": "x" * 300}]},
        {"validation": [PROMPT | {"prompt": 7}]},
        {"validation": [PROMPT | {"text": True}]},
        {"validation": [PROMPT | {"negative": -1}]},
        {"validation": [PROMPT | {"condition": [0, 0]}]},
        {"validation": [PROMPT | {"condition": {"shard": 99, "row": 0}}]},
        {"format_version": 99},
        {"family": ["x"]},
    ],
)
def test_a_description_that_is_no_exports_is_refused(exported: Store, change: dict[str, Any]) -> None:
    rel = "sets/0123456789abcdef/set.json"
    meta = json.loads(exported.read_bytes(rel)) | change
    exported.publish_json(rel, meta)
    with pytest.raises((DamageError, SetError), match="0123456789abcdef"):
        opened(exported)


def test_what_is_changed_above_is_taken_as_it_was(exported: Store) -> None:
    rel = "sets/0123456789abcdef/set.json"
    meta = json.loads(exported.read_bytes(rel))
    assert {key: meta["export"][key] for key in EXPORT} == EXPORT | {"made_with": meta["export"]["made_with"]}
    exported.publish_json(rel, meta | {"validation": [PROMPT, meta["validation"][1]]})
    assert len(opened(exported).validation) == 2


@pytest.mark.parametrize("id", ["../../x", "..", "/etc", "a/b", "", "x" * 200, 7, None, ["a"], {}])
def test_a_pointer_leads_to_a_set_below_alone(exported: Store, id: Any) -> None:
    outside = Path(exported.url).parent / "x"
    shutil.copytree(Path(exported.url) / "sets/0123456789abcdef", outside)
    exported.publish_bytes(f"sets/current-{FAMILY}-{TASK}.json", json.dumps({"id": id}).encode())
    with pytest.raises(DamageError, match=rf"current-{FAMILY}-{TASK}\.json: it names .* which can't be a training set"):
        opened(exported)


@pytest.mark.parametrize("id", ["../../x", "..", ".", "a/b", "x" * 200])
def test_no_set_is_opened_by_a_path(exported: Store, id: str) -> None:
    shutil.copytree(Path(exported.url) / "sets/0123456789abcdef", Path(exported.url).parent / "x")
    with pytest.raises(SetError, match="can't be the name of a training set"):
        open_set(exported, id, FAMILY, TASK)


@pytest.mark.parametrize("id", ["other", "../../x", None, 7])
def test_a_description_of_another_set_is_refused(source: Store, id: Any) -> None:
    """Of a root's own set as of an export's: what it says of itself names the shards of an import."""
    rel = "sets/0123456789abcdef/set.json"
    source.publish_json(rel, json.loads(source.read_bytes(rel)) | {"id": id})
    with pytest.raises(SetError, match="belongs to set"):
        opened(source)


@pytest.mark.parametrize("table", ["index", "texts", "shards"])
def test_a_table_that_is_missing_is_named(exported: Store, table: str) -> None:
    exported.remove(f"sets/0123456789abcdef/{table}.arrow")
    with pytest.raises(DamageError, match=f"{table}.arrow: the file is missing"):
        opened(exported)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 100_000])
def test_no_json_is_refused(exported: Store, data: bytes) -> None:
    for rel in ("sets/0123456789abcdef/set.json", f"sets/current-{FAMILY}-{TASK}.json"):
        exported.publish_bytes(rel, data)
        with pytest.raises(DamageError, match="JSON"):
            opened(exported)


@pytest.mark.parametrize(
    ("info", "tensors"),
    [
        ({}, {}),
        ({"parts": 7}, {}),
        ({"parts": {"../x": {"id": "a", "info": {}, "checksum": ""}}}, {}),
        ({"parts": None}, {}),
        ({"parts": []}, {}),
        ({"parts": [["sample", SAMPLE]]}, {}),
        ({"parts": {"sample": None}}, {}),
        ({"parts": {"sample": [7]}}, {}),
        ({"parts": {"sample": {}}}, {}),
        ({"parts": {"sample": SAMPLE | {"id": "a/b"}}}, {}),
        ({"parts": {"sample": SAMPLE | {"id": 7}}}, {}),
        ({"parts": {"sample": SAMPLE | {"info": []}}}, {}),
        ({"parts": {"sample": SAMPLE}}, {"text0.embeds": 1}),
        ({"parts": {"sample": SAMPLE}}, {"../latent": 1}),
        ({"parts": {"sample": SAMPLE | {"checksum": "no"}}}, {"latent": 1}),
        ({"parts": {"sample": SAMPLE | {"checksum": None}}}, {"latent": 1}),
        ({"parts": {"sample": SAMPLE}}, {"latent": 1}),
    ],
)
def test_rows_that_are_no_exports_are_refused(info: dict, tensors: dict) -> None:
    arrays = {name: Array.from_numpy(np.float32([value])) for name, value in tensors.items()}
    with pytest.raises(PARSE_ERRORS):
        unpack_row(ShardRow("x", arrays, info), verify=True)


@pytest.mark.parametrize("parts", [None, [], 7, "sample", {"sample": None}, {"sample": []}])
def test_a_row_that_is_no_exports_is_named(exported: Store, parts: Any) -> None:
    """Its own checksum is right: nothing but what it says is wrong."""
    path = min(exported.list_names("samples"))
    with shard_io.open_reader(exported, f"samples/{path}") as there:
        meta, rows = there.meta, [there.read(i) for i in range(len(there))]
        columns = read_columns(exported, f"samples/{path}")
    rows[0].info["parts"] = parts
    with open_writer(exported, shard.unit_name(f"samples/{path}"), meta, columns) as out:
        for row in rows:
            out.add(row)
        out.finish()
    with pytest.raises(DamageError, match=f"{path}.*no row of an export"):
        opened(exported).sample(0)


def test_a_row_of_another_sample_is_not_taken(exported: Store, source: Store, tmp_path: Path) -> None:
    """A row says which sample it is; it is not believed where the index names another."""
    path = next(Path(exported.url).glob("samples/*/000000.arrow"))
    data = opened(source)
    exporter = Exporter(data, Store(tmp_path / "other"), "arrow", 0.001, False)
    exporter.data.part_rows = lambda row: TrainSet.part_rows(data, row + 1)  # type: ignore[method-assign]
    exporter.write(exporter.shards[0])
    shutil.copy(next((tmp_path / "other").glob("samples/*/000000.arrow")), path)
    with pytest.raises(DamageError, match="its sample is"):
        opened(exported).sample(0)


PARTS = st.dictionaries(
    st.sampled_from(["sample", "text0", "text1", "null", "vision"]),
    st.dictionaries(st.sampled_from(["latent", "embeds", "pooled"]), st.binary(max_size=8), max_size=3),
    min_size=1,
)


@pytest.mark.slow
@settings(deadline=None)
@given(PARTS, st.dictionaries(st.text(max_size=3), st.integers(-9, 9), max_size=2))
def test_together_and_apart(parts: dict[str, dict[str, bytes]], info: dict[str, int]) -> None:
    rows = {
        name: ShardRow(f"id-{name}", {key: Array("uint8", (len(data),), data) for key, data in tensors.items()}, info)
        for name, tensors in parts.items()
    }
    assert unpack_row(pack_row("x", rows, {"role": "train"}), verify=True) == rows
