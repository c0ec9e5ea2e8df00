"""Denoising, equal to the pipelines' `output_type="latent"` for equal weights, embeddings and noise."""

from collections.abc import Callable
from typing import Any

import diffusers.schedulers
import torch

from schemas.family import Task
from trainer.batch import Batch
from trainer.families.base import FamilyModule

SHIFT_KEYS = ("shift", "flow_shift")  # of FlowMatchEulerDiscreteScheduler, and of the others


def load_scheduler(source: str, revision: str | None = None, shift: float | None = None) -> Any:
    """The scheduler of a checkpoint's folder `scheduler`. shift: replaces the checkpoint's own.

    ValueError for a class that diffusers lacks, or that has no shift to set.
    """
    any_class = diffusers.schedulers.FlowMatchEulerDiscreteScheduler  # all classes read the same file
    config = any_class.load_config(source, subfolder="scheduler", revision=revision)
    name = config.get("_class_name", "")
    scheduler_class = getattr(diffusers.schedulers, name, None) if name.endswith("Scheduler") else None
    if scheduler_class is None:
        raise ValueError(
            f"{source}/scheduler names the class {name!r}, which the installed diffusers "
            f"{diffusers.__version__} does not have; install a newer one"
        )
    scheduler = scheduler_class.from_config(config)
    if shift is None:
        return scheduler
    key = next((key for key in SHIFT_KEYS if key in scheduler.config), None)
    if key is None:
        raise ValueError(f"{source}/scheduler is a {name}, which has no shift; leave validation.shift out")
    return scheduler_class.from_config(config, **{key: shift})


@torch.no_grad()
def denoise(
    model: torch.nn.Module,
    family: FamilyModule,
    task: Task,
    batch: Batch,
    negative: Batch | None,
    noise_BCTHW: torch.Tensor,
    scheduler: Any,
    steps: int,
    guidance: float,
    advance: Callable[[], object] = lambda: None,
) -> torch.Tensor:
    """Latents (B, C, T, h, w) in model space, on the model's device, from noise.

    model: in eval mode. batch, negative: their texts and conditions are used, their latents are not; the negative only
    above guidance 1. advance: called after each step.
    """
    device = batch.text_BLD.device
    dtype = family.sampling_dtype(getattr(model, "module", model))
    x = family.initial_latents(noise_BCTHW.to(device, dtype), batch, task)
    given = family.clean_frames(task)
    scheduler.set_timesteps(steps, device=device)
    for t in scheduler.timesteps:
        # In float64, so that 1000 sigma equals the scheduler's timestep exactly.
        sigma_B = (t.double() / 1000).expand(x.shape[0])
        # Guided and stepped in the dtype in which the family's pipeline keeps latents.
        velocity = family.predict(model, x, sigma_B, batch, task).to(dtype)
        if guidance > 1 and negative is not None:
            unguided = family.predict(model, x, sigma_B, negative, task).to(dtype)
            velocity = unguided + guidance * (velocity - unguided)
        stepped = scheduler.step(velocity[:, :, given:], t, x[:, :, given:], return_dict=False)[0]
        x = torch.cat([x[:, :, :given], stepped], 2)
        advance()
    return family.postprocess_latents(x, task)
