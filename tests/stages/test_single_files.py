"""A project whose models are single files, with the names of their original releases."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import diffusers
import pyarrow as pa
import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file

from cache.models.weights import WeightsError
from schemas.catalog import FAMILIES
from schemas.config.encoding import Model, Text
from stages import bucket, discover, encode_latents, encode_text, index
from stages.encoding.text.base import TextRequest, load_text_encoder
from tests.native_names import to_native
from tests.project import Project
from trainer import export_adapter
from trainer.__main__ import run as train

PARTS = ("transformer", "text_encoder", "vae")


@pytest.fixture
def catalog(tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """catalog(family) -> tiny checkpoint, whose shapes are in the catalog. The Hugging Face cache is the test's."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))

    def enter(name: str) -> Path:
        folder = tiny(name)
        configs = {part: json.loads((folder / part / "config.json").read_text()) for part in PARTS}
        shapes = {
            part: {key: value for key, value in config.items() if not key.startswith("_") and key != "model_type"}
            for part, config in configs.items()
        }
        monkeypatch.setitem(FAMILIES, name, replace(FAMILIES[name], shapes=shapes))
        return folder

    return enter


@pytest.fixture
def checkpoint(catalog: Callable[[str], Path]) -> Path:
    return catalog("z-image")


def write_files(checkpoint: Path, folder: Path) -> dict[str, Path]:
    """Each model of a checkpoint as a single file; the rest of the checkpoint in folder/rest."""
    shutil.copytree(checkpoint, folder / "rest", ignore=shutil.ignore_patterns(*PARTS), symlinks=True)
    files = {part: folder / f"{part}.safetensors" for part in PARTS}
    for part, file in files.items():
        (stored,) = (checkpoint / part).glob("*.safetensors")
        tensors, config = load_file(stored), json.loads((checkpoint / part / "config.json").read_text())
        native = tensors
        if part != "text_encoder":
            with init_empty_weights():
                native = to_native(getattr(diffusers, config["_class_name"]).from_config(config), tensors)
        prefix = "model.diffusion_model." if part == "transformer" else ""
        save_file({f"{prefix}{name}": tensor.contiguous() for name, tensor in native.items()}, file)
    return files


def make_set(home: Project) -> None:
    for number in range(2):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    for program in (discover, bucket, encode_text, encode_latents, index):
        assert home.run(program.run).exit_code == 0


def read_tensors(home: Project) -> list[dict[str, bytes]]:
    """The tensors of all texts and latents, by their columns."""
    rows = []
    for file in sorted(path for kind in ("text", "latents") for path in (home.root / kind).rglob("*.arrow")):
        table = pa.ipc.open_file(file).read_all()
        names = [field.name for field in table.schema if pa.types.is_large_binary(field.type)]
        rows += table.select(names).to_pylist()
    return sorted(rows, key=str)


def read_losses(home: Project) -> list[float]:
    lines = [json.loads(line) for line in (home.folder / "output/run/metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.slow
def test_single_files_give_the_shards_and_losses_of_their_folder(
    checkpoint: Path, project: Callable[..., Project], tmp_path: Path
) -> None:
    settings = {"run": "run", "steps": 2, "log_every": 1, "trackers": []}
    folder, files = project("z-image", train=settings), project("z-image", train=settings)
    places = {part: str(file) for part, file in write_files(checkpoint, tmp_path).items()}
    files.settings["model"] |= {"path": str(tmp_path / "rest"), "flavour": "z-image", **places}
    for home in (folder, files):
        make_set(home)
        assert home.run(train).exit_code == 0
    assert read_tensors(folder) == read_tensors(files) != []
    assert len(read_losses(folder)) == 2 and read_losses(folder) == read_losses(files)

    merged = [home.folder / "merged" for home in (folder, files)]
    for home, to in zip((folder, files), merged, strict=True):
        assert home.run(export_adapter.run, merge=True, whole=True, to=to).exit_code == 0
    components = [{path.parent.name for path in to.glob("*/*")} for to in merged]
    assert components[0] == components[1] == {*PARTS, "tokenizer", "scheduler"}
    for part in PARTS:
        weights = [load_file(next((to / part).glob("*.safetensors"))) for to in merged]
        assert weights[1] and all(torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())

    # Other names of the same weights: the same caches, and the same base for the run.
    for part in PARTS:
        (stored,) = (checkpoint / part).glob("*.safetensors")
        shutil.copyfile(stored, places[part])
    assert files.run(encode_text.run).done == files.run(encode_latents.run).done == 0
    assert files.run(train, "train.steps=3").exit_code == 0


@pytest.mark.slow
def test_a_text_encoder_in_a_file_has_the_tokenizer_in_its_folder(
    catalog: Callable[[str], Path], tmp_path: Path
) -> None:
    """In a checkpoint of FLUX.3, the tokenizer is in the folder of the text encoder."""
    folder, file = catalog("flux3"), tmp_path / "encoder.safetensors"
    (stored,) = (folder / "text_encoder").glob("*.safetensors")
    shutil.copyfile(stored, file)
    base = tmp_path / "base"
    (base / "text_encoder").mkdir(parents=True)
    for path in (folder / "text_encoder").iterdir():
        if path != stored:
            shutil.copyfile(path, base / "text_encoder" / path.name)
    whole = Model(family="flux3", flavour="klein-base", path=str(folder), precision="float32")
    embeds = []
    for model in (whole, whole.changed(path=str(base), text_encoder=str(file))):
        encoder = load_text_encoder(model, Text(), torch.device("cpu"))
        (result,) = encoder.encode([encoder.prepare(TextRequest("a cat"))])
        embeds.append(result.embeds)
    assert torch.equal(*embeds)


@pytest.mark.slow
def test_a_file_of_another_model_is_refused_before_training(
    checkpoint: Path, project: Callable[..., Project], tmp_path: Path
) -> None:
    home, files = (
        project("z-image", train={"run": "run", "steps": 1, "trackers": []}),
        write_files(checkpoint, tmp_path),
    )
    make_set(home)
    home.settings["model"] |= {"flavour": "z-image", "transformer": str(files["vae"])}
    for options in ({"dry_run": True}, {}):
        with pytest.raises(WeightsError, match=r"vae\.safetensors") as caught:
            home.run(train, **options)
        assert "model.flavour" in caught.value.next_step
    assert not list((tmp_path / "home/latentpress").glob("vae-*/")), "nothing is left of the conversion"
