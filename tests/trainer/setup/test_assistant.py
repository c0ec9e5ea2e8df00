"""An assistant affects training and the eval loss, and nothing else."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cache.models.weights import HubError
from cache.sets.training_checks import check_model
from schemas.catalog import FAMILIES
from schemas.cli.console import Console
from schemas.config.encoding import Model
from schemas.config.pipeline import Config
from tests.trainer.pipelines import trained
from tests.trainer.runs import LOADS, lines, moved, plain_batch, prepared, result, train
from trainer.adapters.files import load_layers, merge_component
from trainer.adapters.header import AdapterError, find_adapter, find_assistant, read_adapter, read_assistant
from trainer.families.base import assistant_off
from trainer.memory.estimate import estimate_memory
from trainer.run.resume import ResumeError
from trainer.run.run_state import config_signature
from trainer.setup import export
from trainer.setup.adapters import assistant_bytes

pytestmark = pytest.mark.slow

KIND = "z-image"
LOOK = {"eval_samples": 2, "eval_sigmas": [0.4], "every": 2}


@pytest.fixture
def assistant(tiny, tmp_path):
    """An adapter of rank 4 and alpha 6 that changes the output."""
    return export.save_lora(trained(KIND, tiny(KIND), alpha=6.0), tmp_path / "assistant", KIND)


def assisted(config: Config, path) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"assistant": str(path)})})


def merged(config: Config, path, folder) -> Config:
    """The configuration with a checkpoint into whose weights the adapter is merged."""
    base = Path(config.model.source)
    layers = {name.partition(".")[2]: layer for name, layer in load_layers(read_adapter(path)).items()}
    merge_component(base / "transformer", folder / "transformer", layers, lambda: None)
    (folder / "scheduler").symlink_to(base / "scheduler")
    return moved(config, folder)


@pytest.mark.long
def test_a_run_trains_as_on_merged_weights_and_shows_as_on_the_base(ready, assistant, tmp_path) -> None:
    options = {"steps": 2, "batch_size": 2, "adapter": {"rank": 2}, "validation": LOOK}
    plain, ours, on_merged = (ready(KIND, name=name, **options) for name in ("plain", "ours", "merged"))
    ours, on_merged = assisted(ours, assistant), merged(on_merged, assistant, tmp_path / "checkpoint")
    for config in (plain, ours, on_merged):
        train(config)
    for key in ("loss", "eval_loss", "grad_norm"):
        assert lines(ours, key) == pytest.approx(lines(on_merged, key), rel=1e-5), key
        assert lines(ours, key) != pytest.approx(lines(plain, key), rel=1e-4), key
    latents = [
        load_file(config.run_folder / "validation/step-000000/one.safetensors")["latent"] for config in (plain, ours)
    ]
    assert torch.equal(*latents), "before the first step both are the base"
    plain_result, own_result = result(plain), result(ours)
    assert plain_result.keys() == own_result.keys() and any(
        not torch.equal(plain_result[key], own_result[key]) for key in plain_result
    )


def test_over_a_quantized_base_it_adds_the_same(ready, wide, tmp_path) -> None:
    path = export.save_lora(trained(KIND, wide(KIND), alpha=6.0), tmp_path / "wide", KIND)
    config = moved(ready(KIND, adapter={"rank": 2}, base_precision="int8-quanto"), wide(KIND))
    run = prepared(assisted(config, path))
    batch, sigma_B = plain_batch([run.loader.data.sample(0)]), torch.tensor([0.5])
    with torch.no_grad():
        with_it = run.denoiser(batch.latents_BCTHW, sigma_B, batch)
        with assistant_off(run.model):
            without = run.denoiser(batch.latents_BCTHW, sigma_B, batch)
        second = run.denoiser(batch.latents_BCTHW, sigma_B, batch)
    assert torch.equal(with_it, second) and (with_it - without).norm() > 0.01 * without.norm()


@pytest.mark.long
def test_another_assistant_does_not_continue_a_run(ready, assistant, tiny, tmp_path) -> None:
    config = ready(KIND, steps=1, adapter={"rank": 2})
    train(assisted(config, assistant))
    second = export.save_lora(trained(KIND, tiny(KIND), alpha=5.0), tmp_path / "other", KIND)
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": 2})})
    for changed in (longer, assisted(longer, second)):
        with pytest.raises(ResumeError, match=r"model\.assistant is a different adapter"):
            train(changed)
    train(assisted(longer, assistant.rename(tmp_path / "moved.safetensors")))


@pytest.mark.long
def test_the_prediction_of_memory_has_it(ready, assistant) -> None:
    config = ready(KIND, adapter={"rank": 2})
    plain, ours = (
        estimate_memory(each, check_model(each, print), ["64x64"], 8) for each in (config, assisted(config, assistant))
    )
    assert ours.weights - plain.weights == assistant_bytes(prepared(assisted(config, assistant)).model) > 0


def test_the_published_assistant_is_the_default_file_of_the_flavour(ready, assistant, tmp_path, monkeypatch) -> None:
    """Read from the hub's cache without a network; the run is the same as with the file itself."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    flavours = FAMILIES[KIND].flavours
    changed = {"assistant": "default", "flavour": "z-image-turbo"}
    config = ready(KIND, adapter={"rank": 2})
    turbo = config.model_copy(update={"model": config.model.model_copy(update=changed)})
    with pytest.raises(HubError, match="ostris/zimage_turbo_training_adapter can't be reached") as caught:
        find_assistant(turbo.model)
    assert "set model.assistant to a local copy" in caught.value.next_step
    published, commit = flavours["z-image-turbo"].assistant, "1234567890abcdef1234567890abcdef12345678"
    folder = tmp_path / "hub" / f"models--{published.repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(commit)
    shutil.copy(find_adapter(assistant), snapshot / published.file)
    assert find_assistant(turbo.model) == snapshot / published.file
    assert config_signature(turbo)["assistant"] == config_signature(assisted(config, assistant))["assistant"]
    assert read_assistant(turbo.model).layers.keys() == read_adapter(assistant).layers.keys()
    for flavour in flavours.values():
        if flavour.assistant is None:
            with pytest.raises(ValueError, match=r"no adapter is published for z-image, only for .*krea-2-turbo"):
                Model(family=KIND, flavour=flavour.name, assistant="default")


def test_what_can_be_no_assistant_is_named(ready, tiny, tmp_path, capsys) -> None:
    model = ready(KIND).model
    dora = export.save_lora(trained(KIND, tiny(KIND), dora=True), tmp_path / "dora", KIND)
    sana_adapter = export.save_lora(trained(KIND, tiny(KIND)), tmp_path / "others", "sana")
    for path, words in (
        (dora, "is a DoRA"),
        (sana_adapter, "was trained for sana, and model.family is z-image"),
        (tmp_path / "absent", "absent does not exist"),
    ):
        with pytest.raises(AdapterError, match=rf"model\.assistant: .*{words}"):
            read_assistant(model.model_copy(update={"assistant": str(path)}))
    assert read_assistant(model) is None
    tensors = load_file(export.save_lora(trained(KIND, tiny(KIND)), tmp_path / "loud", KIND))
    save_file({key: torch.full_like(value, 3.4e38) for key, value in tensors.items()}, tmp_path / "loud.safetensors")
    loud = assisted(ready(KIND, precision="bfloat16"), tmp_path / "loud.safetensors")
    with pytest.raises(AdapterError, match=r"model\.assistant: .*lora_A\.weight has 3\.4e\+38, which bfloat16 can't"):
        prepared(loud)
    wide = export.save_lora(trained("sana", tiny("sana")), tmp_path / "wide", KIND)
    with pytest.raises(AdapterError, match="the transformer lacks"):
        prepared(assisted(ready(KIND), wide), Console())
    assert LOADS not in capsys.readouterr().err
