"""Builds random checkpoints in diffusers layout: tiny ones for tests and the demo, true-size ones for a GPU.

Every class, config key and file is the real one; only the numbers are small and random. So the whole code
path runs without a download, and a true-size build shows true speed and memory. Weights depend on the
seed alone.

    python examples/tiny_models.py --kind kandinsky5-image-t2i --out models/t2i
    python examples/tiny_models.py --all --out models
    python examples/tiny_models.py --kind kandinsky5-video-t2v --size pro --dtype bfloat16 --device cuda \\
        --out models/pro
"""

import argparse
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.catalogue import FAMILIES

# A neighbour both as a script and as a module of `examples`.
TOKENIZERS = importlib.import_module(f"{__package__ or ''}.tiny_tokenizers".lstrip(".")).TOKENIZERS

# --- shapes: part -> config of the real class, as far as it differs from that class's defaults ---

_NABLA = {
    "attention_type": "nabla", "attention_causal": False, "attention_local": False, "attention_glob": False,
    "attention_window": 3, "attention_P": 0.9, "attention_wT": 11, "attention_wW": 3, "attention_wH": 3,
    "attention_add_sta": True, "attention_method": "topcdf",
}  # fmt: skip
_KANDINSKY = {"in_visual_dim": 16, "out_visual_dim": 16, "patch_size": (1, 2, 2), "attention_type": "regular"}
_KANDINSKY_TINY = _KANDINSKY | {
    "in_text_dim": 64, "in_text_dim2": 32, "time_dim": 64, "model_dim": 96, "ff_dim": 256,
    "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (8, 12, 12),
}  # fmt: skip
_KANDINSKY_TRUE = _KANDINSKY | {"in_text_dim": 3584, "in_text_dim2": 768, "time_dim": 512, "num_text_blocks": 2}
_FLUX_VAE = {
    "latent_channels": 16, "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "use_quant_conv": False, "use_post_quant_conv": False, "scaling_factor": 0.3611, "shift_factor": 0.1159,
}  # fmt: skip
_DC_BLOCKS = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
_DC_AE = {
    "latent_channels": 32, "encoder_block_types": _DC_BLOCKS, "decoder_block_types": _DC_BLOCKS,
    "downsample_block_type": "Conv", "upsample_block_type": "interpolate", "scaling_factor": 0.41407,
}  # fmt: skip

SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "image": _KANDINSKY_TINY,
        "video": _KANDINSKY_TINY | {"visual_cond": True},
        "sana": {
            "in_channels": 32, "out_channels": 32, "num_attention_heads": 3, "attention_head_dim": 32,
            "num_layers": 3, "num_cross_attention_heads": 3, "cross_attention_head_dim": 32,
            "cross_attention_dim": 96, "caption_channels": 64, "sample_size": 32,
        },
        "flux_vae": _FLUX_VAE | {"block_out_channels": (8, 16, 16, 16), "layers_per_block": 1,
            "norm_num_groups": 4},
        "hunyuan_vae": {"block_out_channels": (8, 16, 16, 16), "layers_per_block": 1, "norm_num_groups": 4},
        "dc_ae": _DC_AE | {
            "attention_head_dim": 8,
            "encoder_block_out_channels": (8, 8, 16, 16, 32, 32), "encoder_layers_per_block": (1,) * 6,
            "decoder_block_out_channels": (8, 8, 16, 16, 32, 32), "decoder_layers_per_block": (1,) * 6,
            "encoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
            "decoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
        },
        "qwen": {
            "text_config": {
                "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_window_layers": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            },
            "vision_config": {
                "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
                "fullatt_block_indexes": [1], "tokens_per_second": 2,
            },
        },
        "clip": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "projection_dim": 32},
        "gemma": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4,
                  "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16},
        "dinov2": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 112},
    },
    "true": {
        "image": _KANDINSKY_TRUE | {"model_dim": 2560, "ff_dim": 10240, "num_visual_blocks": 50,
            "axes_dims": (32, 48, 48)},
        "video": _KANDINSKY_TRUE | {"model_dim": 1792, "ff_dim": 7168, "num_visual_blocks": 32,
            "axes_dims": (16, 24, 24),
                             "visual_cond": True},
        "sana": {},
        "flux_vae": _FLUX_VAE | {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2},
        "hunyuan_vae": {},
        "dc_ae": _DC_AE,
        "qwen": {
            "text_config": {
                "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                "num_attention_heads": 28,
                "num_key_value_heads": 4, "vocab_size": 152064, "rms_norm_eps": 1e-6, "max_window_layers": 28,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            },
            "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584, "tokens_per_second": 2},
        },
        "clip": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
            "num_attention_heads": 12,
                 "projection_dim": 768, "vocab_size": 49408},
        "gemma": {"vocab_size": 256000},
        "dinov2": {"hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 24, "image_size": 518,
                   "use_swiglu_ffn": True, "patch_size": 14},
    },
}  # fmt: skip
for _rows in SHAPES.values():
    _rows["qwen49"] = _rows["qwen"]
SHAPES["pro"] = SHAPES["true"] | {
    "video": _KANDINSKY_TRUE | {"time_dim": 1024, "model_dim": 4096, "ff_dim": 16384, "num_text_blocks": 4,
                         "num_visual_blocks": 60, "axes_dims": (32, 48, 48), "visual_cond": True},
}  # fmt: skip

# part -> (library, model class, config class or None where the class takes the keys itself)
CLASSES = {
    "image": ("diffusers", "Kandinsky5Transformer3DModel", None),
    "video": ("diffusers", "Kandinsky5Transformer3DModel", None),
    "sana": ("diffusers", "SanaTransformer2DModel", None),
    "flux_vae": ("diffusers", "AutoencoderKL", None),
    "hunyuan_vae": ("diffusers", "AutoencoderKLHunyuanVideo", None),
    "dc_ae": ("diffusers", "AutoencoderDC", None),
    "qwen": ("transformers", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig"),
    "qwen49": ("transformers", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig"),
    "clip": ("transformers", "CLIPTextModel", "CLIPTextConfig"),
    "gemma": ("transformers", "Gemma2Model", "Gemma2Config"),
    "dinov2": ("transformers", "Dinov2Model", "Dinov2Config"),
}


@dataclass(frozen=True)
class CheckpointKind:
    """What one checkpoint is made of. `parts` maps a pipeline's component to a row of SHAPES."""

    pipeline: str | None
    components: dict[str, str]
    transformer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)


_QWEN_CLIP = {"text_encoder": "qwen", "text_encoder_2": "clip"}
_IMAGE = {"transformer": "image", "vae": "flux_vae"} | _QWEN_CLIP
_VIDEO = {"transformer": "video", "vae": "hunyuan_vae"} | _QWEN_CLIP
_SANA = {"transformer": "sana", "vae": "dc_ae", "text_encoder": "gemma"}
_SANA_SCHEDULER = {
    "algorithm_type": "dpmsolver++", "prediction_type": "flow_prediction", "use_flow_sigmas": True,
    "flow_shift": 3.0,
}  # fmt: skip
_K5_IMAGE, _K5_VIDEO = (FAMILIES[f"kandinsky5-{media}"].pipelines for media in ("image", "video"))
KINDS = {
    "kandinsky5-image-t2i": CheckpointKind(_K5_IMAGE["t2i"], _IMAGE, {"visual_cond": False}, {"shift": 3.0}),
    "kandinsky5-image-i2i": CheckpointKind(_K5_IMAGE["i2i"], _IMAGE, {"visual_cond": True}, {"shift": 3.0}),
    "kandinsky5-image-i2i-prefix49": CheckpointKind(
        _K5_IMAGE["i2i"], _IMAGE | {"text_encoder": "qwen49"}, {"visual_cond": True}, {"shift": 3.0}
    ),
    "kandinsky5-video-t2v": CheckpointKind(_K5_VIDEO["t2v"], _VIDEO, {}, {"shift": 5.0}),
    "kandinsky5-video-i2v": CheckpointKind(_K5_VIDEO["i2v"], _VIDEO, {}, {"shift": 5.0}),
    "kandinsky5-video-t2v-nabla": CheckpointKind(_K5_VIDEO["t2v"], _VIDEO, _NABLA, {"shift": 5.0}),
    "sana": CheckpointKind(FAMILIES["sana"].pipelines["t2i"], _SANA, {}, _SANA_SCHEDULER),
    "dinov2": CheckpointKind(None, {"": "dinov2"}),
}

# --- models ---


def _config(part: str, size: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """The config keys of a part, with the token ids of the tokenizer that belongs to it."""
    config = SHAPES[size][part] | overrides
    if part not in TOKENIZERS:
        return config
    tokenizer = TOKENIZERS[part]()
    if not part.startswith("qwen"):
        # CLIP's 2 is the original's: it selects pooling at the highest id.
        ends = {"clip": {"eos_token_id": 2, "pad_token_id": 1, "bos_token_id": 0}, "gemma": {}}[part]
        return {"vocab_size": len(tokenizer)} | config | ends
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    ids |= {name: tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")}
    text = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    text |= config["text_config"]
    return config | {f"{name}_token_id": i for name, i in ids.items()} | {"text_config": text}


def make_untrained(part: str, size: str = "tiny", **overrides: Any) -> Any:
    """A part's model with its class's own initialisation, on torch's current default device and dtype."""
    import diffusers
    import transformers

    library, model_class, config_class = CLASSES[part]
    config = _config(part, size, overrides)
    if library == "diffusers":
        return getattr(diffusers, model_class)(**config)
    assert config_class is not None
    return getattr(transformers, model_class)(getattr(transformers, config_class)(**config))


def _randomise(model: Any, seed: int) -> None:
    """Draws every weight anew: matrices keep the scale of what passes them, biases are small, norms stay.

    The classes' own initialisation leaves Kandinsky's modulations at zero (then no block does anything and
    the output ignores the text) and the text encoders' matrices so small that a token hardly sees the others.
    """
    import torch

    for name, parameter in sorted(model.named_parameters()):
        generator = torch.Generator(parameter.device).manual_seed(_stable_hash(f"{seed}/{name}"))
        if parameter.ndim >= 2:
            scale = (parameter.shape[0] / parameter.numel()) ** 0.5
            scale *= 0.5 if "modulation" in name or name.startswith(("out_layer", "proj_out")) else 1.0
        elif name.endswith("bias"):
            scale = 0.1
        else:
            continue
        with torch.no_grad():
            parameter.normal_(0.0, scale, generator=generator)


def _stable_hash(text: str) -> int:
    import hashlib

    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _smooth_clips(shape_BCTHW: tuple[int, int, int, int, int]) -> Any:
    """Seeded pictures in -1..1 with large forms, edges and a little grain; over time the forms drift."""
    import torch

    batch, channels, frames, height, width = shape_BCTHW
    generator = torch.Generator().manual_seed(7)
    clips = torch.zeros(shape_BCTHW)
    for cells, weight in ((2, 1.0), (5, 0.6), (16, 0.3)):
        coarse = torch.randn(batch, channels, 2 if frames > 1 else 1, cells, cells, generator=generator)
        clips += weight * torch.nn.functional.interpolate(coarse, (frames, height, width), mode="trilinear")
    edges = torch.randn(batch, channels, 1, 1, width, generator=generator).cumsum(-1).sign()
    return (clips + 0.4 * edges + 0.05 * torch.randn(shape_BCTHW, generator=generator)).clamp(-1, 1)


def _calibrate(vae: Any, part: str) -> None:
    """Scales an encoder's last layer so that z * scaling_factor has mean 0 and deviation 1 in every channel.

    A shortcut passes DC-AE's last layer by: there the means are moved and the scaling factor itself is set.
    """
    import torch

    clips_BCTHW = _smooth_clips((4, 3, 5 if part == "hunyuan_vae" else 1, 128, 128))
    pixels = clips_BCTHW if part == "hunyuan_vae" else clips_BCTHW[:, :, 0]
    last = vae.quant_conv if part == "hunyuan_vae" else vae.encoder.conv_out
    channels = vae.config.latent_channels
    with torch.no_grad():
        z = vae.encode(pixels)
        z = z.latent if part == "dc_ae" else z.latent_dist.mean
        axes = [axis for axis in range(z.ndim) if axis != 1]
        if part == "dc_ae":
            last.bias -= z.mean(axes)
            vae.register_to_config(scaling_factor=round(1 / (z - z.mean(axes, keepdim=True)).std().item(), 4))
            return
        gain = 1 / (vae.config.scaling_factor * z.std(axes))
        last.weight[:channels] *= gain.view(-1, *[1] * (last.weight.ndim - 1))
        last.bias[:channels] = (last.bias[:channels] - z.mean(axes)) * gain
        # A posterior a tenth as wide as the latents: sampling shows, and hides nothing.
        last.weight[channels:] *= 0.1
        last.bias[channels:] = 2 * torch.log(torch.tensor(0.1 / vae.config.scaling_factor))


@contextmanager
def _single_threaded(seed: int) -> Iterator[None]:
    """One thread (other numbers of threads give other last bits) and a random state of its own."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def make_model(
    part: str,
    size: str = "tiny",
    *,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    overrides: dict[str, Any] | None = None,
) -> Any:
    """A part's model with seeded random weights, in eval mode. True sizes are made on `device` in `dtype`."""
    import torch

    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if size == "tiny" else getattr(torch, dtype))
    try:
        with _single_threaded(seed), torch.device(device):
            model = make_untrained(part, size, **(overrides or {})).eval()
            _randomise(model, seed)
            if size == "tiny" and part in ("flux_vae", "hunyuan_vae", "dc_ae"):
                _calibrate(model, part)
    finally:
        torch.set_default_dtype(kept)
    return model if model.dtype == getattr(torch, dtype) else model.to(getattr(torch, dtype))


# --- checkpoints ---


def _write_tokenizers(kind: CheckpointKind, out: Path, wanted: Callable[[str], bool]) -> None:
    for component, part in kind.components.items():
        name = component.replace("text_encoder", "tokenizer")
        if part not in TOKENIZERS or not wanted(name):
            continue
        TOKENIZERS[part]().save_pretrained(out / name)
        if part.startswith("qwen"):  # the repositories keep Qwen's whole processor under this name
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

            size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}
            Qwen2VLImageProcessorPil(size=size).save_pretrained(out / name)


def _write_scheduler(kind: CheckpointKind, out: Path) -> str:
    import diffusers

    name = "DPMSolverMultistepScheduler" if "flow_shift" in kind.scheduler else "FlowMatchEulerDiscreteScheduler"
    getattr(diffusers, name)(**kind.scheduler).save_pretrained(out / "scheduler")
    return name


def _model_index(kind: CheckpointKind) -> dict[str, Any]:
    """model_index.json as the pipeline's own save_pretrained writes it."""
    import diffusers

    index: dict[str, Any] = {"_class_name": kind.pipeline, "_diffusers_version": diffusers.__version__}
    index |= {component: list(CLASSES[part][:2]) for component, part in kind.components.items()}
    sana = "flow_shift" in kind.scheduler
    index["tokenizer"] = ["transformers", "GemmaTokenizer" if sana else "Qwen2VLProcessor"]
    if not sana:
        index["tokenizer_2"] = ["transformers", "CLIPTokenizer"]
    scheduler = "DPMSolverMultistepScheduler" if sana else "FlowMatchEulerDiscreteScheduler"
    return index | {"scheduler": ["diffusers", scheduler]}


def build(
    kind: str,
    out: Path,
    *,
    seed: int = 0,
    size: str = "tiny",
    dtype: str = "float32",
    device: str = "cpu",
    only: Sequence[str] | None = None,
) -> Path:
    """Writes one checkpoint in diffusers layout and returns its folder.

    `size`: tiny; true (Lite, Sana 1.6B) or pro (video Pro), which are drawn on `device` in `dtype` with the
    encoders and autoencoders in their true shapes too. `only` names the components to write (default: all).
    """
    for value, valid in ((kind, KINDS), (size, SHAPES)):
        if value not in valid:
            raise ValueError(f"{value!r} is unknown; choose one of {', '.join(valid)}")
    spec, out = KINDS[kind], Path(out)
    names = {*spec.components, *(name.replace("text_encoder", "tokenizer") for name in spec.components), "scheduler"}
    if unknown := set(only or ()) - names:
        raise ValueError(f"no component {sorted(unknown)} in {kind}; choose of {', '.join(sorted(names - {''}))}")
    out.mkdir(parents=True, exist_ok=True)

    def wanted(name: str) -> bool:
        return not only or name in only

    for component, part in spec.components.items():
        if wanted(component):
            overrides = spec.transformer if component == "transformer" else None
            model = make_model(part, size, seed=seed, dtype=dtype, device=device, overrides=overrides)
            model.save_pretrained(out / component)
            del model  # a true-size text encoder and transformer need not fit in memory together
    _write_tokenizers(spec, out, wanted)
    if spec.pipeline is not None:
        if wanted("scheduler"):
            _write_scheduler(spec, out)
        (out / "model_index.json").write_text(json.dumps(_model_index(spec), indent=2) + "\n")
    return out


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--kind", choices=list(KINDS))
    which.add_argument("--all", action="store_true", help="every kind, each in a folder of its name under --out")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=list(SHAPES), default="tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu", help="where true sizes are drawn, for example cuda")
    parser.add_argument("--only", nargs="+", metavar="COMPONENT")
    args = parser.parse_args(argv)
    from transformers.utils import logging

    logging.disable_progress_bar()
    for kind in KINDS if args.all else (args.kind,):
        folder = args.out / kind if args.all else args.out
        options = {name: getattr(args, name) for name in ("seed", "size", "dtype", "device", "only")}
        print(build(kind, folder, **options))


if __name__ == "__main__":
    main()
