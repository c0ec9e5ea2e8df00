"""LoRA through peft, and saving results in the formats that diffusers' pipelines load."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer

from schemas.config.training import AdapterFormat
from trainer.adapter_files import load_layers, write_formats
from trainer.adapter_header import AdapterError, AdapterFile, check_fits
from trainer.families.base import Experts, components

ADAPTER_NAME = "default"
Model = Any  # a diffusers ModelMixin with PeftAdapterMixin, which has no type annotations


def choose_targets(model: Model, patterns: Sequence[str]) -> list[str]:
    """Full paths of the modules that LoRA can wrap (linear layers, convolutions without groups) and that a regular
    expression matches whole. ValueError for a pattern without matches."""
    wrappable = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or (isinstance(module, torch.nn.Conv2d) and module.groups == 1)
    ]
    for pattern in patterns:
        if not any(re.fullmatch(pattern, name) for name in wrappable):
            raise ValueError(
                f"train.adapter.targets: {pattern!r} matches no module that LoRA can wrap; such modules are "
                f"{', '.join(wrappable[:8])}, ... ({len(wrappable)} in all)"
            )
    return [name for name in wrappable if any(re.fullmatch(pattern, name) for pattern in patterns)]


def add_lora(model: Model, targets: Sequence[str], rank: int, alpha: float | None = None, dropout: float = 0.0) -> None:
    """Freeze the model, and add a float32 LoRA, drawn from torch's generator, to each target (a full module path).

    alpha: default the rank; the update is scaled by alpha / rank.
    """
    if not targets:
        raise ValueError("LoRA needs at least one target module")
    model.requires_grad_(False)
    scale = rank if alpha is None else alpha  # peft takes fractions
    for name, expert in components(model).items():
        prefix = f"experts.{name}." if isinstance(model, Experts) else ""
        if own := [target.removeprefix(prefix) for target in targets if target.startswith(prefix)]:
            settings = LoraConfig(r=rank, lora_alpha=scale, lora_dropout=dropout, target_modules=own)  # type: ignore[arg-type]
            expert.add_adapter(settings, ADAPTER_NAME)
    wrapped = list_adapted_modules(model)
    assert sorted(wrapped) == sorted(targets), sorted(set(wrapped) ^ set(targets))[:5]
    for parameter in trainable_parameters(model).values():
        parameter.data = parameter.data.float()


def list_adapted_modules(model: Model) -> list[str]:
    """Full paths of the modules that carry an adapter."""
    return [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]


def trainable_parameters(model: Model) -> dict[str, torch.nn.Parameter]:
    """Name -> parameter with gradients, in the model's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def save_lora(
    model: Model,
    directory: Path,
    family: str,
    metadata: Mapping[str, str] | None = None,
    formats: Sequence[AdapterFormat] = ("diffusers",),
) -> Path:
    """Write the adapter's file of each format to `directory`; returns the first one's path.

    metadata: further text for the files' headers (`latentpress.<key>`), which also have the family. The header of
    diffusers' file has the adapter's configuration, too, without which a pipeline would guess alpha.
    """
    tensors, settings = dict[str, torch.Tensor](), dict[str, Any]()
    for part, expert in components(model).items():
        if not list_adapted_modules(expert):
            continue
        state = get_peft_model_state_dict(expert, adapter_name=ADAPTER_NAME, save_embedding_layers=False)
        tensors |= {f"{part}.{name}": value.detach().cpu().contiguous() for name, value in state.items()}
        config = expert.peft_config[ADAPTER_NAME].to_dict()
        # peft may have shortened the paths to suffixes that are unambiguous in this model only.
        config["target_modules"] = sorted(list_adapted_modules(expert))
        # A pipeline adds layers in training mode and never calls eval(): a dropout would stay on at inference.
        config["lora_dropout"] = 0.0
        sets_sorted = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        settings |= {f"{part}.{key}": value for key, value in sets_sorted.items()}
    return write_formats(tensors, settings, directory, {"family": family, **(metadata or {})}, formats)


def load_initial(model: Model, file: AdapterFile) -> None:
    """Set the model's LoRA to that of a file, of the same rank. AdapterError where it adapts other modules."""
    own: dict[str, tuple[Any, Any]] = {
        f"{part}.{name}": (module.lora_A[ADAPTER_NAME].weight, module.lora_B[ADAPTER_NAME].weight)
        for part, expert in components(model).items()
        for name, module in expert.named_modules()
        if isinstance(module, LoraLayer)
    }
    if own.keys() != file.layers.keys():
        theirs = file.layers.keys()
        sides = (("the file", sorted(theirs - own.keys())), ("train.adapter.targets", sorted(own.keys() - theirs)))
        shown = (f"only {side} has {', '.join(names[:3])} ({len(names)} in all)" for side, names in sides if names)
        raise AdapterError(
            f"train.adapter.init: {file.path} adapts other modules than this run: {'; '.join(shown)}",
            "Set train.adapter.targets to the file's modules, or name an adapter of this model.",
        )
    check_fits(file, {name: (up.shape[0], *down.shape[1:]) for name, (down, up) in own.items()}, "the transformer")
    with torch.no_grad():
        for name, lora in load_layers(file).items():
            for parameter, value in zip(own[name], (lora.down, lora.up), strict=True):
                parameter.copy_(value.reshape(parameter.shape))


def save_full(model: Model, directory: Path) -> Path:
    """Write the transformer to `directory` for its `from_pretrained`; further experts into folders next to it."""
    for part, expert in components(model).items():
        folder = directory.with_name(part)
        expert.save_pretrained(folder)
        mode = (folder / "config.json").stat().st_mode & 0o777  # safetensors makes weights private to their owner
        for path in folder.glob("*.safetensors"):
            path.chmod(mode)
    return directory
