"""LoRA and LoKr through peft. A LoKr's update of a matrix is alpha / rank times the Kronecker product
of two small ones."""

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard, TypeVar

import torch
from peft import LoKrConfig, LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lokr.layer import Linear, LoKrLayer
from peft.tuners.tuners_utils import BaseTunerLayer

from trainer.adapters.header import AdapterError

ADAPTER_NAME = "default"
MUTATING_INITS = ("pissa", "olora")
WHOLE_PATHS = "Correct the regular expression, which must match whole paths, as '.*to_query' does."
T = TypeVar("T")
Model = Any  # a diffusers ModelMixin, which has no type annotations


def choose_targets(model: Model, patterns: Sequence[str], left_out: Sequence[torch.nn.Module] = ()) -> list[str]:
    """Full paths of the modules that LoRA can wrap (linear layers, convolutions without groups), that are not inside of
    those left out, and that a regular expression matches whole. AdapterError for a pattern without matches."""
    inside = {part for module in left_out for part in module.modules()}
    wrappable = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or (is_convolution(module) and module.groups == 1)
        if module not in inside
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
        r = _first_match(ranks, target, rank)
        scales[target] = r, _first_match(alphas, target, r if alpha is None else alpha)
    return scales


def _first_match(patterns: Mapping[str, T], path: str, default: T) -> T:
    return next((value for pattern, value in patterns.items() if re.fullmatch(pattern, path)), default)


def scale_settings(scales: Mapping[str, tuple[int, float]]) -> tuple[int, float, dict[str, Any]]:
    """The commonest rank and alpha, and peft's rank_pattern and alpha_pattern with the other modules' by full path."""
    [((rank, alpha), _)] = Counter(scales.values()).most_common(1)
    patterns: dict[str, dict[str, Any]] = {"rank_pattern": {}, "alpha_pattern": {}}
    for other in sorted({*scales.values()} - {(rank, alpha)}):
        # "^": peft looks for a suffix otherwise, and the same name may end paths of other ranks.
        key = "^(" + "|".join(re.escape(path) for path, scale in scales.items() if scale == other) + ")"
        patterns["rank_pattern"][key], patterns["alpha_pattern"][key] = other
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
    """Freeze the model, and add a float32 LoRA, drawn from torch's generator, to each target.

    scales: full module path -> rank and alpha; the update is scaled by alpha / rank, with rslora by alpha / sqrt(rank).
    init_weights: pissa and olora change the base weights, and leave a copy of their start for `save_lora`.
    """
    if not scales:
        raise ValueError("LoRA needs at least one target module")
    model.requires_grad_(False)
    r, lora_alpha, patterns = scale_settings(scales)
    with warnings.catch_warnings():
        # Of merging into torchao's tensors, and of peft's own way to save PiSSA: nothing here does either.
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
    """The adapter's tensors by peft's names, without the adapter's."""
    return get_peft_model_state_dict(model, adapter_name=ADAPTER_NAME, save_embedding_layers=False)


def list_adapted_modules(model: Model) -> list[str]:
    """Full paths of the modules that carry an adapter."""
    return [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]


def read_scales(model: Model) -> dict[str, tuple[int, float]]:
    """Full path of each module that carries an adapter -> its rank and alpha."""
    modules: dict[str, Any] = {name: model.get_submodule(name) for name in list_adapted_modules(model)}
    return {
        name: (
            module.r[ADAPTER_NAME],
            (module.alpha if isinstance(module, LoKrLayer) else module.lora_alpha)[ADAPTER_NAME],
        )
        for name, module in modules.items()
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


class KroneckerLinear(Linear):
    """peft's layer, without making the product: (w1 kron w2) x = w1 X w2^T with X the reshaped x, so that neither the
    product nor its gradient is in memory, and the base may be packed in 4 bits, whose shape peft would take for the
    product's."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)
        result = self.base_layer(x, *args, **kwargs)
        sides = (self.lokr_w1, self.lokr_w1_a, self.lokr_w1_b), (self.lokr_w2, self.lokr_w2_a, self.lokr_w2_b)
        for name in self.active_adapters:
            w1, w2 = (whole[name] if name in whole else a[name] @ b[name] for whole, a, b in sides)
            x_MN = x.to(w1.dtype).unflatten(-1, (w1.shape[1], w2.shape[1]))
            update = (w1 @ (x_MN @ w2.T)).flatten(-2)  # (..., M, K) -> (..., L, K) -> (..., L * K)
            result = result + self.scaling[name] * update
        return result.to(x.dtype)


def add_lokr(
    model: Any, scales: Mapping[str, tuple[int, float]], decompose_factor: int = -1, decompose_both: bool = False
) -> None:
    """Freeze the model, and add a float32 LoKr, drawn from torch's generator, to each target.

    scales: full module path -> rank and alpha. decompose_factor: the first factor of each side; -1: near its root.
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
