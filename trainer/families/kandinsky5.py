"""Kandinsky 5 Image and Video: the transformer, its inputs for each task, and what LoRA adapts.

Inputs equal those of the diffusers pipelines (pipelines/kandinsky5), where trained weights are used. ModelFamily
documents the functions.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from schemas.catalog import FAMILIES
from schemas.family import Task
from trainer.batch import Batch
from trainer.families.base import KeptTokens, ModelFamily, TokenGrid
from trainer.families.kandinsky5_attention import (
    Kandinsky5Transformer3DModel,
    install_processors,
    sparse_edge,
    sparse_params,
    take_blocks,
)

VIDEO = FAMILIES["kandinsky5-video"]
LATENT_STRIDE = VIDEO.spatial_stride  # pixels of one latent, the same for images
NORMALIZED_FRAMES, REFERENCE_FRAMES = 4, 5  # of i2v's normalize_first_frame


def visual_input(
    noisy_BCTHW: torch.Tensor, condition_BCTHW: torch.Tensor | None, task: Task, visual_cond: bool
) -> torch.Tensor:
    """The result of the pipelines' `prepare_latents`, (B, T, H, W, C): the latent's 16 channels, and with `visual_cond`
    those of the condition and a mask.

    i2v: frame 0 of the latent is the clean first frame and has mask 1, the condition is zero. i2i: the source's latent
    and ones. t2v: zeros. ValueError where checkpoint and task do not fit.
    """
    if task in ("i2i", "i2v") and condition_BCTHW is None:
        raise ValueError(f"{task} needs the condition's latent, and this batch has none; run encode-latents")
    if (task == "t2i" and visual_cond) or (task == "i2i" and not visual_cond):
        fitting = "an image i2i or a video one" if visual_cond else "an image t2i one"
        raise ValueError(f"the checkpoint is not made for {task}: by its visual_cond it is {fitting}")
    latent = noisy_BCTHW.movedim(1, -1)  # BCTHW -> BTHWC
    source, mask = torch.zeros_like(latent), torch.zeros_like(latent[..., :1])
    if condition_BCTHW is not None and task in ("i2i", "i2v"):
        condition = condition_BCTHW.movedim(1, -1).to(latent.dtype)
        if task == "i2i":
            source, mask = condition, torch.ones_like(mask)
        else:
            latent = torch.cat([condition, latent[:, 1:]], 1)
            mask[:, :1] = 1
    return torch.cat([latent, source, mask], -1) if visual_cond else latent


class Kandinsky5(ModelFamily):
    TRANSFORMER = Kandinsky5Transformer3DModel
    # Whole paths: the bare name `out_layer` would also match modules that LoRA cannot wrap.
    LORA_TARGETS = (
        r"(text|visual)_transformer_blocks\.\d+\."
        r"((self|cross)_attention\.(to_query|to_key|to_value|out_layer)|feed_forward\.(in_layer|out_layer))"
    )
    QUANTIZED = LORA_TARGETS
    FLOAT32_MODULES = frozenset({"time_embeddings", "modulation", "visual_modulation", "text_modulation"})

    def install(self, model: Any) -> None:
        install_processors(model)

    def load(
        self,
        source: str,
        revision: str | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        part: str = "transformer",
        float32_rotary: bool = False,
    ) -> Kandinsky5Transformer3DModel:
        """Time embeddings and modulations stay in float32 for any dtype: never call `.to(dtype)` on the result."""
        model = super().load(source, revision, dtype, device, part)
        install_processors(model, float32_rotary)
        return model

    def clean_frames(self, task: Task) -> int:
        return 1 if task == "i2v" else 0

    def blocks(self, model: Any) -> list[torch.nn.Module]:
        return [*model.text_transformer_blocks, *model.visual_transformer_blocks]

    def visual_blocks(self, model: Any) -> list[torch.nn.Module]:
        return [*model.visual_transformer_blocks]

    def token_grid(self, model: Any, batch: Batch) -> TokenGrid:
        frames, rows, columns = (
            size // patch for size, patch in zip(batch.latents_BCTHW.shape[2:], model.config.patch_size, strict=True)
        )
        return TokenGrid(frames, rows, columns, batch.text_BLD.shape[1], sparse_edge(model))

    def hidden_size(self, model: Any) -> int:
        return model.config.model_dim

    def dense_attention(self, model: Any) -> tuple[list[Any], int]:
        if sparse_edge(model) > 1:
            raise ValueError("this checkpoint's self-attention is sparse (NABLA), which flex attention computes")
        return [block.self_attention for block in model.visual_transformer_blocks], sum(model.config.axes_dims)

    def route_blocks(self, blocks: Sequence[torch.nn.Module], kept: KeptTokens) -> list[RemovableHandle]:
        taken: dict[str, Any] = {}  # the same for all of them

        def take(block: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            visual_BKD, text, time, rope_BN, sparse = inputs
            if not taken:
                taken["rope"], taken["sparse"] = kept.take(rope_BN), sparse and take_blocks(sparse, kept.positions_BK)
            return visual_BKD, text, time, taken["rope"], taken["sparse"]

        return [block.register_forward_pre_hook(take) for block in blocks]

    def compute_dtype(self, model: Any) -> torch.dtype:
        """The dtype of frozen weights; adapters and modulations may be float32."""
        return model.visual_embeddings.in_layer.weight.dtype

    sampling_dtype = compute_dtype

    def model_inputs(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> dict[str, Any]:
        """Arguments of the transformer's forward pass. The timestep is rounded to the compute dtype, as at
        inference."""
        dtype, device = self.compute_dtype(model), noisy_BCTHW.device
        _, _, frames, height, width = noisy_BCTHW.shape
        if height % 2 or width % 2:
            size = f"{width * LATENT_STRIDE}x{height * LATENT_STRIDE}"
            raise ValueError(f"{size} pixels: sides must be multiples of {2 * LATENT_STRIDE}")
        assert batch.pooled_BD is not None, "Kandinsky 5 texts have a pooled CLIP embedding"
        video, window = task in VIDEO.pipelines, VIDEO.scale_window
        assert window is not None
        positions = [torch.arange(n, device=device) for n in (frames, height // 2, width // 2)]
        return {
            "hidden_states": visual_input(noisy_BCTHW, batch.condition_BCTHW, task, model.visual_cond).to(dtype),
            "encoder_hidden_states": batch.text_BLD.to(dtype),
            "pooled_projections": batch.pooled_BD.to(dtype),
            "timestep": (1000 * sigma_B).float().to(dtype),
            "visual_rope_pos": positions,
            "text_rope_pos": torch.arange(batch.text_BLD.shape[1], device=device),
            "scale_factor": window.factors(width * LATENT_STRIDE, height * LATENT_STRIDE) if video else (1.0, 1.0, 1.0),
            "sparse_params": sparse_params(model, frames, height, width) if video else None,
            "text_mask_BL": batch.text_mask_BL if batch.padded else None,
        }

    def predict(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> torch.Tensor:
        arguments = self.model_inputs(getattr(model, "module", model), noisy_BCTHW, sigma_B, batch, task)
        return model(**arguments, return_dict=False).movedim(-1, 1)  # BTHWC -> BCTHW

    def initial_latents(self, noise_BCTHW: torch.Tensor, batch: Batch, task: Task) -> torch.Tensor:
        if task != "i2v":
            return noise_BCTHW
        assert batch.condition_BCTHW is not None
        return torch.cat([batch.condition_BCTHW.to(noise_BCTHW.dtype), noise_BCTHW[:, :, 1:]], 2)

    def postprocess_latents(self, latents_BCTHW: torch.Tensor, task: Task) -> torch.Tensor:
        """For i2v the pipeline's `normalize_first_frame`: mean and deviation of the first four latent frames move
        towards those of the next five, within limits, against mesh artifacts. With fewer than five frames, the
        pipeline's result is not finite, and latents are unchanged.
        """
        if task != "i2v" or latents_BCTHW.shape[2] <= NORMALIZED_FRAMES:
            return latents_BCTHW
        first = latents_BCTHW[:, :, :NORMALIZED_FRAMES]
        others = latents_BCTHW[:, :, NORMALIZED_FRAMES : NORMALIZED_FRAMES + REFERENCE_FRAMES]
        axes = (1, 2, 3, 4)
        mean, deviation = first.mean(axes, keepdim=True), first.std(axes, keepdim=True)
        new_mean = torch.clamp(others.mean(), mean - 0.05, mean + 0.1)
        new_deviation = torch.clamp(others.std(), deviation - 0.1, deviation + 0.25)
        normalized = (first - mean) / deviation * new_deviation + new_mean
        return torch.cat([normalized, latents_BCTHW[:, :, NORMALIZED_FRAMES:]], 2)
