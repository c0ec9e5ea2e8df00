"""The parts of a checkpoint are compared by their small files: `bucket` refuses parts that do not fit each other."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache.models.compatibility import CheckpointMismatch, check_parts
from schemas.config.pipeline import Config
from stages import bucket, discover, encode_text
from tests.project import CHECKPOINTS, SETTINGS

Tiny = Callable[[str], Path]


def configured(folder: Path, kind: str, **sections: Any) -> Config:
    prompts = {"prompts": [{"name": "one", "prompt": "a cat"}]}
    settings = {"root": "work", "validation": prompts, "model": SETTINGS[kind] | {"path": str(folder)}, **sections}
    settings["datasets"] = [{"id": "a", "instance_data_dir": "a", "conditioning_data": "b"}]
    if kind.endswith("v"):
        settings["datasets"] = [{"id": "a", "instance_data_dir": "a", "dataset_type": "video"}]
    if "a14b" in kind:
        settings["train"] = {"experts": "both"}
    return Config.model_validate(settings)


def small_files(tiny: Tiny, kind: str, folder: Path) -> Path:
    """A copy of a tiny checkpoint without its weights."""
    whole, ignored = tiny(CHECKPOINTS[kind]), shutil.ignore_patterns("*.safetensors", "tokenizer.json")
    return shutil.copytree(whole, folder, ignore=ignored)


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refused(folder: Path, kind: str, match: str) -> str:
    with pytest.raises(CheckpointMismatch, match=match) as caught:
        check_parts(configured(folder, kind), ask_hub=False)
    return caught.value.next_step


@pytest.mark.slow
@pytest.mark.parametrize("kind", SETTINGS)
def test_parts_of_every_family(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    """Whole checkpoints and parts of them pass. Each part is refused that another family or size would have."""
    folder = small_files(tiny, kind, tmp_path / "model")
    config = configured(folder, kind)
    family, check = config.model.family_spec, lambda: check_parts(config, ask_hub=False)
    check()
    for part in [*folder.iterdir()]:
        hidden = part.rename(tmp_path / "elsewhere")
        check()
        hidden.rename(part)
    for tensor, keys in family.text_widths.items():
        for part in family.components:
            kept = (folder / part / "config.json").read_text()
            change(folder / part / "config.json", **dict.fromkeys(keys, 80))
            encoder = {"embeds": "text_encoder", "pooled": "text_encoder_2"}[tensor]
            read = re.escape(" * ".join(keys)) + f" = {80 ** len(keys)}"
            step = refused(folder, kind, rf"{encoder}/config.json has .*{part}/config.json has {read}: the trans")
            assert f"take {encoder}/" in step and config.model.flavour_spec.repo in step
            (folder / part / "config.json").write_text(kept)
    kept = (folder / "vae/config.json").read_text()
    key = next(iter(family.autoencoder_config))
    change(folder / "vae/config.json", **{key: 7})
    refused(folder, kind, f"vae/config.json has {key} = 7")
    (folder / "vae/config.json").write_text(kept)
    for part, own in family.tokenizers.items():
        file = folder / part / "tokenizer_config.json"
        other = "T5TokenizerFast" if own != "T5Tokenizer" else "Qwen2Tokenizer"
        change(file, tokenizer_class=other)
        refused(folder, kind, f"{part} is a {other.removesuffix('Fast')}.*{own}")
        change(file, tokenizer_class="TokenizersBackend")
        check()
    if family.modular is not None:  # makes its scheduler itself
        return
    change(folder / "scheduler/scheduler_config.json", _class_name="DDIMScheduler", prediction_type="epsilon")
    assert "remove validation.prompts" in refused(folder, kind, "DDIMScheduler")
    check_parts(configured(folder, kind, validation={}), ask_hub=False)


def test_an_encoder_with_fewer_layers_than_the_template_takes(tiny: Tiny, tmp_path: Path) -> None:
    folder = small_files(tiny, "flux2-klein", tmp_path / "model")
    change(folder / "text_encoder/config.json", num_hidden_layers=26)
    match = "the hidden states 9, 18, 27: it needs 27 layers"
    refused(folder, "flux2-klein", match)
    change(folder / "text_encoder/config.json", num_hidden_layers=27)
    check_parts(configured(folder, "flux2-klein"), ask_hub=False)


@pytest.mark.slow
def test_bucket_and_encoding_refuse_another_size_of_text_encoder(tiny: Tiny, project: Any, tmp_path: Path) -> None:
    home = project("flux2-klein")
    home.image("a.png")
    home.run(discover.run)
    home.run(bucket.run)
    folder = small_files(tiny, "flux2-klein", tmp_path / "model")
    change(folder / "text_encoder/config.json", hidden_size=4096)
    home.settings["model"]["path"] = str(folder)
    for program in (bucket.run, encode_text.run):
        with pytest.raises(CheckpointMismatch, match="hidden_size = 4096"):
            home.run(program)
    assert not home.shards("text")


def test_parts_of_a_repository(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared by the encoding stages, which ask the hub; `bucket` asks nothing."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    commit, repository = "1" * 40, tmp_path / "hub" / "models--someone--mixed"
    folder = small_files(tiny, "z-image", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    config = configured(Path("someone/mixed"), "z-image")
    check_parts(config, ask_hub=True)
    change(folder / "text_encoder" / "config.json", hidden_size=4096)
    check_parts(config, ask_hub=False)
    with pytest.raises(CheckpointMismatch, match=r"transformer/config\.json has cap_feat_dim"):
        check_parts(config, ask_hub=True)
    (folder / "transformer" / "config.json").unlink()  # as where only the encoders were downloaded
    check_parts(config, ask_hub=True)
