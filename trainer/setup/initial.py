"""Starting from an adapter's file (`train.adapter.init`): modules, ranks, alphas and weights are the file's."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from schemas.config.adapter import Adapter
from trainer.adapters.files import load_layers
from trainer.adapters.header import AdapterError, AdapterFile, check_fits, resolve_names
from trainer.adapters.initial import initial_scale
from trainer.families.base import Experts, components
from trainer.setup.adapters import choose_targets, lora_state


def fit_initial(model: Any, file: AdapterFile, adapter: Adapter) -> tuple[AdapterFile, dict[str, tuple[int, float]]]:
    """The file with module paths for names, and of each module that it adapts the full path, rank and alpha.
    AdapterError where the model has no such module or one of another size, or `train.adapter.targets` chooses others.

    model: without an adapter, on any device, quantised or not.
    """
    paths = _name_modules(model, [".*"])
    file = resolve_names(file, paths, "the transformer")
    if adapter.targets is not None and (chosen := _name_modules(model, adapter.targets).keys()) != file.layers.keys():
        sides = (("the file", file.layers.keys() - chosen), ("train.adapter.targets", chosen - file.layers.keys()))
        shown = (f"only {side} has {', '.join(sorted(own)[:3])} ({len(own)} in all)" for side, own in sides if own)
        raise AdapterError(
            f"train.adapter.init: {file.path} adapts other modules than this run: {'; '.join(shown)}",
            "Remove train.adapter.targets, as training takes the file's modules, or name an adapter of this model.",
        )
    check_fits(file, {name: module_size(model.get_submodule(path)) for name, path in paths.items()}, "the transformer")
    layers = {path: file.layers[name] for name, path in paths.items() if name in file.layers}
    return file, {path: initial_scale(layer, adapter.rslora) for path, layer in layers.items()}


def _name_modules(model: Any, patterns: Sequence[str]) -> dict[str, str]:
    """ "<component>.<module path>" of the modules that the patterns choose -> full path."""
    several = isinstance(model, Experts)
    return {
        path.removeprefix("experts.") if several else f"transformer.{path}": path
        for path in choose_targets(model, patterns)
    }


def module_size(module: Any) -> tuple[int, int]:
    """Outputs and inputs of a linear layer, whose weight may be packed, or of a convolution."""
    if isinstance(module, torch.nn.Linear):
        return module.out_features, module.in_features
    return module.weight.shape[0], math.prod(module.weight.shape[1:])


def load_weights(model: Any, file: AdapterFile) -> None:
    """Set the model's adapter, which has what `fit_initial` said, to the file's weights. AdapterError where a LoKr
    divides matrices otherwise."""
    own = {
        f"{part}.{key}": each for part, expert in components(model).items() for key, each in lora_state(expert).items()
    }
    held = {f"{name}.{end}": each for name, layer in load_layers(file).items() for end, each in layer.tensors.items()}
    if file.kind == "LoKr":
        ours, theirs = ({key: list(each.shape) for key, each in side.items()} for side in (own, held))
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                raise AdapterError(
                    f"train.adapter.init: {file.path} divides matrices otherwise than this run: {key} is "
                    f"{theirs.get(key, 'absent')} there and {ours.get(key, 'absent')} here",
                    "Set train.adapter.decompose_factor and decompose_both to those of its training, or merge it into "
                    "the model: latentpress export-adapter --merge --whole --to FOLDER",
                )
    with torch.no_grad():
        for key, parameter in own.items():
            parameter.copy_(held[key].reshape(parameter.shape))
