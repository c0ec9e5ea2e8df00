"""LoRA through peft, and saving results in the formats that diffusers' pipelines load."""

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import torch
from peft import LoraConfig, PeftType, get_peft_model_state_dict
from peft.tuners.lokr import LoKrLayer
from peft.tuners.tuners_utils import BaseTunerLayer

from schemas.config.adapter import AdapterFormat
from trainer.adapters.files import write_formats
from trainer.adapters.header import AdapterError
from trainer.families.base import Experts, components

ADAPTER_NAME = "default"
MUTATING_INITS = ("pissa", "olora")
WHOLE_PATHS = "Correct the regular expression, which must match whole paths, as '.*to_query' does."
Model = Any  # a diffusers ModelMixin with PeftAdapterMixin, which has no type annotations


def choose_targets(model: Model, patterns: Sequence[str]) -> list[str]:
    """Full paths of the modules that LoRA can wrap (linear layers, convolutions without groups) and that a regular
    expression matches whole. AdapterError for a pattern without matches."""
    wrappable = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or (is_convolution(module) and module.groups == 1)
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
    """Target -> its rank and alpha: those of the first pattern that matches its path whole, else `rank` and `alpha`.

    alpha: default each module's own rank. AdapterError for a pattern that matches no target.
    """
    ranks, alphas = rank_pattern or {}, alpha_pattern or {}
    for option, patterns in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        for pattern in patterns:
            if not any(re.fullmatch(pattern, target) for target in targets):
                raise AdapterError(
                    f"train.adapter.{option}: {pattern!r} matches no target whole; targets are "
                    f"{', '.join(targets[:4])}, ... ({len(targets)} in all)",
                    WHOLE_PATHS,
                )
    scales = {}
    for target in targets:
        own = next((ranks[pattern] for pattern in ranks if re.fullmatch(pattern, target)), rank)
        default = own if alpha is None else alpha
        scales[target] = own, next((alphas[one] for one in alphas if re.fullmatch(one, target)), default)
    return scales


def scale_settings(scales: Mapping[str, tuple[int, float]]) -> tuple[int, float, dict[str, Any]]:
    """The commonest rank and alpha, and peft's rank_pattern and alpha_pattern with the other modules' by full path."""
    [((rank, alpha), _)] = Counter(scales.values()).most_common(1)
    patterns: dict[str, dict[str, Any]] = {"rank_pattern": {}, "alpha_pattern": {}}
    for other in sorted({*scales.values()} - {(rank, alpha)}):
        # "^": peft looks for a suffix otherwise, and the same name may end paths of other ranks.
        key = "^(" + "|".join(re.escape(path) for path, scale in scales.items() if scale == other) + ")"
        patterns["rank_pattern"][key], patterns["alpha_pattern"][key] = other
    return rank, alpha, patterns


def scales_by_component(
    model: Model, scales: Mapping[str, tuple[int, float]]
) -> Iterator[tuple[Model, dict[str, tuple[int, float]]]]:
    """Each transformer of the model that has targets, and these by their paths in it."""
    for name, expert in components(model).items():
        prefix = f"experts.{name}." if isinstance(model, Experts) else ""
        if own := {path.removeprefix(prefix): scale for path, scale in scales.items() if path.startswith(prefix)}:
            yield expert, own


def is_convolution(module: torch.nn.Module) -> TypeGuard[torch.nn.Conv2d]:
    return isinstance(module, torch.nn.Conv2d)


def add_lora(
    model: Model,
    targets: Sequence[str],
    rank: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    *,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    rslora: bool = False,
    dora: bool = False,
    init_weights: str = "default",
) -> None:
    """`add_scaled_lora` to each target (a full module path), with the ranks and alphas of `choose_scales`."""
    scales = choose_scales(targets, rank, alpha, rank_pattern, alpha_pattern)
    add_scaled_lora(model, scales, dropout, rslora=rslora, dora=dora, init_weights=init_weights)


def add_scaled_lora(
    model: Model,
    scales: Mapping[str, tuple[int, float]],
    dropout: float = 0.0,
    *,
    rslora: bool = False,
    dora: bool = False,
    init_weights: str = "default",
) -> None:
    """Freeze the model, and add a float32 LoRA, drawn from torch's generator, to each target.

    scales: full module path -> rank and alpha; the update is scaled by alpha / rank, with rslora by alpha / sqrt(rank).
    init_weights: pissa and olora change the base weights, and leave a copy of their start for `save_lora`.
    """
    if not scales:
        raise ValueError("LoRA needs at least one target module")
    model.requires_grad_(False)
    for expert, own in scales_by_component(model, scales):
        r, lora_alpha, patterns = scale_settings(own)
        with warnings.catch_warnings():
            # Of merging into torchao's tensors, and of peft's own way to save PiSSA: nothing here does either.
            warnings.filterwarnings("ignore", "TorchaoLoraLinear was instantiated without", UserWarning)
            warnings.filterwarnings("ignore", "Using Rank-Stabilized LoRA with rank_pattern", UserWarning)
            settings = LoraConfig(
                r=r,
                lora_alpha=lora_alpha,  # type: ignore[arg-type]  # peft takes fractions
                lora_dropout=dropout,
                target_modules=[*own],
                use_rslora=rslora,
                use_dora=dora,
                init_lora_weights=True if init_weights == "default" else init_weights,  # type: ignore[arg-type]
                **patterns,
            )
            expert.add_adapter(settings, ADAPTER_NAME)
        if init_weights in MUTATING_INITS:
            expert.initial_lora = {name: value.detach().cpu().clone() for name, value in lora_state(expert).items()}
    finish_adapter(model, [*scales])


def finish_adapter(model: Model, targets: Sequence[str]) -> None:
    """Check that the targets have an adapter, and make its weights float32."""
    wrapped = list_adapted_modules(model)
    assert sorted(wrapped) == sorted(targets), sorted(set(wrapped) ^ set(targets))[:5]
    for parameter in trainable_parameters(model).values():
        parameter.data = parameter.data.float()


def lora_state(expert: Model) -> dict[str, torch.Tensor]:
    """The adapter's tensors by peft's names, without the adapter's."""
    return get_peft_model_state_dict(expert, adapter_name=ADAPTER_NAME, save_embedding_layers=False)


def list_adapted_modules(model: Model) -> list[str]:
    """Full paths of the modules that carry an adapter."""
    return [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]


def read_scales(model: Model) -> dict[str, tuple[int, float]]:
    """Full path of each module that carries an adapter -> its rank and alpha."""
    modules: dict[str, Any] = {name: model.get_submodule(name) for name in list_adapted_modules(model)}
    return {
        name: (each.r[ADAPTER_NAME], (each.alpha if isinstance(each, LoKrLayer) else each.lora_alpha)[ADAPTER_NAME])
        for name, each in modules.items()
    }


def trainable_parameters(model: Model) -> dict[str, torch.nn.Parameter]:
    """Name -> parameter with gradients, in the model's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@contextmanager
def adapter_off(model: Model) -> Iterator[None]:
    """The model without its LoRA or LoKr. Its weights keep `requires_grad`, which peft takes from them: `fully_shard`
    looks at it once, in the first forward pass."""
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


def save_lora(
    model: Model,
    directory: Path,
    family: str,
    metadata: Mapping[str, str] | None = None,
    formats: Sequence[AdapterFormat] = ("diffusers",),
) -> Path:
    """Write the adapter's file of each format to `directory`, of a LoKr also LyCORIS'; returns the first's path.

    metadata: further text for the files' headers (`latentpress.<key>`), which also have the family. The header of
    diffusers' file has the adapter's configuration, too, without which a pipeline would guess alpha.
    """
    tensors, settings = dict[str, torch.Tensor](), dict[str, Any]()
    for part, expert in components(model).items():
        if not list_adapted_modules(expert):
            continue
        state, config = file_contents(expert)
        tensors |= {f"{part}.{name}": value.detach().cpu().contiguous() for name, value in state.items()}
        # peft may have shortened the paths to suffixes that are unambiguous in this model only.
        config["target_modules"] = sorted(list_adapted_modules(expert))
        sets_sorted = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        settings |= {f"{part}.{key}": value for key, value in sets_sorted.items()}
    return write_formats(tensors, settings, directory, {"family": family, **(metadata or {})}, formats)


def file_contents(expert: Model) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The adapter's tensors and peft configuration, such that loading them into the original base gives this model."""
    state, config = lora_state(expert), expert.peft_config[ADAPTER_NAME].to_dict()
    if config["peft_type"] == PeftType.LOKR:
        return state, config
    # A pipeline adds layers in training mode and never calls eval(): a dropout would stay on at inference.
    config["lora_dropout"] = 0.0
    config["init_lora_weights"] = True  # a pipeline would start with it, and pissa and olora would change its base
    initial = getattr(expert, "initial_lora", None)
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


def save_full(model: Model, directory: Path) -> Path:
    """Write the transformer to `directory` for its `from_pretrained`; further experts into folders next to it."""
    for part, expert in components(model).items():
        folder = directory.with_name(part)
        expert.save_pretrained(folder)
        mode = (folder / "config.json").stat().st_mode & 0o777  # safetensors makes weights private to their owner
        for path in folder.glob("*.safetensors"):
            path.chmod(mode)
    return directory
