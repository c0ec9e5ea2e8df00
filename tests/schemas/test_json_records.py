"""Records with a checksum: damage of any bit is noticed, and only regular files of a bounded size are read."""

import os
from pathlib import Path

import pytest

from cache.runs.run_queue import QueueError, RunQueue
from cache.store.files import StoreError
from schemas.json_records import format_record, read_record


@pytest.mark.slow
def test_no_flipped_bit_makes_another_queue(tmp_path: Path) -> None:
    queue = RunQueue(tmp_path)
    for number in range(2):
        overrides = [f"train.run=r{number}", "train.optimizer.lr=5e-5"]
        queue.add(Path("/data/photos.yaml"), overrides, tmp_path / f"r{number}")
    path, expected = queue.folder / "entries.json", queue.read()
    good = path.read_bytes()
    for number in range(8 * len(good)):
        data = bytearray(good)
        data[number // 8] ^= 1 << number % 8
        path.write_bytes(data)
        try:
            assert queue.read() == expected
        except QueueError:
            continue


def test_a_queue_that_is_a_pipe_or_a_device_is_named(tmp_path: Path) -> None:
    queue = RunQueue(tmp_path)
    queue.folder.mkdir()
    os.mkfifo(queue.folder / "entries.json")
    with pytest.raises(StoreError, match="is no regular file"):
        queue.read()
    (queue.folder / "entries.json").unlink()
    (queue.folder / "entries.json").symlink_to("/dev/zero")
    with pytest.raises(StoreError, match="is no regular file"):
        queue.read()


def test_a_record_is_as_it_was_written_or_refused(tmp_path: Path) -> None:
    path, record = tmp_path / "a.json", {"a": [1, 0.5, None, "ü"], "b": {}}
    path.write_bytes(format_record(record))
    assert read_record(path) == record
    with pytest.raises(ValueError, match="more than 20 bytes"):
        read_record(path, 20)
    for data in (b"[]", b'{"a": 1}', path.read_bytes().replace(b"0.5", b"0.7")):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"its checksum does not match|is not an object"):
            read_record(path)
