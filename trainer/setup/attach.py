"""What is trained of a model: a LoRA, a LoKr, every weight, or a subset of the weights."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from schemas.config.adapter import Adapter
from trainer.adapters.header import AdapterError
from trainer.adapters.initial import read_initial
from trainer.families.base import FamilyModule
from trainer.setup import adapters, initial, lokr


def make_trainable(
    model: Any,
    family: FamilyModule,
    adapter: Adapter,
    weight_precision: str = "float32",
    scales: Mapping[str, tuple[int, float]] | None = None,
) -> None:
    """Add an adapter, or unfreeze weights. AdapterError where a target or pattern matches nothing, or the initial
    adapter does not fit.

    weight_precision: of full rank; float32 weights are computed with under autocast. scales: rank and alpha of an
    adapter by full module path, in place of those of the settings or the initial adapter, whose weights are then left.
    """
    if adapter.type == "full":
        unfreeze(model, adapter.targets)
        if weight_precision == "float32":
            model.float()
        return
    file = None
    if scales is None:
        if file := read_initial(adapter):
            file, scales = initial.fit_initial(model, file, adapter)
        else:
            targets = adapters.choose_targets(model, adapter.targets or [family.LORA_TARGETS])
            patterns = adapter.rank_pattern, adapter.alpha_pattern
            scales = adapters.choose_scales(targets, adapter.rank, adapter.alpha, *patterns)
    if adapter.type == "lokr":
        lokr.add_lokr(model, scales, adapter.decompose_factor, adapter.decompose_both)
    else:
        options: dict[str, Any] = {name: getattr(adapter, name) for name in ("rslora", "dora", "init_weights")}
        adapters.add_scaled_lora(model, scales, adapter.dropout, **options)
    if file:
        initial.load_weights(model, file)


def unfreeze(model: Any, targets: Sequence[str] | None) -> None:
    """Train the parameters that a pattern matches whole, by their own path or that of a module around them; None: all.
    AdapterError for a pattern without matches."""
    model.requires_grad_(targets is None)
    for pattern in targets or ():
        modules = [part for path, part in model.named_modules() if path and re.fullmatch(pattern, path)]
        own = [weight for path, weight in model.named_parameters() if re.fullmatch(pattern, path)]
        for part in (*modules, *own):
            part.requires_grad_(True)
        if not own and not any([*part.parameters()] for part in modules):
            examples = [path for path, _ in model.named_children()]
            raise AdapterError(
                f"train.adapter.targets: {pattern!r} matches no module with weights and no weight whole; the model's "
                f"modules begin with {', '.join(examples)}",
                adapters.WHOLE_PATHS,
            )
