"""Validation samples in the trainer: divided among ranks, each in a file with its metadata."""

import itertools
import json
import shutil

import pytest
import torch
from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import calculate_shift, retrieve_timesteps
from safetensors import safe_open
from safetensors.torch import load_file

from schemas.catalog import FAMILIES
from schemas.config.validation import Validation, validation_samples
from tests.trainer.runs import moved, prepared
from trainer import train as loop
from trainer.families.base import module_of
from trainer.validation import divide_samples, load_scheduler

SANA = FAMILIES["sana"]
SHIFT_RANGE = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")


@pytest.mark.slow
def test_a_distilled_checkpoint_has_its_own_noise_levels(ready, tmp_path) -> None:
    """For as many steps as levels, as the pipeline passes them to its scheduler."""
    sigmas, family, cpu = [1.0, 0.9, 0.4], module_of(FAMILIES["qwen-image-2.1"]), torch.device("cpu")
    plain = ready("qwen-image-2.1", steps=1, adapter={"rank": 2}, validation={"steps": [2, 3], "guidance": 1.0})
    own = moved(plain, shutil.copytree(plain.model.source, tmp_path / "turbo"))
    (tmp_path / "turbo/model_index.json").write_text(json.dumps({"sample_sigmas": sigmas}))
    own = own.model_copy(update={"output": str(tmp_path / "own")})
    latents = dict[tuple[str, int], torch.Tensor]()
    for name, config in (("plain", plain), ("own", own)):
        loop.validate(prepared(config), lambda *_: None, 0)
        for count in (2, 3):
            file = config.run_folder / f"validation/step-000000/one_{count}steps.safetensors"
            latents[name, count] = load_file(file)["latent"]
    assert torch.equal(latents["plain", 2], latents["own", 2])
    assert (latents["plain", 3] - latents["own", 3]).abs().max() > 1e-3
    ours, theirs = (load_scheduler(plain.model.source, sigmas=values) for values in (sigmas, None))
    mu = calculate_shift(64, *(theirs.config[key] for key in SHIFT_RANGE))
    wanted, _ = retrieve_timesteps(theirs, 3, cpu, sigmas=sigmas, mu=mu)
    family.set_timesteps(ours, 3, 64, cpu)
    assert torch.equal(ours.timesteps, wanted) and torch.equal(ours.sigmas, theirs.sigmas)


def test_ranks_denoise_equally_often_and_every_sample_counts_once() -> None:
    for count, ranks in itertools.product(range(1, 8), range(1, 5)):
        settings = Validation.model_validate({"prompts": [{"name": "a", "prompt": "b"}], "seed": list(range(count))})
        samples = validation_samples(settings, SANA, SANA.flavours[SANA.default_flavour])
        parts = [divide_samples(samples, (rank, ranks)) for rank in range(ranks)]
        assert len({len(part) for part in parts}) == 1
        names = [sample.name for part in parts for sample, counts in part if counts]
        assert sorted(names) == sorted(sample.name for sample in samples), (count, ranks)


@pytest.mark.slow
def test_files_say_what_they_are_and_seeds_are_noise_of_their_own(ready) -> None:
    look = {"eval_samples": 0, "steps": 2, "seed": [3, 4], "guidance": [1, 2.5]}
    prompt = {"name": "one", "prompt": "of the configuration", "seed": [4, 5]}
    config = ready("t2i", validation={**look, "prompts": [prompt]})
    loop.validate(prepared(config), lambda *_: None, 1)
    result = {}
    for path in (config.run_folder / "validation" / "step-000001").iterdir():
        with safe_open(path, framework="pt") as file:
            result[path.stem] = json.loads(file.metadata()["latentpress"])
    assert set(result) == {f"one_guidance{guidance}_seed{seed}" for guidance in ("1", "2.5") for seed in (4, 5)}
    about = result["one_guidance2.5_seed4"]
    expected = {"name": "one_guidance2.5_seed4", "group": "one_guidance2.5", "prompt_name": "one", "seed": 4}
    expected |= {"steps": 2, "guidance": 2.5, "bucket": "64x64", "task": "t2i", "set": "set1"}
    assert about.items() >= expected.items()
    folder = config.run_folder / "validation" / "step-000001"
    latents = [load_file(folder / f"one_guidance1_seed{seed}.safetensors")["latent"] for seed in (4, 5)]
    assert (latents[0] - latents[1]).abs().max() > 0.1
