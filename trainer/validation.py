"""Validation in training: a loss on a fixed grid, and the validation prompts denoised.

Nothing here uses a global random state, so validating more or less often does not change the training.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from cache.tensors import Array
from cache.trainset import Sample, TrainSet, ValidationPrompt
from schemas.catalogue import FAMILIES
from schemas.config.pipeline import Config
from schemas.geometry import Bucket
from schemas.identity import derive_seed
from trainer import flow
from trainer.batch import Batch
from trainer.data import collate
from trainer.families.base import FamilyModule
from trainer.sampling import denoise, load_scheduler
from trainer.tensor_files import write_tensors

#: (noisy_BCTHW, sigma_B, batch) -> velocity_BCTHW
PredictVelocity = Callable[[torch.Tensor, torch.Tensor, Batch], torch.Tensor]


@dataclass(frozen=True)
class EvalGrid:
    """The eval loss is measured on `samples` rows, at each of `sigmas` (0: data, 1: noise)."""

    samples: int
    sigmas: tuple[float, ...]
    seed: int
    batch_size: int = 1


@dataclass(frozen=True)
class EvalLoss:
    """on: a description of the samples, from `TrainSet.choose_eval_rows`."""

    mean: float
    by_sigma: dict[str, float]
    on: str


@torch.no_grad()
def compute_eval_loss(
    predict: PredictVelocity, data: TrainSet, grid: EvalGrid, device: torch.device, skip_frames: int = 0
) -> EvalLoss:
    """Mean loss over rows of the set (`TrainSet.choose_eval_rows`) with their first captions, at every sigma.

    Noise and draws from stored posteriors depend only on (grid.seed, sample id), so checkpoints and runs of one set can
    be compared. The loss of training samples shows fitting, not generalising.
    """
    losses: dict[float, list[float]] = {sigma: [] for sigma in grid.sigmas}
    rows, on = data.choose_eval_rows(grid.samples)
    family = FAMILIES[data.meta["family"]]
    for row in rows:
        sample = data.sample(row)
        for first in range(0, len(grid.sigmas), grid.batch_size):
            sigmas = grid.sigmas[first : first + grid.batch_size]
            draws = [f"{grid.seed}/{sample.id}/eval"] * len(sigmas)
            batch = collate([sample] * len(sigmas), "", family, draws).to(device, torch.float32)
            noise = seeded_noise(f"{grid.seed}/{sample.id}", "eval", batch.latents_BCTHW.shape[1:])
            noise_BCTHW = noise.to(device).expand_as(batch.latents_BCTHW)
            sigma_B = torch.tensor(sigmas, device=device)
            noisy = flow.interpolate(batch.latents_BCTHW, noise_BCTHW, sigma_B)
            target = flow.velocity(batch.latents_BCTHW, noise_BCTHW)
            found = flow.loss_per_sample(predict(noisy, sigma_B, batch), target, skip_frames)
            for sigma, loss in zip(sigmas, found.tolist(), strict=True):
                losses[sigma].append(loss)
    by_sigma = {f"{sigma:g}": fmean(values) for sigma, values in losses.items()}
    return EvalLoss(fmean(by_sigma.values()), by_sigma, on)


def seeded_noise(identity: str, purpose: str, shape_CTHW: tuple[int, ...]) -> torch.Tensor:
    """Standard normal noise, a function of its arguments: float32, on the CPU."""
    generator = torch.Generator().manual_seed(derive_seed(identity, purpose))
    return torch.randn(tuple(shape_CTHW), generator=generator)


def write_validation_latents(
    model: torch.nn.Module,
    family: FamilyModule,
    config: Config,
    data: TrainSet,
    folder: Path,
    autocast: torch.dtype | None = None,
) -> int:
    """Denoise every validation prompt of the set to `folder`/<name>.safetensors; returns how many.

    Each file has a float32 tensor, `latent` (C, T, h, w) in model space, and JSON under the metadata key "latentpress".
    Files appear whole. `latentpress decode` makes pictures of them.
    """
    prompts = data.validation
    if not prompts:
        return 0
    device = next(model.parameters()).device
    scheduler = load_scheduler(config.model.source, config.model.revision, config.validation.shift)
    folder.mkdir(parents=True, exist_ok=True)
    for prompt in prompts:
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            latent = _denoise_prompt(model, family, config, prompt, scheduler, device)
        metadata = _latent_metadata(config, prompt, data.id)
        temp = folder / f".{prompt.name}.{os.getpid()}.tmp"
        write_tensors({"latent": latent.contiguous()}, temp, {"latentpress": json.dumps(metadata)})
        temp.replace(folder / f"{prompt.name}.safetensors")
    return len(prompts)


def _denoise_prompt(
    model: torch.nn.Module,
    family: FamilyModule,
    config: Config,
    prompt: ValidationPrompt,
    scheduler: Any,
    device: torch.device,
) -> torch.Tensor:
    """The prompt's latent (C, T, h, w), float32 on the CPU; the same noise at every step of every run."""
    spec = config.model.family_spec
    grid_THW = Bucket.parse(prompt.bucket).latent_shape(spec.spatial_stride, spec.temporal_stride)
    shape = (spec.latent_channels, *grid_THW)
    noise_BCTHW = seeded_noise(f"{config.validation.seed}/{prompt.name}", "validation", shape)[None]
    tensors = {"latent": Array.from_numpy(np.zeros(shape, np.float32))}
    tensors |= {} if prompt.condition is None else {"condition": prompt.condition}
    draw = f"{config.validation.seed}/{prompt.name}/validation"
    batch, negative = (
        collate([Sample(prompt.name, tensors, text)], prompt.bucket, spec, [draw]).to(device, torch.float32)
        for text in (prompt.text, prompt.negative)
    )
    steps, guidance = config.validation.steps or spec.steps, guidance_scale(config)
    task = config.model.task
    latents = denoise(model, family, task, batch, negative, noise_BCTHW, scheduler, steps, guidance)
    return latents[0].float().cpu()


def guidance_scale(config: Config) -> float:
    """As configured, else the family's; 0 is valid."""
    configured = config.validation.guidance
    return config.model.family_spec.guidance if configured is None else configured


def _latent_metadata(config: Config, prompt: ValidationPrompt, set_id: str) -> dict[str, Any]:
    return {
        "family": config.model.family,
        "flavour": config.model.flavour_spec.name,
        "task": config.model.task,
        "name": prompt.name,
        "prompt": prompt.prompt,
        "negative_prompt": prompt.negative_prompt,
        "bucket": prompt.bucket,
        "set": set_id,
        "seed": config.validation.seed,
        "steps": config.validation.steps or config.model.family_spec.steps,
        "guidance": guidance_scale(config),
    }
