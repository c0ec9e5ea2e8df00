"""Records with a checksum: damage of any bit is noticed, and only regular files of a bounded size are read."""

import os
from pathlib import Path

import pytest
from pydantic import Field

from cache.runs.run_queue import QueueError, RunQueue
from cache.store.files import StoreError
from schemas.json_records import Record, RecordError, format_record, parse_record


class Example(Record):
    a: list[float | str | None]
    b: int = Field(0, ge=0)


def test_no_flipped_bit_makes_another_record() -> None:
    record = Example(a=[1, 0.5, None, "ü"], b=7)
    content = record.format()
    for number in range(8 * len(content)):
        data = bytearray(content)
        data[number // 8] ^= 1 << number % 8
        try:
            assert Example.parse(data) == record
        except ValueError:
            continue


@pytest.mark.parametrize("target", ["pipe", "/dev/zero"])
def test_a_queue_that_is_a_pipe_or_a_device_is_named(tmp_path: Path, target: str) -> None:
    queue = RunQueue(tmp_path)
    queue.folder.mkdir()
    path = queue.folder / "entries.json"
    if target == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    with pytest.raises(StoreError, match="regular file"):
        queue.read()
    path.unlink()
    path.write_bytes(format_record({"entries": [{"id": -1}]}))
    with pytest.raises(QueueError, match=r"entries\.json is damaged: .*id"):
        queue.read()


def test_a_record_is_as_it_was_written_or_the_error_names_its_file(tmp_path: Path) -> None:
    path, record = tmp_path / "a.json", Example(a=[1, 0.5, None, "ü"])
    assert Example.try_read(path) is None
    for _ in range(2):
        record.write(path)
        assert Example.read(path) == record and os.listdir(tmp_path) == ["a.json"]
    large = type("Small", (Example,), {"max_bytes": 20})
    with pytest.raises(RecordError, match=f"{path} .* 20 bytes"):
        large.read(path)
    for data in (b"[]", b'{"a": 1}', path.read_bytes().replace(b"0.5", b"0.7"), format_record({"a": [], "b": -1})):
        path.write_bytes(data)
        with pytest.raises(RecordError, match=f"^{path} is damaged: "):
            Example.read(path)
        assert Example.try_read(path) is None


def test_the_checksum_is_of_the_values() -> None:
    record = {"a": [1, 0.5, None, "ü"], "b": {}}
    assert parse_record(format_record(record)) == record
