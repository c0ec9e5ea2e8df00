"""The weights of a run: averages that are validated, saved and resumed; full rank in float32 and in bfloat16."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from schemas.config.training import Optimizer
from tests.forms import long
from tests.trainer.runs import prepared
from trainer import train as loop
from trainer.run import metrics
from trainer.run.resume import ResumeError
from trainer.setup.optimizers import make_optimizer

pytestmark = pytest.mark.slow


def checkpoint(config, step: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    folder = config.run_folder / "checkpoints" / f"step-{step:06d}"
    return load_file(folder / "trainable.safetensors"), load_file(folder / "optimizer.safetensors")


def eval_losses(config) -> list[float]:
    lines = metrics.read_metrics(config.run_folder / "metrics.jsonl")
    return [line["eval_loss"] for line in lines if "eval_loss" in line]


AVERAGES = {
    "schedule-free average": {"optimizer": {"name": "adamw-schedulefree", "lr": 1e-2, "warmup": 2}},
    "ema": {
        "optimizer": {"name": "prodigy", "warmup": 0, "arguments": {"d0": 1e-3}},
        "ema": {"decay": 0.6, "validate": True, "device": "cpu"},
    },
}


@pytest.mark.parametrize("weights", [name if name == "ema" else long(name) for name in AVERAGES])
def test_averages_are_resumed_validated_and_saved(ready, make_config, weights) -> None:
    """A resumed run and a run without validation end with the same weights and state; the result is the average, which
    is recorded."""
    look = {"eval_samples": 2, "eval_sigmas": [0.5], "every": 1, "steps": 1}
    settings = {"checkpoint_every": 1, "adapter": {"rank": 2}, **AVERAGES[weights]}
    full_run = ready("t2i", name="whole", steps=2, validation=look, **settings)
    result = loop.train_loop(prepared(full_run))
    cut = ready("t2i", name="cut", steps=1, **settings)
    loop.train_loop(prepared(cut))
    more = make_config("t2i", name="cut", steps=2, **settings)
    assert loop.train_loop(prepared(more))["skipped"] == 1
    for first, second in zip(checkpoint(full_run, 2), checkpoint(more, 2), strict=True):
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)

    trained, state = checkpoint(full_run, 2)
    with safe_open(Path(result["saved"]) / "pytorch_lora_weights.safetensors", framework="pt") as file:
        assert file.metadata()["latentpress.weights"] == weights
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert json.loads((full_run.run_folder / "result.json").read_text())["weights"] == weights
    assert result["weights"] == weights
    for name, value in trained.items():
        z = state.get(f"{name}/z")
        average = state[f"ema/{name}"] if z is None else value + (1 - 1 / 0.9) * (z - value)
        actual = saved["transformer." + name.replace(".default", "")]
        assert torch.allclose(actual, average, atol=1e-6) and not torch.allclose(actual, value, atol=1e-5)
    if weights == "ema":
        with pytest.raises(ResumeError, match=r"train\.ema"):
            loop.train_loop(prepared(more.model_copy(update={"train": more.train.model_copy(update={"ema": None})})))
        plain = ready("t2i", name="plain", steps=2, validation=look, **{**settings, "ema": {"decay": 0.6}})
        loop.train_loop(prepared(plain))
        assert all(torch.equal(value, checkpoint(plain, 2)[0][name]) for name, value in trained.items())
        ours, theirs = eval_losses(full_run), eval_losses(plain)
        assert ours[0] == theirs[0] and ours[-1] != theirs[-1], "with the average, if that is asked for"


@pytest.mark.long
def test_bfloat16_weights_with_kahan_summation_follow_float32_masters(ready) -> None:
    """Weights together with their rounding errors move like the masters, within 15 % (4 % seen); without the summation,
    9 in 10 weights do not move at all."""
    moved, rounding = {}, {}
    for name, optimizer, precision in (
        ("masters", "adamw", "float32"),
        ("kahan", "optimi-adamw", "bfloat16"),
        ("plain", "optimi-adamw", "bfloat16"),
    ):
        settings = {"name": optimizer, "lr": 1e-5, "warmup": 0, "weight_decay": 0.0}
        train = {"weight_precision": precision, "precision": "bfloat16", "adapter": {"type": "full"}, "steps": 15}
        config = ready("sana", name=name, batch_size=2, optimizer=settings, **train)
        run = prepared(config)
        if name == "plain":
            run.optimizer = make_optimizer(run.trainable, Optimizer.model_validate({**settings, "name": "adamw"}))
        assert {weight.dtype for weight in run.trainable.values()} == {getattr(torch, precision)}
        start = {key: weight.detach().float().clone() for key, weight in run.trainable.items()}
        loop.train_loop(run)
        state = run.optimizer.state
        rounding[name] = {
            key: state[weight].get("kahan_comp", torch.zeros(())).float() for key, weight in run.trainable.items()
        }
        moved[name] = {key: weight.detach().float() - start[key] for key, weight in run.trainable.items()}
    result = config.run_folder / "model" / "transformer" / "diffusion_pytorch_model.safetensors"
    assert {value.dtype for value in load_file(result).values()} == {torch.bfloat16}

    def flat(values: dict[str, torch.Tensor], *more: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([sum((tensors[key] for tensors in more), values[key]).flatten() for key in moved["kahan"]])

    masters = flat(moved["masters"])
    assert (flat(moved["kahan"], rounding["kahan"]) - masters).norm() < 0.15 * masters.norm()
    assert (flat(moved["plain"]) - masters).norm() > 0.8 * masters.norm()
    assert (flat(moved["plain"]) == 0).float().mean() > 0.9 > (flat(moved["kahan"]) == 0).float().mean()
