"""Wan 2.1 text to video and Wan 2.2 TI2V-5B: the transformer, its inputs (equal to the pipelines'), and what LoRA
adapts. See ModelFamily.

The transformer has no mask for text, and attends to zeros after the real tokens. The pipelines pad to 512 tokens, so
every batch is padded to 512 tokens, and a sample's prediction does not depend on the text lengths of its batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch.utils.hooks import RemovableHandle

from schemas.catalog import FAMILIES
from schemas.family import Task
from trainer.batch import Batch
from trainer.families.base import KeptTokens, ModelFamily, TokenGrid, change_arguments

TEXT_LENGTH = FAMILIES["wan2.1"].templates["t2v"].max_length


def pad_texts(text_BLD: torch.Tensor) -> torch.Tensor:
    """Pad texts with zeros to (B, 512, D). Raises ValueError for longer texts."""
    if (length := text_BLD.shape[1]) > TEXT_LENGTH:
        raise ValueError(f"a text has {length} tokens, and this model reads {TEXT_LENGTH}; set text.max_length to that")
    return F.pad(text_BLD, (0, 0, 0, TEXT_LENGTH - length))


class Wan(ModelFamily):
    TRANSFORMER = WanTransformer3DModel
    FLOAT32_MODULES = frozenset(WanTransformer3DModel._keep_in_fp32_modules)  # time embedding, modulations and norms
    LORA_TARGETS = r"blocks\.\d+\.(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ffn\.net\.(0\.proj|2))"
    QUANTIZED = LORA_TARGETS

    def check(self, source: str, config: Any) -> None:
        if config.image_dim is not None or config.in_channels != config.out_channels:
            raise ValueError(f"{source}: a transformer that reads an encoded image next to the noise can't be trained")

    def clean_frames(self, task: Task) -> int:
        return 1 if task == "i2v" else 0

    def visual_blocks(self, model: Any) -> list[torch.nn.Module]:
        return [*model.blocks]

    def token_grid(self, model: Any, batch: Batch) -> TokenGrid:
        sizes = zip(batch.latents_BCTHW.shape[2:], model.config.patch_size, strict=True)
        frames, rows, columns = (size // patch for size, patch in sizes)
        return TokenGrid(frames, rows, columns, TEXT_LENGTH)

    def dense_attention(self, model: Any) -> tuple[list[Any], int]:
        return [block.attn1 for block in model.blocks], model.config.attention_head_dim

    def route_blocks(self, blocks: Sequence[torch.nn.Module], kept_tokens: KeptTokens) -> list[RemovableHandle]:
        changes: list[tuple[torch.Tensor, ...]] = []  # the same for all blocks

        def take(arguments: dict[str, Any]) -> dict[str, Any]:
            if not changes:
                changes.append(tuple(kept_tokens.take(values) for values in arguments["rotary_emb"]))
            # (B, 6, D), or (B, N, 6, D) if given frames have their own time. It may have a gradient, so it is selected
            # in every block: a stored selection would be missing when gradient checkpointing computes a block again.
            time = arguments["temb"]
            return {"temb": kept_tokens.take(time) if time.ndim == 4 else time, "rotary_emb": changes[0]}

        return [change_arguments(block, take) for block in blocks]

    def compute_dtype(self, model: Any) -> torch.dtype:
        """The dtype of frozen weights; adapters, modulations and norms may be float32."""
        return model.patch_embedding.weight.dtype

    def model_inputs(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> dict[str, Any]:
        """Keyword arguments of the transformer's forward pass.

        i2v: frame 0 of the latent is the clean first frame, whose tokens have the timestep 0; all remaining tokens have
        the sample's timestep; shape (B, N). t2v: one timestep per sample, (B,); the output is the same as with a
        timestep for each token, but the modulations are computed once per sample.
        """
        dtype, timestep = self.compute_dtype(model), (1000 * sigma_B).float()
        if task == "i2v":
            _, rows, columns = model.config.patch_size
            grid_THW = torch.ones(noisy_BCTHW[0, 0, :, ::rows, ::columns].shape, device=noisy_BCTHW.device)
            grid_THW[: self.clean_frames(task)] = 0
            timestep = timestep[:, None] * grid_THW.flatten()
        return {
            "hidden_states": self.initial_latents(noisy_BCTHW, batch, task).to(dtype),
            "timestep": timestep,
            "encoder_hidden_states": pad_texts(batch.text_BLD.to(dtype)),
        }

    def predict(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> torch.Tensor:
        arguments = self.model_inputs(getattr(model, "module", model), noisy_BCTHW, sigma_B, batch, task)
        return model(**arguments, return_dict=False)[0]

    def initial_latents(self, noise_BCTHW: torch.Tensor, batch: Batch, task: Task) -> torch.Tensor:
        if task != "i2v":
            return noise_BCTHW
        if batch.condition_BCTHW is None:
            raise ValueError("i2v needs the condition's latent, and this batch has none; run encode-latents")
        return torch.cat([batch.condition_BCTHW.to(noise_BCTHW.dtype), noise_BCTHW[:, :, 1:]], 2)
