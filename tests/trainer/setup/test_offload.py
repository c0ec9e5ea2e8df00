"""Block offload: the place of each weight, for any kind of weight, with unchanged numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.rehearsing.tiny_models import make_model
from tests.forms import long
from tests.trainer.pipelines import KINDS, make_batch
from tests.trainer.setup.test_quantize import NAMES, adapted, step
from trainer.setup import blocks
from trainer.setup.adapters import trainable_parameters
from trainer.setup.blocks import BlockGroup, GroupScheduler, copy_weight, offload_blocks
from trainer.setup.quantize import take_apart

CPU = torch.device("cpu")
KIND = "kandinsky5-image-t2i"
ADAPTERS = {"lora": {"type": "lora"}, "dora": {"type": "lora", "dora": True}, "lokr": {"type": "lokr"}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One text block and four image blocks, whose sides nf4-bnb can quantize."""
    folder = tmp_path_factory.mktemp("deep")
    shape = {"model_dim": 128, "visual_cond": False, "num_visual_blocks": 4}
    make_model("image", overrides=shape).save_pretrained(folder / "transformer")
    return folder


@pytest.fixture
def make(checkpoint: Path) -> Callable[..., Any]:
    """make(base_precision, adapter): a transformer in training, whose blocks are checkpointed."""

    def get(name: str | None = None, adapter: str = "lora") -> Any:
        model = adapted(KIND, checkpoint, name, torch.float32, **ADAPTERS[adapter]).train()
        blocks.checkpoint_blocks(model, blocks_of(model))
        return model

    return get


def blocks_of(model: Any) -> list[torch.nn.Module]:
    family, task = KINDS[KIND]
    return family.blocks(model, task)


def frozen(model: Any) -> dict[str, torch.nn.Parameter]:
    """Frozen weights of the blocks."""
    frozen_ids = {id(weight) for block in blocks_of(model) for weight in block.parameters() if not weight.requires_grad}
    return {name: weight for name, weight in model.named_parameters() if id(weight) in frozen_ids}


def settle(model: Any, blocks_per_group: int, prefetch: bool = False) -> GroupScheduler:
    scheduler = offload_blocks(model, blocks_of(model), CPU, blocks_per_group)
    scheduler.prefetch = prefetch  # like with streams, which a CPU does not have: copies are synchronous here
    return scheduler


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name == "nf4-bnb" else long(name) for name in (None, *NAMES)])
def test_loss_prediction_and_gradients_are_those_without_offload(make, is_long, name) -> None:
    for adapter in ADAPTERS if is_long else ("dora",):
        if adapter == "dora" and name == "int8-quanto":
            continue
        expected = step(KIND, make(name, adapter))
        for blocks_per_group in (1, 2, 5) if adapter == "lora" else (2,):
            model = make(name, adapter)
            scheduler = settle(model, blocks_per_group, prefetch=blocks_per_group == 2)
            for first, second in zip(step(KIND, model), expected, strict=True):
                assert torch.equal(first, second), (adapter, blocks_per_group)
            assert len(scheduler.groups) == {1: 5, 2: 3, 5: 1}[blocks_per_group]


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [long(False), True])
def test_a_group_comes_when_one_of_its_blocks_computes_in_either_direction(make, prefetch) -> None:
    model = make()
    home, trained = frozen(model), trainable_parameters(model)
    names = dict(model.named_parameters()).keys()
    scheduler = settle(model, 2, prefetch)
    states: list[list[bool]] = []
    blocks = blocks_of(model)
    numbers = {id(weight): number for number, block in enumerate(blocks) for weight in block.parameters()}
    group_of = {name: numbers[id(weight)] // 2 for name, weight in home.items()}

    def look(block: torch.nn.Module, *_: object) -> None:
        states.append([group.is_on_device for group in scheduler.groups])
        copied = {name for name, weight in model.named_parameters() if name in home and weight is not home[name]}
        assert copied == {name for name in home if scheduler.groups[group_of[name]].is_on_device}
        assert all(model.get_parameter(name) is weight for name, weight in trained.items())

    for block in blocks:
        # The hook of a part of the block is called after the block's weights are on the device.
        next(part for part in block.children() if not [*part.children()]).register_forward_pre_hook(look)
    step(KIND, model)
    positions = ["".join(str(number) for number, parts in enumerate(row) if parts) for row in states]
    changes = [position for position, before in zip(positions, ["", *positions], strict=False) if position != before]
    assert changes == (["01", "12", "2", "01", "0"] if prefetch else ["0", "1", "2", "1", "0"])
    at_home(model, home, names)
    with torch.no_grad():
        batch = make_batch(KIND, model)
        KINDS[KIND][0].predict(model.eval(), batch.latents_BCTHW, torch.tensor([0.3, 0.8]), batch, "t2i")
    at_home(model, home, names)


def at_home(model: Any, home: dict[str, torch.nn.Parameter], names: Any) -> None:
    """Whether every frozen weight is the host's, under its name."""
    result = dict(model.named_parameters())
    assert result.keys() == names and all(result[name] is weight for name, weight in home.items())


@pytest.mark.parametrize("name", [long(name) if name in (None, "fp8-torchao") else name for name in (None, *NAMES)])
def test_everything_that_a_weight_is_made_of_goes_to_the_device_and_the_host_keeps_its_own(make, name) -> None:
    """On torch's meta device, so that a part that stays on the host is detected."""
    model = make(name)
    host = {key: [part.clone() for part in take_apart(weight)[0]] for key, weight in frozen(model).items()}
    group = BlockGroup(blocks_of(model), torch.device("meta"), None)
    kinds = {type(weight) for weight in frozen(model).values()}
    group.onload()
    moved = dict(model.named_parameters())
    for key, before in host.items():
        parts = take_apart(moved[key])[0]
        assert [part.device.type for part in parts] == ["meta"] * len(before), key
        assert moved[key].device.type == "meta" and not moved[key].requires_grad
        assert [(part.shape, part.dtype) for part in parts] == [(part.shape, part.dtype) for part in before]
    assert {type(moved[key]) for key in host} == kinds
    assert all(weight.device.type == "cpu" for weight in trainable_parameters(model).values())
    group.offload()
    for key, weight in frozen(model).items():
        assert all(
            torch.equal(first, second) for first, second in zip(take_apart(weight)[0], host[key], strict=True)
        ), key


def test_a_copy_outlives_its_group(make) -> None:
    """torch's checkpointing does not copy the tensors that the backward pass keeps of bitsandbytes' weights."""
    weight = next(weight for weight in frozen(make("nf4-bnb")).values() if hasattr(weight, "quant_state"))
    moved = copy_weight(weight, torch.device("meta"))
    second = copy_weight(weight, CPU)
    assert moved.quant_state.absmax.is_meta and not second.quant_state.absmax.is_meta
    assert not weight.quant_state.absmax.is_meta
