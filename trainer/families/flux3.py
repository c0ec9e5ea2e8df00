"""FLUX.3 Image: the transformer, its inputs (equal to the pipeline's), and what LoRA adapts. See ModelFamily.

Noisy image, references and text are three streams. The first blocks of each stream see only their own stream; the
single blocks compute all three jointly, and have the text as a separate tensor. The transformer reads the text's
padding up to a multiple of `Template.window`. A stored text ends with the state of its padding, which is repeated here.

Texts with different windows are masked in a batch. The stock forward pass gives its blocks no mask, so the mask is in
the rotary embeddings, as further columns: in this way a block that is computed again in the backward pass has the mask
of its own forward pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_flux3 import (
    Flux3PosEmbed,
    Flux3SingleTransformerBlock,
    Flux3Transformer2DModel,
)
from torch.utils.hooks import RemovableHandle

from schemas.devices import to_device
from schemas.families.flux3 import FAMILIES, LONGEST, WINDOW
from schemas.family import Task
from trainer.batch import Batch
from trainer.families.base import (
    FIRST_TOKENS,
    BlockTokens,
    KeptTokens,
    ModelFamily,
    TokenGrid,
    change_arguments,
    set_linear_sigmas,
)
from trainer.families.flux2 import pack, rotate, unpack
from trainer.joint_attention import Processor, attend

FAMILY = FAMILIES["flux3"]
IMAGE_SCALE = 0.5  # of rows and columns in position ids
COORDINATES = 4  # of position ids: frame, row, column, index in the text
SINGLE = BlockTokens(output=1)  # the image, then its references
Rotary = tuple[torch.Tensor, torch.Tensor]


class MaskedPositions(Flux3PosEmbed):
    """Rotary embeddings for position ids (S, 4), and for (S, 4 + B): then the last B columns, whether each sample's
    token S is real, are the last columns of both results."""

    def forward(self, ids: torch.Tensor) -> Rotary:  # type: ignore[override]  # its annotation is wrong
        positions, real = ids.tensor_split([COORDINATES], 1)
        cosine, sine = super().forward(positions)
        return (torch.cat([cosine, real], 1), torch.cat([sine, real], 1)) if real.shape[1] else (cosine, sine)


class MaskedAttention(Processor):
    """The stock processor, except that rotary embeddings may contain a mask, and that each sample may have its own
    rotary embeddings, which dropping of tokens needs: (S, D), (S, D + B) of `MaskedPositions`, (B, S, D), or
    (B, S, D + 1) with the mask."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        assert image_rotary_emb is not None and attention_mask is None
        layers = attn.to_q, attn.to_k, attn.to_v
        query, key, value = (layer(hidden_states).unflatten(-1, (attn.heads, -1)) for layer in layers)
        rotary, mask_BS = split_mask(image_rotary_emb, attn.head_dim)
        normed = attn.norm_q(query.float()), attn.norm_k(key.float())
        query, key = (rotate(x, rotary).to(value.dtype) for x in normed)
        out = attend(query, key, value, None if mask_BS is None else mask_BS.bool(), self._attention_backend)
        return attn.to_out[1](attn.to_out[0](out.flatten(2).to(query.dtype)))


def split_mask(rotary: Rotary, size: int) -> tuple[Rotary, torch.Tensor | None]:
    """Returns rotary embeddings of heads of this size, and the mask (B, S) or None."""
    (cosine, real), (sine, _) = (part.tensor_split([size], -1) for part in rotary)
    if not real.shape[-1]:
        return (cosine, sine), None
    return (cosine, sine), real.T if real.ndim == 2 else real[..., 0]


def take_rotary(rotary: Rotary, size: int, kept_tokens: KeptTokens, length: int) -> Rotary:
    """Rotary embeddings (B, S, D), or (B, S, D + 1) with a mask, of the kept tokens. size: size D of a head. length:
    number of text tokens, all kept, before the visual tokens."""
    (cosine, sine), mask_BS = split_mask(rotary, size)
    taken = []
    for part in (cosine, sine):
        values = (
            part[None] if mask_BS is None else torch.cat([part.expand(len(mask_BS), -1, -1), mask_BS[..., None]], 2)
        )
        text, visual = values.tensor_split([length], 1)
        visual = kept_tokens.take(visual)
        taken.append(torch.cat([text.expand(len(visual), -1, -1), visual], 1))
    return taken[0], taken[1]


def image_positions(latents_BCTHW: torch.Tensor, reference: int) -> torch.Tensor:
    """Position ids (N, 4) of the noisy image (reference 0), or of a reference, numbered from 1."""
    sides = [torch.arange(side, device=latents_BCTHW.device).float() for side in latents_BCTHW.shape[2:]]
    grid_N3 = torch.stack(torch.meshgrid(*sides, indexing="ij"), -1).reshape(-1, 3)
    return F.pad(grid_N3 * IMAGE_SCALE, (0, 1), value=-float(reference))


def window_length(length: int) -> int:
    """Number of tokens that the transformer reads for a stored text of this length."""
    return min(-(-length // WINDOW) * WINDOW, LONGEST)


class Flux3(ModelFamily):
    TRANSFORMER = Flux3Transformer2DModel
    MASKS_TEXT = True
    FLOAT32_MODULES = frozenset(Flux3Transformer2DModel._keep_in_fp32_modules)
    LORA_TARGETS = (
        r"(mode_blocks\.\w+|txt_mode_blocks|single_transformer_blocks)\.\d+\."
        r"(attn\.(to_q|to_k|to_v|to_out\.0)|ff\.linear_(in|out))"
    )
    QUANTIZED = LORA_TARGETS

    def check(self, source: str, config: Any) -> None:
        if config.flow_map:
            base = FAMILY.flavours[FAMILY.default_flavour]
            raise ValueError(f"{source}: a distilled flow map can't be trained; train {base.name} ({base.repo})")

    def install(self, model: Any) -> None:
        for attention in self.dense_attention(model)[0]:
            attention.set_processor(MaskedAttention())
        model.pos_embed = MaskedPositions(model.pos_embed.theta, model.pos_embed.axes_dim)

    def blocks(self, model: Any, task: Task) -> list[torch.nn.Module]:
        references = model.mode_blocks["image_cond"] if task == "i2i" else []
        streams = model.txt_mode_blocks, model.mode_blocks["image"], references
        return [*(block for blocks in streams for block in blocks), *model.single_transformer_blocks]

    def visual_blocks(self, model: Any) -> list[torch.nn.Module]:
        return [*model.mode_blocks["image"], *model.single_transformer_blocks]

    def block_tokens(self, block: torch.nn.Module) -> BlockTokens:
        return SINGLE if isinstance(block, Flux3SingleTransformerBlock) else FIRST_TOKENS

    def without_gradient(self, model: Any, task: Task) -> list[torch.nn.Module]:
        """The layers of references, for a task without references."""
        if task == "i2i":
            return []
        modulations = model.early_stream_modulations, model.single_stream_modulations
        return [part["image_cond"] for part in (model.mode_blocks, model.x_embedders, *modulations)]

    def token_grid(self, model: Any, batch: Batch) -> TokenGrid:
        _, _, frames, height, width = batch.latents_BCTHW.shape
        return TokenGrid(frames, height, width, window_length(batch.text_BLD.shape[1]))

    def dense_attention(self, model: Any) -> tuple[list[Any], int]:
        streams = *model.mode_blocks.values(), model.txt_mode_blocks, model.single_transformer_blocks
        return [block.attn for blocks in streams for block in blocks], model.config.attention_head_dim

    def route_blocks(self, blocks: Sequence[Any], kept_tokens: KeptTokens) -> list[RemovableHandle]:
        size = blocks[0].attn.head_dim
        rotaries: dict[int, Rotary] = {}  # number of text tokens before the visual tokens -> the same for all blocks

        def take(arguments: dict[str, Any]) -> dict[str, Any]:
            length = arguments["encoder_hidden_states"].shape[1] if "encoder_hidden_states" in arguments else 0
            if length not in rotaries:
                rotaries[length] = take_rotary(arguments["image_rotary_emb"], size, kept_tokens, length)
            return {"image_rotary_emb": rotaries[length], "temb_mod": kept_tokens.take(arguments["temb_mod"])}

        return [change_arguments(block, take) for block in blocks]

    def compute_dtype(self, model: Any) -> torch.dtype:
        """The dtype of frozen weights; adapters and norms may be float32."""
        return model.x_embedders["image"].weight.dtype

    sampling_dtype = compute_dtype

    def model_inputs(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> dict[str, Any]:
        """Keyword arguments of the transformer's forward pass. T must be 1."""
        if task not in FAMILY.pipelines:
            raise ValueError(f"FLUX.3 has no task {task!r}; valid: {', '.join(FAMILY.pipelines)}")
        references = batch.references
        if bool(references) != (task == "i2i"):
            raise ValueError(f"{task} with {len(references)} references: i2i needs at least one, and t2i has none")
        assert noisy_BCTHW.shape[2] == 1, f"images have one frame, not {noisy_BCTHW.shape[2]}"
        dtype, device = self.compute_dtype(model), noisy_BCTHW.device
        windows = [window_length(length) for length in batch.lengths]
        places_W = torch.arange(max(windows), device=device)
        lengths_B1 = to_device(torch.tensor(batch.lengths), device)[:, None]
        stored_BW = torch.minimum(places_W, lengths_B1 - 1)  # beyond its end, a text's last state is repeated
        text_BWD = batch.text_BLD.to(dtype).take_along_dim(stored_BW[..., None], 1)
        ids = [image_positions(latents, number) for number, latents in enumerate((noisy_BCTHW, *references))]
        text_ids = F.pad(places_W[:, None].float(), (3, 0))
        if min(windows) < max(windows):
            windows_B = to_device(torch.tensor(windows), device)
            text_ids = torch.cat([text_ids, (places_W[:, None] < windows_B).float()], 1)
            ids = [F.pad(part, (0, len(windows)), value=1.0) for part in ids]
        arguments: dict[str, Any] = {
            "hidden_states": pack(noisy_BCTHW.to(dtype)),
            "timestep": ((1000 * sigma_B).float() / 1000).to(dtype),
            "encoder_hidden_states": text_BWD,
            "txt_ids": text_ids,
            "img_ids": ids[0],
        }
        if references:
            arguments["image_cond_hidden_states"] = torch.cat([pack(latents.to(dtype)) for latents in references], 1)
            arguments["image_cond_ids"] = torch.cat(ids[1:])
        return arguments

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        set_linear_sigmas(scheduler, steps, tokens, device)

    def predict(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> torch.Tensor:
        arguments = self.model_inputs(getattr(model, "module", model), noisy_BCTHW, sigma_B, batch, task)
        return unpack(model(**arguments, return_dict=False)[0], noisy_BCTHW.shape)
