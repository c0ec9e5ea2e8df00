"""The wheel in an environment of its own: the command is there, what it starts runs, no common name is importable."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.ray_cluster import ray_cluster
from tests.wheels import RECIPES, ROOT, TOP, clean_environment

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, and with the libraries of this one, whose own latentpress it does not have:
    what makes an editable installation importable is not read there."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel],
        check=True,
    )
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


@pytest.fixture
def run(environment: Path, tmp_path: Path) -> Callable[..., str]:
    """run(*command) -> what a command of the environment printed, in an empty folder; it ended with `code`."""

    def start(*command: str, code: int = 0) -> str:
        kept = clean_environment(PATH=f"{environment}:{os.environ['PATH']}")
        done = subprocess.run(
            [environment / command[0], *command[1:]], cwd=tmp_path, env=kept, capture_output=True, text=True
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return start


def test_it_has_one_package_with_all_that_git_tracks(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    command = ["git", "ls-files", "latentpress", *TOP, RECIPES]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    files = [name.removeprefix("examples/") for name in tracked.stdout.split()]
    assert names == {name if name.startswith("latentpress/") else f"latentpress/{name}" for name in files}


@pytest.mark.parametrize("name", TOP)
def test_no_package_with_a_common_name_is_importable(run: Callable[..., str], name: str) -> None:
    assert f"No module named '{name}'" in run("python", "-c", f"import latentpress, {name}", code=1)


def test_programs_workers_and_launchers_start(run: Callable[..., str], tmp_path: Path, tiny: Callable) -> None:
    """By two workers of an encoding stage, by actors of a Ray cluster, and by two ranks of torchrun."""
    assert run("latentpress", "--version") == run("python", "-m", "latentpress", "--version")
    for number in range(4):
        Image.new("RGB", (64, 64), (60 * number, 20, 90)).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text(f"color number {number}")
    settings = {
        "root": "work",
        "cache": {"unit_mib": 0.02},
        "model": {"family": "z-image", "path": str(tiny("z-image")), "precision": "float32"},
        "datasets": [{"id": "colors", "instance_data_dir": ".", "resolution": 64, "dataset_type": "image"}],
        "stages": {"order": ["discover", "bucket", "encode-text"], "encode-text": {"workers": 2}},
        "train": {"steps": 1, "batch_size": 1, "device": "cpu", "threads": 1},
    }
    (tmp_path / "pipeline.yaml").write_text(json.dumps(settings))
    run("latentpress", "run")
    with ray_cluster(4) as cluster:
        engine = ("--engine", "ray", "--set", f"stages.ray.address={cluster.address}")
        run("latentpress", "encode-latents", *engine)
    run("latentpress", "index")
    run(
        "python",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--no-python",
        "latentpress",
        "train",
    )
    assert json.loads((tmp_path / "output" / "run" / "result.json").read_text())["step"] == 1


def test_a_rehearsal_runs(run: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    for number in range(2):
        Image.new("RGB", (512, 512), (90 * number, 20, 90)).save(tmp_path / "media" / f"{number}.png")
        (tmp_path / "media" / f"{number}.txt").write_text(f"color number {number}")
    run("latentpress", "new", "media", "--yes", "--card", "16")
    said = run("latentpress", "rehearse", "--config", "media.yaml")
    assert "rehearse: 7 stages done" in said and not (tmp_path / "work").exists()


def test_new_finds_the_recipes(run: Callable[..., str]) -> None:
    code = "import latentpress; latentpress.add_packages(); from stages.configuring.choice import families as names"
    assert "sana" in run("python", "-c", f"{code}; print(names('style'))")


def test_what_is_missing_is_installed_as_this_was(run: Callable[..., str], tmp_path: Path) -> None:
    code = "import latentpress; latentpress.add_packages(); from schemas.cli.starting import install_command as name"
    assert run("python", "-c", f"{code}; print(name('ui'))").strip() == "pip install 'latentpress[ui]'"
