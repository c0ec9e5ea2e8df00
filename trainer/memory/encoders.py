"""Device memory of the encoding stages, predicted from settings and configs of the models, as that of training is.

The models are built on torch's meta device. The autoencoder encodes a batch there, whose tensors are counted; of the
text encoder the weights are counted and the activations of one block computed, as they are small beside the weights.
Not counted: memory inside kernels, of which convolutions may take some hundred MB.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from cache.sets.text_lengths import reference_tokens
from schemas.config.encoding import Text
from schemas.config.pipeline import Config
from schemas.geometry import Bucket
from trainer.memory.estimate import sum_bytes
from trainer.memory.meter import META, KernelMode, MemoryMeter
from trainer.setup.quantize import QUANTIZERS, packed_bytes

#: Of tensors of a text token that are alive in a block at once: of the width of the hidden states (input, residual,
#: norm, query, keys and values, attention's output), and of the width inside of the feed-forward.
HIDDEN_TENSORS, INNER_TENSORS = 8, 3
#: Of the activations of an autoencoder those that `latents.chunk_frames` leaves: two of four.
CHUNKED_SHARE = 0.5

CACHED_IMAGES = 64  # of whose features encode-text keeps those of the last ones

Shapes = Mapping[str, Mapping[str, Any]]  # sub-folder of the checkpoint -> its config


@dataclass(frozen=True)
class EncoderMemory:
    """Bytes on the device."""

    weights: int
    activations: int

    @property
    def device(self) -> int:
        return self.weights + self.activations


def estimate_text(config: Config, shapes: Shapes, length: int) -> EncoderMemory:
    """Predict encode-text: the language model, other text models beside it, and a pass with texts of which the longest
    has `length` tokens that are stored; before it one of the vision model where prompts have images."""
    text, template = config.text, config.model.template
    dtype = torch.bfloat16 if text.quantization == "bf16" else getattr(torch, text.precision or config.model.precision)
    types = config.model.family_spec.model_classes
    model = _untrained(types["text_encoder"], shapes["text_encoder"], dtype)
    if not template.with_image and hasattr(model, "visual"):
        del model.visual
    if hasattr(model, "decoder"):  # transformers' model of a T5 has one, and no pipeline uses it
        del model.decoder
    layers = model.encoder.block if hasattr(model, "encoder") else getattr(model, "language_model", model).layers
    others = [
        _untrained(types[part], shape, dtype)
        for part, shape in shapes.items()
        if part.startswith("text_encoder") and part != "text_encoder"
    ]
    weights = _text_weights(model, layers, text) + sum(sum_bytes(other.parameters()) for other in others)
    settings = getattr(model.config, "text_config", model.config)
    longest = (template.crop or 0) + length
    tokens = max(text.batch_tokens, longest)
    inner = settings.d_ff if hasattr(settings, "d_ff") else settings.intermediate_size
    eager = (text.attention or config.model.family_spec.text_attention) == "eager"
    heads = settings.num_attention_heads if eager else 0  # whose scores are stored, and in float32
    activations = _pass_bytes(tokens, settings.hidden_size, inner, dtype) + tokens * longest * _scores(heads, dtype)
    if not template.with_image:
        return EncoderMemory(weights, activations)
    vision, of_each = model.config.vision_config, reference_tokens(config) or length
    patches, heads = of_each * vision.spatial_merge_size**2, vision.num_heads if eager else 0
    seen = _pass_bytes(patches, vision.hidden_size, vision.intermediate_size, dtype)
    seen += patches**2 * _scores(heads, dtype)
    numbers = patches * vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    seen += numbers * (torch.float32.itemsize + dtype.itemsize)  # of the picture, which comes in float32
    kept = CACHED_IMAGES * of_each * vision.out_hidden_size * dtype.itemsize
    return EncoderMemory(weights, max(activations, seen) + kept)


def _pass_bytes(tokens: int, width: int, inner: int, dtype: torch.dtype) -> int:
    """Activations of a block of these widths, which are small beside the weights."""
    return tokens * (HIDDEN_TENSORS * width + INNER_TENSORS * inner) * dtype.itemsize


def _scores(heads: int, dtype: torch.dtype) -> int:
    """Bytes of a query's and a key's scores."""
    return heads * (2 * dtype.itemsize + 4)


def _untrained(kind: str, shape: Mapping[str, Any], dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModel

    settings = {key: value for key, value in shape.items() if key not in ("model_type", "architectures")}
    with META:
        return AutoModel.from_config(AutoConfig.for_model(kind, **settings)).to(dtype)


def _text_weights(model: Any, layers: Sequence[torch.nn.Module], text: Text) -> int:
    whole = sum_bytes(model.parameters())
    if text.quantization in QUANTIZERS:
        kept = (model._keep_in_fp32_modules or ()) if text.quantization == "nf4-bnb" else ()
        linear = [
            part
            for layer in layers
            for name, part in layer.named_modules()
            if isinstance(part, torch.nn.Linear) and name.rpartition(".")[2] not in kept
        ]
        return whole + sum(packed_bytes(part, text.quantization) - part.weight.nbytes for part in linear)
    if text.offload == "blocks":  # each module in turn: the largest is a block or the embedding
        blocks = [sum_bytes(layer.parameters()) for layer in layers]
        return max(*blocks, *_sizes_outside(model, layers))
    return whole


def _sizes_outside(model: Any, layers: Sequence[torch.nn.Module]) -> Iterable[int]:
    inside = {id(part) for layer in layers for part in layer.modules()}
    parts = (part for part in model.modules() if id(part) not in inside)
    return (sum_bytes(part.parameters(recurse=False)) for part in parts)


def estimate_latents(config: Config, shapes: Shapes, bucket: str) -> EncoderMemory:
    """Predict encode-latents: the autoencoder, and a batch of the bucket."""
    import diffusers

    family, latents, size = config.model.family_spec, config.latents, Bucket.parse(bucket)
    dtype = getattr(torch, latents.precision or config.model.precision)
    with META:
        vae = getattr(diffusers, family.model_classes["vae"]).from_config(dict(shapes["vae"])).eval()
        torch.nn.Module.to(vae, dtype)  # the class's own warns of a conversion
    pixels = size.width * size.height * size.frames
    count = max(1, latents.batch_pixels // pixels)
    side = family.tile[0] if latents.tiling else max(size.width, size.height)
    height, width = min(size.height, side), min(size.width, side)
    passes = 1 if latents.slicing else count
    frames = (size.frames,) if family.video or "z_dim" in vae.config else ()  # an image family may have one of clips
    weights, meter = sum_bytes(vae.parameters()), MemoryMeter()
    with META, torch.no_grad(), ExitStack() as stack:
        stack.enter_context(meter)
        stack.enter_context(KernelMode(None))
        vae.encode(torch.empty(passes, 3, *frames, height, width, dtype=dtype))
    activations = meter.peak * (CHUNKED_SHARE if latents.chunk_frames and family.frame_chunks else 1.0)
    return EncoderMemory(weights, int(activations) + count * 3 * pixels * dtype.itemsize)


def text_changes(config: Config) -> list[tuple[str, dict[str, Any]]]:
    """Options with which encode-text needs less, in the order in which they are tried. The first ones give the same."""
    return [
        ("text.batch_tokens 1024", {"text": {"batch_tokens": min(1024, config.text.batch_tokens)}}),
        ("text.offload blocks", {"text": {"offload": "blocks"}}),
        ("text.quantization int8-quanto", {"text": {"offload": "none", "quantization": "int8-quanto"}}),
        ("text.quantization nf4-bnb", {"text": {"offload": "none", "quantization": "nf4-bnb"}}),
    ]


def latent_changes(config: Config) -> list[tuple[str, dict[str, Any]]]:
    """Options with which encode-latents needs less. Tiles give other latents, and come last."""
    changes: list[tuple[str, dict[str, Any]]] = [("latents.slicing true", {"latents": {"slicing": True}})]
    if config.model.family_spec.frame_chunks and not config.latents.chunk_frames:
        changes.append(("latents.chunk_frames 4", {"latents": {"chunk_frames": 4}}))
    return [*changes, ("latents.tiling true", {"latents": {"tiling": True}})]
