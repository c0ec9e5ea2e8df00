"""Losses of samples in a batch and of each alone."""

from dataclasses import replace

import torch

from tests.trainer.pipelines import random
from trainer.batch import Batch
from trainer.flow import interpolate, loss_per_sample, velocity


def alone(batch: Batch, i: int) -> Batch:
    """Sample i by itself, without padding."""
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
    """(losses in a batch, losses one by one, largest relative difference of any parameter's gradient). least: of a
    gradient's norm, below which it counts as that."""
    model.zero_grad()
    together = sample_losses(family, model, batch, task)
    together.mean().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    single = torch.cat([sample_losses(family, model, alone(batch, i), task) for i in range(len(batch))])
    single.mean().backward()
    pairs = ((grads[name], p.grad) for name, p in model.named_parameters() if name in grads)
    largest = max(((found - grad).norm() / grad.norm().clamp(min=least)).item() for found, grad in pairs)
    return together.detach(), single.detach(), largest
