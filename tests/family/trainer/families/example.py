"""The example family's transformers: two of Wan's, for much noise and for little, given two clean frames. One is loaded
at a time."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch.utils.hooks import RemovableHandle

from cache.models.weights import load_part
from schemas.catalog import FAMILIES
from schemas.family import Task
from trainer.batch import Batch
from trainer.families import base
from trainer.families.base import FamilyModule, KeptTokens, TokenGrid

LORA_TARGETS = r"blocks\.\d+\.attn[12]\.(to_q|to_k|to_v|to_out\.0)"
QUANTIZED = LORA_TARGETS
UNGUIDED_SCALE = 1.0
guide = base.guide
set_timesteps = base.set_timesteps
block_tokens = base.first_tokens
without_gradient = base.all_have_gradient


def load(
    source: str,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    part: str = "transformer",
) -> WanTransformer3DModel:
    return load_part(WanTransformer3DModel, source, revision, part, torch_dtype=dtype).to(device)


def untrained(config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> WanTransformer3DModel:
    return WanTransformer3DModel.from_config(dict(config)).to(dtype)


def clean_frames(task: Task) -> int:
    return FAMILIES["example"].condition_frames(task) or 0


def blocks(model: Any) -> list[torch.nn.Module]:
    return [*model.blocks]


def visual_blocks(model: Any) -> list[torch.nn.Module]:
    return [*model.blocks]


def token_grid(model: Any, batch: Batch) -> TokenGrid:
    sizes = zip(batch.latents_BCTHW.shape[2:], model.config.patch_size, strict=True)
    return TokenGrid(*(size // patch for size, patch in sizes), batch.text_BLD.shape[1])


def hidden_size(model: Any) -> int:
    return model.config.num_attention_heads * model.config.attention_head_dim


def dense_attention(model: Any) -> tuple[list[Any], int]:
    return [block.attn1 for block in model.blocks], model.config.attention_head_dim


def route_blocks(blocks: Sequence[torch.nn.Module], kept: KeptTokens) -> list[RemovableHandle]:
    def take(block: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        *others, rotary = inputs
        return *others, tuple(kept.take(each) for each in rotary)

    return [block.register_forward_pre_hook(take) for block in blocks]


def sampling_dtype(model: Any) -> torch.dtype:
    return torch.float32


def predict(model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task) -> torch.Tensor:
    assert bool(batch.text_mask_BL.all()), "this transformer masks no text: train with batches of one"
    inputs = {
        "hidden_states": initial_latents(noisy_BCTHW, batch, task),
        "timestep": (1000 * sigma_B).float(),
        "encoder_hidden_states": batch.text_BLD,
    }
    return model(**inputs, return_dict=False)[0]


def initial_latents(noise_BCTHW: torch.Tensor, batch: Batch, task: Task) -> torch.Tensor:
    assert batch.condition_BCTHW is not None
    given = batch.condition_BCTHW.to(noise_BCTHW.dtype)
    return torch.cat([given, noise_BCTHW[:, :, given.shape[2] :]], 2)


def postprocess_latents(latents_BCTHW: torch.Tensor, task: Task) -> torch.Tensor:
    return latents_BCTHW


if TYPE_CHECKING:
    from trainer.families import example as this_module

    _checked: FamilyModule = this_module
