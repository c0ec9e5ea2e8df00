"""What only two experts have: runs of their own, noise levels of their own, and samples by both."""

import json
from itertools import pairwise

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from schemas.cli.console import Options, run_program
from schemas.config.loading import load_config
from schemas.config.pipeline import Config
from tests.trainer import runs
from trainer.__main__ import run as train_program

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def ended(config: Config, folder, *overrides: str) -> int:
    return run_program("train", train_program, Options(runs.write(config, folder), overrides, json=True))


@pytest.mark.long
def test_both_experts_are_trained_one_after_the_other(make_config, make_set, helpers, tmp_path, capsys):
    """Runs of their own, each with its noise levels. The samples of the second have the first's adapter, too."""
    look = {"every": 2, "steps": 6, "guidance": 4.0, "guidance_low": 3.0, "seed": 7, "eval_samples": 2}
    config = make_config("wan-a14b-i2v", validation=look, steps=2, experts="both", adapter={"rank": 4})
    make_set(config, *helpers.mixed_items(config))
    assert ended(config, tmp_path) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["done"] == 4 and {"high", "low"} <= report["details"].keys()
    experts = dict(zip(("high", "low"), config.expert_runs, strict=True))
    assert [run.run_folder.name for run in experts.values()] == ["run-high", "run-low"]
    for name, run in experts.items():
        lowest, highest = run.expert.range
        curve = runs.lines(run, "eval_by_sigma")[2]
        assert len(curve) == 4 and all(lowest <= float(sigma) < highest for sigma in curve)
        again = load_config(run.run_folder / "config.yaml")
        assert (again.train.experts, again.eval_sigmas) == (name, run.eval_sigmas)
    paths = [run.run_folder / "validation/step-000000/one.safetensors" for run in experts.values()]
    first, second = (load_file(path)["latent"] for path in paths)
    assert (first - second).abs().max() > 1e-4, "the second one's samples begin with what the first one has learned"
    with safe_open(paths[1], "pt") as file:
        about = json.loads(file.metadata()["latentpress"])
    assert (about["guidance"], about["guidance_low"]) == (4.0, 3.0)


@pytest.mark.long
def test_an_interrupted_run_of_an_expert_goes_on_with_the_same_numbers(
    make_config, make_set, helpers, tmp_path, capsys
):
    """And `both` then goes on with the other one; what is finished is not done again."""
    whole, parted = (
        make_config("wan-a14b", name=name, experts="both", steps=3, adapter={"rank": 2}) for name in ("a", "b")
    )
    for config in (whole, parted):
        make_set(config, *helpers.mixed_items(config))
    assert ended(whole, tmp_path) == 0
    assert ended(parted, tmp_path, "train.steps=2", "train.experts=high") == 0
    assert not parted.expert_runs[1].run_folder.exists()
    assert ended(parted, tmp_path) == 0
    capsys.readouterr()
    for one, other in zip(whole.expert_runs, parted.expert_runs, strict=True):
        assert runs.lines(one) == runs.lines(other) and list(runs.lines(one)) == [1, 2, 3]
        found, expected = (
            load_file(run.run_folder / "adapter" / "pytorch_lora_weights.safetensors") for run in (other, one)
        )
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    first = [path.stat().st_mtime_ns for path in sorted(whole.run_folder.rglob("*.safetensors"))]
    assert ended(whole, tmp_path) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["done"] == 0 and report["skipped"] == 6
    assert [path.stat().st_mtime_ns for path in sorted(whole.run_folder.rglob("*.safetensors"))] == first
    assert all(one < other for one, other in pairwise(sorted(runs.lines(whole))))


def test_what_does_not_go_with_the_experts_is_refused(make_config):
    def problem(kind="wan-a14b", **train) -> str:
        with pytest.raises(ValueError) as caught:
            make_config(kind, **train)
        return str(caught.value)

    assert "two transformers" in problem(experts=None)
    assert "one transformer; remove it" in problem("wan", experts="high")
    assert "set guidance" in problem("wan", validation={"guidance_low": 2.0})
    assert "0.875 to 1" in problem(validation={"eval_sigmas": [0.2, 0.8]})
    assert "0 to 0.875" in problem(experts="both", timesteps={"sampling": "list", "values": [0.9]})
    assert "train.experts" in problem(experts="low", methods={"scheduled_sampling": {}})
    assert make_config("wan-a14b", methods={"scheduled_sampling": {}}).train.methods.scheduled_sampling
    given = make_config("wan-a14b", validation={"eval_sigmas": [0.2, 0.875, 1.0]})
    assert given.eval_sigmas == (0.875, 1.0) and given.expert_runs == [given]
