"""A disk that has too little room is warned of before it is full."""

from pathlib import Path

from cache.store.files import find_shortage


def test_a_folder_that_is_not_there_yet_is_on_the_disk_of_one_above_it(tmp_path: Path) -> None:
    assert find_shortage(tmp_path / "a/b", 1) is None
    said = find_shortage(tmp_path / "a/b", 1 << 80)
    assert said is not None and f"the disk of {tmp_path}/a/b has " in said
    assert not (tmp_path / "a").exists()


def test_of_an_object_store_nothing_is_known() -> None:
    assert find_shortage("s3://bucket/work", 1 << 80) is None
