"""The example family's transformers: two, for much noise and for little, given two clean frames. One is loaded at a
time."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from cache.models.weights import load_part
from schemas.catalog import FAMILIES
from schemas.family import Task
from trainer.batch import Batch
from trainer.families import base
from trainer.families.base import FamilyModule, KeptTokens, TokenGrid
from trainer.families.example_transformer import ExampleTransformer

LORA_TARGETS = r"blocks\.\d+\.attn[12]\.(to_q|to_k|to_v|to_out)"
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
) -> ExampleTransformer:
    return load_part(ExampleTransformer, source, revision, part, torch_dtype=dtype).to(device)


def untrained(config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> ExampleTransformer:
    return ExampleTransformer.from_config(dict(config)).to(dtype)


def clean_frames(task: Task) -> int:
    return FAMILIES["example"].condition_frames(task) or 0


def blocks(model: Any) -> list[torch.nn.Module]:
    return [*model.blocks]


def visual_blocks(model: Any) -> list[torch.nn.Module]:
    return [*model.blocks]


def token_grid(model: Any, batch: Batch) -> TokenGrid:
    frames, height, width = batch.latents_BCTHW.shape[2:]
    return TokenGrid(frames, height // 2, width // 2, batch.text_BLD.shape[1])


def hidden_size(model: Any) -> int:
    return model.config.width


def dense_attention(model: Any) -> tuple[list[Any], int]:
    raise ValueError("its attention is torch's own")


def route_blocks(blocks: Sequence[torch.nn.Module], kept: KeptTokens) -> list[RemovableHandle]:
    return []  # nothing else belongs to a token


def sampling_dtype(model: Any) -> torch.dtype:
    return torch.float32


def predict(model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task) -> torch.Tensor:
    assert bool(batch.text_mask_BL.all()), "this transformer masks no text: train with batches of one"
    return model(initial_latents(noisy_BCTHW, batch, task), sigma_B, batch.text_BLD)


def initial_latents(noise_BCTHW: torch.Tensor, batch: Batch, task: Task) -> torch.Tensor:
    assert batch.condition_BCTHW is not None
    given = batch.condition_BCTHW.to(noise_BCTHW.dtype)
    return torch.cat([given, noise_BCTHW[:, :, given.shape[2] :]], 2)


def postprocess_latents(latents_BCTHW: torch.Tensor, task: Task) -> torch.Tensor:
    return latents_BCTHW


if TYPE_CHECKING:
    from trainer.families import example as this_module

    _checked: FamilyModule = this_module
