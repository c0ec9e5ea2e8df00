"""What makes a run fit the card that is there, by the same prediction."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from pydantic import ValidationError

from schemas.config.pipeline import Config
from schemas.config.section import Section
from schemas.config.training import Train
from trainer.memory.estimate import MemoryEstimate

#: of a card, for the CUDA context, kernels' own memory and fragments
RESERVED = 1 << 30
LEAST_SAVED = 0.01  # share of what is needed, by an option that is named


def find_card(device: str) -> tuple[str, int] | None:
    """Name and bytes of the card that a run on `device` (auto, cpu, cuda or cuda:N) would use; None without one."""
    index = int(device.partition(":")[2] or 0)
    if device == "cpu" or not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    card = torch.cuda.get_device_properties(index)
    return card.name, card.total_memory


def explain_fit(
    config: Config,
    ranks: int,
    card: tuple[str, int],
    found: MemoryEstimate,
    predict: Callable[[Config], MemoryEstimate],
) -> str | None:
    """A warning where `found`, the prediction for `config`, exceeds the card, with the options that help; else None."""
    name, size = card
    if found.device + RESERVED <= size:
        return None
    train = [(label, {"train": values}) for label, values in list_changes(config.train, ranks).items()]
    shown, need = try_changes(config, train, found.device, size - RESERVED, lambda changed: predict(changed).device)
    said = (
        f"the run would need {gib(found.device + RESERVED)} on the device, 1 GiB of it for CUDA and its kernels, and "
        f"{name} has {gib(size)}."
    )
    if shown:
        said += f" {list_smaller(shown)}"
    if need + RESERVED > size:
        said += " A smaller train.base_precision, train.adapter.rank, smaller buckets or fewer frames take less."
    return said


def try_changes(
    config: Config,
    changes: Iterable[tuple[str, dict[str, Any]]],
    need: int,
    limit: int,
    predict: Callable[[Config], int],
) -> tuple[list[str], int]:
    """(the changes that each need fewer bytes than those before, with what they need; the least need). They add up, and
    the last one is the first within `limit`. changes: (label, section of the configuration -> keys)."""
    shown = []
    for label, sections in changes:
        try:
            values = {name: change_settings(getattr(config, name), keys) for name, keys in sections.items()}
        except ValidationError:  # such as block offload of full rank
            continue
        changed = config.model_copy(update=values)
        if changed == config or (smaller := predict(changed)) > need * (1 - LEAST_SAVED):
            continue
        need, config = smaller, changed
        shown.append(f"{label} ({gib(need + RESERVED)})")
        if need <= limit:
            break
    return shown, need


def list_smaller(shown: Sequence[str]) -> str:
    return f"It would need less with {', and with '.join(shown)}."


def list_changes(settings: Train, ranks: int) -> dict[str, dict[str, Any]]:
    """Options that change nothing of what is trained -> values of `train`, in the order in which they are tried."""
    every_block = {"gradient_checkpointing": True, "gradient_checkpointing_interval": 1}
    changes: dict[str, dict[str, Any]] = {"train.gradient_checkpointing true of every block": every_block}
    if settings.ema:
        changes["train.ema.device cpu"] = {"ema": {"device": "cpu"}}
    changes["train.offload.streams false"] = {"offload": {"streams": False}}
    changes["train.offload.blocks_per_group 1"] = {"offload": {"blocks_per_group": 1}}
    changes["train.offload.activations true"] = {"offload": {"activations": True}}
    if ranks == 1:
        changes["train.offload.blocks true"] = {**every_block, "offload": {"blocks": True}}
    else:
        changes["train.parallel.strategy fsdp2"] = {"parallel": {"strategy": "fsdp2"}}
        changes["train.parallel.reshard_after_forward true"] = {"parallel": {"reshard_after_forward": True}}
        changes["train.parallel.cpu_offload true"] = {"parallel": {"cpu_offload": True}}
    return changes


def change_settings(settings: Section, values: Mapping[str, Any]) -> Section:
    """`settings` with `values`, in which a section has the keys that change. ValidationError where they don't fit."""
    given = settings.model_dump(by_alias=True)
    for key, value in values.items():
        given[key] = {**given[key], **value} if isinstance(value, dict) else value
    return type(settings).model_validate(given)


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
