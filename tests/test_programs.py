"""Every program as a shell sees it: help without torch, exit codes, reports that are JSON and nothing else."""

import json
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from stages import cli
from stages.cli import PROGRAMS

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "diffusers", "transformers", "accelerate", "peft", "av", "decord", "datasets")


NEEDED = {
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "safetensors",
    "av",
    "pillow",
    "numpy",
    "pyarrow",
    "fsspec",
    "xxhash",
    "pydantic",
    "typer",
    "rich",
    "ruamel-yaml",
    "ftfy",
    "tensorboard",
    "huggingface-hub",
}


def module_of(program: str) -> str:
    return "trainer" if program == "train" else cli.module_of(program)


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env={"PYTHONPATH": str(ROOT), "PATH": ""}
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_imports_nothing_heavy(program: str) -> None:
    code = f"""
import runpy, sys
sys.argv = [{program!r}, "--help"]
try:
    runpy.run_module({module_of(program)!r}, run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
loaded = [name for name in {HEAVY!r} if name in sys.modules]
assert not loaded, loaded
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "--config" in done.stdout and "--json" in done.stdout and "Exit codes" in done.stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_wrong_use_ends_with_2(program: str, tmp_path: Path) -> None:
    assert python("-m", "stages.cli", program, "--no-such-option").returncode == 2
    absent = python("-m", "stages.cli", program, "--config", str(tmp_path / "absent.yaml"))
    assert absent.returncode == 2
    assert "absent.yaml" in absent.stderr


def test_an_unknown_program_is_answered_with_the_list() -> None:
    done = python("-m", "stages.cli", "encode")
    assert done.returncode == 2
    assert all(program in done.stderr for program in PROGRAMS)


def test_an_error_is_one_json_document_on_standard_output(tmp_path: Path) -> None:
    (tmp_path / "pipeline.yaml").write_text(
        "root: work\nmodel: {family: sana, path: nowhere}\ndatasets: [{id: a, instance_data_dir: absent}]\n"
    )
    done = python("-m", "stages.discover", "--json", cwd=tmp_path)
    assert done.returncode == 3
    assert "absent is not a folder" in json.loads(done.stdout)["error"]["message"]


def closure(extra: str) -> set[str]:
    """The distributions that installing latentpress[extra] brings, as the installed ones state their needs."""
    found: set[str] = set()
    waiting = [("latentpress", extra)]
    while waiting:
        name, wanted = waiting.pop()
        for text in requires(name) or []:
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": wanted}):
                key = need.name.lower().replace("_", "-").replace(".", "-")
                if key not in found:
                    found.add(key)
                    waiting += [(key, inner) for inner in (need.extras or {""})]
    return found


IMPORTS = """
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
roots = sorted({{name.partition(".")[0] for name in sys.modules}} - set(sys.stdlib_module_names))
print("\\n".join(roots))
"""


@pytest.mark.parametrize(
    ("extra", "modules"),
    [
        ("", ["stages.cli", "stages.verify"]),
        (
            "media",
            [
                *("stages.discover", "stages.bucket", "stages.preview"),
                *("stages.media.image", "stages.media.video", "stages.media.samples"),
            ],
        ),
        ("encode", ["stages.encode_text", "stages.text.worker", "stages.text.kandinsky5", "stages.text.gemma"]),
        ("encode", ["stages.encode_latents", "stages.vae.worker", "stages.vae.flux", "stages.vae.hunyuan_video"]),
        ("encode", ["stages.decode", "stages.vae.dc_ae", "stages.index", "stages.status", "stages.run"]),
        ("train", ["trainer.train", "trainer.families.kandinsky5", "trainer.families.sana", "trainer.sampling"]),
    ],
)
def test_an_extra_brings_everything_that_its_programs_import(extra: str, modules: list[str]) -> None:
    done = python("-c", IMPORTS.format(modules=modules))
    assert done.returncode == 0, done.stderr
    owners = packages_distributions()
    imported = {owner.lower().replace("_", "-") for root in done.stdout.split() for owner in owners.get(root, [])}
    # What a library picks up only because it happens to be installed is no need of ours.
    optional = {"latentpress"} | ({"peft"} if extra == "encode" else set())
    missing = {name for name in imported - closure(extra) - optional if name in NEEDED}
    assert not missing, f"latentpress[{extra}] does not bring {missing}"
