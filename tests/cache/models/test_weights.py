"""Finding weights and naming them by their content."""

import json
import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from cache.models import weights
from cache.models.compatibility import CheckpointMismatch, check_component, check_task
from cache.models.weights import WeightsError, fetch_components, fingerprint_weights
from cache.store.store import Store
from schemas.config.encoding import Model, Resources
from schemas.config.pipeline import Config

COMMIT, OTHER = "0" * 38 + "ab", "1" * 40


def checkpoint(folder: Path) -> Path:
    for name, content in {
        "model_index.json": "{}",
        "vae/config.json": '{"a": 1}',
        "vae/model.safetensors": "weights",
        "tokenizer/tokenizer.json": "{}",
        "tokenizer/deep/more.txt": "x",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def test_a_directory_is_named_by_the_content_of_its_parts(tmp_path):
    folder = checkpoint(tmp_path / "here")
    copied_folder = shutil.copytree(folder, tmp_path / "elsewhere/under another name")
    first = fingerprint_weights(str(folder), ["vae", "tokenizer"], None)
    assert json.loads(json.dumps(first)) == first
    assert fingerprint_weights(str(copied_folder), ["tokenizer", "vae"], None) == first
    assert fingerprint_weights(str(folder), ["vae"], None) != first


@pytest.mark.parametrize("change", ["content", "name", "new file", "config"])
def test_any_change_of_a_part_changes_the_name(tmp_path, change):
    folder = checkpoint(tmp_path)
    weights = folder / "vae/model.safetensors"
    before, other = (
        fingerprint_weights(str(folder), ["vae"], None),
        fingerprint_weights(str(folder), ["tokenizer"], None),
    )
    if change == "content":
        weights.write_text("Weights")  # as long as before, and perhaps in the same second
        os.utime(weights, ns=(1, 1))
    elif change == "name":
        weights.rename(folder / "vae/model.fp16.safetensors")
    elif change == "new file":
        (folder / "vae/extra.json").write_text("")
    else:
        (folder / "vae/config.json").write_text('{"a": 2}')
    assert fingerprint_weights(str(folder), ["vae"], None) != before
    assert fingerprint_weights(str(folder), ["tokenizer"], None) == other


def test_what_systems_leave_behind_changes_nothing(tmp_path):
    folder = checkpoint(tmp_path)
    before = fingerprint_weights(str(folder), ["vae"], None)
    (folder / "vae/.DS_Store").write_text("x")
    (folder / "vae/.cache").mkdir()
    (folder / "vae/.cache/lock").write_text("x")
    (folder / "README.md").write_text("x")
    assert fingerprint_weights(str(folder), ["vae"], None) == before


def test_a_missing_part_is_answered_with_what_is_there_and_what_belongs(tmp_path):
    folder = checkpoint(tmp_path)
    (folder / "text_encoder").mkdir()  # without a file in it
    for call in (fingerprint_weights, fetch_components):
        arguments = {"source": str(folder), "revision": None, "parts": ["vae", "text_encoder"]}
        with pytest.raises(WeightsError, match="lacks text_encoder; it") as caught:
            call(**arguments)
        assert isinstance(caught.value, ValueError)
        assert "vae, text_encoder" in caught.value.next_step


@pytest.mark.parametrize("source", ["/no/such/folder", "./models/x", "model", "a/b/c", "no such/repo"])
def test_what_is_neither_directory_nor_repository_is_refused(source):
    with pytest.raises(WeightsError, match="neither a directory nor a repository id"):
        fingerprint_weights(source, ["vae"], None)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A Hugging Face cache with one repository: `main` is COMMIT, and OTHER is cached, too."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repo = tmp_path / "hub/models--someone--something"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs/main").write_text(COMMIT)
    for commit in (COMMIT, OTHER):
        checkpoint(repo / "snapshots" / commit)
    return tmp_path


def test_a_repository_is_named_by_its_commit(home):
    name = "someone/something"
    expected = {"repo": name, "commit": COMMIT, "parts": ["tokenizer", "vae"]}
    assert fingerprint_weights(name, ["vae", "tokenizer"], None) == expected
    assert fingerprint_weights(name, ["vae"], OTHER)["commit"] == OTHER
    for revision, commit in ((None, COMMIT), ("main", COMMIT), (OTHER, OTHER)):
        assert fetch_components(name, revision, ["vae"]).name == commit


def test_a_repository_of_a_modular_pipeline_is_named_by_its_commit(home):
    """It has another index, which is fetched with each component."""
    for folder in (home / "hub").rglob("snapshots/*"):
        (folder / "model_index.json").rename(folder / "modular_model_index.json")
    name, memo = "someone/something", Store(str(home / "root"))
    assert fingerprint_weights(name, ["vae"], None)["commit"] == COMMIT
    assert weights.current_commit(name, None, memo) == weights.current_commit(name, "main", memo) == COMMIT
    assert weights.find_index(fetch_components(name, None, ["vae"])).name == "modular_model_index.json"
    with pytest.raises(WeightsError, match="someone/other can't be reached"):
        weights.current_commit("someone/other", None, memo)


def test_an_index_names_the_folders_of_its_components():
    """Of a modular pipeline, without components of other repositories."""
    plain = {"_class_name": "A", "vae": ["diffusers", "B"], "image_encoder": [None, None], "boundary_ratio": None}
    assert weights.list_parts(plain) == ["vae"]
    places = {"transformer": "transformer", "text_encoder": "text_encoder", "tokenizer": "text_encoder", "vae": None}
    modular = {
        name: [None, None, {"pretrained_model_name_or_path": "a/b", "subfolder": folder, "revision": None}]
        for name, folder in places.items()
    }
    modular["upsampler"] = ["transformers", "C", {"pretrained_model_name_or_path": "a/c", "subfolder": ""}]
    assert weights.list_parts(modular) == ["transformer", "text_encoder", "vae"]


def test_a_repository_that_is_not_there_says_what_to_do(home):
    with pytest.raises(WeightsError, match="the commit of someone/other at revision v2") as caught:
        fingerprint_weights("someone/other", ["vae"], "v2")
    assert "model.revision" in caught.value.next_step and "model.path" in caught.value.next_step
    with pytest.raises(WeightsError, match="someone/other at revision v2 can't be reached") as caught:
        fetch_components("someone/other", "v2", ["vae"])
    assert "HF_ENDPOINT" in caught.value.next_step


def test_large_files_are_read_once_and_again_when_they_change(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "MEMO_MIN_BYTES", 1)
    folder = tmp_path / "model"
    (folder / "vae").mkdir(parents=True)
    file = folder / "vae" / "weights.safetensors"
    file.write_bytes(b"first")
    memo = Store(tmp_path / "root")
    first = weights.fingerprint_weights(str(folder), ("vae",), None, memo)
    weights._hashes.clear()
    with monkeypatch.context() as never:
        never.setattr(weights, "_hash_content", lambda *_: pytest.fail("read again"))
        assert weights.fingerprint_weights(str(folder), ("vae",), None, memo) == first
    (remembered,) = (tmp_path / "root" / "weights").iterdir()
    record = remembered.read_bytes()
    for place in range(0, len(record), 7):
        remembered.write_bytes(record[:place] + bytes([record[place] ^ 1]) + record[place + 1 :])
        assert weights.fingerprint_weights(str(folder), ("vae",), None, memo) == first, f"a flipped bit in byte {place}"
    assert remembered.read_bytes() == record
    file.write_bytes(b"other")
    os.utime(file, ns=(1, 1))
    assert weights.fingerprint_weights(str(folder), ("vae",), None, memo) != first


@pytest.mark.parametrize(
    ("kind", "family", "flavour"),
    [
        ("kandinsky5-image-t2i", "sana", None),
        ("kandinsky5-image-t2i", "kandinsky5-image", "i2i-lite-sft"),
        ("sana", "kandinsky5-image", None),
    ],
)
def test_a_checkpoint_of_another_family_or_task_is_refused_by_name(tiny, tmp_path, kind, family, flavour):
    configured = Model(family=family, flavour=flavour, path=str(tiny(kind)))
    with pytest.raises(CheckpointMismatch, match=f"is a checkpoint for {kind.rpartition('-')[0] or kind}"):
        check_task(configured)
    check_task(configured.model_copy(update={"path": str(checkpoint(tmp_path / "no index"))}))


def test_a_part_of_another_family_is_refused_by_name(tiny):
    configured = Model(family="sana", path=str(tiny("kandinsky5-image-t2i")))
    for part, found in (("vae", "AutoencoderKL"), ("text_encoder", "qwen2_5_vl")):
        with pytest.raises(CheckpointMismatch, match=f"{part} is a {found}"):
            check_component(configured, part)
        check_component(configured.model_copy(update={"path": str(tiny("sana"))}), part)


@pytest.mark.parametrize("name", ["vae/config.json", "vae/diffusion_pytorch_model.safetensors"])
def test_damaged_weights_are_named(tiny, tmp_path, name):
    folder = shutil.copytree(tiny("kandinsky5-image-t2i"), tmp_path / "model")
    (folder / name).write_bytes((folder / name).read_bytes()[:100])
    settings = {"root": "r", "datasets": [{"id": "a", "instance_data_dir": "a"}]}
    config = Config.model_validate(settings | {"model": {"family": "kandinsky5-image", "path": str(folder)}})
    from stages.encoding import model_loading
    from stages.encoding.vae import base

    with pytest.raises(WeightsError, match="vae") as caught:
        device = model_loading.select_device(Resources(device="cpu", threads=1))
        base.load_autoencoder(config.model, config.latents, device)
    assert "whole copy" in caught.value.next_step


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
    def snapshot(repo_id: str, revision: str | None, allow_patterns: list[str], tqdm_class: type) -> str:
        for name in filter_repo_objects(REPO, allow_patterns=allow_patterns):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("x")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert fetch_components("someone/something", None, ["vae", "tokenizer", "text_encoder"]) == tmp_path
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {name for name, is_fetched in REPO.items() if is_fetched}
