"""The pipelines' own transformers, compared with trained transformers on one fixed batch."""

import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path

import diffusers
import torch
from diffusers.models.transformers import transformer_kandinsky as stock
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence

from schemas.catalog import FAMILIES
from schemas.config.training import Adapter
from tests.project import SETTINGS
from trainer.batch import Batch, text_mask
from trainer.families.flux2 import Flux2
from trainer.families.kandinsky5 import Kandinsky5, MaskedAttnProcessor
from trainer.families.qwen_image import QwenImage
from trainer.families.sana import Sana
from trainer.families.wan import Wan
from trainer.families.z_image import ZImage
from trainer.setup import adapters
from trainer.setup.adapters import make_trainable
from trainer.validation import Denoising

KINDS = {
    "kandinsky5-image-t2i": (Kandinsky5(), "t2i"),
    "kandinsky5-image-i2i": (Kandinsky5(), "i2i"),
    "kandinsky5-video-t2v": (Kandinsky5(), "t2v"),
    "kandinsky5-video-i2v": (Kandinsky5(), "i2v"),
    "sana": (Sana(), "t2i"),
    "z-image": (ZImage(), "t2i"),
    "qwen-image": (QwenImage(), "t2i"),
    "qwen-image-edit": (QwenImage(), "i2i"),
    "qwen-image-edit-plus": (QwenImage(), "i2i"),
    "wan2.1-t2v": (Wan(), "t2v"),
    "wan2.2-5b-i2v": (Wan(), "i2v"),
    "flux2-klein": (Flux2(), "t2i"),
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_batch(kind: str) -> Batch:
    family = FAMILIES[SETTINGS[kind]["family"]]
    channels, frames = family.latent_channels, 3 if family.video else 1
    width = 96 if kind == "flux2-klein" else 64  # three hidden states of 32
    text, mask = random(2, 6, width, seed=1), torch.ones(2, 6, dtype=torch.bool)
    condition = random(2, channels, 1, 4, 4, seed=4) if kind.endswith(("i2i", "i2v")) else None
    latents, extras = random(2, channels, frames, 4, 4, seed=2), {}
    if kind.startswith("qwen-image-edit"):
        extras["reference1"] = random(2, channels, 1, 4, 6, seed=5)
    return Batch(latents, condition, text, mask, random(2, 32, seed=3), ["a", "b"], "32x32@1", extras)


def output(kind: str, model) -> torch.Tensor:
    """The velocity of a fixed batch; `model` may be a pipeline's own transformer, which has no mask."""
    family, task = KINDS[kind]
    batch, sigma = make_batch(kind), torch.tensor([0.3, 0.8])
    arguments = family.model_inputs(model, batch.latents_BCTHW, sigma, batch, task)
    if type(model) is stock.Kandinsky5Transformer3DModel:
        assert arguments.pop("text_mask_BL") is None
    with torch.no_grad():
        made = model(**arguments, return_dict=False)[0]
    return torch.stack(made) if isinstance(made, list) else made


def denoise(model, family, task, batch, negative, noise_BCTHW, scheduler, steps: int, guidance: float) -> torch.Tensor:
    """The latents that a model makes from noise."""
    denoising = Denoising(model, family, task, batch, negative, noise_BCTHW, scheduler, steps)
    denoising.take_steps(model, guidance)
    return denoising.finish()


def pipeline_class(kind: str):
    return getattr(diffusers, FAMILIES[SETTINGS[kind]["family"]].pipelines[KINDS[kind][1]])


def pipeline(kind: str, folder: Path):
    """The real pipeline around the real transformer, without encoders, autoencoder and scheduler."""
    name = json.loads((folder / "transformer" / "config.json").read_text())["_class_name"]
    transformer = getattr(diffusers, name).from_pretrained(folder / "transformer")
    return pipeline_class(kind)(transformer=transformer, **absent_parts(pipeline_class(kind)))


def absent_parts(pipeline_class: type) -> dict[str, None]:
    """None for every component that a pipeline class requires, except for the transformer."""
    parameters = inspect.signature(pipeline_class).parameters.values()
    required = {parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty}
    return dict.fromkeys(required - {"transformer"})


def trained(kind: str, folder: Path, moved: float = 0.1, **options):
    """A model with an adapter, by default a LoRA of rank 4, with changed weights."""
    family, _ = KINDS[kind]
    model = family.load(str(folder))
    torch.manual_seed(0)
    make_trainable(model, family, Adapter(**{"rank": 4, **options}))
    for i, (name, parameter) in enumerate(adapters.trainable_parameters(model).items()):
        if "lora_A" not in name:
            parameter.data += random(*parameter.shape, seed=i) * moved
    return model.eval()


def exact_output(kind: str, model: torch.nn.Module) -> torch.Tensor:
    """The output without the stock rounding of rotary embeddings to bfloat16, which turns differences of 1e-7 into
    1e-4."""
    for module in model.modules() if isinstance(KINDS[kind][0], Kandinsky5) else ():
        if hasattr(module, "set_processor"):
            module.set_processor(MaskedAttnProcessor(None, float32_rotary=True))  # no text has padding
    return output(kind, model)


def comfyui_names(model: torch.nn.Module, name: str) -> list[str]:
    """Start of ComfyUI's keys of a module (comfy/lora.py, model_lora_keys_unet). Its models of Wan and FLUX.2 have the
    original names (comfy/ldm), and for Wan it maps no other names. It also maps diffusers' names of FLUX.2, after other
    prefixes (comfy/utils.py), and maps q, k and v to parts of its own weight."""
    flat = f"lycoris_{name.replace('.', '_')}"
    if isinstance(model, WanTransformer3DModel):
        name = re.sub(r"\.attn1\.to_(?:out\.0|(.))$", lambda match: f".self_attn.{match[1] or 'o'}", name)
        name = re.sub(r"\.attn2\.to_(?:out\.0|(.))$", lambda match: f".cross_attn.{match[1] or 'o'}", name)
        name = re.sub(r"\.ffn\.net\.(\d)(?:\.proj)?$", r".ffn.\1", name)
        return [f"diffusion_model.{name}"]
    if isinstance(model, Flux2Transformer2DModel):
        return [f"transformer.{name}", flat]
    mapped = isinstance(model, QwenImageTransformer2DModel | ZImageTransformer2DModel)
    return [f"diffusion_model.{name}", f"transformer.{name}", *([flat] if mapped else [])]


def lycoris_names(_: torch.nn.Module, name: str) -> list[str]:
    """Start of the LyCORIS library's keys of a module."""
    return [f"lycoris_{name.replace('.', '_')}"]


LORA = ("lora_B.weight", "lora_A.weight")
LOKR = tuple(f"lokr_w{number}{end}" for number in "12" for end in ("", "_a", "_b"))


def apply_as_comfyui(model: torch.nn.Module, path: Path, names=comfyui_names) -> dict[str, torch.Tensor]:
    """Add a file to a model's weights by ComfyUI's rule (comfy/weight_adapter/lora.py, lokr.py); returns the change of
    each module's weight.

    Alpha is divided by the rank; without alpha, and for two whole matrices of a LoKr, the strength is 1. Keys without a
    weight are skipped with a warning.
    """
    tensors, changes = load_file(path), dict[str, torch.Tensor]()
    for name, module in model.named_modules():
        for start in names(model, name) if isinstance(getattr(module, "weight", None), torch.nn.Parameter) else ():
            result = {end: tensors.pop(key) for end in (*LORA, *LOKR, "alpha") if (key := f"{start}.{end}") in tensors}
            if result:
                changes[name] = _comfyui_change(result, module.weight).to(module.weight.dtype)
                module.weight.data += changes[name]
    assert not tensors, f"keys that ComfyUI would not load: {[*tensors][:3]}"
    return changes


def _comfyui_change(result: dict[str, torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    alpha, rank = result.pop("alpha", None), None
    if set(LORA) == result.keys():
        up, down = (result[end].to(weight.dtype) for end in LORA)
        rank, product = down.shape[0], torch.mm(up.flatten(start_dim=1), down.flatten(start_dim=1))
    else:
        factors = []
        for side in ("lokr_w1", "lokr_w2"):
            if side in result:
                factors.append(result.pop(side))
            else:
                first, second = result.pop(f"{side}_a"), result.pop(f"{side}_b")
                rank = second.shape[0]
                factors.append(torch.mm(first, second))
        assert not result
        left, right = factors
        product = torch.kron(left[:, :, None, None] if right.ndim == 4 else left, right)
    strength = 1.0 if alpha is None or rank is None else alpha.item() / rank
    return strength * product.reshape(weight.shape)


def pad_text(texts_LD: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts (L_i, D) of unequal length -> (B, max L, D) zero-padded on the right, (B, max L) bool mask."""
    if len({text.dtype for text in texts_LD}) > 1:
        texts_LD = [text.float() for text in texts_LD]
    return pad_sequence(list(texts_LD), batch_first=True), text_mask([len(text) for text in texts_LD])
