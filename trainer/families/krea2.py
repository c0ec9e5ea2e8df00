"""Krea 2: the transformer, its inputs (equal to Krea2Pipeline's), and what LoRA adapts. See ModelFamily.

A text has the hidden states of several layers of the text encoder, concatenated along the channels. The blocks of
`text_fusion` join them for each token, and then compute the text's tokens; all other blocks compute text and image
jointly.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_krea2 import Krea2Transformer2DModel
from torch.utils.hooks import RemovableHandle

from schemas.catalog import FAMILIES
from schemas.family import Task
from trainer.batch import Batch
from trainer.families.base import BlockTokens, KeptTokens, ModelFamily, TokenGrid, change_arguments, set_linear_sigmas
from trainer.families.qwen_image import pack, unpack
from trainer.joint_attention import Processor, attend

FAMILY = FAMILIES["krea2"]
PATCH = 2
BLOCK_TOKENS = BlockTokens(is_text_first=True)


class JointAttnProcessor(Processor):
    """The stock attention, which also takes rotary embeddings of each sample's own tokens, (B, S, D), as the dropping
    of tokens needs. Keys and values are repeated for each group of heads, because some kernels take no mask with
    `enable_gqa`."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        assert image_rotary_emb is not None
        layers = attn.to_q, attn.to_k, attn.to_v
        query, key, value = (layer(hidden_states).unflatten(-1, (-1, attn.head_dim)) for layer in layers)
        query, key = (rotate(norm(x), image_rotary_emb) for norm, x in ((attn.norm_q, query), (attn.norm_k, key)))
        groups = attn.num_heads // attn.num_kv_heads
        key, value = (x.repeat_interleave(groups, dim=2) for x in (key, value))
        out = attend(query, key, value, attention_mask, self._attention_backend)
        return attn.to_out[0](out.flatten(2) * torch.sigmoid(attn.to_gate(hidden_states)))


def rotate(x_BSHD: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate pairs of channels by cosines and sines (S, D) or (B, S, D), like `apply_rotary_emb` of diffusers."""
    cosine, sine = (part.unsqueeze(-2) for part in rotary)
    real, imaginary = x_BSHD.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-imaginary, real], -1).flatten(-2)
    return (x_BSHD.float() * cosine + turned.float() * sine).to(x_BSHD.dtype)


def fuse_text(
    model: Any, encoder_hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The forward pass of `text_fusion`: (B, L, layers, D) -> (B, L, D). The stock forward pass does not checkpoint its
    blocks, the first of which compute a row per token and layer."""
    fusion, length = model.text_fusion, encoder_hidden_states.shape[1]

    def compute(block: torch.nn.Module, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if torch.is_grad_enabled() and model.gradient_checkpointing:
            return model._gradient_checkpointing_func(block, hidden, mask)
        return block(hidden, mask)

    hidden = encoder_hidden_states.flatten(0, 1)
    for block in fusion.layerwise_blocks:
        hidden = compute(block, hidden.contiguous(), None)
    hidden = fusion.projector(hidden.unflatten(0, (-1, length)).transpose(2, 3)).squeeze(-1)
    for block in fusion.refiner_blocks:
        hidden = compute(block, hidden, attention_mask)
    return hidden


class Krea2(ModelFamily):
    TRANSFORMER = Krea2Transformer2DModel
    MASKS_TEXT = True
    FLOAT32_MODULES = frozenset(Krea2Transformer2DModel._keep_in_fp32_modules)  # norms, whose weights are around zero
    # All linear layers, as the authors of the model recommend.
    LORA_TARGETS = (
        r"(transformer_blocks|text_fusion\.\w+_blocks)\.\d+\.(attn\.(to_[qkv]|to_gate|to_out\.0)|ff\.(gate|up|down))"
        r"|text_fusion\.projector|img_in|txt_in\.linear_[12]|time_embed\.linear_[12]|time_mod_proj|final_layer\.linear"
    )
    QUANTIZED = r"transformer_blocks\.\d+\..*"
    UNGUIDED_SCALE = 0.0

    def install(self, model: Any) -> None:
        for block in model.transformer_blocks:
            block.attn.set_processor(JointAttnProcessor())
        model.text_fusion.__dict__["forward"] = partial(fuse_text, model)

    def blocks(self, model: Any, task: Task) -> list[torch.nn.Module]:
        fusion = model.text_fusion
        return [*fusion.layerwise_blocks, *fusion.refiner_blocks, *model.transformer_blocks]

    def block_tokens(self, block: torch.nn.Module) -> BlockTokens:
        return BLOCK_TOKENS

    def token_grid(self, model: Any, batch: Batch) -> TokenGrid:
        _, _, frames, height, width = batch.latents_BCTHW.shape
        return TokenGrid(frames, height // PATCH, width // PATCH, batch.text_BLD.shape[1])

    def dense_attention(self, model: Any) -> tuple[list[Any], int]:
        return [block.attn for block in model.transformer_blocks], model.config.attention_head_dim

    def route_blocks(self, blocks: Sequence[torch.nn.Module], kept_tokens: KeptTokens) -> list[RemovableHandle]:
        changes: dict[str, Any] = {}  # the same for all blocks

        def take(arguments: dict[str, Any]) -> dict[str, Any]:
            if not changes:
                rotary, mask_B11S = arguments["image_rotary_emb"], arguments.get("attention_mask")
                changes["image_rotary_emb"] = tuple(kept_tokens.take(part[None], BLOCK_TOKENS) for part in rotary)
                if mask_B11S is not None:
                    changes["attention_mask"] = kept_tokens.take(mask_B11S[:, 0, 0], BLOCK_TOKENS)[:, None, None]
            return changes

        return [change_arguments(block, take) for block in blocks]

    def compute_dtype(self, model: Any) -> torch.dtype:
        """The dtype of frozen weights; adapters and norms may be float32."""
        return model.img_in.weight.dtype

    sampling_dtype = compute_dtype

    def model_inputs(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> dict[str, Any]:
        """Keyword arguments of the transformer's forward pass. T must be 1. Text tokens have the position 0."""
        assert noisy_BCTHW.shape[2] == 1, f"images have one frame, not {noisy_BCTHW.shape[2]}"
        height, width = noisy_BCTHW.shape[3:]
        if height % PATCH or width % PATCH:
            stride = FAMILY.spatial_stride
            raise ValueError(f"{width * stride}x{height * stride} pixels: sides must be multiples of {PATCH * stride}")
        dtype, device = self.compute_dtype(model), noisy_BCTHW.device
        sides = 1, height // PATCH, width // PATCH
        grid_N3 = torch.cartesian_prod(*(torch.arange(side, device=device) for side in sides))
        return {
            "hidden_states": pack(noisy_BCTHW.to(dtype)),
            "timestep": ((1000 * sigma_B).float() / 1000).to(dtype),
            "encoder_hidden_states": batch.text_BLD.to(dtype).unflatten(-1, (model.config.num_text_layers, -1)),
            "position_ids": F.pad(grid_N3, (0, 0, batch.text_BLD.shape[1], 0)),
            "encoder_attention_mask": batch.text_mask_BL if batch.padded else None,
        }

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        set_linear_sigmas(scheduler, steps, tokens, device)

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, scale: float) -> torch.Tensor:
        return conditional + scale * (conditional - unconditional)

    def predict(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> torch.Tensor:
        arguments = self.model_inputs(getattr(model, "module", model), noisy_BCTHW, sigma_B, batch, task)
        return unpack(model(**arguments, return_dict=False)[0], noisy_BCTHW.shape)
