"""Z-Image: the transformer, its inputs (equal to ZImagePipeline's), and what LoRA adapts. See ModelFamily.

Its blocks compute visual tokens and text jointly: first the visual tokens, then the text tokens, each padded to a
multiple of 32 with a learned token. Both lengths depend only on the sample, and the padding of a batch is masked.
"""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from torch.utils.hooks import RemovableHandle

from schemas.family import Task
from trainer.batch import Batch
from trainer.families.base import KeptTokens, ModelFamily, TokenGrid, change_arguments, set_linear_sigmas
from trainer.families.qwen_image import project
from trainer.joint_attention import Processor, attend

PATCH = 2


class JointAttnProcessor(Processor):
    """The stock ZSingleStreamAttnProcessor, except for the choice of kernels."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: None = None,
        attention_mask: torch.Tensor | None = None,
        freqs_cis: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert freqs_cis is not None
        layers, norms = (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k)
        query, key, value = project(hidden_states, layers, norms, freqs_cis, attn.heads)
        out = attend(query, key, value, attention_mask, self._attention_backend)
        return attn.to_out[0](out.flatten(2))


class ZImage(ModelFamily):
    TRANSFORMER = ZImageTransformer2DModel
    MASKS_TEXT = True
    LORA_TARGETS = (
        r"(noise_refiner|context_refiner|layers)\.\d+\.(attention\.(to_q|to_k|to_v|to_out\.0)|feed_forward\.w[123])"
    )
    QUANTIZED = LORA_TARGETS
    UNGUIDED_SCALE = 0.0

    def check(self, source: str, config: Any) -> None:
        if config.siglip_feat_dim is not None:
            raise ValueError(
                f"{source}: a transformer that reads images next to the text (Z-Image-Omni) can't be trained"
            )

    def install(self, model: Any) -> None:
        for attention in self.dense_attention(model)[0]:
            attention.set_processor(JointAttnProcessor())

    def blocks(self, model: Any, task: Task) -> list[torch.nn.Module]:
        return [*model.noise_refiner, *model.context_refiner, *model.layers]

    def visual_blocks(self, model: Any) -> list[torch.nn.Module]:
        return [*model.layers]

    def token_grid(self, model: Any, batch: Batch) -> TokenGrid:
        _, _, frames, height, width = batch.latents_BCTHW.shape
        return TokenGrid(frames, height // PATCH, width // PATCH, batch.text_BLD.shape[1])

    def hidden_size(self, model: Any) -> int:
        return model.config.dim

    def dense_attention(self, model: Any) -> tuple[list[Any], int]:
        blocks = *model.noise_refiner, *model.context_refiner, *model.layers
        return [block.attention for block in blocks], model.config.dim // model.config.n_heads

    def route_blocks(self, blocks: Sequence[torch.nn.Module], kept_tokens: KeptTokens) -> list[RemovableHandle]:
        changes: dict[str, Any] = {}  # the same for all blocks

        def take(arguments: dict[str, Any]) -> dict[str, Any]:
            if not changes:
                mask = arguments["attn_mask"]
                changes["attn_mask"] = None if mask is None else kept_tokens.take(mask)
                changes["freqs_cis"] = kept_tokens.take(arguments["freqs_cis"])
            return changes

        return [change_arguments(block, take) for block in blocks]

    def compute_dtype(self, model: Any) -> torch.dtype:
        """The dtype of frozen weights; adapters may be float32."""
        return model.x_pad_token.dtype

    def model_inputs(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> dict[str, Any]:
        """Arguments of the transformer's forward pass: images (C, 1, h, w) and texts (L, D), each of its own length. T
        must be 1. The transformer's timestep is 0 for noise and 1 for data."""
        dtype = self.compute_dtype(model)
        texts = batch.text_BLD.to(dtype).unbind()
        return {
            "x": [*noisy_BCTHW.to(dtype).unbind()],
            "t": (1000 - (1000 * sigma_B).float()) / 1000,
            "cap_feats": [text_LD[:length] for text_LD, length in zip(texts, batch.lengths, strict=True)],
        }

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        set_linear_sigmas(scheduler, steps, tokens, device, torch.linspace)

    def predict(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> torch.Tensor:
        arguments = self.model_inputs(getattr(model, "module", model), noisy_BCTHW, sigma_B, batch, task)
        return -torch.stack(model(**arguments, return_dict=False)[0])

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, scale: float) -> torch.Tensor:
        return conditional + scale * (conditional - unconditional)
