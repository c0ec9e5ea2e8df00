"""Losses of samples in a batch and of each sample alone."""

from dataclasses import replace

import torch

from tests.trainer.pipelines import random
from trainer.batch import Batch
from trainer.flow import interpolate, loss_per_sample, velocity


def alone(batch: Batch, i: int) -> Batch:
    """Sample i alone, without padding."""
    single, length = batch.select(torch.tensor([i])), int(batch.text_mask_BL[i].sum())
    return replace(single, text_BLD=single.text_BLD[:, :length], text_mask_BL=single.text_mask_BL[:, :length])


def sample_losses(family, model, batch: Batch, task="t2i", sigma=0.6) -> torch.Tensor:
    """(B,) at fixed noise."""
    noise = torch.cat([random(1, *batch.latents_BCTHW.shape[1:], seed=50 + int(id)) for id in batch.ids])
    sigma_B = torch.full((len(batch),), sigma)
    noisy = interpolate(batch.latents_BCTHW, noise, sigma_B)
    predicted = family.predict(model, noisy, sigma_B, batch, task)
    return loss_per_sample(predicted, velocity(batch.latents_BCTHW, noise), family.clean_frames(task))


def by_batch_and_alone(family, model, batch: Batch, task="t2i", least=1e-6) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(losses in a batch, losses one by one, largest relative difference of any parameter's gradient). least: smallest
    norm by which a gradient's difference is divided."""
    model.zero_grad()
    together = sample_losses(family, model, batch, task)
    together.mean().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    single = torch.cat([sample_losses(family, model, alone(batch, i), task) for i in range(len(batch))])
    single.mean().backward()
    pairs = ((grads[name], p.grad) for name, p in model.named_parameters() if name in grads)
    largest = max(((result - grad).norm() / grad.norm().clamp(min=least)).item() for result, grad in pairs)
    return together.detach(), single.detach(), largest


def check_batch_mates(family, model, batch: Batch, record, task="t2i", least=1e-3, loss=1e-5, gradient=1e-4) -> None:
    """Check that a sample's loss and gradients do not depend on the rest of its batch. loss, gradient: the largest
    valid differences. record: function that records a property of the test."""
    together, single, gradients = by_batch_and_alone(family, model, batch, task, least)
    losses = (together - single).abs().max().item()
    record(f"loss, {batch.lengths}", losses)
    record(f"gradients, {batch.lengths}", gradients)
    assert losses <= loss
    assert gradients <= gradient
