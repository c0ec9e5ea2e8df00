"""A root or output that can't be a folder is refused with a message that names the obstacle, before any work."""

from pathlib import Path

import pytest

from schemas.config.loading import ConfigError, load_config
from schemas.regular_files import find_obstacle

BASE = "root: work/below\nmodel: {family: sana}\ndatasets:\n  - {id: photos, instance_data_dir: photos}\n"


def test_an_obstacle_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/mnt/nowhere")
    (tmp_path / "file").write_text("x")
    (tmp_path / "to-file").symlink_to("file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "to-folder").symlink_to("folder")
    assert f"{tmp_path}/link is a link to /mnt/nowhere" in str(find_obstacle(tmp_path / "link"))
    assert find_obstacle(tmp_path / "link/below") == find_obstacle(tmp_path / "link")
    assert f"{tmp_path}/file is a file" in str(find_obstacle(tmp_path / "file/below"))
    assert "to-file is a link to file, which is a file" in str(find_obstacle(tmp_path / "to-file"))
    for fine in ("folder", "to-folder", "to-folder/new/below", "new"):
        assert find_obstacle(tmp_path / fine) is None


def test_a_root_that_is_not_a_folder_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(BASE)
    (tmp_path / "work").symlink_to(tmp_path / "unmounted")
    with pytest.raises(ConfigError, match=r"pipeline\.yaml:1: root: .*work is a link to .*unmounted"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"--set root: .*pipeline\.yaml is a file, not a folder"):
        load_config(path, [f"root={path}"])
    (tmp_path / "unmounted").mkdir()
    assert load_config(path).root == str(tmp_path / "work/below")
