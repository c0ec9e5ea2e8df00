"""Validation samples in the trainer: divided among ranks, each in a file with its metadata."""

import itertools
import json

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from schemas.catalog import FAMILIES
from schemas.config.validation import Validation, validation_samples
from tests.trainer.runs import train
from trainer.validation import divide_samples

SANA = FAMILIES["sana"]


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
    config = ready("t2i", steps=1, validation={**look, "prompts": [prompt]})
    train(config)
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
