"""Export of trained weights to files that diffusers' pipelines load: a run's result, and a part of each checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from peft import PeftType
from safetensors import safe_open

from schemas.catalog import FAMILIES
from schemas.config.training import Adapter
from schemas.family import Task
from trainer.adapters.files import write_adapter
from trainer.adapters.header import DIFFUSERS_NAMES
from trainer.families.base import ModelFamily, on_meta
from trainer.run.sharded import gather_all, is_sharded
from trainer.setup.adapters import (
    ADAPTER_NAME,
    list_adapted_modules,
    lora_state,
    make_trainable,
    read_scales,
    trainable_parameters,
)
from trainer.setup.load import model_shape


def export_weights(
    model: Any,
    family: ModelFamily,
    task: Task,
    adapter: Adapter,
    part: str,
    folder: Path | None,
    notes: Mapping[str, str],
    comfyui_file: Path | None = None,
) -> dict[str, dict[str, str]]:
    """Write the adapter to `folder`, with `notes` in its header, or, for a full-rank run, the transformer to the folder
    `part` in it. Returns weights file, relative to `folder` -> key -> name of the parameter that the key holds.

    folder: None on processes that only take part in gathering a sharded model. comfyui_file: see `save_lora`.
    """
    if is_sharded(model.parameters()):
        model = gather_model(model, family, task, adapter, folder is not None)
    if folder is None:
        return {}
    if adapter.type != "full":
        save_lora(model, folder, notes["family"], notes, comfyui_file)
        names = {weight.data_ptr(): name for name, weight in trainable_parameters(model).items()}
        names_by_key = {f"transformer.{key}": names[tensor.data_ptr()] for key, tensor in lora_state(model).items()}
        return {LORA_WEIGHT_NAME_SAFE: names_by_key}
    save_full(model, folder / part)
    names_by_file: dict[str, dict[str, str]] = {}
    for path in sorted((folder / part).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names_by_file[f"{part}/{path.name}"] = {key: key for key in file.keys()}  # noqa: SIM118 (no mapping)
    return names_by_file


def gather_model(model: Any, family: ModelFamily, task: Task, adapter: Adapter, keep: bool) -> Any:
    """A model on the host with the unsharded weights that are saved; all other weights are on the meta device. Every
    process must call this function. keep: whether this process needs the model; False: returns None."""
    trained = trainable_parameters(model)
    state = gather_all(model.state_dict() if adapter.type == "full" else trained, keep)
    if not keep:
        return None
    with on_meta():
        full_model = family.untrained(model_shape(model))
        adapter = adapter.changed(init_weights="default")
        make_trainable(full_model, family, task, adapter, scales=read_scales(model))
    full_model.load_state_dict(state, strict=False, assign=True)
    if hasattr(model, "initial_lora"):  # with PiSSA and OLoRA
        full_model.initial_lora = model.initial_lora
    return full_model


def save_lora(
    model: Any,
    directory: Path,
    family: str,
    metadata: Mapping[str, str] | None = None,
    comfyui_file: Path | None = None,
) -> Path:
    """Write the adapter to `directory` in diffusers' format, and a LoKr in LyCORIS' format, too. Returns the path of
    diffusers' file.

    The header of diffusers' file also has the adapter's configuration, without which a pipeline would guess alpha.
    Names begin with "transformer." for either of two experts, since pipelines silently ignore other prefixes.

    metadata: text for the files' headers (`latentpress.<key>`), in addition to the family. comfyui_file: file for
    ComfyUI, or None.
    """
    state, config = file_contents(model)
    tensors = {f"transformer.{name}": value.detach().cpu().contiguous() for name, value in state.items()}
    # peft may have shortened the paths to suffixes that are unambiguous in this model only.
    config["target_modules"] = sorted(list_adapted_modules(model))
    sets_sorted = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    settings = {f"transformer.{key}": value for key, value in sets_sorted.items()}
    notes = {"family": family, **(metadata or {})}
    names = FAMILIES[family].comfyui_names if family in FAMILIES else DIFFUSERS_NAMES
    return write_adapter(tensors, settings, directory, notes, names, comfyui_file)


def file_contents(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The adapter's tensors and peft configuration. Loading them into the original base model gives this model."""
    state, config = lora_state(model), model.peft_config[ADAPTER_NAME].to_dict()
    if config["peft_type"] == PeftType.LOKR:
        return state, config
    # A pipeline adds layers in training mode and never calls eval(), so a dropout would stay active at inference.
    config["lora_dropout"] = 0.0
    config["init_lora_weights"] = True  # a pipeline applies it first, and pissa and olora would change its base
    initial = getattr(model, "initial_lora", None)
    if initial is None:
        return state, config
    # As the base W was replaced by W - s B0 A0, the change of W is s (B A - B0 A0): a LoRA of twice the rank, same s.
    for name, value in state.items():
        start = initial[name].to(value.device)
        state[name] = torch.cat([value, start]) if "lora_A" in name else torch.cat([value, -start], 1)
    factor = 2**0.5 if config["use_rslora"] else 2
    config |= {"r": 2 * config["r"], "lora_alpha": factor * config["lora_alpha"]}
    config["rank_pattern"] = {key: 2 * value for key, value in config["rank_pattern"].items()}
    config["alpha_pattern"] = {key: factor * value for key, value in config["alpha_pattern"].items()}
    return state, config


def save_full(model: Any, directory: Path) -> Path:
    """Write the transformer to `directory` for its `from_pretrained`."""
    model.save_pretrained(directory)
    mode = (directory / "config.json").stat().st_mode & 0o777  # safetensors makes files that only their owner can read
    for path in directory.glob("*.safetensors"):
        path.chmod(mode)
    return directory
