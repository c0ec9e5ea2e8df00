"""What training computes, against the definition of its loss. The conformance suite compares samples with the
pipelines."""

import json
from pathlib import Path

import diffusers
import pytest
import torch

from tests.trainer.runs import plain_batch, prepared
from trainer import train as loop
from trainer.batch import Batch
from trainer.data import BatchLoader
from trainer.families.base import module_of
from trainer.families.kandinsky5 import Kandinsky5
from trainer.noise import seeded_noise

pytestmark = pytest.mark.slow

#: An adapter, given frames, full rank.
KINDS = ["t2i", "i2v", "sana"]
ADAPTERS = {"sana": {"type": "full"}}


def stock_transformer(config):
    folder = Path(config.model.path) / "transformer"
    name = json.loads((folder / "config.json").read_text())["_class_name"]
    return getattr(diffusers, name).from_pretrained(folder).eval()


@pytest.mark.parametrize(("kind", "shift"), [("t2i", 6.0), ("i2v", None), ("sana", 6.0)])
def test_the_loss_is_the_definition(ready, kind, shift) -> None:
    """Of the stock transformer: |v - (noise - x0)|^2 at x = (1 - sigma) x0 + sigma noise, without given frames.

    With another loss, weight and distribution where a shift is set, but for those of images, where the number of tokens
    sets it: they are few, so that it is 1.65.
    """
    spread = {"sampling": "mode", "low_discrepancy": True}
    chosen = {"loss": {"type": "huber", "huber_c": 0.5, "weighting": "min_snr"}}
    chosen |= {"timesteps": spread | {"auto_shift": True}} if kind == "t2i" else {"timesteps": spread, "shift": shift}
    more = chosen if shift else {}
    config = ready(kind, steps=1, caption_dropout=0.0, adapter=ADAPTERS.get(kind, {"rank": 2}), **more)
    run = prepared(config)
    (part,) = BatchLoader(run.loader.data, run.loader.schedule, 0.0, low_discrepancy=bool(more)).step(0).micro_batches
    noise, drawn = part.noise_BCTHW, part.uniform_B
    modes = 1 - drawn - 1.29 * (torch.cos(torch.pi * drawn / 2) ** 2 - 1 + drawn)
    u = modes if more else torch.sigmoid(torch.special.ndtri(drawn))
    s = 1.6487 if more and kind == "t2i" else shift or config.model.flavour_spec.shift
    sigma = s * u / (1 + (s - 1) * u)
    factor = min((1 - sigma.item()) ** 2, 5 * sigma.item() ** 2) if more else 1
    huber = lambda error: 2 * 0.5 * ((error.square() + 0.25).sqrt() - 0.5)  # noqa: E731
    expected = factor * defined_loss(config, part.batch, noise, sigma, huber if more else torch.square)
    found = loop.finish_step(run, loop.train_step(run, run.loader.step(0)))["loss"]
    assert found == pytest.approx(expected, rel=1e-4 if more else 1e-5)


def defined_loss(config, batch: Batch, noise: torch.Tensor, sigma: torch.Tensor, cost=torch.square) -> float:
    """Of one sample, by the stock transformer. cost: of the velocity's errors."""
    given = 1 if config.model.task == "i2v" else 0
    x0, model = batch.latents_BCTHW, stock_transformer(config)
    family = module_of(config.model.family_spec)
    arguments = family.model_inputs(model, (1 - sigma) * x0 + sigma * noise, sigma, batch, config.model.task)
    assert arguments.pop("text_mask_BL", None) is None, "one caption has no padding"
    with torch.no_grad():
        velocity = model(**arguments).sample
    velocity = velocity.movedim(-1, 1) if isinstance(family, Kandinsky5) else velocity[:, :, None]
    return cost((velocity - (noise - x0))[:, :, given:]).mean().item()


@pytest.mark.parametrize("kind", KINDS)
def test_the_eval_loss_is_the_definition_at_its_sigmas(ready, kind) -> None:
    """Before the first step, where a LoRA changes nothing; each sample's noise depends on its identity alone."""
    look = {"eval_samples": 2, "eval_sigmas": [0.25, 0.75], "seed": 3}
    config = ready(kind, validation=look, steps=1, adapter=ADAPTERS.get(kind, {"rank": 2}))
    run, rows = prepared(config), list[dict]()
    loop.validate(run, lambda row, latent=True: rows.append(row), 0)
    (first,), data = rows, run.loader.data
    by_bucket: dict[str, list[float]] = {}
    for sigma, found in zip((0.25, 0.75), first["eval_by_sigma"].values(), strict=True):
        losses = []
        for row in (len(data) // 4, 3 * len(data) // 4):
            batch = plain_batch([data.sample(row)])
            noise = seeded_noise([f"3/{batch.ids[0]}"], "eval", batch.latents_BCTHW.shape[1:])
            losses.append(defined_loss(config, batch, noise, torch.tensor([sigma])))
            by_bucket.setdefault(data.bucket(row), []).append(losses[-1])
        assert found == pytest.approx(sum(losses) / 2, rel=1e-5)
    means = {bucket: sum(losses) / len(losses) for bucket, losses in by_bucket.items()}
    assert len(means) == 2 and first["eval_by_bucket"] == pytest.approx(means, rel=1e-5)
