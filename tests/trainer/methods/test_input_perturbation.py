"""Input perturbation, compared with its formula, and the effect of the changed input on other methods."""

from typing import Any

import numpy as np
import pytest
import torch

from schemas.catalog import FAMILIES
from schemas.config.methods import InputPerturbation
from tests.trainer.runs import prepared
from trainer import flow
from trainer import train as loop
from trainer.batch import Batch
from trainer.families.base import module_of
from trainer.methods.base import MethodStep
from trainer.methods.input_perturbation import InputPerturbationMethod

COUNT, GAMMA = 4, 0.25
CLEAN = {"t2i": 0, "i2i": 0, "t2v": 0, "i2v": 1}  # leading latent frames that are given


def make_step(task: Any, number: int = 0, rows: tuple[int, ...] = tuple(range(COUNT))) -> MethodStep:
    """Random samples, the same in each call; `rows`: number of samples."""
    generator, frames = torch.Generator().manual_seed(0), 4 if task.endswith("v") else 1
    x0, noise, condition = (torch.randn(COUNT, 4, frames, 24, 16, generator=generator) for _ in range(3))
    text, selection = torch.ones(COUNT, 1, 1), list(rows)
    batch = Batch(x0, None if task.startswith("t") else condition, text, text[..., 0].bool(), None, ["id"] * COUNT, "")
    sigma_B = torch.tensor([0.1, 0.4, 0.7, 1.0])[selection]
    return MethodStep(
        number=number, steps=1000, model=None, task=task, predict=None, most_passes=int, shift=1.0,
        family=module_of(FAMILIES["kandinsky5-video" if frames > 1 else "kandinsky5-image"]),
        batch=batch.select(torch.tensor(selection)), noise_BCTHW=noise[selection],
        sigma_B=sigma_B, host_sigma_B=sigma_B, identities=[f"{number}/{row}" for row in selection],
    )  # fmt: skip


def prepare(step: MethodStep, **settings: Any) -> MethodStep:
    InputPerturbationMethod(InputPerturbation(**settings)).prepare(step)
    return step


def drawn(step: MethodStep, gamma: float) -> np.ndarray:
    """The xi (B, C, T, h, w) that explains the input."""
    x0, noise = step.batch.latents_BCTHW.double().numpy(), step.noise_BCTHW.double().numpy()
    sigma = step.sigma_B.double().numpy()[:, None, None, None, None]
    return ((step.noisy_BCTHW.double().numpy() - (1 - sigma) * x0) / sigma - noise) / gamma


@pytest.mark.parametrize("task", CLEAN)
def test_the_input_has_more_noise_of_its_own_and_nothing_else_changes(task) -> None:
    clean_frames = CLEAN[task]
    before, step = make_step(task), prepare(make_step(task), strength=GAMMA)
    xi, noise = drawn(step, GAMMA), step.noise_BCTHW.numpy()[:, :, clean_frames:]
    assert np.abs(xi[:, :, :clean_frames]).max(initial=0) < 1e-4, "given frames"
    assert torch.equal(step.noisy_BCTHW[:, :, :clean_frames], before.noisy_BCTHW[:, :, :clean_frames])
    xi = xi[:, :, clean_frames:]
    for mine, row in zip(xi, noise, strict=True):  # at least 1536 numbers
        assert abs(mine.mean()) < 0.1 and mine.std() == pytest.approx(1, abs=0.07), "standard normal"
        assert np.mean(np.abs(mine) < 1) == pytest.approx(0.683, abs=0.05)
        assert abs(np.corrcoef(mine.ravel(), row.ravel())[0, 1]) < 0.1, "it is not the noise"
    assert np.abs(np.corrcoef(xi.reshape(COUNT, -1)) - np.eye(COUNT)).max() < 0.1, "each sample has its own"
    for name in ("target_BCTHW", "noise_BCTHW", "sigma_B"):
        assert torch.equal(getattr(step, name), getattr(before, name)), name
    assert torch.equal(step.batch.latents_BCTHW, before.batch.latents_BCTHW)
    if before.batch.condition_BCTHW is not None:
        assert torch.equal(step.batch.condition_BCTHW, before.batch.condition_BCTHW)


def test_it_falls_linearly_to_nothing() -> None:
    for number, strength in ((0, 0.2), (25, 0.15), (50, 0.1), (99, 0.002)):
        xi = drawn(prepare(make_step("t2v", number), strength=0.2, decay_steps=100), strength)
        assert xi.std() == pytest.approx(1, abs=0.05)
    assert drawn(prepare(make_step("t2v", 999), strength=0.2), 0.2).std() == pytest.approx(1, abs=0.05), (
        "by default not"
    )
    for number in (100, 999):
        after = prepare(make_step("t2v", number), strength=0.2, decay_steps=100)
        assert torch.equal(after.noisy_BCTHW, make_step("t2v").noisy_BCTHW), "bit by bit"


@pytest.mark.slow
def test_the_loss_is_that_of_the_perturbed_input(ready) -> None:
    """With blocks that are computed again in the backward pass; sigma stays the same for the model and in the
    metrics."""
    config = ready(
        "i2v",
        steps=1,
        batch_size=4,
        timesteps={"sampling": "list", "values": [0.7]},
        adapter={"rank": 2},
        methods={"input_perturbation": {"strength": 1.0}},
    )
    run, losses = prepared(config), {}
    [part] = run.loader.step(0).micro_batches
    step = loop.start_step(run, 0, part)
    run.methods["input_perturbation"].prepare(step)
    line = flow.interpolate(part.batch.latents_BCTHW, part.noise_BCTHW, torch.full((4,), 0.7))
    for name, noisy in (("perturbed", step.noisy_BCTHW), ("plain", line)):
        with torch.no_grad():
            predicted = run.family.predict(run.model, noisy, torch.full((4,), 0.7), step.batch, config.model.task)
        error = predicted - (part.noise_BCTHW - part.batch.latents_BCTHW)
        losses[name] = error[:, :, CLEAN["i2v"] :].square().mean().item()
    result = loop.finish_step(run, loop.train_step(run, run.loader.step(0)))
    assert result["loss"] == pytest.approx(losses["perturbed"], rel=1e-5)
    assert result["loss"] != pytest.approx(losses["plain"], rel=1e-4)
    assert result["loss_by_sigma"].keys() == {"0.5-0.75"}
