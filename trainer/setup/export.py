"""What is trained, in files that diffusers' pipelines load: a run's result, and a part of each checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from safetensors import safe_open

from schemas.config.adapter import AdapterFormat
from schemas.config.pipeline import Config
from trainer.families.base import Experts, FamilyModule, components
from trainer.run.sharded import gather_all, is_sharded
from trainer.setup import adapters
from trainer.setup.attach import make_trainable
from trainer.setup.load import model_shape


def export_weights(
    model: Any,
    family: FamilyModule,
    config: Config,
    folder: Path | None,
    notes: Mapping[str, str],
    formats: Sequence[AdapterFormat],
) -> dict[str, dict[str, str]]:
    """Write an adapter in each format, with `notes` in its header, or transformer/ of a full-rank run, to `folder`.
    Returns each file of weights, relative to `folder`: its keys and the parameters that they hold.

    folder: None on processes that only take part in gathering a sharded model."""
    if is_sharded(model.parameters()):
        model = gather_model(model, family, config, folder is not None)
    if folder is None:
        return {}
    if config.train.adapter.type != "full":
        adapters.save_lora(model, folder, config.model.family, notes, formats)
        names = {weight.data_ptr(): name for name, weight in model.named_parameters() if weight.requires_grad}
        held: dict[str, str] = {}
        for part, expert in components(model).items():
            if adapters.list_adapted_modules(expert):
                own = adapters.lora_state(expert)
                held |= {f"{part}.{key}": names[tensor.data_ptr()] for key, tensor in own.items()}
        return {LORA_WEIGHT_NAME_SAFE: held} if "diffusers" in formats else {}
    adapters.save_full(model, folder / "transformer")
    written: dict[str, dict[str, str]] = {}
    for part in components(model):
        prefix = f"experts.{part}." if isinstance(model, Experts) else ""
        for path in sorted((folder / part).glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                written[f"{part}/{path.name}"] = {key: prefix + key for key in file.keys()}  # noqa: SIM118 (no mapping)
    return written


def gather_model(model: Any, family: FamilyModule, config: Config, keep: bool) -> Any:
    """A model on the host with the whole weights that are saved, the others on the meta device; None where not kept.
    Every process calls it."""
    adapter = config.train.adapter
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    state = gather_all(model.state_dict() if adapter.type == "full" else trained, keep)
    if not keep:
        return None
    with torch.device("meta"):
        whole = family.untrained(model_shape(model))
        adapter = adapter.model_copy(update={"init_weights": "default"})
        make_trainable(whole, family, adapter, scales=adapters.read_scales(model))
    whole.load_state_dict(state, strict=False, assign=True)
    for expert, saved in zip(components(model).values(), components(whole).values(), strict=True):
        if hasattr(expert, "initial_lora"):  # of PiSSA and OLoRA
            saved.initial_lora = expert.initial_lora
    return whole
