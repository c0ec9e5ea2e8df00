"""What the programs of each kind of machine import: all of it comes with the kind's extra, and nothing of another's."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
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
    "jinja2",
}


WITHOUT_PANDAS = "from schemas.cli.starting import leave_out_pandas; leave_out_pandas()"  # as programs start


def run_code(code: str, *arguments: str) -> list[str]:
    """The lines that a new process prints."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def loaded(code: str, *arguments: object) -> set[str]:
    """The modules that a new process has after `code`."""
    printed = run_code(f"{code}\nimport json, sys\nprint(json.dumps([*sys.modules]))", *map(str, arguments))
    return set(json.loads(printed[-1]))


def within(modules: set[str], *packages: str) -> set[str]:
    """Those of `modules` that are one of `packages` or below it."""
    return {name for name in modules if any(f"{name}.".startswith(f"{package}.") for package in packages)}


def closure(extra: str) -> set[str]:
    """The distributions that installing latentpress[extra] brings, as pyproject.toml and the installed ones state."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = project["dependencies"] + project["optional-dependencies"].get(extra, [])
    found: set[str] = set()
    waiting = [("latentpress", extra)]
    while waiting:
        name, wanted = waiting.pop()
        for text in ours if name == "latentpress" else requires(name) or []:
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": wanted}):
                key = need.name.lower().replace("_", "-").replace(".", "-")
                if key not in found:
                    found.add(key)
                    waiting += [(key, inner) for inner in (need.extras or {""})]
    return found


owners = cache(packages_distributions)


def missing(extra: str, modules: set[str]) -> set[str]:
    """Distributions that own one of `modules` and do not come with latentpress[extra]."""
    roots = {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names)
    imported = {owner.lower().replace("_", "-") for root in roots for owner in owners().get(root, [])}
    # What a library picks up only because it happens to be installed is no need of ours.
    optional = {"latentpress"} | ({"peft"} if extra == "encode" else set())
    return {name for name in imported - closure(extra) - optional if name in NEEDED}


def test_every_machine_has_what_it_imports() -> None:
    programs = "import stages.cli, stages.verify, stages.doctor, stages.maintenance.probes"
    assert missing("", loaded(f"{WITHOUT_PANDAS}; {programs}")) == set()


@pytest.mark.long
def test_what_reads_media_has_what_it_imports() -> None:
    programs = "import stages.discover, stages.bucket, stages.preview"
    assert (
        missing("media", loaded(f"{programs}, stages.media.image, stages.media.video, stages.media.sample_reader"))
        == set()
    )


TRAINER = """
import importlib, pkgutil, sys
from pathlib import Path
import trainer
for module in pkgutil.walk_packages(trainer.__path__, "trainer."):
    importlib.import_module(module.name)
from schemas.config.training import Adapter
from trainer.setup.adapters import make_trainable
from trainer.setup.export import save_lora
from trainer.families.kandinsky5 import Kandinsky5
from trainer.families.sana import Sana
from trainer.validation import load_scheduler
for family, folder in ((Kandinsky5(), sys.argv[1]), (Sana(), sys.argv[2])):
    model = family.load(folder)
    make_trainable(model, family, "t2i", Adapter(rank=2))
    save_lora(model, Path(sys.argv[3]), "family")
    load_scheduler(folder)
"""

# What diffusers' loaders and peft import: tables (auto), a configuration (encoder_decoder), a helper (bloom).
ALLOWED = {"auto", "encoder_decoder", "bloom"}


@pytest.mark.long
def test_the_trainer_loads_no_encoder_no_pipeline_and_no_media_library(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """On import of all of its modules, and when a model is loaded, adapted and saved.

    PIL is not looked for: diffusers' own utilities import it for every model class.
    """
    modules = loaded(TRAINER, tiny("kandinsky5-image-t2i"), tiny("sana"), tmp_path)
    assert {"trainer.train", "trainer.families.sana", "peft"} <= modules
    models = within(modules, "transformers.models") - {"transformers.models"}
    assert {name.split(".")[2] for name in models} - ALLOWED == set()
    unwanted = ("av", "decord", "torchvision", "skimage", "stages", "diffusers.pipelines", "diffusers.training_utils")
    assert within(modules, *unwanted) == set()
    assert {name for name in modules if "autoencoder" in name} == set()
    assert missing("train", modules) == set()


def test_the_trainer_has_no_pandas_unless_it_asks_for_it() -> None:
    """pyarrow would import it at its first conversion."""
    code = f"{WITHOUT_PANDAS}\nimport numpy as np, pyarrow as pa, sys\nnp.asarray(pa.chunked_array([[1, 2]]))"
    code += "\nprint('pandas' in sys.modules)"
    code += "\nimport pandas\nprint(len(pandas.DataFrame({'a': [1, 2]})))"
    assert run_code(code) == ["False", "2"]
