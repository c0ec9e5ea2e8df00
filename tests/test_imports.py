"""What the programs of each kind of machine import: all of it comes with the kind's extra, and nothing of another's."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from cache.runs.training_run import read_metrics
from stages import bucket, discover, encode_latents, encode_text, encode_vision, index
from tests.project import SETTINGS, Project

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
ENCODERS = ("qwen2", "qwen2_vl", "qwen2_5_vl", "clip", "gemma", "gemma2")


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
    assert missing("", loaded("import stages.cli, stages.verify, stages.doctor, stages.maintenance.probes")) == set()


def test_what_reads_media_has_what_it_imports() -> None:
    programs = "import stages.discover, stages.bucket, stages.preview"
    assert (
        missing("media", loaded(f"{programs}, stages.media.image, stages.media.video, stages.media.sample_reader"))
        == set()
    )


TEXT_AND_VISION = """
import stages.encode_text, stages.encoding.text.worker, stages.encoding.text.kandinsky5, stages.encoding.text.gemma
import stages.encode_vision, stages.encoding.vision.worker
"""
LATENTS = """
import stages.encoding.vae.flux, stages.encoding.vae.hunyuan_video, stages.encoding.vae.dc_ae
import stages.encode_latents, stages.encoding.vae.worker
import stages.decode, stages.index, stages.status, stages.run
"""
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
    make_trainable(model, family, Adapter(rank=2))
    save_lora(model, Path(sys.argv[3]), "family")
    load_scheduler(folder)
"""

ALIGNED = """
import os, sys
from pathlib import Path
from schemas.cli.console import Console, Options
from schemas.config.loading import load_config
from trainer.__main__ import run
quiet = open(os.devnull, "w")
for path in map(Path, sys.argv[1:]):
    assert run(load_config(path), Options(path), Console(stdout=quiet, stderr=quiet)).exit_code == 0, path
"""


@pytest.fixture(scope="module")
def aligned(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[Project]:
    """Clips, and pictures, from their files to a training set with vision features, to be trained with CREPA."""
    homes = []
    for kind in ("kandinsky5-video-t2v", "sana"):
        dataset: dict[str, Any] = {"id": "made", "instance_data_dir": "media", "resolution": 64, "allow_upscale": True}
        if kind != "sana":
            dataset |= {"dataset_type": "video", "video": {"num_frames": 9, "frame_rate": 12.0}}
        settings = {
            "root": "work",
            "model": {**SETTINGS[kind], "path": str(tiny(kind)), "precision": "float32"},
            "datasets": [dataset],
            "vision": {"model": str(tiny("dinov2")), "size": 42},
            "train": {"steps": 2, "device": "cpu", "threads": 1, "methods": {"crepa": {"block_index": 1}}},
            "validation": {"eval_samples": 1, "eval_sigmas": [0.5]},
        }
        home = Project(tmp_path_factory.mktemp(kind), settings)
        for name in ("one", "two"):
            home.image(f"{name}.png", (64, 64), seed=len(homes)) if kind == "sana" else home.video(f"{name}.mp4", 12)
        for program in (discover, bucket, encode_text, encode_latents, encode_vision, index):
            assert home.run(program.run).exit_code == 0
        homes.append(home)
    return homes


@pytest.mark.long
def test_the_text_and_vision_programs_load_no_autoencoder_pipeline_or_transformer() -> None:
    modules = loaded(TEXT_AND_VISION)
    assert "transformers.models.qwen2_5_vl" in modules
    assert within(modules, "diffusers") == set()
    assert missing("encode", modules) == set()


@pytest.mark.long
def test_the_latents_program_loads_no_text_encoder_and_no_pipeline() -> None:
    """Importing an autoencoder imports transformers, but none of its models, and no diffusers pipeline."""
    modules = loaded(LATENTS)
    assert "diffusers.models.autoencoders.autoencoder_dc" in modules
    encoders = (f"transformers.models.{name}" for name in ENCODERS)
    assert within(modules, "diffusers.pipelines", *encoders) == set()
    assert missing("encode", modules) == set()


# What diffusers' loaders and peft import: tables (auto), a configuration (encoder_decoder), a helper (bloom).
ALLOWED = {"auto", "encoder_decoder", "bloom"}


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


@pytest.mark.long
def test_a_run_with_crepa_loads_no_vision_model_and_no_autoencoder(aligned: list[Project]) -> None:
    modules = loaded(ALIGNED, *(home.folder / "pipeline.yaml" for home in aligned))
    assert {"trainer.methods.crepa", "diffusers.models.transformers.transformer_kandinsky"} <= modules
    models = within(modules, "transformers.models") - {"transformers.models"}
    assert {name.split(".")[2] for name in models} - ALLOWED == set()
    assert within(modules, "stages", "av", "diffusers.pipelines", "torchvision") == set()
    assert {name for name in modules if "autoencoder" in name or "dinov2" in name} == set()
    for home in aligned:
        rows = read_metrics(home.folder / "output/run/metrics.jsonl")
        steps = [row for row in rows if "loss" in row]
        assert len(steps) == 2 and {row["crepa_weight"] for row in steps} == {0.5}
        assert [row["crepa_loss"] for row in steps] == pytest.approx([-row["crepa_similarity"] / 2 for row in steps])


def test_the_trainer_has_no_pandas_unless_it_asks_for_it() -> None:
    """pyarrow would import it at its first conversion."""
    code = "from schemas.cli.starting import leave_out_pandas\nleave_out_pandas()"
    code += "\nimport numpy as np, pyarrow as pa, sys\nnp.asarray(pa.chunked_array([[1, 2]]))"
    code += "\nprint('pandas' in sys.modules)"
    code += "\nimport pandas\nprint(len(pandas.DataFrame({'a': [1, 2]})))"
    assert run_code(code) == ["False", "2"]
