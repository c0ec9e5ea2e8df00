"""Files and folders that appear whole or not at all."""

from pathlib import Path

import pytest

from cache.store import files
from cache.store.files import find_shortage, is_temporary, replacing, restore_folders, write_new


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_a_file_takes_the_place_of_an_older_one_when_the_body_ends(tmp_path) -> None:
    path = tmp_path / "new" / "a.json"
    for text in ("old", "new"):
        with replacing(path) as temporary:
            temporary.write_text(text)
            assert temporary.parent == path.parent and is_temporary(temporary.name)
            assert not path.exists() or path.read_text() == "old"
    assert path.read_text() == "new" and names(path.parent) == ["a.json"]


def test_a_folder_takes_the_place_of_an_older_one_with_all_its_files(tmp_path) -> None:
    path = tmp_path / "step-1"
    for name in ("old", "new"):
        with replacing(path) as temporary:
            (temporary / "deep").mkdir(parents=True)
            (temporary / "deep" / name).write_text(name)
    assert names(tmp_path) == ["deep", "new", "step-1"]


@pytest.mark.parametrize("folder", [False, True])
def test_a_body_that_raises_leaves_what_was_there(tmp_path, folder) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(KeyError), replacing(path) as temporary:
        if folder:
            temporary.mkdir()
        (temporary / "b" if folder else temporary).write_text("half")
        raise KeyError
    assert names(tmp_path) == ["a"] and path.read_text() == "old"


@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_a_kill_while_a_folder_is_replaced_leaves_the_old_or_the_new_one(tmp_path, monkeypatch, before: int) -> None:
    """before: the step that is killed: remains are removed, the old folder is moved away, the new folder is moved in,
    the old folder is removed."""
    path, steps = tmp_path / "folder", list[str]()

    def write(text: str) -> None:
        with replacing(path) as temp:
            temp.mkdir()
            (temp / "a").write_text(text)

    def step(real):
        def run(*arguments: object, **options: object) -> None:
            steps.append("step")
            if len(steps) == before:
                raise KeyboardInterrupt
            real(*arguments, **options)

        return run

    write("old")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(files, "replace", step(files.replace))
        patched.setattr(files.shutil, "rmtree", step(lambda *_, **__: None))  # a killed process does not do this
        write("new")
    restore_folders(tmp_path)
    assert (path / "a").read_text() == ("new" if before == 4 else "old")
    write("newest")
    restore_folders(tmp_path)
    assert (path / "a").read_text() == "newest" and not list(tmp_path.glob("*.former"))


def test_a_new_file_never_replaces_one_that_appeared(tmp_path: Path) -> None:
    write_new(tmp_path / "sub/a.yaml", "one")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "sub/a.yaml", "two")
    assert (tmp_path / "sub/a.yaml").read_text() == "one"


def test_a_folder_that_does_not_exist_is_on_the_disk_of_one_above_it(tmp_path: Path) -> None:
    assert find_shortage(tmp_path / "a/b", 1) is None and find_shortage("s3://bucket/work", 1 << 80) is None
    warning = find_shortage(tmp_path / "a/b", 1 << 80)
    assert warning is not None and f"the disk of {tmp_path}/a/b has " in warning and not (tmp_path / "a").exists()
