"""The example family's transformers: two, for much noise and for little, given two clean frames. One is loaded at a
time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from schemas.catalog import FAMILIES
from schemas.family import Task
from trainer.batch import Batch
from trainer.families.base import KeptTokens, ModelFamily, TokenGrid
from trainer.families.example_transformer import ExampleTransformer


class Example(ModelFamily):
    TRANSFORMER = ExampleTransformer
    LORA_TARGETS = r"(free_)?blocks\.\d+\.attn[12]\.(to_q|to_k|to_v|to_out)"
    QUANTIZED = LORA_TARGETS

    def clean_frames(self, task: Task) -> int:
        return FAMILIES["example"].condition_frames(task) or 0

    def blocks(self, model: Any, task: Task) -> list[torch.nn.Module]:
        return [*(model.free_blocks if task == "t2v" else []), *model.blocks]

    def visual_blocks(self, model: Any) -> list[torch.nn.Module]:
        return [*model.blocks]

    def without_gradient(self, model: Any, task: Task) -> list[torch.nn.Module]:
        return [] if task == "t2v" else [model.free_blocks]

    def token_grid(self, model: Any, batch: Batch) -> TokenGrid:
        frames, height, width = batch.latents_BCTHW.shape[2:]
        return TokenGrid(frames, height // 2, width // 2, batch.text_BLD.shape[1])

    def hidden_size(self, model: Any) -> int:
        return model.config.width

    def dense_attention(self, model: Any) -> tuple[list[Any], int]:
        raise ValueError("its attention is torch's own")

    def route_blocks(self, blocks: Sequence[torch.nn.Module], kept: KeptTokens) -> list[RemovableHandle]:
        return []  # nothing else belongs to a token

    def predict(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> torch.Tensor:
        assert bool(batch.text_mask_BL.all()), "this transformer masks no text: train with batches of one"
        return model(self.initial_latents(noisy_BCTHW, batch, task), sigma_B, batch.text_BLD)

    def initial_latents(self, noise_BCTHW: torch.Tensor, batch: Batch, task: Task) -> torch.Tensor:
        assert batch.condition_BCTHW is not None
        given = batch.condition_BCTHW.to(noise_BCTHW.dtype)
        return torch.cat([given, noise_BCTHW[:, :, given.shape[2] :]], 2)
