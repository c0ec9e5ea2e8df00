"""Wan 2.2 T2V-A14B and I2V-A14B: one of their two transformers, its inputs (equal to the pipelines'), and what LoRA
adapts. See FamilyModule.

The transformer of i2v reads three things of each latent frame: what is denoised, 4 channels that are 1 where the frame
is given (the first one) and 0 elsewhere, and the latents of a clip that has the first frame and zeros behind it. All
frames are noised, and the loss has all of them.
"""

from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from cache.models.weights import load_part
from schemas.family import Task
from trainer.batch import Batch
from trainer.families import base, wan
from trainer.families.base import FamilyModule

MASK_CHANNELS = 4  # one for each of the frames of a latent frame
LORA_TARGETS, QUANTIZED, UNGUIDED_SCALE = wan.LORA_TARGETS, wan.QUANTIZED, wan.UNGUIDED_SCALE
guide = wan.guide
set_timesteps = wan.set_timesteps
postprocess_latents = wan.postprocess_latents
block_tokens = wan.block_tokens
without_gradient = wan.without_gradient
untrained = wan.untrained
blocks = wan.blocks
visual_blocks = wan.visual_blocks
token_grid = wan.token_grid
hidden_size = wan.hidden_size
dense_attention = wan.dense_attention
route_blocks = wan.route_blocks
sampling_dtype = wan.sampling_dtype
clean_frames = base.no_clean_frames
initial_latents = base.noise_alone


def load(
    source: str,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    part: str = "transformer",
) -> WanTransformer3DModel:
    """Load one expert; for the dtypes see `wan.load`."""
    model = load_part(WanTransformer3DModel, source, revision, part, torch_dtype=dtype)
    if model.config.image_dim is not None:
        raise ValueError(f"{source}: a transformer that reads an encoded image beside the noise can't be trained")
    return model.to(device)


def model_inputs(
    model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
) -> dict[str, Any]:
    """Keyword arguments of the transformer's forward pass."""
    inputs = wan.model_inputs(model, noisy_BCTHW, sigma_B, batch, "t2v")
    if task == "i2v":
        condition = given_frames(batch).to(noisy_BCTHW.dtype)
        inputs["hidden_states"] = torch.cat([noisy_BCTHW, condition], 1).to(inputs["hidden_states"].dtype)
    return inputs


def given_frames(batch: Batch) -> torch.Tensor:
    """(B, 4 + C, T, h, w): the mask of frames that are given, and the condition's latents."""
    condition_BCTHW = batch.condition_BCTHW
    if condition_BCTHW is None:
        raise ValueError("i2v needs the condition's latent, and this batch has none; run encode-latents")
    size, _, *grid_THW = condition_BCTHW.shape
    mask_BCTHW = condition_BCTHW.new_zeros(size, MASK_CHANNELS, *grid_THW)
    mask_BCTHW[:, :, 0] = 1
    return torch.cat([mask_BCTHW, condition_BCTHW], 1)


def predict(model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task) -> torch.Tensor:
    arguments = model_inputs(getattr(model, "module", model), noisy_BCTHW, sigma_B, batch, task)
    return model(**arguments, return_dict=False)[0]


if TYPE_CHECKING:
    from trainer.families import wan_a14b as this_module

    _checked: FamilyModule = this_module
