"""An assistant affects training and the eval loss, and nothing else; an adapter of few steps affects samples only."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cache.models.weights import HubError
from cache.sets.training_checks import check_model
from schemas.catalog import FAMILIES
from schemas.cli.console import Console
from schemas.config.encoding import Model
from schemas.config.pipeline import Config
from schemas.config.validation import SampleAdapter, SizedPrompt, Validation
from tests.forms import long
from tests.trainer.pipelines import trained
from tests.trainer.runs import LOADS, lines, moved, plain_batch, prepared, result, train
from trainer import train as loop
from trainer.adapters.files import load_layers, merge_component
from trainer.adapters.header import AdapterError, find_adapter, find_assistant, read_adapter, read_frozen
from trainer.families.base import sampling
from trainer.memory.estimate import estimate_memory
from trainer.run.resume import ResumeError
from trainer.run.run_state import config_signature
from trainer.setup import export
from trainer.setup.adapters import frozen_bytes

pytestmark = pytest.mark.slow

KIND = "z-image"
LOOK = {"eval_samples": 2, "eval_sigmas": [0.4], "every": 2}


@pytest.fixture
def assistant(tiny, tmp_path):
    """An adapter of rank 4 and alpha 6 that changes the output."""
    return export.save_lora(trained(KIND, tiny(KIND), alpha=6.0), tmp_path / "assistant", KIND)


def assisted(config: Config, path) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"assistant": str(path)})})


def with_few_steps(config: Config, path) -> Config:
    adapter = SampleAdapter(path=str(path), steps=3, guidance=0.0)
    validation = config.validation.model_dump(exclude_unset=True, exclude={"steps"}) | {"adapter": adapter}
    return config.model_copy(update={"validation": Validation.model_validate(validation)})


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


@pytest.mark.parametrize("strategy", ["plain", long("offload")])
def test_an_adapter_of_few_steps_affects_samples_only(ready, assistant, tmp_path, strategy) -> None:
    """Samples equal the samples of a checkpoint into which it is merged; losses and the result equal the plain run's
    bit for bit, also if the run resumes with it."""
    options: dict[str, Any] = {"batch_size": 2, "adapter": {"rank": 2}, "validation": LOOK}
    options |= {"offload": {"blocks": True}} if strategy == "offload" else {}
    plain, ours, on_merged = (ready(KIND, name=name, steps=2, **options) for name in ("plain", "ours", "merged"))
    ours = with_few_steps(ours, assistant)
    reference = {"validation": ours.validation.changed(adapter=None, steps=3, guidance=0.0)}
    on_merged = merged(on_merged, assistant, tmp_path / "checkpoint").model_copy(update=reference)
    cut = ours.model_copy(update={"train": ours.train.changed(steps=1), "validation": plain.validation})
    for config in (plain, cut, ours):
        train(config)
    assert {sample.steps for sample in ours.validation_samples([SizedPrompt("one", None)])} == {3}
    for key in ("loss", "eval_loss", "grad_norm"):
        resumed = lines(ours, key)
        assert {step: resumed[step] for step in lines(plain, key)} == lines(plain, key), key
    before, after = result(plain), result(ours)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    with safe_open(ours.run_folder / "validation/step-000002/one.safetensors", "np") as file:
        about = json.loads(file.metadata()["latentpress"])
    assert (about["adapter"], about["steps"], about["guidance"]) == ("pytorch_lora_weights.safetensors", 3, 0.0)
    own, without = shown(ours, 2), shown(plain, 2)
    assert (own - without).norm() > 0.01 * without.norm()
    first = with_few_steps(ready(KIND, name="first", **options), assistant)
    for config in (first, on_merged):
        loop.validate(prepared(config), lambda *_: None, 0)
    torch.testing.assert_close(shown(first, 0), shown(on_merged, 0), rtol=1e-5, atol=2e-5)


def shown(config: Config, step: int) -> torch.Tensor:
    return load_file(config.run_folder / f"validation/step-{step:06d}/one.safetensors")["latent"]


def test_two_transformers_have_no_adapter_of_few_steps(make_config) -> None:
    adapter = {"path": "a.safetensors", "steps": 4, "guidance": 1.0}
    with pytest.raises(ValueError, match="whose two transformers need an adapter each"):
        make_config("wan-a14b", validation={"adapter": adapter})


def test_over_a_quantized_base_it_adds_the_same(ready, wide, tmp_path) -> None:
    path = export.save_lora(trained(KIND, wide(KIND), alpha=6.0), tmp_path / "wide", KIND)
    config = moved(ready(KIND, adapter={"rank": 2}, base_precision="int8-quanto"), wide(KIND))
    run = prepared(assisted(config, path))
    batch, sigma_B = plain_batch([run.loader.data.sample(0)]), torch.tensor([0.5])
    with torch.no_grad():
        with_it = run.denoiser(batch.latents_BCTHW, sigma_B, batch)
        with sampling(run.model):
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
    both = with_few_steps(assisted(config, assistant), assistant)
    plain, *others = (
        estimate_memory(each, check_model(each, print), ["64x64"], 8)
        for each in (config, assisted(config, assistant), with_few_steps(config, assistant), both)
    )
    size = frozen_bytes(prepared(assisted(config, assistant)).model)
    assert [other.weights - plain.weights for other in others] == [size, size, 2 * size] and size > 0


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
    assert read_frozen(turbo)["model.assistant"].layers.keys() == read_adapter(assistant).layers.keys()
    for flavour in flavours.values():
        if flavour.assistant is None:
            with pytest.raises(ValueError, match=r"no adapter is published for z-image, only for .*krea-2-turbo"):
                Model(family=KIND, flavour=flavour.name, assistant="default")


def test_what_can_be_no_assistant_is_named(ready, tiny, tmp_path, capsys) -> None:
    config = ready(KIND)
    dora = export.save_lora(trained(KIND, tiny(KIND), dora=True), tmp_path / "dora", KIND)
    sana_adapter = export.save_lora(trained(KIND, tiny(KIND)), tmp_path / "others", "sana")
    for path, words in (
        (dora, "is a DoRA"),
        (sana_adapter, "was trained for sana, and model.family is z-image"),
        (tmp_path / "absent", "absent does not exist"),
    ):
        for option, chosen in (("model.assistant", assisted), ("validation.adapter", with_few_steps)):
            with pytest.raises(AdapterError, match=rf"{re.escape(option)}: .*{words}"):
                read_frozen(chosen(config, path))
    assert read_frozen(config) == {}
    tensors = load_file(export.save_lora(trained(KIND, tiny(KIND)), tmp_path / "loud", KIND))
    save_file({key: torch.full_like(value, 3.4e38) for key, value in tensors.items()}, tmp_path / "loud.safetensors")
    loud = assisted(ready(KIND, precision="bfloat16"), tmp_path / "loud.safetensors")
    with pytest.raises(AdapterError, match=r"model\.assistant: .*lora_A\.weight has 3\.4e\+38, which bfloat16 can't"):
        prepared(loud)
    wide = export.save_lora(trained("sana", tiny("sana")), tmp_path / "wide", KIND)
    with pytest.raises(AdapterError, match="the transformer lacks"):
        prepared(assisted(ready(KIND), wide), Console())
    assert LOADS not in capsys.readouterr().err
