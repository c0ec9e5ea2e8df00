"""Wan 2.2 T2V-A14B and I2V-A14B: one of their two transformers, its inputs (equal to the pipelines'), and what LoRA
adapts. See ModelFamily.

The transformer of i2v reads three inputs for each latent frame: the noisy latents, 4 mask channels that are 1 for the
given frame (the first) and 0 for all later frames, and the latents of a clip with the first frame followed by zeros.
All frames are noised, and all frames are part of the loss.
"""

from typing import Any

import torch

from schemas.family import Task
from trainer.batch import Batch
from trainer.families.base import ModelFamily
from trainer.families.wan import Wan

MASK_CHANNELS = 4  # one for each of the frames of a latent frame


def given_frames(batch: Batch) -> torch.Tensor:
    """Returns (B, 4 + C, T, h, w): the mask of given frames, and the condition's latents."""
    condition_BCTHW = batch.condition_BCTHW
    if condition_BCTHW is None:
        raise ValueError("i2v needs the condition's latent, and this batch has none; run encode-latents")
    size, _, *grid_THW = condition_BCTHW.shape
    mask_BCTHW = condition_BCTHW.new_zeros(size, MASK_CHANNELS, *grid_THW)
    mask_BCTHW[:, :, 0] = 1
    return torch.cat([mask_BCTHW, condition_BCTHW], 1)


class WanA14B(Wan):
    clean_frames = ModelFamily.clean_frames
    initial_latents = ModelFamily.initial_latents

    def check(self, source: str, config: Any) -> None:
        if config.image_dim is not None:
            raise ValueError(f"{source}: a transformer that reads an encoded image next to the noise can't be trained")

    def model_inputs(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> dict[str, Any]:
        """Keyword arguments of the transformer's forward pass."""
        inputs = super().model_inputs(model, noisy_BCTHW, sigma_B, batch, "t2v")
        if task == "i2v":
            condition = given_frames(batch).to(noisy_BCTHW.dtype)
            inputs["hidden_states"] = torch.cat([noisy_BCTHW, condition], 1).to(inputs["hidden_states"].dtype)
        return inputs
