"""What is trained of a model: a LoRA, or every weight."""

from typing import Any

from schemas.config.training import Adapter
from trainer.adapter_header import read_initial
from trainer.families.base import FamilyModule
from trainer.setup import adapters


def make_trainable(model: Any, family: FamilyModule, adapter: Adapter, weight_precision: str = "float32") -> None:
    """Add a LoRA, or unfreeze every weight. ValueError where a target matches nothing, AdapterError where the initial
    adapter does not fit."""
    if adapter.type == "full":
        model.requires_grad_(True)
        if weight_precision == "float32":
            model.float()  # the master weights; autocast computes
    else:
        targets = adapters.choose_targets(model, adapter.targets or [family.LORA_TARGETS])
        adapters.add_lora(model, targets, adapter.rank, adapter.alpha, adapter.dropout)
        if initial := read_initial(adapter):
            adapters.load_initial(model, initial)
