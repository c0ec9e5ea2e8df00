"""Lists of what was set aside: a thousand of them take few requests of an object store."""

from pathlib import Path

import pytest

from cache.sets import rejects
from cache.sets.rejects import make_reject, read_stage, write_rejects
from cache.store.damage import DamageError
from cache.store.layout import is_project_file
from cache.store.store import Store
from stages.maintenance.checks import find_damaged_tables
from tests.s3_server import BUCKET, S3Server

CACHE = "0" * 24
STAGE = f"encode-latents/{CACHE}"
MERGED = f"rejects/{STAGE}.arrow"


def fill(store: Store, numbers: range, reason: str = "corrupt") -> dict[str, list[dict]]:
    made = {}
    for number in numbers:
        rows = [make_reject("encode-latents", f"{number}-{row}", "a.png", reason, "why") for row in range(2)]
        write_rejects(store, STAGE, f"unit-{number:04}", rows)
        made[f"unit-{number:04}"] = rows
    return made


@pytest.mark.long
def test_lists_are_merged_and_those_that_changed_are_read_again(s3: S3Server, monkeypatch) -> None:
    monkeypatch.setattr(rejects, "MIN_UNMERGED", 5)
    store = Store(f"s3://{BUCKET}/work")
    made = fill(store, range(22))
    s3.reset()
    assert read_stage(store, STAGE) == made
    assert s3.counts() == {"ListObjectsV2": 1, "HeadObject": 1, "GetObject": 22}, "nothing was merged yet"
    assert read_stage(store, STAGE, merge=True) == made
    s3.reset()
    assert read_stage(store, STAGE, merge=True) == made
    assert s3.counts() == {"ListObjectsV2": 1, "HeadObject": 1, "GetObject": 1}
    # Replaced by as many bytes, new, and removed.
    made |= fill(store, range(3), "changed") | fill(store, range(22, 25))
    write_rejects(store, STAGE, "unit-0010", [])
    del made["unit-0010"]
    s3.reset()
    assert read_stage(store, STAGE) == made and s3.counts()["GetObject"] <= 1 + 6
    assert read_stage(store, STAGE, merge=True) == made
    s3.reset()
    assert read_stage(store, STAGE) == made and s3.counts()["GetObject"] <= 1
    # It is one of this project's files, verify knows it, and damage to it costs requests only.
    assert is_project_file(MERGED) and find_damaged_tables(store) == (25, {})
    store.publish_bytes(MERGED, store.read_bytes(MERGED)[:-9])
    assert list(find_damaged_tables(store)[1]) == [MERGED]
    assert read_stage(store, STAGE, merge=True) == made
    assert find_damaged_tables(store)[1] == {}


def test_a_damaged_list_is_named_and_not_merged(s3: S3Server, monkeypatch) -> None:
    monkeypatch.setattr(rejects, "MIN_UNMERGED", 1)
    store = Store(f"s3://{BUCKET}/work")
    made = fill(store, range(3))
    store.publish_bytes(f"rejects/{STAGE}/unit-0001.arrow", b"ARROW1")
    with pytest.raises(DamageError, match=f"s3://{BUCKET}/work/rejects/{STAGE}/unit-0001.arrow"):
        read_stage(store, STAGE)
    del made["unit-0001"]
    for _ in range(2):
        damaged: dict[str, DamageError] = {}
        assert read_stage(store, STAGE, damaged, merge=True) == made and [*damaged] == ["unit-0001"]


def test_on_a_disk_nothing_is_merged(tmp_path: Path) -> None:
    store = Store(tmp_path)
    made = fill(store, range(40))
    assert read_stage(store, STAGE, merge=True) == made
    assert not store.exists(MERGED)
