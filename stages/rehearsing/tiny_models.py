"""Builds random checkpoints in diffusers layout: tiny ones for rehearsals, tests and the demo, and true-size ones.

Classes, config keys and files are the same as in published checkpoints; only the numbers are small and random. So the
whole code path runs without a download, and a true-size checkpoint has the true speed and memory. Weights depend only
on the seed.

    python -m stages.rehearsing.tiny_models --kind kandinsky5-image-t2i --out models/t2i
    python -m stages.rehearsing.tiny_models --all --out models
    python -m stages.rehearsing.tiny_models --kind kandinsky5-video-t2v --size pro --dtype bfloat16 --device cuda \\
        --out models/pro
"""

import argparse
import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from schemas.cli.starting import silence_libraries
from stages.encoding.model_loading import disable_progress_bars
from stages.rehearsing.tiny_shapes import CLASSES, KINDS, SHAPES
from stages.rehearsing.tiny_tokenizers import TOKENIZERS

VISION_LANGUAGE = ("qwen", "qwen49", "qwen3_vl_images")  # text encoders that read images, too

# --- models ---


def model_config(part: str, size: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a part, with the token ids of its tokenizer."""
    config = SHAPES[size][part] | overrides
    if part not in TOKENIZERS:
        return config
    tokenizer = TOKENIZERS[part]()
    # The original CLIP has 2, which selects pooling at the highest id.
    clip_ends = {"eos_token_id": 2, "pad_token_id": 1, "bos_token_id": 0}
    if part == "clip_model":
        return config | {"text_config": {"vocab_size": len(tokenizer)} | config["text_config"] | clip_ends}
    if "text_config" not in config:
        return {"vocab_size": len(tokenizer)} | config | {"clip": clip_ends}.get(part, {})
    names = ("vision_start", "vision_end", "image_pad", "video_pad")
    ids = {f"{name.removesuffix('_pad')}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names}
    text = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    return config | ids | {"text_config": text | config["text_config"]}


def make_untrained(part: str, size: str = "tiny", **overrides: Any) -> Any:
    """A part's model with the initialization of its class, on torch's default device and in its default dtype."""
    library, model_class, config_class = CLASSES[part]
    classes, config = importlib.import_module(library), model_config(part, size, overrides)
    model_type = getattr(classes, model_class)
    return model_type(**config) if config_class is None else model_type(getattr(classes, config_class)(**config))


def weight_scale(name: str, shape: Sequence[int]) -> float | None:
    """Standard deviation of a random weight: a matrix preserves the scale of its input, a bias is small. None for the
    weight of a norm of any shape.

    The classes' initialization sets Kandinsky's modulations to zero (then no block has an effect and the output
    ignores the text) and makes the text encoders' matrices so small that tokens hardly influence each other.
    """
    if len(shape) >= 2 and not name.endswith("gamma"):
        scale = (shape[0] / prod(shape)) ** 0.5
        if name.endswith("SelfAttention.q.weight"):  # T5 does not divide scores by the root of a head's size, here 16
            return scale / 4
        if name.startswith("language_model.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            return scale / 2  # Qwen3-VL, whose 36 layers add up to numbers with larger roundings than 1e-5
        if "stream_modulation" in name:  # FLUX.2 has small gates at this width, so the text would have little effect
            return scale * 2
        is_small = "modulation" in name or name.startswith(("out_layer", "proj_out", "final_layer"))
        return scale * (0.5 if is_small else 1.0)
    return 0.1 if name.endswith("bias") else None


def _randomize(model: Any, seed: int) -> None:
    """Draw every weight again, except weights of norms."""
    import torch

    for name, parameter in sorted(model.named_parameters()):
        deep = getattr(model.config, "model_type", "") == "qwen3_vl"  # 36 layers
        scale = weight_scale(name.removeprefix("model.") if deep else name, parameter.shape)
        if scale is None:
            continue
        weight_seed = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")
        with torch.no_grad():
            parameter.normal_(0.0, scale, generator=torch.Generator(parameter.device).manual_seed(weight_seed))


def _smooth_clips(shape_BCTHW: tuple[int, int, int, int, int]) -> Any:
    """Seeded clips in -1..1 with large moving shapes, edges and a little grain."""
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
    """Scale an encoder's last layer so that normalized latents have mean 0 and deviation 1 in every channel.

    DC-AE's last layer has a shortcut around it, so its means are shifted and the scaling factor is set instead.
    """
    import torch

    video = part not in ("flux_vae", "flux2_vae", "dc_ae")
    has_alpha = part == "qwen_image_21_vae"
    clips_BCTHW = _smooth_clips((4, 3, 5 if video and not has_alpha else 1, 128, 128))
    if has_alpha:
        clips_BCTHW = torch.nn.functional.pad(clips_BCTHW, (0, 0, 0, 0, 0, 0, 0, 1), value=1.0)
    last = vae.quant_conv if video or part == "flux2_vae" else vae.encoder.conv_out
    channels = vae.config.latent_channels if "latent_channels" in vae.config else vae.config.z_dim
    with torch.no_grad():
        encoded = vae.encode(clips_BCTHW if video else clips_BCTHW[:, :, 0])
        z = encoded.latent if part == "dc_ae" else encoded.latent_dist.mean
        axes = [axis for axis in range(z.ndim) if axis != 1]
        if part == "dc_ae":
            last.bias -= z.mean(axes)
            vae.register_to_config(scaling_factor=round(1 / (z - z.mean(axes, keepdim=True)).std().item(), 4))
            return
        # The posterior is a tenth as wide as the latents, so that sampling is visible but does not hide the picture.
        if vae.config.get("latents_std"):
            means, deviations = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
            gain, narrow = deviations / z.std(axes), 2 * torch.log(0.1 * deviations)
        elif part == "flux2_vae":  # normalized by its buffers, one for each channel of 2x2 latents
            means, gain = torch.zeros(channels), 2 / z.std(axes)
            narrow = 2 * torch.log(torch.tensor(0.2))
            vae.bn.running_mean += 0.1 * torch.arange(len(vae.bn.running_mean)).cos()
            vae.bn.running_var *= 4
        else:
            means, gain = torch.zeros(channels), 1 / (vae.config.scaling_factor * z.std(axes))
            narrow = 2 * torch.log(torch.tensor(0.1 / vae.config.scaling_factor))
        last.weight[:channels] *= gain.view(-1, *[1] * (last.weight.ndim - 1))
        last.bias[:channels] = (last.bias[:channels] - z.mean(axes)) * gain + means
        last.weight[channels:] *= 0.1
        last.bias[channels:] = narrow


@contextmanager
def _reproducible(seed: int, dtype: Any) -> Iterator[None]:
    """Context with a separate random state, a default dtype, and one thread, because the number of threads changes the
    last bits."""
    import torch

    threads, default = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_default_dtype(default)
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

    torch_dtype = getattr(torch, dtype)
    with _reproducible(seed, torch.float32 if size == "tiny" else torch_dtype), torch.device(device):
        model = make_untrained(part, size, **(overrides or {})).eval()
        _randomize(model, seed)
        if size == "tiny" and (part.endswith("vae") or part == "dc_ae"):
            _calibrate(model, part)
    return model if model.dtype == torch_dtype else model.to(torch_dtype)


# --- checkpoints ---


def _write_tokenizers(kind: Any, out: Path, size: str, selected: Callable[[str], bool]) -> None:
    for component, part in kind.components.items():
        name = component.replace("text_encoder", kind.tokenizer)
        if part not in TOKENIZERS or not selected(name):
            continue
        TOKENIZERS[part]().save_pretrained(out / name)
        if part == "clip_model":
            from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

            side = SHAPES[size][part]["vision_config"]["image_size"]
            CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=side).save_pretrained(out / name)
        if part in VISION_LANGUAGE:  # the repositories keep Qwen's whole processor under this name
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

            edges = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}
            if part == "qwen3_vl_images":
                edges = {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 16384}
                Qwen2VLImageProcessorPil(size=edges, patch_size=16).save_pretrained(out / name)
                continue
            Qwen2VLImageProcessorPil(size=edges).save_pretrained(out / name)
            if "processor" in kind.index and selected("processor"):
                Qwen2VLImageProcessorPil(size=edges).save_pretrained(out / "processor")


def _write_pipeline_files(kind: Any, out: Path, with_scheduler: bool) -> None:
    """Write the scheduler, and model_index.json like the pipeline's save_pretrained."""
    import diffusers

    if kind.repo:
        _write_modular_index(kind, out)
        return
    if with_scheduler:
        getattr(diffusers, kind.scheduler_class)(**kind.scheduler).save_pretrained(out / "scheduler")
    index: dict[str, Any] = {"_class_name": kind.pipeline, "_diffusers_version": diffusers.__version__}
    index |= {component: list(CLASSES[part][:2]) for component, part in kind.components.items()}
    for component, part in kind.components.items():
        if part in TOKENIZERS:
            name = "Qwen2VLProcessor" if part in VISION_LANGUAGE else type(TOKENIZERS[part]()).__name__
            index[component.replace("text_encoder", kind.tokenizer)] = ["transformers", name]
    index |= {"scheduler": ["diffusers", kind.scheduler_class]} | kind.index
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_modular_index(kind: Any, out: Path) -> None:
    """Write modular_model_index.json, like in a repository of a modular pipeline."""
    import diffusers

    index: dict[str, Any] = {"_class_name": kind.pipeline, "_diffusers_version": diffusers.__version__}
    places = {component: (component, CLASSES[part][:2]) for component, part in kind.components.items()}
    places["tokenizer"] = "text_encoder", ("transformers", "Qwen3VLProcessor")
    for component, (folder, loaded) in places.items():
        place = {"pretrained_model_name_or_path": kind.repo, "subfolder": folder, "type_hint": loaded}
        index[component] = [None, None, place | {"revision": None, "variant": None}]
    (out / "modular_model_index.json").write_text(json.dumps(index, indent=2) + "\n")


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
    """Write one checkpoint in diffusers layout and return its folder.

    size: "tiny", "true" (Lite, Sana 1.6B) or "pro" (video Pro). Weights of the last two are drawn on `device` in
    `dtype`, and encoders and autoencoders have their true shapes, too. only: names of the components to write, by
    default all.
    """
    for value, valid in ((kind, KINDS), (size, SHAPES)):
        if value not in valid:
            raise ValueError(f"{value!r} is unknown; choose one of {', '.join(valid)}")
    spec, out = KINDS[kind], Path(out)
    names = {*spec.components, *(name.replace("text_encoder", spec.tokenizer) for name in spec.components), "scheduler"}
    if unknown := set(only or ()) - names:
        raise ValueError(
            f"{kind} does not have components {sorted(unknown)}; choose from {', '.join(sorted(names - {''}))}"
        )
    out.mkdir(parents=True, exist_ok=True)

    def selected(name: str) -> bool:
        return not only or name in only

    for component, part in spec.components.items():
        if selected(component):
            overrides = spec.transformer if component.startswith("transformer") else None
            numbers = seed + (component == "transformer_2")  # weights that differ from the first transformer
            model = make_model(part, size, seed=numbers, dtype=dtype, device=device, overrides=overrides)
            model.save_pretrained(out / component)
            del model  # the next true-size model may need its memory
    _write_tokenizers(spec, out, size, selected)
    if spec.pipeline is not None:
        _write_pipeline_files(spec, out, selected("scheduler"))
    return out


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--kind", choices=list(KINDS))
    group.add_argument("--all", action="store_true", help="every kind, each in a folder of its name under --out")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=list(SHAPES), default="tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu", help="device that draws weights of true sizes, for example cuda")
    parser.add_argument("--only", nargs="+", metavar="COMPONENT")
    args = parser.parse_args(argv)
    silence_libraries()
    disable_progress_bars()
    options = {name: getattr(args, name) for name in ("seed", "size", "dtype", "device", "only")}
    for kind in KINDS if args.all else (args.kind,):
        print(build(kind, args.out / kind if args.all else args.out, **options))


if __name__ == "__main__":
    main()
