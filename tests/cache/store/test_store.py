import os
import signal
import tempfile
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

import cache.store.files
import cache.store.object_store
from cache.store.damage import DamageError
from cache.store.files import StoreError
from cache.store.store import Store
from schemas.json_records import Record
from tests.processes import in_child


@pytest.fixture(params=["path", "file-url", "memory"])
def store(request, tmp_path) -> Store:
    urls = {"path": tmp_path, "file-url": f"file://{tmp_path}", "memory": f"memory://{tmp_path.name}"}
    return Store(urls[request.param])


def test_publish_read_list_remove(store):
    assert store.list_names("") == [] and not store.exists("a/b")
    store.publish_bytes("a/b", b"1")
    store.publish_bytes("a/c/d", b"2")
    store.publish_bytes("ab", b"3")
    assert store.list_names("a") == ["b", "c/d"]
    assert store.list_names("") == ["a/b", "a/c/d", "ab"]
    assert store.list_names("absent") == []
    assert store.exists("a/b") and store.read_bytes("a/c/d") == b"2"
    store.publish_bytes("a/b", b"other")
    assert store.read_bytes("a/b") == b"other"
    store.remove("a/b")
    store.remove("a/b")
    assert store.list_names("a") == ["c/d"]
    with pytest.raises(FileNotFoundError):
        store.read_bytes("a/b")
    with pytest.raises(FileNotFoundError):
        store.open("a/b")


@pytest.mark.parametrize("odd", ["pipe", "link to a device", "link to nothing", "link to itself", "folder"])
def test_what_stands_in_the_place_of_a_file_is_none(tmp_path, odd):
    """It is not listed, reading it is damage and never waits, and the next file takes its place."""
    store, path = Store(tmp_path), tmp_path / "text/f/t-1.arrow"
    path.parent.mkdir(parents=True)
    links = {"link to a device": "/dev/zero", "link to nothing": tmp_path / "gone", "link to itself": path}
    if odd in links:
        path.symlink_to(links[odd])
    else:
        os.mkfifo(path) if odd == "pipe" else path.mkdir()
    assert store.list_names("") == [] == store.list_files("") and not store.exists("text/f/t-1.arrow")
    for read in (store.read_bytes, partial(store.read_record, kind=Record), store.read_table, store.open, store.size):
        with pytest.raises(FileNotFoundError if odd == "link to nothing" else DamageError):
            read("text/f/t-1.arrow")
    if odd == "folder":
        with pytest.raises(StoreError, match=r"t-1\.arrow: a folder"):
            store.publish_bytes("text/f/t-1.arrow", b"1")
        path.rmdir()
    store.publish_bytes("text/f/t-1.arrow", b"1")
    assert store.read_bytes("text/f/t-1.arrow") == b"1" and not path.is_symlink()


@pytest.mark.linux
def test_a_large_table_of_an_object_store_is_mapped_from_a_copy_without_a_name(tmp_path, monkeypatch):
    """So that it is fetched once and needs no memory; a small one is read into memory."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    store, table = Store(f"memory://{tmp_path.name}"), pa.table({"x": range(100_000)})
    store.write_table("t.arrow", table)
    mapped = []
    for limit in (1 << 30, 1000):
        monkeypatch.setattr(cache.store.object_store, "MAPPED_BYTES", limit)
        found = Store(store.url).read_table("t.arrow")
        assert found.equals(table)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        with open("/proc/self/maps") as maps:
            mapped.append(str(tmp_path) in maps.read())
    assert mapped == [False, True]
    store.publish_bytes("t.arrow", store.read_bytes("t.arrow")[:-1])
    with pytest.raises(DamageError):
        store.read_table("t.arrow")
    with pytest.raises(FileNotFoundError):
        store.read_table("absent.arrow")


def test_tables(store):
    table = pa.table({"x": pa.array([1, None, 3], pa.int32()), "y": ["a", "b", None]})
    store.write_table("t/one.arrow", table)
    chunked = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    store.write_table("t/two.arrow", chunked)
    assert store.read_table("t/one.arrow").equals(table)
    assert store.read_bytes("t/one.arrow") == store.read_bytes("t/two.arrow"), "chunks leave no trace"
    store.write_table("t/none.arrow", table.slice(0, 0))
    assert store.read_table("t/none.arrow").num_rows == 0
    for damaged in (b"", store.read_bytes("t/one.arrow")[:-1]):
        store.publish_bytes("t/one.arrow", damaged)
        with pytest.raises(DamageError, match=r"t/one\.arrow"):
            store.read_table("t/one.arrow")


def test_a_local_table_is_mapped(tmp_path):
    store = Store(tmp_path)
    store.write_table("t.arrow", pa.table({"x": pa.array(range(1 << 20))}))
    before = pa.total_allocated_bytes()
    table = store.read_table("t.arrow")
    assert pa.total_allocated_bytes() - before < 1 << 16
    store.write_table("t.arrow", pa.table({"x": [1]}))
    assert table["x"][-1].as_py() == (1 << 20) - 1, "the old file lives on in its map"
    assert store.read_table("t.arrow")["x"].to_pylist() == [1]


def test_what_is_being_written_is_not_listed(tmp_path):
    store = Store(tmp_path)
    with store.create("a/b") as file:
        file.write(b"half")
        file.flush()
        assert Path(file.name).parent == tmp_path / "a", "a rename must not cross file systems"
        assert store.list_names("") == [] and not store.exists("a/b")
    assert store.read_bytes("a/b") == b"half"


def test_a_body_that_fails_leaves_nothing(store, tmp_path):
    with pytest.raises(KeyError), store.create("a/b") as file:
        file.write(b"half")
        raise KeyError
    assert store.list_names("") == [] and file.closed
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_process_killed_before_the_rename_leaves_what_sweep_removes(tmp_path):
    store = Store(tmp_path)
    store.publish_bytes("a/kept", b"old")

    def replace_and_die() -> None:
        cache.store.files.replace = lambda source, target: os.kill(os.getpid(), signal.SIGKILL)
        Store(tmp_path).publish_bytes("a/kept", b"new")

    assert in_child(replace_and_die) == -signal.SIGKILL
    assert store.list_names("") == ["a/kept"] and store.read_bytes("a/kept") == b"old"
    assert len(os.listdir(tmp_path / "a")) == 2
    assert store.remove_stale_temps(older_than_s=3600) == []
    assert len(store.remove_stale_temps(older_than_s=-1)) == 1
    assert os.listdir(tmp_path / "a") == ["kept"]


def test_only_its_own_temporaries_are_swept(store, tmp_path):
    """Files .tmp of other programs are not removed, at any age."""
    ours = ".kept.arrow.0123456789abcdef.tmp"
    foreign_files = [
        ".mine.tmp",
        ".half.arrow.0123.tmp",
        ".0123456789abcdef.tmp",
        "x.0123456789abcdef.tmp",
        ".x.0123456789ABCDEF.tmp",
    ]
    if store.local("") is None:
        pytest.skip("temporaries of an object store lie elsewhere")
    for name in (ours, *foreign_files):
        store.local("").joinpath("a").mkdir(exist_ok=True)
        store.local("a").joinpath(name).write_bytes(b"x")
    assert [entry.name for entry in store.list_files(temporaries=True)] == [f"a/{ours}"]
    assert store.remove_stale_temps(older_than_s=-1) == [str(store.local(f"a/{ours}"))]
    assert sorted(os.listdir(store.local("a"))) == sorted(foreign_files)


def test_file_and_folders_are_synced_around_the_rename(tmp_path, monkeypatch):
    steps = []
    original_sync, original_replace = os.fsync, cache.store.files.replace

    def fsync(descriptor: int) -> None:
        steps.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        original_sync(descriptor)

    def replace(source: str, target: str) -> None:
        steps.append("replace")
        original_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(cache.store.files, "replace", replace)
    Store(tmp_path).publish_bytes("a/b/c", b"1")
    assert steps[:2] == [str(tmp_path / "a"), str(tmp_path)], "new folders are entered in their parents"
    assert steps[2].endswith(".tmp") and steps[3:] == ["replace", str(tmp_path / "a/b")]


def test_a_url_that_nothing_here_can_open_is_named():
    with pytest.raises(StoreError, match="s4://bucket/x") as caught:
        Store("s4://bucket/x")
    assert "begins with s3" in caught.value.next_step


def test_a_folder_that_is_removed_while_a_file_is_opened_is_made_again(tmp_path, monkeypatch) -> None:
    """As gc of another configuration does with an empty one."""
    make, times = cache.store.files.make_folders, []

    def raced(folder) -> None:
        make(folder)
        if len(times) < 2:
            times.append(folder)
            folder.rmdir()

    monkeypatch.setattr(cache.store.files, "make_folders", raced)
    store = Store(tmp_path)
    store.publish_bytes("rejects/a/x.arrow", b"x")
    assert store.read_bytes("rejects/a/x.arrow") == b"x" and len(times) == 2


def test_what_stands_in_the_way_of_the_root_is_named(tmp_path):
    (tmp_path / "link").symlink_to("/mnt/nowhere")
    (tmp_path / "file").write_text("x")
    cases = {
        tmp_path / "link": "link is a link to /mnt/nowhere, which",
        tmp_path / "file": "file is a file, not a folder",
        "/proc/nothing": "can't be created",
    }
    for root, reason in cases.items():
        with pytest.raises(StoreError, match=reason) as caught:
            Store(root).publish_bytes("a/b", b"1")
        assert caught.value.next_step
