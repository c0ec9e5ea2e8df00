"""Sana: the transformer, what it reads, and what LoRA adapts. Equal to what SanaPipeline gives the model."""

import re
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.transformers.sana_transformer import SanaTransformer2DModel

from cache.weights import load_part
from schemas.catalogue import FAMILIES
from schemas.family import Task
from trainer.batch import Batch
from trainer.families.base import FamilyModule

TASKS = tuple(FAMILIES["sana"].pipelines)

# The feed-forward's depthwise convolution is left out: LoRA of a grouped convolution needs a rank that is a
# multiple of its groups, which are thousands of channels. Its two pointwise ones are linear layers in effect.
_LORA_TARGETS = re.compile(
    r"transformer_blocks\.\d+\.(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ff\.(conv_inverted|conv_point))"
)


def load(
    source: str,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> SanaTransformer2DModel:
    """The transformer of a checkpoint, a local folder or a repo id, and nothing else of it."""
    model = load_part(SanaTransformer2DModel, source, revision, "transformer", torch_dtype=dtype)
    if model.config.guidance_embeds:
        raise ValueError(
            f"{source}: a guidance-distilled model (Sana Sprint) cannot be trained; choose Sana or Sana 1.5"
        )
    return model.to(device)


def clean_frames(task: Task) -> int:
    """Leading latent frames that are given: none."""
    return 0


def compute_dtype(model: Any) -> torch.dtype:
    """The dtype that frozen weights have; adapters may be in float32 beside it."""
    return model.patch_embed.proj.weight.dtype


def sampling_dtype(model: Any) -> torch.dtype:
    """In which the pipeline keeps latents between denoising steps."""
    return torch.float32


def model_inputs(
    model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
) -> dict[str, Any]:
    """Keyword arguments of the transformer's forward pass. T must be 1."""
    if task not in TASKS:
        raise ValueError(f"Sana has no task {task!r}; valid: {', '.join(TASKS)}")
    assert noisy_BCTHW.shape[2] == 1, f"images have one frame, not {noisy_BCTHW.shape[2]}"
    dtype = compute_dtype(model)
    return {
        "hidden_states": noisy_BCTHW[:, :, 0].to(dtype),
        "encoder_hidden_states": batch.text_BLD.to(dtype),
        "encoder_attention_mask": batch.text_mask_BL,
        "timestep": (1000 * sigma_B).float() * model.config.timestep_scale,
    }


def predict(model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task) -> torch.Tensor:
    """The predicted velocity, shaped as the latents.

    model: the transformer, or a DistributedDataParallel around it.
    """
    arguments = model_inputs(getattr(model, "module", model), noisy_BCTHW, sigma_B, batch, task)
    return model(**arguments, return_dict=False)[0][:, :, None]  # BCHW -> BCTHW


def initial_latents(noise_BCTHW: torch.Tensor, batch: Batch, task: Task) -> torch.Tensor:
    """What denoising starts from: the noise."""
    return noise_BCTHW


def postprocess_latents(latents_BCTHW: torch.Tensor, task: Task) -> torch.Tensor:
    """What the pipeline does to latents after denoising: nothing."""
    return latents_BCTHW


def lora_targets(model: Any) -> list[str]:
    """Full module paths of the attention projections and the feed-forward's pointwise convolutions."""
    return [name for name, _ in model.named_modules() if _LORA_TARGETS.fullmatch(name)]


if TYPE_CHECKING:
    from trainer.families import sana as this_module

    _checked: FamilyModule = this_module
