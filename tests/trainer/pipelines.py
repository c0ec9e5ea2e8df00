"""The pipelines' own transformers beside trained ones, on one fixed batch."""

import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path

import diffusers
import torch
from diffusers.models.transformers import transformer_kandinsky as stock
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from diffusers.models.transformers.transformer_flux3 import Flux3Transformer2DModel
from diffusers.models.transformers.transformer_krea2 import Krea2Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Transformer2DModel
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence

from schemas.config.training import Adapter
from schemas.family import REFERENCE_PARTS
from tests.conformance.flavours import ROWS
from tests.qwen_processor import absent_processor
from trainer.batch import IMAGE_PLACES, Batch, text_mask
from trainer.families.base import module_of
from trainer.families.kandinsky5 import Kandinsky5, MaskedAttnProcessor
from trainer.setup import adapters
from trainer.setup.adapters import make_trainable

#: Row of the conformance suite -> the trainer's object of its family, and its task.
KINDS = {name: (module_of(row.spec), row.task) for name, row in ROWS.items()}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_batch(
    kind: str, model: torch.nn.Module, lengths: Sequence[int] = (6, 6), side: int = 4, frames: int = 3, seed: int = 0
) -> Batch:
    """Random samples with texts of these lengths. model: the transformer, whose configuration has the widths."""
    row, spec, count = ROWS[kind], ROWS[kind].spec, len(lengths)
    widths = spec.read_text_widths(model.config)
    text, mask = pad_text([random(length, widths["embeds"], seed=seed + 100 + i) for i, length in enumerate(lengths)])
    pooled = random(count, widths["pooled"], seed=seed + 3) if "pooled" in widths else None
    shape = (count, spec.latent_channels, frames if spec.video else 1, side, side)
    condition, given, extras = spec.conditions.get(row.task), None, {}
    if condition and condition.in_row:
        shown = spec.condition_frames(row.task) if condition.kind == "first-frame" else None
        given = random(*shape, seed=seed + 4)[:, :, :shown]
    elif condition:
        for number, part in enumerate(REFERENCE_PARTS[: min(2, condition.most)]):
            extras[part] = random(count, spec.latent_channels, 1, 4, 6 - 2 * number, seed=seed + 5 + number)
    if spec.templates[row.task].drops_images:
        extras[IMAGE_PLACES] = torch.tensor([[1, 2]] * count, dtype=torch.int32)
    ids = [str(number) for number in range(count)]
    return Batch(random(*shape, seed=seed + 2), given, text, mask, pooled, ids, "32x32@1", extras)


def output(kind: str, model) -> torch.Tensor:
    """The velocity of a fixed batch; `model` may be a pipeline's own transformer, which takes no mask."""
    family, task = KINDS[kind]
    batch, sigma = make_batch(kind, model), torch.tensor([0.3, 0.8])
    arguments = family.model_inputs(model, batch.latents_BCTHW, sigma, batch, task)
    if type(model) is stock.Kandinsky5Transformer3DModel:
        assert arguments.pop("text_mask_BL") is None
    with torch.no_grad():
        made = model(**arguments, return_dict=False)[0]
    return torch.stack(made) if isinstance(made, list) else made


def pipeline_class(kind: str):
    return getattr(diffusers, ROWS[kind].spec.pipelines[ROWS[kind].task])


def pipeline(kind: str, folder: Path):
    """The real pipeline around the real transformer, without encoders, autoencoder and scheduler."""
    name = json.loads((folder / "transformer" / "config.json").read_text())["_class_name"]
    transformer = getattr(diffusers, name).from_pretrained(folder / "transformer")
    if ROWS[kind].spec.modular:
        modular = pipeline_class(kind)()
        modular.update_components(transformer=transformer)
        return modular
    return pipeline_class(kind)(transformer=transformer, **absent_parts(pipeline_class(kind)))


def absent_parts(wanted: type) -> dict[str, None]:
    """None for every component that a pipeline class must be given, but for the transformer."""
    parameters = inspect.signature(wanted).parameters.values()
    required = {parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty}
    return dict.fromkeys(required - {"transformer"}) | absent_processor(wanted)


def trained(kind: str, folder: Path, moved: float = 0.1, part: str = "transformer", **options):
    """A model with an adapter, a LoRA of rank 4 by default, that has moved away from its start."""
    family, task = KINDS[kind]
    model = family.load(str(folder), part=part)
    torch.manual_seed(0)
    make_trainable(model, family, task, Adapter(**{"rank": 4, **options}))
    for i, (name, parameter) in enumerate(adapters.trainable_parameters(model).items()):
        if "lora_A" not in name:
            parameter.data += random(*parameter.shape, seed=i) * moved
    return model.eval()


def exact_output(kind: str, model: torch.nn.Module) -> torch.Tensor:
    """Without the stock rounding of rotary embeddings to bfloat16, which turns differences of 1e-7 into 1e-4."""
    for module in model.modules() if isinstance(KINDS[kind][0], Kandinsky5) else ():
        if hasattr(module, "set_processor"):
            module.set_processor(MaskedAttnProcessor(None, float32_rotary=True))  # no text is padded here
    return output(kind, model)


def comfyui_names(model: torch.nn.Module, name: str) -> list[str]:
    """What ComfyUI's keys of a module begin with (comfy/lora.py, model_lora_keys_unet). Its models of Wan and FLUX.2
    have the original names (comfy/ldm), and of Wan it maps no others. It maps diffusers' names of FLUX.2, too, behind
    other prefixes (comfy/utils.py), and those of q, k and v to parts of its own weight."""
    flat = f"lycoris_{name.replace('.', '_')}"
    if isinstance(model, WanTransformer3DModel):
        name = re.sub(r"\.attn1\.to_(?:out\.0|(.))$", lambda found: f".self_attn.{found[1] or 'o'}", name)
        name = re.sub(r"\.attn2\.to_(?:out\.0|(.))$", lambda found: f".cross_attn.{found[1] or 'o'}", name)
        name = re.sub(r"\.ffn\.net\.(\d)(?:\.proj)?$", r".ffn.\1", name)
        return [f"diffusion_model.{name}"]
    if isinstance(model, Flux3Transformer2DModel):
        name = re.sub(
            r"^single_transformer_blocks", "single_blocks", re.sub("^mode_blocks", "content_mode_blocks", name)
        )
        name = re.sub(r"attn\.to_([qkv])$", r"\1_proj", re.sub(r"ff\.linear_(in|out)$", r"mlp_\1", name))
        return [f"diffusion_model.{name.replace('attn.to_out.0', 'attn_out')}"]
    if isinstance(model, Flux2Transformer2DModel):
        return [f"transformer.{name}", flat]
    if isinstance(model, QwenImage21Transformer2DModel):  # its feed-forwards are parts of a weight there
        fused = re.search(r"\.img_mlp\.(gate_layer|proj)$", name)
        return [f"transformer.{name}", name, flat, *([] if fused else [f"diffusion_model.{name}"])]
    mapped = isinstance(model, Krea2Transformer2DModel | QwenImageTransformer2DModel | ZImageTransformer2DModel)
    return [f"diffusion_model.{name}", f"transformer.{name}", *([flat] if mapped else [])]


def lycoris_names(_: torch.nn.Module, name: str) -> list[str]:
    """Likewise of the LyCORIS library."""
    return [f"lycoris_{name.replace('.', '_')}"]


LORA = ("lora_B.weight", "lora_A.weight")
LOKR = tuple(f"lokr_w{number}{end}" for number in "12" for end in ("", "_a", "_b"))


def apply_as_comfyui(model: torch.nn.Module, path: Path, names=comfyui_names) -> dict[str, torch.Tensor]:
    """Add a file to a model's weights by ComfyUI's rule (comfy/weight_adapter/lora.py, lokr.py); returns the change of
    each module's weight.

    Alpha is divided by the rank; without alpha, and for two whole matrices of a LoKr, the strength is 1. Keys that no
    weight asks for are left out with a warning.
    """
    held, changes = load_file(path), dict[str, torch.Tensor]()
    for name, module in model.named_modules():
        for start in names(model, name) if isinstance(getattr(module, "weight", None), torch.nn.Parameter) else ():
            found = {end: held.pop(key) for end in (*LORA, *LOKR, "alpha") if (key := f"{start}.{end}") in held}
            if found:
                changes[name] = _comfyui_change(found, module.weight).to(module.weight.dtype)
                module.weight.data += changes[name]
    assert not held, f"keys that ComfyUI would not load: {[*held][:3]}"
    return changes


def _comfyui_change(found: dict[str, torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    alpha, rank = found.pop("alpha", None), None
    if set(LORA) == found.keys():
        up, down = (found[end].to(weight.dtype) for end in LORA)
        rank, product = down.shape[0], torch.mm(up.flatten(start_dim=1), down.flatten(start_dim=1))
    else:
        factors = []
        for side in ("lokr_w1", "lokr_w2"):
            if side in found:
                factors.append(found.pop(side))
            else:
                first, second = found.pop(f"{side}_a"), found.pop(f"{side}_b")
                rank = second.shape[0]
                factors.append(torch.mm(first, second))
        assert not found
        left, right = factors
        product = torch.kron(left[:, :, None, None] if right.ndim == 4 else left, right)
    strength = 1.0 if alpha is None or rank is None else alpha.item() / rank
    return strength * product.reshape(weight.shape)


def pad_text(texts_LD: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts (L_i, D) of unequal length -> (B, max L, D) zero-padded on the right, (B, max L) bool mask."""
    if len({text.dtype for text in texts_LD}) > 1:
        texts_LD = [text.float() for text in texts_LD]
    return pad_sequence(list(texts_LD), batch_first=True), text_mask([len(text) for text in texts_LD])
