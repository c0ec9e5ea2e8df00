"""Exports: a set's rows together and apart again bit by bit, read by strangers' libraries, whole or not there."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import plans, shard, shard_io
from cache.damage import PARSE_ERRORS, DamageError
from cache.exported_set import ExportedSet, pack_row, read_columns, unpack_row
from cache.exporter import Exporter, RowSize, TargetError, divide_groups
from cache.importer import Importer
from cache.layout import is_project_file, is_shard
from cache.opening import find_set, open_set
from cache.shard import ShardMeta, ShardRow, canonical_json, row_checksum
from cache.shard_io import open_writer
from cache.store import Store
from cache.tensors import Array
from cache.trainset import SetError, TrainSet
from schemas.tables import (
    ACTIVE_SCHEMA,
    INDEX_SCHEMA,
    SAMPLES_SCHEMA,
    SET_SHARDS_SCHEMA,
    SET_TEXTS_SCHEMA,
    SET_VERSIONS,
    TABLES_VERSION,
    TEXTS_SCHEMA,
    UNITS_SCHEMA,
    index_schema,
)

FAMILY, TASK = "kandinsky5-image", "t2i"
FORMS = ["arrow", "webdataset"]
ROLES, DATASETS = ("train", "eval"), ("d", "e")


def name_of(kind: str, number: int) -> str:
    return f"{kind}{number:031x}"


def bfloat(rng: np.random.Generator, *shape: int) -> Array:
    return Array.from_numpy(rng.integers(0, 2**16, shape, dtype=np.uint16), "bfloat16")


def make_shard(store: Store, kind: str, unit: str, rows: list[ShardRow], form: str) -> str:
    columns = {name: array.dtype for row in rows for name, array in row.tensors.items()}
    provenance = {"libraries": {"torch": "2.13.0"}, "device": "cpu", "batch": len(rows)}
    meta = ShardMeta(kind, "f" * 24, unit, "", provenance=provenance)
    with open_writer(store, f"{kind}/{'f' * 24}/{unit}", meta, columns, form) as out:
        for row in rows:
            out.add(row)
        return out.finish()


def publish(store: Store, tables: dict[str, pa.Table], meta: dict[str, Any]) -> None:
    for key, table in tables.items():
        store.write_table(f"sets/{meta['id']}/{key}.arrow", table)
    store.publish_bytes(f"sets/{meta['id']}/set.json", json.dumps(meta, indent=1, sort_keys=True).encode())
    store.publish_bytes(f"sets/current-{FAMILY}-{TASK}.json", json.dumps({"id": meta["id"]}).encode())


@pytest.fixture
def source(request, tmp_path: Path) -> Store:
    return make_source(Store(tmp_path / "root"), getattr(request, "param", "arrow"))


def make_source(store: Store, form: str) -> Store:
    """Samples 0-8 of two buckets and roles, two of them of one id; texts 0-11, some shared; text 0 is the null prompt,
    sample 3 has one of its own; two validation prompts, of which one has an image."""
    rng = np.random.default_rng(0)
    texts = [
        ShardRow(
            name_of("a", i), {"embeds": bfloat(rng, i % 5, 8), "pooled": bfloat(rng, 4)}, {"tokens": i % 5, "ü": "é\n"}
        )
        for i in range(12)
    ]
    latents = [
        ShardRow(name_of("b", i), {"latent": bfloat(rng, 4, 1, 4, 4 + 2 * (i % 2))}, {"number": i / 3})
        for i in range(9)
    ]
    latents[2].tensors["condition"] = bfloat(rng, 4, 1, 1, 1)
    paths = [
        make_shard(store, "latents", "l0", latents[::2], form),
        make_shard(store, "latents", "l1", latents[1::2], form),
        make_shard(store, "text", "t0", texts[:7], form),
        make_shard(store, "text", "t1", texts[7:], form),
    ]
    rows = []
    for i in [*range(8), 1]:
        rows.append(
            {
                **{"sample_id": name_of("b", i), "role": ROLES[i > 5], "dataset": DATASETS[len(rows) == 8]},
                **{"bucket": ("32x32", "48x32")[i % 2], "repeats": 0, "weight": 1.5, "regularisation": i == 4},
                **{"shard": i % 2, "row": i // 2, "texts": [1 + i, *([2] if i % 3 == 0 else [])]},
                "null_text": 9 if i == 3 else None,
            }
        )
    rows.sort(key=lambda row: (row["role"] != "train", row["bucket"], row["dataset"], row["sample_id"]))
    prompts = [
        {"name": "one", "prompt": "a cat", "negative_prompt": "", "bucket": "32x32", "text": 10, "negative": 0},
        {"name": "two", "prompt": "a dog", "negative_prompt": "", "bucket": "32x32", "text": 10, "negative": 11},
    ]
    prompts[0]["condition"], prompts[1]["condition"] = None, {"shard": 0, "row": 4}
    kinds = ["latents", "latents", "text", "text"]
    tables = {
        "index": pa.Table.from_pylist(rows, INDEX_SCHEMA),
        "texts": pa.Table.from_pylist(
            [{"text_id": row.id, "shard": 2 + (i > 6), "row": i % 7} for i, row in enumerate(texts)], SET_TEXTS_SCHEMA
        ),
        "shards": pa.Table.from_pylist(
            [{"path": p, "kind": k} for p, k in zip(paths, kinds, strict=True)], SET_SHARDS_SCHEMA
        ),
    }
    meta = {"format_version": TABLES_VERSION, "id": "0123456789abcdef", "family": FAMILY, "flavour": "t2i-lite-sft"}
    meta |= {"task": TASK, "template": "image", "generation": "000001-a", "null_text": 0, "validation": prompts}
    meta |= {"fingerprints": {"text": "f" * 24, "latents": "f" * 24}, "provenance": {"text": {"a": 1}, "latents": {}}}
    publish(store, tables, meta)
    return store


def add_vision(store: Store, form: str) -> None:
    """Features of every sample, in a shard of their own, in another order than that of the index."""
    data, rng = opened(store), np.random.default_rng(1)
    index, folder = data.tables["index"], f"sets/{data.id}"
    ids = sorted(set(index.column("sample_id").to_pylist()), reverse=True)
    rows = [ShardRow(id, {"vision": bfloat(rng, 1, 2, 2, 3)}, {"number": i}) for i, id in enumerate(ids)]
    shards = [
        *data.tables["shards"].to_pylist(),
        {"path": make_shard(store, "vision", "v0", rows, form), "kind": "vision"},
    ]
    places = [{"vision_shard": 4, "vision_row": ids.index(row["sample_id"])} for row in index.to_pylist()]
    found = [row | place for row, place in zip(index.to_pylist(), places, strict=True)]
    store.write_table(f"{folder}/index.arrow", pa.Table.from_pylist(found, index_schema(["vision"])))
    store.write_table(f"{folder}/shards.arrow", pa.Table.from_pylist(shards, SET_SHARDS_SCHEMA))
    store.publish_bytes(f"{folder}/set.json", json.dumps(data.meta | {"format_version": SET_VERSIONS[1]}).encode())


def opened(store: Store) -> TrainSet:
    return open_set(store, "current", FAMILY, TASK)


def export(source: Store, target: Store, form: str = "arrow", mib: float = 0.001, captions: bool = False) -> Exporter:
    exporter = Exporter(opened(source), target, form, mib, captions)
    exporter.check_target()
    for piece in exporter.shards:
        if not exporter.is_complete(piece):
            exporter.write(piece)
    exporter.write_prompts()
    exporter.publish()
    return exporter


def import_(source: Store, target: Store, form: str = "arrow") -> Importer:
    data = opened(source)
    assert isinstance(data, ExportedSet)
    importer = Importer(data, target, form)
    for part in importer.shards:
        if not importer.is_complete(part):
            importer.write(part)
    importer.publish(importer.write_prompts())
    return importer


def content(store: Store) -> list[Any]:
    """Everything that a trainer gets out of a set, and every row that it is made of."""
    data = opened(store)
    index = (
        data.tables["index"].select([name for name in INDEX_SCHEMA.names if name not in ("shard", "row")]).to_pylist()
    )
    samples = []
    for row, entry in enumerate(index):
        samples += [data.sample(row, caption) for caption in range(len(entry["texts"]))]
        samples.append(data.sample(row, dropped=True))
    parts = [data.part_rows(row) for row in range(len(index))]
    parts += [data.prompt_rows(number) for number in range(2)]
    sums = [
        {name: (row.id, row_checksum(row.id, canonical_json(row.info), row.tensors)) for name, row in p.items()}
        for p in parts
    ]
    eval_rows, choice = list(data.eval_rows), data.choose_eval_rows(2)
    return [data.id, index, data.spans, samples, parts, sums, data.validation, eval_rows, choice, data.regularisation]


def files(store: Store) -> dict[str, bytes]:
    return {name: store.read_bytes(name) for name in store.list_names()}


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


def test_one_bucket_and_role_a_shard(source: Store, tmp_path: Path) -> None:
    exporter = export(source, target := Store(tmp_path / "export"))
    shards = [shard_io.open_reader(target, name) for name in target.list_names() if name.startswith("samples/")]
    assert len(shards) == len(exporter.shards) > 3
    for one in shards:
        infos = [one.read(i).info for i in range(len(one))]
        assert {info["bucket"] for info in infos} == {one.meta.bucket} and len({info["role"] for info in infos}) == 1
        assert one.meta.provenance["made_with"] == [{"libraries": {"torch": "2.13.0"}, "device": "cpu"}]
        assert one.meta.provenance["provenance"]["text"] == {"a": 1}
        assert all(info["family"] == FAMILY and info["template"] == "image" for info in infos)


def test_webdataset_alone_reads_it(source: Store, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    from safetensors import deserialize

    export(source, target := Store(tmp_path / "export"), "webdataset")
    tars = sorted(str(path) for path in Path(target.url).glob("samples/*/*.tar"))
    found = list(webdataset.WebDataset(tars, shardshuffle=False).decode())
    data = opened(source)
    assert len(found) == data.tables["index"].num_rows
    for row, sample in enumerate(found):
        parts, info = data.part_rows(row), sample["json"]
        tensors = {name: bytes(value["data"]) for name, value in deserialize(sample["safetensors"])}
        assert tensors.pop("latent") == parts["sample"].tensors["latent"].raw()
        assert tensors["text0.embeds"] == parts["text0"].tensors["embeds"].raw()
        assert tensors["null.pooled"] == parts["null"].tensors["pooled"].raw()
        assert info["parts"]["text0"]["id"] == parts["text0"].id and info["task"] == TASK and "captions" not in info


def test_datasets_alone_reads_it(source: Store, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    export(source, target := Store(tmp_path / "export"))
    paths = sorted(str(path) for path in Path(target.url).glob("samples/*/*.arrow"))
    found = datasets.load_dataset("arrow", data_files=paths, split="train", cache_dir=str(tmp_path / "hf"))
    data = opened(source)
    assert len(found) == data.tables["index"].num_rows
    for number, row in enumerate(found):
        parts = data.part_rows(number)
        assert row["latent"] == bytes(parts["sample"].tensors["latent"].raw())
        assert tuple(row["latent_shape"]) == parts["sample"].tensors["latent"].shape
        assert row["text0.embeds"] == bytes(parts["text0"].tensors["embeds"].raw())
        assert (row["text1.embeds"] is None) == ("text1" not in parts)
        assert json.loads(row["info"])["parts"]["sample"]["id"] == parts["sample"].id


def test_the_words_are_there_when_they_are_asked_for(source: Store, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="without --with-captions"):
        export(source, Store(tmp_path / "export"), captions=True)
    words = [{"text_id": name_of("a", i), "text": f"words {i}"} for i in range(12)]
    tables = {
        "samples": SAMPLES_SCHEMA.empty_table(),
        "units": UNITS_SCHEMA.empty_table(),
        "active": ACTIVE_SCHEMA.empty_table(),
    }
    plan = plans.publish_plan(
        source,
        key="k",
        info={"null_text": None, "validation": []},
        texts=pa.Table.from_pylist(words, TEXTS_SCHEMA),
        **tables,
    )
    data = opened(source)
    publish(source, data.tables, {**data.meta, "generation": plan.name})
    export(source, target := Store(tmp_path / "export"), captions=True)
    info = opened(target)._read(0, 0, None).info
    assert info["captions"] == ["words 1", "words 2"] and info["parts"]["text1"]["id"] == name_of("a", 2)


def test_a_killed_export_goes_on_and_is_no_set_before(source: Store, tmp_path: Path) -> None:
    target = Store(tmp_path / "export")
    whole = export(source, Store(tmp_path / "whole"))
    exporter = Exporter(opened(source), target, "arrow", 0.001, False)
    first, second, *_ = exporter.shards
    exporter.write(first)
    exporter.write(second)
    with pytest.raises(SetError, match="no training set"):
        opened(target)
    path = next(Path(target.url).glob("samples/*/000001.arrow"))
    raw = bytearray(path.read_bytes())
    raw[raw.index(b'"parts"')] ^= 1  # in a row's info
    path.write_bytes(raw)
    again = Exporter(opened(source), target, "arrow", 0.001, False)
    assert [again.is_complete(piece) for piece in again.shards] == [True, *[False] * (len(whole.shards) - 1)]
    assert len(again.missing_shards) == len(whole.shards) - 2
    export(source, target)
    assert files(target) == files(Store(tmp_path / "whole"))


def test_a_set_is_published_once(source: Store, tmp_path: Path) -> None:
    export(source, target := Store(tmp_path / "export"))
    export(source, target)
    for other in ({"form": "webdataset"}, {"mib": 1.0}):
        with pytest.raises(TargetError, match="--to"):
            export(source, target, **other)
    with pytest.raises(TargetError):
        export(source, source)
    with pytest.raises(TargetError, match="root"):
        Importer(opened(target), target, "arrow").is_present()
    assert Importer(opened(target), source, "arrow").is_present()


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


def test_a_set_is_named_by_its_place(source: Store, tmp_path: Path) -> None:
    export(source, Store(tmp_path / "export"))
    for place in (f"{tmp_path}/export", f"{tmp_path}/export/", f"{tmp_path}/root/sets/0123456789abcdef"):
        data = find_set("/nowhere", place, FAMILY, TASK)
        assert data.id == "0123456789abcdef" and isinstance(data, ExportedSet) == ("export" in place[-7:])
    with pytest.raises(SetError, match="no training set"):
        find_set(str(tmp_path / "export"), str(tmp_path), FAMILY, TASK)


def test_damage_is_found_and_says_how_to_mend_it(source: Store, tmp_path: Path) -> None:
    export(source, target := Store(tmp_path / "export"))
    path = next(Path(target.url).glob("samples/*/000000.arrow"))
    raw = bytearray(path.read_bytes())
    raw[raw.index(bytes(opened(source).sample(0).tensors["latent"].raw())) + 3] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DamageError, match="latentpress export") as caught:
        opened(target).sample(0, dropped=True)
    assert str(path) == caught.value.path and caught.value.row == 0
    with pytest.raises(DamageError, match="000000"):
        import_(target, Store(tmp_path / "back"))
    assert opened(target).sample(8).id


# ---------------------------------------------------------------------------------------- hostile exports


#: What is in order; each case below changes one thing of it.
EXPORT = {"version": 1, "folders": {"text": "f" * 24, "latents": "f" * 24}, "made_with": []}
PROMPT = {"name": "one", "prompt": "a cat", "negative_prompt": "", "bucket": "32x32", "text": 10, "negative": 0}
PROMPT |= {"condition": None}
SAMPLE = {"id": "a", "info": {}, "checksum": "0" * 32}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    export(make_source(Store(folder / "root"), "arrow"), Store(folder / "export"))
    return folder / "export"


@pytest.fixture
def exported(whole: Path, tmp_path: Path) -> Store:
    return Store(shutil.copytree(whole, tmp_path / "export"))


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
        ("texts", {"text_id": name_of("a", 5)}),
    ],
)
def test_tables_that_are_no_exports_are_refused(exported: Store, table: str, values: dict[str, Any]) -> None:
    changed(exported, table, 0, values)
    with pytest.raises(DamageError, match=r"sets/0123456789abcdef/.*: its .*\n.*copy an export again"):
        opened(exported)


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
    with pytest.raises(DamageError, match=rf"current-{FAMILY}-{TASK}\.json: it names .* no training set is called"):
        opened(exported)


@pytest.mark.parametrize("id", ["../../x", "..", ".", "a/b", "x" * 200])
def test_no_set_is_opened_by_a_path(exported: Store, id: str) -> None:
    shutil.copytree(Path(exported.url) / "sets/0123456789abcdef", Path(exported.url).parent / "x")
    with pytest.raises(SetError, match="no name that a training set has"):
        open_set(exported, id, FAMILY, TASK)


@pytest.mark.parametrize("id", ["other", "../../x", None, 7])
def test_a_description_of_another_set_is_refused(source: Store, id: Any) -> None:
    """Of a root's own set as of an export's: what it says of itself names the shards of an import."""
    rel = "sets/0123456789abcdef/set.json"
    source.publish_json(rel, json.loads(source.read_bytes(rel)) | {"id": id})
    with pytest.raises(SetError, match="is that of set"):
        opened(source)


@pytest.mark.parametrize("table", ["index", "texts", "shards"])
def test_a_table_that_is_missing_is_named(exported: Store, table: str) -> None:
    exported.remove(f"sets/0123456789abcdef/{table}.arrow")
    with pytest.raises(DamageError, match=f"{table}.arrow: the file is missing"):
        opened(exported)


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


# ---------------------------------------------------------------------------------------- pure parts


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 10**6)), min_size=1, max_size=5), st.integers(1, 10**8))
def test_pieces_cover_each_group_and_keep_to_the_size(groups: list[tuple[int, int]], limit: int) -> None:
    bounds = np.cumsum([0, *(count for count, _ in groups)]).tolist()
    named = [("train", str(i), bounds[i], bounds[i + 1]) for i in range(len(groups))]
    pieces = divide_groups(named, [RowSize(size, 0) for _, size in groups], limit)
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == bounds[-1] and [piece.number for piece in pieces] == list(range(len(pieces)))
    for piece in pieces:
        rows, size = piece.stop - piece.start, groups[int(piece.bucket)][1]
        assert rows == 1 or (rows - 1) * size <= limit
        assert bounds[int(piece.bucket)] <= piece.start < piece.stop <= bounds[int(piece.bucket) + 1]


PARTS = st.dictionaries(
    st.sampled_from(["sample", "text0", "text1", "null", "vision"]),
    st.dictionaries(st.sampled_from(["latent", "embeds", "pooled"]), st.binary(max_size=8), max_size=3),
    min_size=1,
)


@settings(deadline=None)
@given(PARTS, st.dictionaries(st.text(max_size=3), st.integers(-9, 9), max_size=2))
def test_together_and_apart(parts: dict[str, dict[str, bytes]], info: dict[str, int]) -> None:
    rows = {
        name: ShardRow(f"id-{name}", {key: Array("uint8", (len(data),), data) for key, data in tensors.items()}, info)
        for name, tensors in parts.items()
    }
    assert unpack_row(pack_row("x", rows, {"role": "train"}), verify=True) == rows
