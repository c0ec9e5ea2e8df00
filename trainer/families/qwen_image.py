"""Qwen-Image and Qwen-Image-Edit: the transformer, its inputs (equal to the pipelines'), and what LoRA adapts. See
ModelFamily. Tokens of reference images come after the tokens of the noisy image, and their predictions are discarded.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from torch.utils.hooks import RemovableHandle

from schemas.catalog import FAMILIES
from schemas.family import Task
from trainer.batch import Batch
from trainer.families.base import BlockTokens, KeptTokens, ModelFamily, TokenGrid, change_arguments, set_linear_sigmas
from trainer.joint_attention import Processor, attend

FAMILY = FAMILIES["qwen-image"]
BLOCK_TOKENS = BlockTokens(output=1)  # blocks return text and image


class JointAttnProcessor(Processor):
    """The stock QwenDoubleStreamAttnProcessor2_0 with two differences. Each sample may have its own rotary embeddings
    of the image, (N, D) or (B, N, D), which dropping of tokens needs. The text's mask is passed in `attention_kwargs`:
    if the forward pass gets a mask, it computes lengths that are not used, and waits for their copy to the device."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor],
        attention_mask: None = None,
        text_mask_BL: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        image, text = image_rotary_emb
        layers = attn.to_q, attn.to_k, attn.to_v
        text_layers = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
        joint = zip(
            project(encoder_hidden_states, text_layers, (attn.norm_added_q, attn.norm_added_k), text, attn.heads),
            project(hidden_states, layers, (attn.norm_q, attn.norm_k), image, attn.heads),
            strict=True,
        )
        query, key, value = (torch.cat(pair, 1) for pair in joint)  # (B, L + N, heads, D)
        mask_BS = None if text_mask_BL is None else F.pad(text_mask_BL, (0, hidden_states.shape[1]), value=True)
        out = attend(query, key, value, mask_BS, self._attention_backend)
        text_out, image_out = out.flatten(2).tensor_split([encoder_hidden_states.shape[1]], 1)
        return attn.to_out[0](image_out.contiguous()), attn.to_add_out(text_out.contiguous())


def project(
    hidden_BLD: torch.Tensor, layers: Sequence[Any], norms: Sequence[Any], rotary: torch.Tensor, heads: int
) -> tuple[torch.Tensor, ...]:
    """Query, key and value (B, L, heads, D), the first two normed and rotated."""
    query, key, value = (layer(hidden_BLD).unflatten(-1, (heads, -1)) for layer in layers)
    return *(rotate(norm(x), rotary) for norm, x in zip(norms, (query, key), strict=True)), value


def rotate(x_BLHD: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x_BLHD.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotary.unsqueeze(-2)).flatten(3).type_as(x_BLHD)


def install_processors(model: Any) -> None:
    """Install the attention processors and, if references have the noise level 0, hooks that pass an index of these
    tokens from `model_inputs` to the blocks: the stock forward pass makes the index on the host and waits for its copy
    to the device."""
    for block in model.transformer_blocks:
        block.attn.set_processor(JointAttnProcessor())
    if model.zero_cond_t:
        model.zero_cond_t = False  # attribute of the forward pass; the blocks have their own
        for block in model.transformer_blocks:
            change_arguments(block, give_index)
        model.norm_out.register_forward_pre_hook(leave_zero_out)


def give_index(arguments: dict[str, Any]) -> dict[str, Any]:
    """Move the index of tokens with noise level 0 from the attention options to the block's own argument."""
    options = dict(arguments["joint_attention_kwargs"])
    return {"modulate_index": options.pop("modulate_index"), "joint_attention_kwargs": options}


def leave_zero_out(norm: torch.nn.Module, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns the hidden states, and the time embeddings of the noisy tokens (B, D): the first half of (2 B, D), whose
    second half is for time 0."""
    hidden, time = inputs
    return hidden, time.chunk(2)[0]


def pack(latents_BC1HW: torch.Tensor) -> torch.Tensor:
    """(B, N, 4 C): a token of each 2x2 latents, channels first."""
    squares = latents_BC1HW[:, :, 0].unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # B C H/2 2 W/2 2
    return squares.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack(tokens_BND: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Latents of this shape, (B, C, 1, H, W)."""
    squares = tokens_BND.unflatten(2, (-1, 2, 2)).unflatten(1, (shape[3] // 2, -1))  # B H/2 W/2 C 2 2
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(shape)


class QwenImage(ModelFamily):
    TRANSFORMER = QwenImageTransformer2DModel
    MASKS_TEXT = True
    # The image's attention, the default of other trainers; the text's layers are add_q_proj and similar names.
    LORA_TARGETS = r"transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|to_out\.0)"
    # All linear layers of the blocks: a third of the weights is in modulations. The first block's image modulation is
    # not quantized, as in the 4-bit checkpoint that diffusers publishes (diffusers/Qwen-Image-Layered-modular).
    QUANTIZED = r"transformer_blocks\.(?!0\.img_mod)\d+\..*"

    def check(self, source: str, config: Any) -> None:
        if config.guidance_embeds:
            raise ValueError(f"{source}: a guidance-distilled model can't be trained")

    def install(self, model: Any) -> None:
        install_processors(model)

    def block_tokens(self, block: torch.nn.Module) -> BlockTokens:
        return BLOCK_TOKENS

    def without_gradient(self, model: Any, task: Task) -> list[torch.nn.Module]:
        """The layers of the last block that compute the text beyond its keys and values."""
        last = model.transformer_blocks[-1]
        return [last.attn.to_add_out, last.txt_mlp]

    def token_grid(self, model: Any, batch: Batch) -> TokenGrid:
        _, _, frames, height, width = batch.latents_BCTHW.shape
        return TokenGrid(frames, height // 2, width // 2, batch.text_BLD.shape[1])

    def dense_attention(self, model: Any) -> tuple[list[Any], int]:
        return [block.attn for block in model.transformer_blocks], model.config.attention_head_dim

    def route_blocks(self, blocks: Sequence[torch.nn.Module], kept_tokens: KeptTokens) -> list[RemovableHandle]:
        changes: dict[str, Any] = {}  # for all blocks: rotary embeddings, and the index of tokens with noise or None

        def take(arguments: dict[str, Any]) -> dict[str, Any]:
            if not changes:
                (image, text), index_BN = arguments["image_rotary_emb"], arguments.get("modulate_index")
                changes["image_rotary_emb"] = kept_tokens.take(image[None]), text
                changes["modulate_index"] = None if index_BN is None else kept_tokens.take(index_BN)
            return changes

        return [change_arguments(block, take) for block in blocks]

    def compute_dtype(self, model: Any) -> torch.dtype:
        """The dtype of frozen weights; adapters may be float32."""
        return model.img_in.weight.dtype

    sampling_dtype = compute_dtype

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, scale: float) -> torch.Tensor:
        """Classifier-free guidance, rescaled so that each token has the norm of the conditional token."""
        tokens, guided = pack(conditional), pack(super().guide(conditional, unconditional, scale))
        norm, guided_norm = (torch.linalg.vector_norm(vectors, dim=-1, keepdim=True) for vectors in (tokens, guided))
        return unpack(guided * (norm / guided_norm), conditional.shape)

    def model_inputs(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> dict[str, Any]:
        """Keyword arguments of the transformer's forward pass. T must be 1. The timestep is rounded to the compute
        dtype in thousandths, as at inference."""
        if task not in ("t2i", "i2i"):
            raise ValueError(f"Qwen-Image has no task {task!r}; valid: t2i, and i2i of Qwen-Image-Edit")
        if bool(references := batch.references) != (task == "i2i"):
            raise ValueError(f"{task} with {len(references)} references: i2i needs at least one, and t2i has none")
        assert noisy_BCTHW.shape[2] == 1, f"images have one frame, not {noisy_BCTHW.shape[2]}"
        sides = [latents.shape[-2:] for latents in (noisy_BCTHW, *references)]
        for height, width in sides:
            if height % 2 or width % 2:
                stride = FAMILY.spatial_stride
                raise ValueError(f"{width * stride}x{height * stride} pixels: sides must be multiples of {2 * stride}")
        dtype = self.compute_dtype(model)
        hidden_BND = torch.cat([pack(latents.to(dtype)) for latents in (noisy_BCTHW, *references)], 1)
        timestep, options = (1000 * sigma_B).float().to(dtype) / 1000, dict[str, torch.Tensor]()
        if batch.padded:
            options["text_mask_BL"] = batch.text_mask_BL
        if model.config.zero_cond_t and not model.zero_cond_t:  # by this module's hooks
            timestep = torch.cat([timestep, torch.zeros_like(timestep)])
            positions_N = torch.arange(hidden_BND.shape[1], device=hidden_BND.device)
            is_reference_N = positions_N >= noisy_BCTHW[0, 0].numel() // 4
            options["modulate_index"] = is_reference_N.int().expand(len(batch), -1)
        return {
            "hidden_states": hidden_BND,
            "timestep": timestep,
            "encoder_hidden_states": batch.text_BLD.to(dtype),
            "attention_kwargs": options or None,
            "img_shapes": [[(1, height // 2, width // 2) for height, width in sides]] * len(batch),
        }

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        set_linear_sigmas(scheduler, steps, tokens, device)

    def predict(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> torch.Tensor:
        arguments = self.model_inputs(getattr(model, "module", model), noisy_BCTHW, sigma_B, batch, task)
        tokens = noisy_BCTHW[0, 0].numel() // 4
        return unpack(model(**arguments, return_dict=False)[0][:, :tokens], noisy_BCTHW.shape)
