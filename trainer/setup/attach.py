"""Attaching what is trained of a model: a LoRA, a LoKr, every weight, or a subset of the weights. An adapter's file to
start from (`train.adapter.init`) gives modules, ranks, alphas and weights.

An assistant (`model.assistant`) is a frozen LoRA with which a checkpoint that was distilled to few steps is trained. It
takes back the distillation: training steps and the eval loss compute with it, so that what is trained need not do that.
Samples are made without it, as what was trained is used later, and no file of the run has it. Ostris' training adapters
of distilled models are such files.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from schemas.config.training import Adapter
from trainer.adapters.files import check_finite, load_layers
from trainer.adapters.header import AdapterError, AdapterFile, check_fits, initial_scale, read_initial, resolve_names
from trainer.adapters.layers import DOWN, UP
from trainer.families.base import ModelFamily
from trainer.setup import adapters
from trainer.setup.adapters import choose_targets, lora_state

BUFFERS = ("assistant_down", "assistant_up")


def make_trainable(
    model: Any,
    family: ModelFamily,
    adapter: Adapter,
    weight_precision: str = "float32",
    scales: Mapping[str, tuple[int, float]] | None = None,
) -> None:
    """Add an adapter, or unfreeze weights. AdapterError where a target or pattern matches nothing, or the initial
    adapter does not fit.

    weight_precision: of full rank; float32 weights are computed with under autocast. scales: rank and alpha of an
    adapter by full module path, in place of those of the settings or the initial adapter, whose weights are then left.
    What the family names as `without_gradient` has no adapter and stays frozen.
    """
    if adapter.type == "full":
        unfreeze(model, adapter.targets, family)
        if weight_precision == "float32":
            model.float()
        return
    file = None
    if scales is None:
        if file := read_initial(adapter):
            file, scales = fit_initial(model, family, file, adapter)
        else:
            patterns = adapter.targets or [family.LORA_TARGETS]
            targets = adapters.choose_targets(model, patterns, family.without_gradient(model))
            scales = adapters.choose_scales(
                targets, adapter.rank, adapter.alpha, adapter.rank_pattern, adapter.alpha_pattern
            )
    if adapter.type == "lokr":
        adapters.add_lokr(model, scales, adapter.decompose_factor, adapter.decompose_both)
    else:
        options: dict[str, Any] = {name: getattr(adapter, name) for name in ("rslora", "dora", "init_weights")}
        adapters.add_lora(model, scales, adapter.dropout, **options)
    if file:
        load_weights(model, file)


def unfreeze(model: Any, targets: Sequence[str] | None, family: ModelFamily) -> None:
    """Train the parameters that a pattern matches whole, by their own path or that of a module around them; None: all.
    Those without a gradient stay frozen. AdapterError for a pattern without matches."""
    model.requires_grad_(targets is None)
    for pattern in targets or ():
        modules = [part for path, part in model.named_modules() if path and re.fullmatch(pattern, path)]
        weights = [weight for path, weight in model.named_parameters() if re.fullmatch(pattern, path)]
        for part in (*modules, *weights):
            part.requires_grad_(True)
        if not weights and not any([*part.parameters()] for part in modules):
            examples = [path for path, _ in model.named_children()]
            raise AdapterError(
                f"train.adapter.targets: {pattern!r} matches no module with weights and no weight whole; the model's "
                f"modules begin with {', '.join(examples)}",
                adapters.WHOLE_PATHS,
            )
    for part in family.without_gradient(model):
        part.requires_grad_(False)
    if not adapters.trainable_parameters(model):
        raise AdapterError(
            f"train.adapter.targets: {', '.join(map(repr, targets or ()))} chooses weights only on which no prediction "
            "depends",
            "Name modules of other blocks, or remove train.adapter.targets.",
        )


def fit_initial(
    model: Any, family: ModelFamily, file: AdapterFile, adapter: Adapter
) -> tuple[AdapterFile, dict[str, tuple[int, float]]]:
    """The file with module paths for names, and of each module that it adapts the full path, rank and alpha.
    AdapterError where the model has no such module or one of another size, or `train.adapter.targets` chooses others.
    What it has of modules without a gradient, which changes nothing, is left out.

    model: without an adapter, on any device, quantized or not.
    """
    paths = name_modules(model, [".*"])
    file = resolve_names(file, paths, "the transformer")
    left_out = family.without_gradient(model)
    unused = paths.keys() - name_modules(model, [".*"], left_out).keys()
    file = replace(file, layers={name: layer for name, layer in file.layers.items() if name not in unused})
    chosen = None if adapter.targets is None else name_modules(model, adapter.targets, left_out).keys()
    if chosen is not None and chosen != file.layers.keys():
        sides = (("the file", file.layers.keys() - chosen), ("train.adapter.targets", chosen - file.layers.keys()))
        shown = (
            f"only {side} has {', '.join(sorted(names)[:3])} ({len(names)} in all)" for side, names in sides if names
        )
        raise AdapterError(
            f"train.adapter.init: {file.path} adapts other modules than this run: {'; '.join(shown)}",
            "Remove train.adapter.targets, as training takes the file's modules, or name an adapter of this model.",
        )
    check_fits(file, {name: module_size(model.get_submodule(path)) for name, path in paths.items()}, "the transformer")
    layers = {path: file.layers[name] for name, path in paths.items() if name in file.layers}
    return file, {path: initial_scale(layer, adapter.rslora) for path, layer in layers.items()}


def name_modules(model: Any, patterns: Sequence[str], left_out: Sequence[torch.nn.Module] = ()) -> dict[str, str]:
    """ "transformer.<module path>" of the modules that the patterns choose -> full path."""
    return {f"transformer.{path}": path for path in choose_targets(model, patterns, left_out)}


def module_size(module: Any) -> tuple[int, int]:
    """Outputs and inputs of a linear layer, whose weight may be packed, or of a convolution."""
    if isinstance(module, torch.nn.Linear):
        return module.out_features, module.in_features
    return module.weight.shape[0], math.prod(module.weight.shape[1:])


def load_weights(model: Any, file: AdapterFile) -> None:
    """Set the model's adapter, which has what `fit_initial` said, to the file's weights. AdapterError where a LoKr
    divides matrices otherwise."""
    parameters = {f"transformer.{key}": value for key, value in lora_state(model).items()}
    held = {f"{name}.{end}": value for name, layer in load_layers(file).items() for end, value in layer.tensors.items()}
    if file.kind == "LoKr":
        ours, theirs = ({key: list(value.shape) for key, value in side.items()} for side in (parameters, held))
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                raise AdapterError(
                    f"train.adapter.init: {file.path} divides matrices otherwise than this run: {key} is "
                    f"{theirs.get(key, 'absent')} there and {ours.get(key, 'absent')} here",
                    "Set train.adapter.decompose_factor and decompose_both to those of its training, or merge it into "
                    "the model: latentpress export-adapter --merge --whole --to FOLDER",
                )
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(held[key].reshape(parameter.shape))


class Assistant:
    """A hook that adds the LoRA of a module to its output, while it is active; one for all modules of a model."""

    def __init__(self) -> None:
        self.active = True

    def __call__(self, module: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        if not self.active:
            return output
        down, up = module.assistant_down, module.assistant_up
        return output + F.linear(F.linear(inputs[0].to(down.dtype), down), up).to(output.dtype)


def add_assistant(model: Any, file: AdapterFile, dtype: torch.dtype) -> None:
    """Add the LoRA to a model, quantized or not, before what is trained is added. AdapterError where it does not fit.

    Its matrices are buffers in `dtype`, which are in no state_dict.
    """
    file, modules = match_modules(model, file)
    assistant = Assistant()
    for name, layer in load_layers(file).items():
        part = modules[name]
        matrices = {DOWN: layer.tensors[DOWN], UP: layer.scale * layer.tensors[UP].double()}
        for buffer, (end, matrix) in zip(BUFFERS, matrices.items(), strict=True):
            check_finite(matrix, dtype, f"model.assistant: {file.path}: {layer.keys[end]}")
            part.register_buffer(buffer, matrix.to(part.weight.device, dtype), persistent=False)
        part.register_forward_hook(assistant)
    model.assistant = assistant


def match_modules(model: Any, file: AdapterFile) -> tuple[AdapterFile, dict[str, Any]]:
    """The file with module paths for names, and the model's linear layers by them. AdapterError where the file adapts
    another module or one of another size. model: on any device, quantized or not."""
    parts = {name: model.get_submodule(path) for name, path in name_modules(model, [".*"]).items()}
    linear = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Linear)}
    file = resolve_names(file, linear, "the transformer")
    check_fits(file, {name: module_size(part) for name, part in linear.items()}, "the transformer")
    return file, linear


def assistant_bytes(model: Any) -> int:
    buffers = ((name.rpartition(".")[2], buffer) for name, buffer in model.named_buffers())
    return sum(buffer.numel() * buffer.element_size() for name, buffer in buffers if name in BUFFERS)
