"""Sana: the transformer, its inputs (equal to SanaPipeline's), and what LoRA adapts. See ModelFamily."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.transformers.sana_transformer import SanaTransformer2DModel
from torch.utils.hooks import RemovableHandle

from schemas.catalog import FAMILIES
from schemas.family import Task
from trainer.batch import Batch
from trainer.families.base import KeptTokens, ModelFamily, TokenGrid

TASKS = tuple(FAMILIES["sana"].pipelines)


class Sana(ModelFamily):
    TRANSFORMER = SanaTransformer2DModel
    # The feed-forward's depthwise convolution is left out: LoRA of a grouped convolution needs a rank that is a
    # multiple of its groups, which are thousands of channels. Its two pointwise convolutions are equivalent to linear
    # layers.
    LORA_TARGETS = r"transformer_blocks\.\d+\.(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ff\.(conv_inverted|conv_point))"
    QUANTIZED = LORA_TARGETS

    def check(self, source: str, config: Any) -> None:
        if config.guidance_embeds:
            raise ValueError(
                f"{source}: a guidance-distilled model (Sana Sprint) can't be trained; choose Sana or Sana 1.5"
            )

    def token_grid(self, model: Any, batch: Batch) -> TokenGrid:
        _, _, frames, height, width = batch.latents_BCTHW.shape
        patch = model.config.patch_size
        return TokenGrid(frames, height // patch, width // patch, batch.text_BLD.shape[1])

    def dense_attention(self, model: Any) -> tuple[list[Any], int]:
        raise ValueError("Sana's self-attention is linear, and attention backends only compute softmax")

    def route_blocks(self, blocks: Sequence[torch.nn.Module], kept_tokens: KeptTokens) -> list[RemovableHandle]:
        """Attention computes only the kept tokens. The feed-forward's depthwise convolution, the transformer's only
        source of positions, gets the whole grid, with the waiting tokens unchanged; the layers after it get the kept
        tokens."""

        def whole_grid(norm: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
            return (kept_tokens.restore(inputs[0]),)

        def kept_pixels(conv: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
            hidden_BCN = inputs[0].flatten(2)
            places_BCK = kept_tokens.positions_BK[:, None].expand(-1, hidden_BCN.shape[1], -1)
            return (hidden_BCN.gather(2, places_BCK)[..., None],)  # a column of K pixels

        handles = []
        block: Any
        for block in blocks:
            handles += [block.norm2.register_forward_pre_hook(whole_grid)]
            handles += [block.ff.conv_point.register_forward_pre_hook(kept_pixels)]
        return handles

    def compute_dtype(self, model: Any) -> torch.dtype:
        """The dtype of frozen weights; adapters may be float32."""
        return model.patch_embed.proj.weight.dtype

    def model_inputs(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> dict[str, Any]:
        """Keyword arguments of the transformer's forward pass. T must be 1."""
        if task not in TASKS:
            raise ValueError(f"Sana has no task {task!r}; valid: {', '.join(TASKS)}")
        assert noisy_BCTHW.shape[2] == 1, f"images have one frame, not {noisy_BCTHW.shape[2]}"
        dtype = self.compute_dtype(model)
        return {
            "hidden_states": noisy_BCTHW[:, :, 0].to(dtype),
            "encoder_hidden_states": batch.text_BLD.to(dtype),
            "encoder_attention_mask": batch.text_mask_BL,
            "timestep": (1000 * sigma_B).float() * model.config.timestep_scale,
        }

    def predict(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> torch.Tensor:
        arguments = self.model_inputs(getattr(model, "module", model), noisy_BCTHW, sigma_B, batch, task)
        return model(**arguments, return_dict=False)[0][:, :, None]  # BCHW -> BCTHW
