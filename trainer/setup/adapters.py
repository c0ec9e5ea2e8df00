"""Selecting the trained parameters of a model: a LoRA, a LoKr, every weight, or a subset of the weights. An initial
adapter file (`train.adapter.init_from`) gives modules, ranks, alphas and weights.

LoRA and LoKr are peft's. A LoKr's update of a weight matrix is alpha / rank times the Kronecker product of two small
matrices.

An assistant (`model.assistant`) is a frozen LoRA for training a checkpoint that was distilled to few steps. It reverses
the distillation: training steps and the eval loss compute with the assistant, so that the trained adapter does not have
to learn the reversal. Samples are generated without the assistant, because the result is used without it later, and the
run does not save it. Ostris' training adapters for distilled models are such assistants. An adapter of few steps
(`validation.adapter`) is the opposite: a frozen LoRA with which only samples are generated.
"""

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from peft import LoKrConfig, LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lokr.layer import Linear, LoKrLayer
from peft.tuners.tuners_utils import BaseTunerLayer

from schemas.config.pipeline import Config
from schemas.config.training import Adapter
from schemas.family import Task
from trainer.adapters.files import check_finite, load_layers
from trainer.adapters.header import (
    AdapterError,
    AdapterFile,
    check_fits,
    initial_scale,
    read_frozen,
    read_initial,
    resolve_names,
)
from trainer.adapters.layers import DOWN, UP
from trainer.families.base import ModelFamily

ADAPTER_NAME = "default"
MUTATING_INITS = ("pissa", "olora")
WHOLE_PATHS = "Correct the regular expression, which must match whole paths, such as '.*to_query'."
T = TypeVar("T")
Model = Any  # a diffusers ModelMixin, which has no type annotations


def choose_targets(model: Model, patterns: Sequence[str], left_out: Sequence[torch.nn.Module] = ()) -> list[str]:
    """Full paths of the modules that LoRA can wrap (linear layers, convolutions without groups) and whose whole path
    matches one of the regular expressions `patterns`. AdapterError if a pattern matches no module.

    left_out: modules that are excluded together with their submodules.
    """
    excluded = {part for module in left_out for part in module.modules()}
    wrappable = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or (is_convolution(module) and module.groups == 1)
        if module not in excluded
    ]
    for pattern in patterns:
        if not any(re.fullmatch(pattern, name) for name in wrappable):
            raise AdapterError(
                f"train.adapter.targets: {pattern!r} matches no module that LoRA can wrap; such modules are "
                f"{', '.join(wrappable[:8])}, ... ({len(wrappable)} in all)",
                WHOLE_PATHS,
            )
    return [name for name in wrappable if any(re.fullmatch(pattern, name) for pattern in patterns)]


def choose_scales(
    targets: Sequence[str],
    rank: int,
    alpha: float | None = None,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
) -> dict[str, tuple[int, float]]:
    """Target -> (rank, alpha): the values of the first pattern that matches the whole path, else `rank` and `alpha`.
    AdapterError if a pattern matches no target.

    alpha: default alpha; None: each module's own rank.
    """
    ranks, alphas = rank_pattern or {}, alpha_pattern or {}
    for option, patterns in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        for pattern in patterns:
            if not any(re.fullmatch(pattern, target) for target in targets):
                raise AdapterError(
                    f"train.adapter.{option}: {pattern!r} matches the whole path of no target; targets are "
                    f"{', '.join(targets[:4])}, ... ({len(targets)} in all)",
                    WHOLE_PATHS,
                )
    scales = {}
    for target in targets:
        r = _first_match(ranks, target, rank)
        scales[target] = r, _first_match(alphas, target, r if alpha is None else alpha)
    return scales


def _first_match(patterns: Mapping[str, T], path: str, default: T) -> T:
    return next((value for pattern, value in patterns.items() if re.fullmatch(pattern, path)), default)


def scale_settings(scales: Mapping[str, tuple[int, float]]) -> tuple[int, float, dict[str, Any]]:
    """The most common rank and alpha, and peft's rank_pattern and alpha_pattern for the modules with other values, by
    full path."""
    [((rank, alpha), _)] = Counter(scales.values()).most_common(1)
    patterns: dict[str, dict[str, Any]] = {"rank_pattern": {}, "alpha_pattern": {}}
    for value in sorted({*scales.values()} - {(rank, alpha)}):
        # Without "^" peft would match suffixes, and a path of another rank may end with the same name.
        key = "^(" + "|".join(re.escape(path) for path, module_scale in scales.items() if module_scale == value) + ")"
        patterns["rank_pattern"][key], patterns["alpha_pattern"][key] = value
    return rank, alpha, patterns


def is_convolution(module: torch.nn.Module) -> TypeGuard[torch.nn.Conv2d]:
    return isinstance(module, torch.nn.Conv2d)


def add_lora(
    model: Model,
    scales: Mapping[str, tuple[int, float]],
    dropout: float = 0.0,
    *,
    rslora: bool = False,
    dora: bool = False,
    init_weights: str = "default",
) -> None:
    """Freeze the model, and add a float32 LoRA, initialized with torch's global generator, to each target.

    scales: full module path -> rank and alpha; the update is scaled by alpha / rank, with rslora by alpha / sqrt(rank).
    init_weights: initialization of the LoRA. pissa and olora change the base weights; a copy of the initial LoRA is
        then stored as `model.initial_lora` for `save_lora`.
    """
    if not scales:
        raise ValueError("LoRA needs at least one target module")
    model.requires_grad_(False)
    r, lora_alpha, patterns = scale_settings(scales)
    with warnings.catch_warnings():
        # These warnings are about merging into torchao's tensors and peft's own way to save PiSSA, both unused here.
        warnings.filterwarnings("ignore", "TorchaoLoraLinear was instantiated without", UserWarning)
        warnings.filterwarnings("ignore", "Using Rank-Stabilized LoRA with rank_pattern", UserWarning)
        settings = LoraConfig(
            r=r,
            lora_alpha=lora_alpha,  # type: ignore[arg-type]  # peft takes fractions
            lora_dropout=dropout,
            target_modules=[*scales],
            use_rslora=rslora,
            use_dora=dora,
            init_lora_weights=True if init_weights == "default" else init_weights,  # type: ignore[arg-type]
            **patterns,
        )
        inject_adapter_in_model(settings, model, ADAPTER_NAME)
    if init_weights in MUTATING_INITS:
        model.initial_lora = {name: value.detach().cpu().clone() for name, value in lora_state(model).items()}
    finish_adapter(model, [*scales])


def finish_adapter(model: Model, targets: Sequence[str]) -> None:
    """Check that the targets have an adapter, and make its weights float32."""
    wrapped = list_adapted_modules(model)
    assert sorted(wrapped) == sorted(targets), sorted(set(wrapped) ^ set(targets))[:5]
    for parameter in trainable_parameters(model).values():
        parameter.data = parameter.data.float()


def lora_state(model: Model) -> dict[str, torch.Tensor]:
    """The adapter's tensors by peft's keys, which do not contain the name of the adapter."""
    return get_peft_model_state_dict(model, adapter_name=ADAPTER_NAME, save_embedding_layers=False)


def list_adapted_modules(model: Model) -> list[str]:
    """Full paths of the modules that have an adapter."""
    return [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]


def read_scales(model: Model) -> dict[str, tuple[int, float]]:
    """Full path of each module that has an adapter -> (rank, alpha)."""
    modules: dict[str, Any] = {name: model.get_submodule(name) for name in list_adapted_modules(model)}
    return {
        name: (
            module.r[ADAPTER_NAME],
            (module.alpha if isinstance(module, LoKrLayer) else module.lora_alpha)[ADAPTER_NAME],
        )
        for name, module in modules.items()
    }


def trainable_parameters(model: Model) -> dict[str, torch.nn.Parameter]:
    """Name -> parameter that requires a gradient, in the model's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@contextmanager
def adapter_off(model: Model) -> Iterator[None]:
    """Context in which the model computes without its LoRA or LoKr. The adapter's weights keep `requires_grad`, which
    peft would unset: `fully_shard` reads it only once, in the first forward pass."""
    layers, trained = (
        [module for module in model.modules() if isinstance(module, BaseTunerLayer)],
        trainable_parameters(model),
    )
    assert layers, "the model has no adapter to switch off"
    for layer in layers:
        layer.enable_adapters(False)
    for parameter in trained.values():
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


class KroneckerLinear(Linear):
    """peft's LoKr layer without computing the Kronecker product: (w1 kron w2) x = w1 X w2^T, X being the reshaped x.
    Neither the product nor its gradient is in memory, and the base weight may be packed in 4 bits; peft's layer would
    reshape the product to the shape of the packed weight."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)
        result = self.base_layer(x, *args, **kwargs)
        sides = (self.lokr_w1, self.lokr_w1_a, self.lokr_w1_b), (self.lokr_w2, self.lokr_w2_a, self.lokr_w2_b)
        for name in self.active_adapters:
            w1, w2 = (full[name] if name in full else a[name] @ b[name] for full, a, b in sides)
            x_MN = x.to(w1.dtype).unflatten(-1, (w1.shape[1], w2.shape[1]))
            update = (w1 @ (x_MN @ w2.T)).flatten(-2)  # (..., M, K) -> (..., L, K) -> (..., L * K)
            result = result + self.scaling[name] * update
        return result.to(x.dtype)


def add_lokr(
    model: Any, scales: Mapping[str, tuple[int, float]], decompose_factor: int = -1, decompose_both: bool = False
) -> None:
    """Freeze the model, and add a float32 LoKr, initialized with torch's global generator, to each target.

    scales: full module path -> rank and alpha. decompose_factor: the first factor of each side of the weight; -1: the
    factor next to the side's square root. decompose_both: whether w1 may be factorized to the rank, too.
    """
    model.requires_grad_(False)
    rank, alpha, patterns = scale_settings(scales)
    config = LoKrConfig(
        r=rank,
        alpha=alpha,  # type: ignore[arg-type]  # peft takes fractions
        target_modules=[*scales],
        decompose_factor=decompose_factor,
        decompose_both=decompose_both,
        **patterns,
    )
    inject_adapter_in_model(config, model, ADAPTER_NAME)
    for path, layer in [*model.named_modules()]:
        if isinstance(layer, Linear):
            r, scale = scales[path]
            ours = KroneckerLinear(layer.get_base_layer(), ADAPTER_NAME, config=config, r=r, alpha=scale)
            model.set_submodule(path, ours)
    finish_adapter(model, [*scales])


#: Option of a frozen adapter -> buffers of its matrices.
BUFFERS = {
    "model.assistant": ("assistant_down", "assistant_up"),
    "validation.adapter": ("few_steps_down", "few_steps_up"),
}


def make_trainable(
    model: Any,
    family: ModelFamily,
    task: Task,
    adapter: Adapter,
    weight_precision: str = "float32",
    scales: Mapping[str, tuple[int, float]] | None = None,
) -> None:
    """Add an adapter, or unfreeze weights. Modules that the family lists as `without_gradient` get no adapter and stay
    frozen. AdapterError if a target or pattern matches no module, or if the initial adapter does not fit the model.

    weight_precision: dtype of the weights in full-rank training; float32 weights compute under autocast. scales: full
    module path -> rank and alpha of the adapter, instead of the values in the settings or the initial adapter; the
    weights of the initial adapter are not loaded then.
    """
    if adapter.type == "full":
        unfreeze(model, adapter.targets, family, task)
        if weight_precision == "float32":
            model.float()
        return
    file = None
    if scales is None:
        if file := read_initial(adapter):
            file, scales = fit_initial(model, family, task, file, adapter)
        else:
            patterns = adapter.targets or [family.LORA_TARGETS]
            targets = choose_targets(model, patterns, family.without_gradient(model, task))
            scales = choose_scales(targets, adapter.rank, adapter.alpha, adapter.rank_pattern, adapter.alpha_pattern)
    if adapter.type == "lokr":
        add_lokr(model, scales, adapter.decompose_factor, adapter.decompose_both)
    else:
        options: dict[str, Any] = {name: getattr(adapter, name) for name in ("rslora", "dora", "init_weights")}
        add_lora(model, scales, adapter.dropout, **options)
    if file:
        load_weights(model, file)


def unfreeze(model: Any, targets: Sequence[str] | None, family: ModelFamily, task: Task) -> None:
    """Make parameters trainable. Parameters without a gradient stay frozen. AdapterError if a pattern matches nothing.

    targets: regular expressions that match the whole path of a parameter or of a module that contains it; None: all
        parameters.
    """
    model.requires_grad_(targets is None)
    for pattern in targets or ():
        modules = [part for path, part in model.named_modules() if path and re.fullmatch(pattern, path)]
        weights = [weight for path, weight in model.named_parameters() if re.fullmatch(pattern, path)]
        for part in (*modules, *weights):
            part.requires_grad_(True)
        if not weights and not any([*part.parameters()] for part in modules):
            examples = [path for path, _ in model.named_children()]
            raise AdapterError(
                f"train.adapter.targets: {pattern!r} matches the whole path of no weight and no module with weights; "
                f"the model's top-level modules are {', '.join(examples)}",
                WHOLE_PATHS,
            )
    for part in family.without_gradient(model, task):
        part.requires_grad_(False)
    if not trainable_parameters(model):
        raise AdapterError(
            f"train.adapter.targets: {', '.join(map(repr, targets or ()))} selects only weights that do not affect the "
            "prediction",
            "Name modules of other blocks, or remove train.adapter.targets.",
        )


def fit_initial(
    model: Any, family: ModelFamily, task: Task, file: AdapterFile, adapter: Adapter
) -> tuple[AdapterFile, dict[str, tuple[int, float]]]:
    """The file with its layers by module path, and full path -> rank and alpha for each module that it adapts. Layers
    for modules without a gradient are left out, since they have no effect. AdapterError if the model does not have such
    a module, if the module has another size, or if `train.adapter.targets` selects other modules.

    model: transformer without an adapter, on any device, quantized or not.
    """
    paths = name_modules(model, [".*"])
    sizes = {name: module_size(model.get_submodule(path)) for name, path in paths.items()}
    file = resolve_names(file, sizes, "the transformer")
    left_out = family.without_gradient(model, task)
    unused = paths.keys() - name_modules(model, [".*"], left_out).keys()
    file = replace(file, layers={name: layer for name, layer in file.layers.items() if name not in unused})
    names = None if adapter.targets is None else name_modules(model, adapter.targets, left_out).keys()
    if names is not None and names != file.layers.keys():
        sides = (("the file", file.layers.keys() - names), ("train.adapter.targets", names - file.layers.keys()))
        differences = (
            f"only {side} has {', '.join(sorted(paths)[:3])} ({len(paths)} in all)" for side, paths in sides if paths
        )
        raise AdapterError(
            f"train.adapter.init_from: {file.path} adapts other modules than this run: {'; '.join(differences)}",
            "Remove train.adapter.targets to train the modules of the file, or name an adapter of this model.",
        )
    check_fits(file, sizes, "the transformer")
    layers = {path: file.layers[name] for name, path in paths.items() if name in file.layers}
    return file, {path: initial_scale(layer, adapter.rslora) for path, layer in layers.items()}


def name_modules(model: Any, patterns: Sequence[str], left_out: Sequence[torch.nn.Module] = ()) -> dict[str, str]:
    """ "transformer.<module path>" -> full path, for each module that the patterns select."""
    return {f"transformer.{path}": path for path in choose_targets(model, patterns, left_out)}


def module_size(module: Any) -> tuple[int, int]:
    """(outputs, inputs) of a linear layer, whose weight may be packed, or of a convolution."""
    if isinstance(module, torch.nn.Linear):
        return module.out_features, module.in_features
    return module.weight.shape[0], math.prod(module.weight.shape[1:])


def load_weights(model: Any, file: AdapterFile) -> None:
    """Copy the file's weights to the model's adapter, which has the modules, ranks and alphas that `fit_initial`
    returned. AdapterError if a LoKr in the file divides the matrices differently."""
    parameters = {f"transformer.{key}": value for key, value in lora_state(model).items()}
    values = {
        f"{name}.{end}": value for name, layer in load_layers(file).items() for end, value in layer.tensors.items()
    }
    if file.kind == "LoKr":
        ours, theirs = ({key: list(value.shape) for key, value in side.items()} for side in (parameters, values))
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                raise AdapterError(
                    f"train.adapter.init_from: {file.path} divides matrices differently: {key} is "
                    f"{theirs.get(key, 'absent')} in the file and {ours.get(key, 'absent')} in this run",
                    "Set train.adapter.decompose_factor and decompose_both to the file's values, or merge the file "
                    "into the model: latentpress export-adapter --merge --whole --to FOLDER",
                )
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(values[key].reshape(parameter.shape))


class FrozenAdapter:
    """A forward hook that adds the output of a module's LoRA to the module's output while the adapter is active. All
    modules of a model share one object. buffers: names of a module's buffers. is_active: whether training steps and the
    eval loss compute with the adapter; samples do the opposite (`families.base.sampling`)."""

    def __init__(self, buffers: tuple[str, str], is_active: bool) -> None:
        self.buffers, self.is_active = buffers, is_active

    def __call__(self, module: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        if not self.is_active:
            return output
        down, up = (getattr(module, name) for name in self.buffers)
        return output + F.linear(F.linear(inputs[0].to(down.dtype), down), up).to(output.dtype)


def add_frozen(model: Any, config: Config, dtype: torch.dtype) -> dict[str, AdapterFile]:
    """Add the LoRAs of `model.assistant` and `validation.adapter` to a model, quantized or not, before the trained
    adapter is added. Returns option -> adapter. AdapterError if an adapter does not fit the model.

    dtype: dtype of the LoRAs' matrices, which are buffers and not part of the state_dict.
    """
    files, model.frozen_adapters = read_frozen(config), []
    for option, unresolved in files.items():
        file, modules = match_modules(model, unresolved)
        adapter = FrozenAdapter(BUFFERS[option], is_active=option == "model.assistant")
        for name, layer in load_layers(file).items():
            part = modules[name]
            matrices = {DOWN: layer.tensors[DOWN], UP: layer.scale * layer.tensors[UP].double()}
            for buffer, (end, matrix) in zip(adapter.buffers, matrices.items(), strict=True):
                check_finite(matrix, dtype, f"{option}: {file.path}: {layer.keys[end]}")
                part.register_buffer(buffer, matrix.to(part.weight.device, dtype), persistent=False)
            part.register_forward_hook(adapter)
        model.frozen_adapters.append(adapter)
    return files


def match_modules(model: Any, file: AdapterFile) -> tuple[AdapterFile, dict[str, Any]]:
    """The file with its layers by module path, and the model's linear layers by the same names. AdapterError if the
    file adapts a module that the model does not have as a linear layer, or that has another size.

    model: transformer on any device, quantized or not.
    """
    parts = {name: model.get_submodule(path) for name, path in name_modules(model, [".*"]).items()}
    linear = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Linear)}
    sizes = {name: module_size(part) for name, part in linear.items()}
    file = resolve_names(file, sizes, "the transformer")
    check_fits(file, sizes, "the transformer")
    return file, linear


def frozen_bytes(model: Any) -> int:
    """Bytes of the matrices of `add_frozen`."""
    names = {name for buffers in BUFFERS.values() for name in buffers}
    buffers = ((name.rpartition(".")[2], buffer) for name, buffer in model.named_buffers())
    return sum(buffer.numel() * buffer.element_size() for name, buffer in buffers if name in names)
