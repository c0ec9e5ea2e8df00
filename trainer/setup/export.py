"""Export of what is trained to files that diffusers' pipelines load: a run's result, and a part of each checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from peft import PeftType
from safetensors import safe_open

from schemas.catalog import FAMILIES
from schemas.config.training import Adapter, AdapterFormat
from trainer.adapters.files import write_formats
from trainer.adapters.header import DIFFUSERS_NAMES
from trainer.families.base import ModelFamily
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
    adapter: Adapter,
    part: str,
    folder: Path | None,
    notes: Mapping[str, str],
    formats: Sequence[AdapterFormat],
) -> dict[str, dict[str, str]]:
    """Write an adapter in each format, with `notes` in its header, or of a full-rank run the transformer, in the folder
    `part`, to `folder`. Returns each file of weights, relative to `folder`: its keys and
    the parameters that they hold.

    folder: None on processes that only take part in gathering a sharded model."""
    if is_sharded(model.parameters()):
        model = gather_model(model, family, adapter, folder is not None)
    if folder is None:
        return {}
    if adapter.type != "full":
        save_lora(model, folder, notes["family"], notes, formats)
        names = {weight.data_ptr(): name for name, weight in trainable_parameters(model).items()}
        held = {f"transformer.{key}": names[tensor.data_ptr()] for key, tensor in lora_state(model).items()}
        return {LORA_WEIGHT_NAME_SAFE: held} if "diffusers" in formats else {}
    save_full(model, folder / part)
    written: dict[str, dict[str, str]] = {}
    for path in sorted((folder / part).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            written[f"{part}/{path.name}"] = {key: key for key in file.keys()}  # noqa: SIM118 (no mapping)
    return written


def gather_model(model: Any, family: ModelFamily, adapter: Adapter, keep: bool) -> Any:
    """A model on the host with the whole weights that are saved, the others on the meta device; None where not kept.
    Every process calls it."""
    trained = trainable_parameters(model)
    state = gather_all(model.state_dict() if adapter.type == "full" else trained, keep)
    if not keep:
        return None
    with torch.device("meta"):
        whole = family.untrained(model_shape(model))
        adapter = adapter.changed(init_weights="default")
        make_trainable(whole, family, adapter, scales=read_scales(model))
    whole.load_state_dict(state, strict=False, assign=True)
    if hasattr(model, "initial_lora"):  # of PiSSA and OLoRA
        whole.initial_lora = model.initial_lora
    return whole


def save_lora(
    model: Any,
    directory: Path,
    family: str,
    metadata: Mapping[str, str] | None = None,
    formats: Sequence[AdapterFormat] = ("diffusers",),
) -> Path:
    """Write the adapter's file of each format to `directory`, of a LoKr also LyCORIS'; returns the first's path.

    metadata: further text for the files' headers (`latentpress.<key>`), which also have the family. The header of
    diffusers' file has the adapter's configuration, too, without which a pipeline would guess alpha. Names begin with
    "transformer." whichever of two experts it is: of other prefixes, pipelines load nothing without a word.
    """
    state, config = file_contents(model)
    tensors = {f"transformer.{name}": value.detach().cpu().contiguous() for name, value in state.items()}
    # peft may have shortened the paths to suffixes that are unambiguous in this model only.
    config["target_modules"] = sorted(list_adapted_modules(model))
    sets_sorted = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    settings = {f"transformer.{key}": value for key, value in sets_sorted.items()}
    notes = {"family": family, **(metadata or {})}
    names = FAMILIES[family].comfyui_names if family in FAMILIES else DIFFUSERS_NAMES
    return write_formats(tensors, settings, directory, notes, formats, names)


def file_contents(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The adapter's tensors and peft configuration, such that loading them into the original base gives this model."""
    state, config = lora_state(model), model.peft_config[ADAPTER_NAME].to_dict()
    if config["peft_type"] == PeftType.LOKR:
        return state, config
    # A pipeline adds layers in training mode and never calls eval(): a dropout would stay on at inference.
    config["lora_dropout"] = 0.0
    config["init_lora_weights"] = True  # a pipeline would start with it, and pissa and olora would change its base
    initial = getattr(model, "initial_lora", None)
    if initial is None:
        return state, config
    # With W - s B0 A0 in place of W, the change of W is s (B A - B0 A0), a LoRA of twice the rank with the same s.
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
    mode = (directory / "config.json").stat().st_mode & 0o777  # safetensors makes weights private to their owner
    for path in directory.glob("*.safetensors"):
        path.chmod(mode)
    return directory
