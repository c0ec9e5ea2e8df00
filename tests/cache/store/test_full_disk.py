"""A disk that fails: each way of writing reports the reason, and leaves no file."""

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from cache.store.store import Store

ROOT = Path(__file__).parents[3]


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True)


WRITE_ALL = r"""
import os, sys
import cache.store.store as module
from cache.shards import arrow, shard_io, wds  # imported before a process gives up its rights
from cache.shards.shard import ShardMeta, ShardRow
from cache.shards.tensors import Array
import pyarrow as pa

def attempts(root):
    store = module.Store(root)
    big = bytes(3 << 20)
    meta = ShardMeta("text", "f", "u", "")
    def write(format):
        with shard_io.open_writer(store, "u-" + format, meta, {"a": "uint8"}, format) as out:
            for number in range(3):
                out.add(ShardRow(f"r{number}", {"a": Array("uint8", (len(big),), big)}))
            out.finish()
    return {
        "bytes": lambda: store.publish_bytes("x", big),
        "table": lambda: store.write_table("t.arrow", pa.table({"x": [big]})),
        "arrow": lambda: write("arrow"),
        "webdataset": lambda: write("webdataset"),
    }

def try_all(root):
    for name, attempt in attempts(root).items():
        try:
            attempt()
            print(name, "SUCCEEDED")
        except module.StoreError as error:
            print(name, str(error).replace("\n", "; "))
    print("left:", [file for _, _, files in os.walk(root) for file in files])
"""


def refusals(code: str) -> dict[str, str]:
    """The message of each way of writing; asserts that none left a file."""
    process = run(WRITE_ALL + textwrap.dedent(code))
    assert process.returncode == 0, process.stderr
    *lines, remains = process.stdout.splitlines()
    assert remains == "left: []"
    return dict(line.split(" ", 1) for line in lines)


WAYS = {"bytes": "/x", "table": "/t.arrow", "arrow": "/u-arrow.arrow", "webdataset": "/u-webdataset.tar"}


@pytest.mark.slow
def test_a_file_size_limit(tmp_path):
    messages = refusals(f"""
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try_all({str(tmp_path)!r})
    """)
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


@pytest.mark.slow
def test_a_full_disk_and_a_read_only_one(small_disk):
    messages = refusals(f"try_all({small_disk!r})")
    for way, name in WAYS.items():
        assert messages[way].startswith(f"{small_disk}{name}: the disk is full; free space"), messages[way]
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    messages = refusals(f"try_all({small_disk!r})")
    assert "the file system is read-only" in messages["bytes"] and set(messages) == set(WAYS)


@pytest.mark.slow
def test_no_permission():
    """Root has all permissions, so the process becomes another user if it can."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as readable:
        Store(readable).publish_bytes("a/b", b"1")
        for name, mode in (("a/b", 0), ("a", 0o300), ("", 0o755)):
            os.chmod(f"{readable}/{name}", mode)
        os.chmod(folder, 0o555)
        messages = refusals(f"""
            from pathlib import Path
            from cache.store.files import check_writable
            store = module.Store({readable!r})
            if os.getuid() == 0:
                os.chown({readable!r} + "/a", 65534, -1)
                os.setuid(65534)
            for name, attempt, path in (
                ("here", check_writable, Path({folder!r})),
                ("below", check_writable, Path({folder!r}, "below", "it")),
                ("list", store.list_names, "a"),
                ("read", store.read_bytes, "a/b"),
                ("open", store.open, "a/b"),
            ):
                try:
                    attempt(path)
                except module.StoreError as error:
                    print(name, str(error).replace("\\n", "; "))
            try_all({folder!r})
        """)
        os.chmod(f"{readable}/a", 0o755)
    for way, name in WAYS.items():
        assert messages[way].startswith(f"{folder}{name}: permission denied; give this user"), messages[way]
    for way, place in (("here", folder), ("below", f"{folder}/below/it")):
        assert messages[way].startswith(f"{place}: can't be written to: permission denied; give this user"), messages[
            way
        ]
    assert all("permission denied" in messages[way] for way in ("list", "read", "open"))
