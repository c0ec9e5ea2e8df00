"""Qwen-Image-2.1: the transformer, its inputs (equal to the pipeline's), and what LoRA adapts. See ModelFamily.

Text, references and the noisy image are one sequence: references are in the places that the text encoder has for them,
the noisy image is at its end. A text token sees what precedes it, and an image sees what precedes it and itself. Text
and references have the noise level 0. A text's padding precedes the noisy image; it is masked, and takes no positions:
the positions of the noisy image depend on the length of its own text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Transformer2DModel as StockTransformer
from torch.utils.hooks import RemovableHandle

from schemas.catalog import FAMILIES
from schemas.devices import to_device, to_device_together
from schemas.family import Task
from trainer.batch import IMAGE_PLACES, Batch
from trainer.families.base import BlockTokens, KeptTokens, ModelFamily, TokenGrid, change_arguments, set_linear_sigmas
from trainer.families.flux2 import pack, unpack
from trainer.families.qwen_image import rotate
from trainer.joint_attention import Processor

FAMILY = FAMILIES["qwen-image-2.1"]
BLOCK_TOKENS = BlockTokens(is_text_first=True)
HOST = torch.device("cpu")  # named, because memory is predicted with another default device
SLOT = 4  # tokens of an image in one place of a text: 2x2 latents
Segment = tuple[int, int, bool]  # first token, end, whether it is text


class SegmentAttention(Processor):
    """The stock QwenImage21AttnProcessor, with two differences: each sample may have its own rotary embeddings,
    (1, S, D / 2) or (B, S, D / 2), and only the noisy image is masked. The padding of a text follows all its tokens and
    all references, so that none of them sees it."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        rotary_emb: torch.Tensor,
        segments: Sequence[Segment],
        key_valid: torch.Tensor | None = None,
        **_: None,
    ) -> torch.Tensor:
        """segments: parts of the sequence before the noisy image. key_valid: (B, S), without padding."""
        layers, size = (attn.to_q, attn.to_k, attn.to_v), attn.inner_dim // attn.heads
        query, key, value = (layer(hidden_states).unflatten(-1, (-1, size)) for layer in layers)
        normed = attn.norm_q(query).to(value.dtype), attn.norm_k(key).to(value.dtype)
        query, key = (rotate(x, rotary_emb) for x in normed)
        parts, prefix = [], segments[-1][1]
        for start, end, is_text in (*segments, (prefix, query.shape[1], False)):
            mask = None
            if is_text and start:
                rows, columns = (torch.arange(first, end, device=query.device) for first in (start, 0))
                mask = (columns <= rows[:, None])[None, None]
            elif start == prefix and key_valid is not None:
                mask = key_valid[:, None, None]
            inputs = query[:, start:end], key[:, :end], value[:, :end]
            causal = is_text and not start
            parts.append(
                dispatch_attention_fn(*inputs, attn_mask=mask, is_causal=causal, backend=self._attention_backend)
            )
        out = torch.cat(parts, 1).flatten(2).to(value.dtype)
        return attn.to_out[1](attn.to_out[0](out))


@dataclass(frozen=True)
class Layout:
    """The order of the tokens of a batch, computed on the host.

    segments: parts before the noisy image, in their order. sizes: rows and columns of each reference and of the noisy
    image. lengths: number of text tokens of each sample.
    """

    segments: list[Segment]
    sizes: list[tuple[int, int]]
    lengths: list[int]

    @classmethod
    def of(cls, img_shapes: Sequence[tuple[int, int, int]], slots: Sequence[bool], lengths: Sequence[int]) -> "Layout":
        """img_shapes: frames, rows and columns of references and the noisy image. slots: whether each place of the text
        is an image's. lengths: number of real places of each text, with the places of images."""
        sizes, segments, place, start = [shape[1:] for shape in img_shapes], list[Segment](), 0, 0
        for rows, columns in sizes[:-1]:
            text = [*slots].index(True, place) - place
            if text:
                segments.append((start, start + text, True))
            segments.append((start + text, start + text + rows * columns, False))
            place, start = place + text + rows * columns // SLOT, start + text + rows * columns
        if rest := len(slots) - place:
            segments.append((start, start + rest, True))
        return cls(segments, sizes, [length - sum(slots) for length in lengths])

    @property
    def text(self) -> int:
        """Number of text tokens, with padding."""
        return sum(end - start for start, end, is_text in self.segments if is_text)

    @property
    def prefix(self) -> int:
        """Number of tokens before the noisy image."""
        return self.segments[-1][1]

    def positions(self) -> torch.Tensor:
        """(1, S, 3) frame, row and column of each token, or (B, S, 3) if the lengths of the texts differ."""
        parts, position, images = [], 0, iter(self.sizes)
        for start, end, is_text in self.segments:
            if is_text:
                parts.append((position + torch.arange(end - start))[:, None].expand(-1, 3))
                position += end - start
            else:
                size = next(images)
                parts.append(place_image(position, *size))
                position += max(size)
        lengths = self.lengths if min(self.lengths) < self.text else [self.text]
        rows = [torch.cat([*parts, place_image(position - self.text + length, *self.sizes[-1])]) for length in lengths]
        return torch.stack(rows)

    def mask(self) -> torch.Tensor | None:
        """(B, S) bool: False for padding; None if no text is padded."""
        if min(self.lengths) == self.text:
            return None
        tokens, rest = torch.arange(self.prefix + math.prod(self.sizes[-1])), torch.tensor(self.lengths) - self.text
        return (tokens < self.prefix + rest[:, None]) | (tokens >= self.prefix)


def place_image(position: int, rows: int, columns: int) -> torch.Tensor:
    """(N, 3): an image keeps the position that the tokens before it have reached; its rows and columns are centered on
    0."""
    grid = torch.cartesian_prod(
        torch.arange(rows) - (rows - rows // 2), torch.arange(columns) - (columns - columns // 2)
    )
    return torch.cat([torch.full((len(grid), 1), position), grid], 1)


class QwenImage21Transformer2DModel(StockTransformer):
    """The diffusers model, which computes each sample of a batch as the stock model computes it alone, and does not
    wait for the device. It has the stock name, which save_pretrained writes into config.json."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        img_shapes: list[list[tuple[int, int, int]]],
        img_mask: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """As the stock forward pass, with both masks on the host. All samples have the same images in the same
        places."""
        device, places = hidden_states.device, encoder_hidden_states.shape[1]
        slots = img_mask[0, :places].tolist()
        lengths = [places] * len(hidden_states)
        if encoder_hidden_states_mask is not None:
            lengths = encoder_hidden_states_mask.sum(1).tolist()
        layout = Layout.of(img_shapes[0], slots, lengths)
        with HOST:
            positions, mask = layout.positions(), layout.mask()
        arrived = to_device_together([positions, *([] if mask is None else [mask])], device)
        text_BLD = take_text(encoder_hidden_states, slots)
        joint = join(self.txt_in(text_BLD), self.img_in(hidden_states), layout.segments)
        times = torch.cat([timestep.to(joint.dtype), timestep.new_zeros(1, dtype=joint.dtype)])
        time = self.time_text_embed(times, joint)
        is_noisy_S = torch.arange(joint.shape[1], device=device) >= layout.prefix
        arguments: dict[str, Any] = {
            "modulation": self.modulation(time),
            "rotary_emb": self._rotate(arrived[0]),
            "attention_mask": None,
            "target_token_mask": is_noisy_S,
            "layer_cache": None,
            "kv_cache_mode": None,
            "cache_write_slice": None,
            "segments": layout.segments,
            "key_valid": None if mask is None else arrived[1],
        }
        for block in self.transformer_blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                joint = self._gradient_checkpointing_func(block, joint, *arguments.values())
            else:
                joint = block(joint, **arguments)
        return (self.proj_out(self.norm_out(joint, time, is_noisy_S)),)

    def _rotate(self, positions_BS3: torch.Tensor) -> torch.Tensor:
        """Rotary embeddings, complex (1 or B, S, D / 2)."""
        # diffusers has no buffers for the frequencies, so they would be copied from the host in each pass.
        frequencies = self.pos_embed.freqs = [to_device(part, positions_BS3.device) for part in self.pos_embed.freqs]
        axes = zip(frequencies, positions_BS3.unbind(-1), strict=True)
        return torch.cat([values[positions % len(values)] for values, positions in axes], -1)


def take_text(places_BLD: torch.Tensor, slots: Sequence[bool]) -> torch.Tensor:
    """The places of a text that are not an image's."""
    if not any(slots):
        return places_BLD
    parts, start = [], 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or slots[end] != slots[start]:
            parts += [] if slots[start] else [places_BLD[:, start:end]]
            start = end
    return torch.cat(parts, 1)


def join(text: torch.Tensor, images: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
    """The sequence (B, S, D) of text tokens, and of the tokens of references and the noisy image."""
    parts, rest = [], {True: text, False: images}
    for start, end, is_text in segments:
        part, rest[is_text] = rest[is_text].tensor_split([end - start], 1)
        parts.append(part)
    return torch.cat([*parts, rest[False]], 1)


class QwenImage21(ModelFamily):
    TRANSFORMER = QwenImage21Transformer2DModel
    LORA_TARGETS = r"transformer_blocks\.\d+\.(attn\.(to_[qkv]|to_out\.0)|img_mlp\.(proj|gate_layer|out))"
    QUANTIZED = LORA_TARGETS

    def check(self, source: str, config: Any) -> None:
        if not config.causal_condition:
            raise ValueError(f"{source}: causal_condition in transformer/config.json is false; use the published file")

    def install(self, model: Any) -> None:
        for block in model.transformer_blocks:
            block.attn.set_processor(SegmentAttention())

    def block_tokens(self, block: torch.nn.Module) -> BlockTokens:
        return BLOCK_TOKENS

    def token_grid(self, model: Any, batch: Batch) -> TokenGrid:
        """References and the text precede the noisy image."""
        _, _, frames, height, width = batch.latents_BCTHW.shape
        references = sum(latents[0, 0].numel() for latents in batch.references)
        return TokenGrid(frames, height, width, references + batch.text_BLD.shape[1])

    def dense_attention(self, model: Any) -> tuple[list[Any], int]:
        raise ValueError("Qwen-Image-2.1 attends to text causally, and the text's padding needs a mask")

    def route_blocks(self, blocks: Sequence[torch.nn.Module], kept_tokens: KeptTokens) -> list[RemovableHandle]:
        changes: dict[str, Any] = {}  # the same for all blocks

        def take(arguments: dict[str, Any]) -> dict[str, Any]:
            if not changes:
                dropped = kept_tokens.tokens - kept_tokens.positions_BK.shape[1]
                mask_BS = arguments["key_valid"]
                changes["rotary_emb"] = kept_tokens.take(arguments["rotary_emb"], BLOCK_TOKENS)
                changes["target_token_mask"] = arguments["target_token_mask"][
                    : -dropped or None
                ]  # noisy tokens are last
                changes["key_valid"] = None if mask_BS is None else mask_BS[:, : -dropped or None]
            return changes

        return [change_arguments(block, take) for block in blocks]

    def compute_dtype(self, model: Any) -> torch.dtype:
        """The dtype of frozen weights; adapters may be float32."""
        return model.img_in.weight.dtype

    sampling_dtype = compute_dtype

    def model_inputs(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> dict[str, Any]:
        """Keyword arguments of the transformer's forward pass. T must be 1. The timestep is rounded to the compute
        dtype in thousandths, as at inference. Places of images in the text are filled with zeros, which are not read.
        """
        if task not in FAMILY.pipelines:
            raise ValueError(f"Qwen-Image-2.1 has no task {task!r}; valid: {', '.join(FAMILY.pipelines)}")
        images = [*batch.references, noisy_BCTHW]
        if (len(images) > 1) != (task == "i2i"):
            raise ValueError(f"{task} with {len(images) - 1} references: i2i needs at least one, and t2i has none")
        assert noisy_BCTHW.shape[2] == 1, f"images have one frame, not {noisy_BCTHW.shape[2]}"
        shapes = [(1, *latents.shape[-2:]) for latents in images]
        for _, height, width in shapes:
            if height % 2 or width % 2:
                stride = FAMILY.spatial_stride
                raise ValueError(f"{width * stride}x{height * stride} pixels: sides must be multiples of {2 * stride}")
        dtype = self.compute_dtype(model)
        slots = [height * width // SLOT for _, height, width in shapes]
        counts = [*find_places(batch, len(images) - 1), batch.text_BLD.shape[1]]
        parts, is_slot, start = [], list[bool](), 0
        for end, count in zip(counts, [*slots[:-1], 0], strict=True):
            text_BLD = batch.text_BLD[:, start:end].to(dtype)
            parts += [text_BLD, text_BLD.new_zeros(len(batch), count, text_BLD.shape[2])]
            is_slot += [False] * (end - start) + [True] * count
            start = end
        mask = None
        if batch.padded:
            lengths_B1 = torch.tensor(batch.lengths, device=HOST)[:, None] + sum(slots[:-1])
            mask = torch.arange(len(is_slot), device=HOST) < lengths_B1
        return {
            "hidden_states": torch.cat([pack(latents.to(dtype)) for latents in images], 1),
            "encoder_hidden_states": torch.cat(parts, 1),
            "timestep": (1000 * sigma_B).float().to(dtype) / 1000,
            "img_shapes": [shapes] * len(batch),
            "img_mask": torch.tensor([is_slot + [True] * slots[-1]] * len(batch), device=HOST),
            "encoder_hidden_states_mask": mask,
        }

    def set_timesteps(self, scheduler: Any, steps: int, tokens: int, device: torch.device) -> None:
        set_linear_sigmas(scheduler, steps, tokens, device)

    def predict(
        self, model: Any, noisy_BCTHW: torch.Tensor, sigma_B: torch.Tensor, batch: Batch, task: Task
    ) -> torch.Tensor:
        arguments = self.model_inputs(getattr(model, "module", model), noisy_BCTHW, sigma_B, batch, task)
        tokens = noisy_BCTHW[0, 0].numel()
        return unpack(model(**arguments, return_dict=False)[0][:, -tokens:], noisy_BCTHW.shape)


def find_places(batch: Batch, references: int) -> list[int]:
    """Number of text tokens before each reference, which the template determines."""
    if not references:
        return []
    places = {tuple(row) for row in batch.extras[IMAGE_PLACES].tolist()}
    if len(places) > 1 or len(found := places.pop()) != references:
        raise ValueError(
            f"the texts of samples {', '.join(batch.ids)} have their {references} references in different places; "
            "encode them again with one tokenizer (latentpress run encode-text)"
        )
    return [*found]
