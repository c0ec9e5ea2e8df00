"""What makes a run fit the card that is there, by the same prediction."""

from collections.abc import Callable, Iterator

import torch
from pydantic import ValidationError

from schemas.config.pipeline import Config
from schemas.config.training import Parallel, Train
from trainer.memory_estimate import MemoryEstimate

#: of a card, for the CUDA context, kernels' own memory and fragments
RESERVED = 1 << 30


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
    shown, need = [], found.device
    for change, smaller in list_changes(config, ranks, predict):
        if smaller.device >= need:
            continue
        need = smaller.device
        shown.append(f"{change} ({gib(need + RESERVED)})")
        if need + RESERVED <= size:
            break
    said = (
        f"the run would need {gib(found.device + RESERVED)} on the device, 1 GiB of it for CUDA and its kernels, and "
        f"{name} has {gib(size)}."
    )
    if shown:
        said += f" It would need less with {', and with '.join(shown)}."
    if need + RESERVED > size:
        said += " A smaller train.base_precision, train.adapter.rank, smaller buckets or fewer frames take less."
    return said


def list_changes(
    config: Config, ranks: int, predict: Callable[[Config], MemoryEstimate]
) -> Iterator[tuple[str, MemoryEstimate]]:
    """Options that change nothing of what is trained, each with the prediction for it and those before it."""
    settings = config.train
    changes: dict[str, dict[str, object]] = {
        "train.gradient_checkpointing true of every block": {
            "gradient_checkpointing": True,
            "gradient_checkpointing_interval": 1,
        },
        "train.offload.activations true": {"offload": {**settings.offload.model_dump(), "activations": True}},
    }
    if ranks == 1:
        changes["train.offload.blocks true"] = {"offload": {"activations": True, "blocks": True}}
    else:
        changes["train.parallel.strategy fsdp2"] = {"parallel": Parallel(strategy="fsdp2").model_dump()}
    for change, values in changes.items():
        if all(getattr(settings, key) == value for key, value in values.items()):
            continue
        try:
            settings = Train.model_validate({**settings.model_dump(by_alias=True), **values})
        except ValidationError:  # such as block offload of full rank
            continue
        yield change, predict(config.model_copy(update={"train": settings}))


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
