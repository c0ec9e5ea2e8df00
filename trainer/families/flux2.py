"""FLUX.2 klein: the transformer, its inputs (equal to the pipeline's), and what LoRA adapts. See ModelFamily.

Double blocks take image and text as separate tensors, single blocks take one tensor with the text before the image.
Stored texts usually have one length, padding included, and need no mask. Texts of unequal lengths are masked. Tokens of
reference images come before the tokens of the noisy image, and their predictions are discarded. The pipeline places
references after the noisy image, which is equivalent, because attention depends on position ids, not on the order of
tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_flux2 import Flux2SingleTransformerBlock, Flux2Transformer2DModel
from torch.utils.hooks import RemovableHandle

from schemas.families.flux2 import FAMILIES, compute_mu
from schemas.family import Task
from trainer.batch import Batch
from trainer.families.base import BlockTokens, KeptTokens, ModelFamily, TokenGrid, change_arguments
from trainer.joint_attention import Processor, attend

FAMILY = FAMILIES["flux2-klein"]
DOUBLE, SINGLE = BlockTokens(output=1, is_text_first=True), BlockTokens(is_text_first=True)


REFERENCE_DISTANCE = 10  # of the first reference's frame id from the image's, and between references


class JointAttention(Processor):
    """The stock processors, except that each sample may have its own rotary embeddings, which dropping of tokens needs:
    cosines and sines (L + N, D) each, or (B, L + N, D)."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        rotary: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Returns (B, L + N, heads * D) from query, key and value (B, L + N, heads, D) before rotation."""
        query, key = rotate(query, rotary), rotate(key, rotary)
        out = attend(query, key, value, mask, self._attention_backend)
        return out.flatten(2).to(query.dtype)


class DoubleAttention(JointAttention):
    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        text = [layer(encoder_hidden_states) for layer in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)]
        image = [layer(hidden_states) for layer in (attn.to_q, attn.to_k, attn.to_v)]
        text, image = ([values.unflatten(-1, (-1, attn.head_dim)) for values in stream] for stream in (text, image))
        query = torch.cat([attn.norm_added_q(text[0]), attn.norm_q(image[0])], 1)
        key = torch.cat([attn.norm_added_k(text[1]), attn.norm_k(image[1])], 1)
        value = torch.cat([text[2], image[2]], 1)
        out = self.attend(query, key, value, attention_mask, image_rotary_emb)
        text_out, image_out = out.tensor_split([encoder_hidden_states.shape[1]], 1)
        return attn.to_out[0](image_out), attn.to_add_out(text_out)


class SingleAttention(JointAttention):
    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        joint, inner = attn.to_qkv_mlp_proj(hidden_states).tensor_split([3 * attn.inner_dim], -1)
        query, key, value = joint.unflatten(-1, (3, -1, attn.head_dim)).unbind(2)
        out = self.attend(attn.norm_q(query), attn.norm_k(key), value, attention_mask, image_rotary_emb)
        return attn.to_out(torch.cat([out, attn.mlp_act_fn(inner)], -1))


def rotate(x_BLHD: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate each pair of neighboring channels, in float32."""
    cosine, sine = (values.unsqueeze(-2) for values in rotary)
    x = x_BLHD.float()
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return (x * cosine + torch.stack([-second, first], -1).flatten(-2) * sine).to(x_BLHD.dtype)


def install_processors(model: Any) -> None:
    for block in model.transformer_blocks:
        block.attn.set_processor(DoubleAttention())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(SingleAttention())


def pack(latents_BC1HW: torch.Tensor) -> torch.Tensor:
    """(B, N, C): each latent is a token."""
    return latents_BC1HW.flatten(2).transpose(1, 2)


def unpack(tokens_BND: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Latents of this shape, (B, C, 1, H, W)."""
    return tokens_BND.transpose(1, 2).reshape(shape)


def positions(
    grid: TokenGrid, device: torch.device, references: Sequence[tuple[int, int]] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns position ids (N, 4) of the references and the image, and (L, 4) of the text: frame, row, column, index in
    the text. references: rows and columns of each reference."""
    first = REFERENCE_DISTANCE * torch.arange(1, len(references) + 1, device=device)
    tables = [(first[number : number + 1], *sides) for number, sides in enumerate(references)]
    images = []
    for frames, rows, columns in (*tables, (torch.arange(grid.frames, device=device), grid.rows, grid.columns)):
        places = (frames, *(torch.arange(side, device=device) for side in (rows, columns, 1)))
        images.append(torch.stack(torch.meshgrid(*places, indexing="ij"), -1).reshape(-1, 4))
    return torch.cat(images), F.pad(torch.arange(grid.text_length, device=device)[:, None], (3, 0))


class Flux2(ModelFamily):
    TRANSFORMER = Flux2Transformer2DModel
    LORA_TARGETS = (
        r"transformer_blocks\.\d+\.(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
        r"|ff(_context)?\.linear_(in|out))"
        r"|single_transformer_blocks\.\d+\.attn\.(to_qkv_mlp_proj|to_out)"
    )
    QUANTIZED = LORA_TARGETS

    def install(self, model: Any) -> None:
        install_processors(model)

    def visual_blocks(self, model: Any) -> list[torch.nn.Module]:
        return [*model.transformer_blocks, *model.single_transformer_blocks]

    def block_tokens(self, block: torch.nn.Module) -> BlockTokens:
        return SINGLE if isinstance(block, Flux2SingleTransformerBlock) else DOUBLE

    def token_grid(self, model: Any, batch: Batch) -> TokenGrid:
        _, _, frames, height, width = batch.latents_BCTHW.shape
        return TokenGrid(frames, height, width, batch.text_BLD.shape[1])

    def dense_attention(self, model: Any) -> tuple[list[Any], int]:
        return [block.attn for block in self.visual_blocks(model)], model.config.attention_head_dim

    def route_blocks(self, blocks: Sequence[torch.nn.Module], kept_tokens: KeptTokens) -> list[RemovableHandle]:
        changes: dict[str, Any] = {}  # the same for all blocks: rotary embeddings, and the mask of padded texts

        def take(arguments: dict[str, Any]) -> dict[str, Any]:
            if not changes:
                options = arguments["joint_attention_kwargs"]
                rotary = tuple(kept_tokens.take(values[None], SINGLE) for values in arguments["image_rotary_emb"])
                mask = options and {"attention_mask": options["attention_mask"][..., : rotary[0].shape[1]]}
                changes.update(image_rotary_emb=rotary, joint_attention_kwargs=mask)
            return changes

        return [change_arguments(block, take) for block in blocks]

    def compute_dtype(self, model: Any) -> torch.dtype:
        """The dtype of frozen weights; adapters may be float32."""
        return model.x_embedder.weight.dtype

    sampling_dtype = compute_dtype

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        """Sigmas from 1 to 1 / steps, unless the scheduler makes its own, shifted by the number of tokens."""
        makes_sigmas = scheduler.config.get("use_flow_sigmas", False)
        levels = {"num_inference_steps": steps} if makes_sigmas else {"sigmas": np.linspace(1.0, 1 / steps, steps)}
        scheduler.set_timesteps(**levels, mu=compute_mu(tokens, steps), device=device)

    def model_inputs(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> dict[str, Any]:
        """Keyword arguments of the transformer's forward pass. T must be 1. The timestep is rounded to the compute
        dtype in thousandths, as at inference."""
        if task not in FAMILY.pipelines:
            raise ValueError(f"FLUX.2 klein has no task {task!r}; valid: {', '.join(FAMILY.pipelines)}")
        assert noisy_BCTHW.shape[2] == 1, f"images have one frame, not {noisy_BCTHW.shape[2]}"
        grid, dtype = self.token_grid(model, batch), self.compute_dtype(model)
        references = batch.references
        if bool(references) != (task == "i2i"):
            raise ValueError(f"{task} with {len(references)} references: i2i needs at least one, and t2i has none")
        sides = [(reference.shape[-2], reference.shape[-1]) for reference in references]
        image_ids, text_ids = positions(grid, noisy_BCTHW.device, sides)
        arguments: dict[str, Any] = {
            "hidden_states": torch.cat([pack(latents.to(dtype)) for latents in (*references, noisy_BCTHW)], 1),
            "timestep": (1000 * sigma_B).float().to(dtype) / 1000,
            "encoder_hidden_states": batch.text_BLD.to(dtype),
            "img_ids": image_ids,
            "txt_ids": text_ids,
        }
        if batch.padded:
            mask_B11L = F.pad(batch.text_mask_BL, (0, len(image_ids)), value=True)[:, None, None]
            arguments["joint_attention_kwargs"] = {"attention_mask": mask_B11L}
        return arguments

    def predict(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> torch.Tensor:
        arguments = self.model_inputs(getattr(model, "module", model), noisy_BCTHW, sigma_B, batch, task)
        tokens = noisy_BCTHW[0, 0].numel()
        return unpack(model(**arguments, return_dict=False)[0][:, -tokens:], noisy_BCTHW.shape)
