"""No stage reads pickled weights, and none is fetched."""

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file

from cache.weights import WeightsError, fetch_components
from schemas.catalogue import FAMILIES
from stages.encoding.text import gemma, kandinsky5

CPU = torch.device("cpu")
TEXT, IMAGE = "kandinsky5-image-t2i", FAMILIES["kandinsky5-image"].templates["t2i"]


@pytest.fixture
def pickled(tiny: Callable[[str], Path], tmp_path: Path) -> Callable[[str, str], Path]:
    """pickled(kind, part): a copy in which that part's weights, the same ones, are a pickle; it is right otherwise."""

    def copy(kind: str, part: str) -> Path:
        for source in tiny(kind).iterdir():
            if source.name != part:
                (tmp_path / source.name).symlink_to(source)
        (tmp_path / part).mkdir()
        for file in (tiny(kind) / part).iterdir():
            if file.suffix != ".safetensors":
                (tmp_path / part / file.name).symlink_to(file)
                continue
            name = {"model": "pytorch_model"}.get(file.stem, file.stem)
            torch.save(load_file(file), tmp_path / part / f"{name}.bin")
        return tmp_path

    return copy


def refused(folder: Path, part: str, load: Callable[[], object]) -> None:
    with pytest.raises(WeightsError, match=rf"{folder}/{part}/\w+\.bin is pickled") as caught:
        load()
    assert "safe_serialization=True" in caught.value.next_step


@pytest.mark.parametrize(
    ("name", "kind"), [("flux", TEXT), ("dc_ae", "sana"), ("hunyuan_video", "kandinsky5-video-t2v")]
)
def test_an_autoencoder(pickled, name, kind) -> None:
    folder = pickled(kind, "vae")
    module = importlib.import_module(f"stages.encoding.vae.{name}")
    refused(folder, "vae", lambda: module.Autoencoder(str(folder), None, torch.float32, CPU))


@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2"])
def test_qwen_and_clip(pickled, part) -> None:
    folder = pickled(TEXT, part)
    refused(folder, part, lambda: kandinsky5.Encoder(str(folder), None, IMAGE, 64, torch.float32, CPU))


def test_gemma(pickled) -> None:
    folder, template = pickled("sana", "text_encoder"), FAMILIES["sana"].templates["t2i"]
    refused(folder, "text_encoder", lambda: gemma.Encoder(str(folder), None, template, 64, torch.float32, CPU))


REPO = {
    "model_index.json": True,
    "README.md": False,
    "vae/config.json": True,
    "vae/diffusion_pytorch_model.safetensors": True,
    "vae/diffusion_pytorch_model.bin": False,
    "vae/evil.pkl": False,
    "transformer/diffusion_pytorch_model.safetensors": False,
    "tokenizer/merges.txt": True,
    "tokenizer/vocab.json": True,
    "tokenizer/tokenizer.model": True,
    "tokenizer/chat_template.jinja": True,
    "tokenizer/tokenizer.py": False,
    "text_encoder/model-00001-of-00002.safetensors": True,
    "text_encoder/model.safetensors.index.json": True,
    "text_encoder/pytorch_model-00001-of-00002.bin": False,
    "text_encoder/pytorch_model.pt": False,
}


def test_of_a_repository_safetensors_configurations_and_tokenizers_are_fetched(monkeypatch, tmp_path) -> None:
    def snapshot(repo_id: str, revision: str | None, allow_patterns: list[str]) -> str:
        for name in filter_repo_objects(REPO, allow_patterns=allow_patterns):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("x")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert fetch_components("someone/something", None, ["vae", "tokenizer", "text_encoder"]) == tmp_path
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {name for name, wanted in REPO.items() if wanted}
