"""A disk that fails: each way of writing reports the reason, and leaves no file."""

import json
import os
import resource
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from cache.shards.shard import ShardMeta, ShardRow
from cache.shards.shard_io import open_writer
from cache.shards.tensors import Array
from cache.store.files import check_writable
from cache.store.store import Store, StoreError
from tests.processes import in_child

BIG = bytes(3 << 20)
WAYS = {"bytes": "/x", "table": "/t.arrow", "arrow": "/u-arrow.arrow", "webdataset": "/u-webdataset.tar"}


def refusals(attempts: dict[str, Callable[[], object]]) -> dict[str, str]:
    """The message of each."""
    messages = {}
    for name, attempt in attempts.items():
        with pytest.raises(StoreError) as caught:
            attempt()
        messages[name] = str(caught.value).replace("\n", "; ")
    return messages


def try_all(root: str) -> dict[str, str]:
    """The message of each way of writing, none of which leaves a file."""
    store = Store(root)

    def write(form: str) -> None:
        with open_writer(store, f"u-{form}", ShardMeta("text", "f", "u", ""), {"a": "uint8"}, form) as shard:
            for number in range(3):
                shard.add(ShardRow(f"r{number}", {"a": Array("uint8", (len(BIG),), BIG)}))
            shard.finish()

    messages = refusals(
        {
            "bytes": lambda: store.publish_bytes("x", BIG),
            "table": lambda: store.write_table("t.arrow", pa.table({"x": [BIG]})),
            "arrow": partial(write, "arrow"),
            "webdataset": partial(write, "webdataset"),
        }
    )
    assert [file for _, _, files in os.walk(root) for file in files] == []
    return messages


def in_own_process(work: Callable[[], dict[str, str]]) -> dict[str, str]:
    """What `work` returns in a fork, whose limits and user are its own."""
    with tempfile.TemporaryFile("w+") as answer:

        def do() -> None:
            json.dump(work(), answer)
            answer.flush()

        assert in_child(do) == 0
        answer.seek(0)
        return json.load(answer)


def test_a_file_size_limit(tmp_path):
    def limited() -> dict[str, str]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        return try_all(str(tmp_path))

    messages = in_own_process(limited)
    for way, name in WAYS.items():
        assert messages[way].startswith(f"{tmp_path}{name}: the file would exceed"), messages[way]
        assert "ulimit -f" in messages[way]


@pytest.fixture
def small_disk():
    """A tmpfs of 1 MiB."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
        if mounted.returncode:
            pytest.skip(f"mounting is not permitted: {mounted.stderr.decode().strip()}")
        try:
            yield folder
        finally:
            subprocess.run(["umount", folder], check=True)


def test_a_full_disk_and_a_read_only_one(small_disk):
    messages = try_all(small_disk)
    for way, name in WAYS.items():
        assert messages[way].startswith(f"{small_disk}{name}: the disk is full; free space"), messages[way]
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    messages = try_all(small_disk)
    assert "the file system is read-only" in messages["bytes"] and set(messages) == set(WAYS)


def test_no_permission():
    """Root has all permissions, so the process becomes another user if it can."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as readable:
        Store(readable).publish_bytes("a/b", b"1")
        for name, mode in (("a/b", 0), ("a", 0o300), ("", 0o755)):
            os.chmod(f"{readable}/{name}", mode)
        os.chmod(folder, 0o555)

        def without_rights() -> dict[str, str]:
            store = Store(readable)
            if os.getuid() == 0:
                os.chown(f"{readable}/a", 65534, -1)
                os.setuid(65534)
            return refusals(
                {
                    "here": lambda: check_writable(Path(folder)),
                    "below": lambda: check_writable(Path(folder, "below", "it")),
                    "list": lambda: store.list_names("a"),
                    "read": lambda: store.read_bytes("a/b"),
                    "open": lambda: store.open("a/b"),
                }
            ) | try_all(folder)

        messages = in_own_process(without_rights)
        os.chmod(f"{readable}/a", 0o755)
    for way, name in WAYS.items():
        assert messages[way].startswith(f"{folder}{name}: permission denied; give this user"), messages[way]
    for way, place in (("here", folder), ("below", f"{folder}/below/it")):
        assert messages[way].startswith(f"{place}: can't be written to: permission denied; give this user"), messages[
            way
        ]
    assert all("permission denied" in messages[way] for way in ("list", "read", "open"))
