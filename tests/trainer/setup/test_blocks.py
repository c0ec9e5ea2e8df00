"""Checkpointing, offload and compilation change the place and time of computation and memory, and no numbers."""

import re
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from cache.runs.training_run import RunError
from schemas.cli.console import Console
from tests.forms import long
from tests.trainer.runs import prepared
from trainer import train as loop
from trainer.run import metrics
from trainer.setup import blocks

STEPS = 2


def note(calls: list[int], number: int, *_: object) -> None:
    calls.append(number)


def train(config) -> dict:
    """Loss of each step, the validation picture, and the trained weights after each step."""
    run = prepared(config)
    trained, take = [], run.optimizer.step
    run.optimizer.step = lambda: (take(), trained.append({k: v.detach().clone() for k, v in run.trainable.items()}))
    loop.train_loop(run)
    folder = config.run_folder
    losses = [line["loss"] for line in metrics.read_metrics(folder / "metrics.jsonl") if "loss" in line]
    latent = load_file(folder / "validation" / f"step-{STEPS:06d}" / "one.safetensors")["latent"]
    return {"losses": losses, "shown": latent, "trained": trained}


OPTIONS = {
    "half of the blocks": {"gradient_checkpointing_interval": 2},
    "activations": {"offload": {"activations": True}, "gradient_checkpointing": False},
    "inputs of blocks": {"offload": {"activations": True}},
    "both": {"offload": {"blocks": True, "activations": True}},
    "groups that do not divide": {"offload": {"blocks": True, "blocks_per_group": 2}},
    "one group": {"offload": {"blocks": True, "blocks_per_group": 3}},
}
SHORT = ("activations", "both", "groups that do not divide")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "t2i",
        *map(long, ("sana", "z-image", "qwen-image", "wan", "flux2-klein", "krea2", "flux3", "edit-plus-i2i")),
        *map(long, ("qwen-image-2.1", "qwen-image-2.1-i2i")),
    ],
)
def test_no_option_changes_a_loss_a_picture_or_what_a_step_trains(ready, is_long, kind) -> None:
    # The steps of AdamW with its usual eps depend on the sign of gradients that are only rounding.
    optimizer = {"eps": 1e-3}
    train_options = {
        "batch_size": 1 if kind == "sana" else 2,
        "steps": STEPS,
        "adapter": {"rank": 2},
        "optimizer": optimizer,
    }
    look = {"validation": {"eval_samples": 0}}
    plain = ready(kind, name="plain", gradient_checkpointing=False, **look, **train_options)
    expected = train(plain)
    for name in OPTIONS if is_long else SHORT:
        config = ready(kind, name=name, **look, **train_options, **OPTIONS[name])
        result = train(config)
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5), name
        # A different last bit in the weights is visible in a picture of several steps.
        torch.testing.assert_close(result["shown"], expected["shown"], rtol=1e-4, atol=5e-5)
        assert len(result["trained"]) == STEPS
        for before, after in zip(result["trained"], result["trained"][1:], strict=False):
            assert all(not torch.equal(before[key], after[key]) for key in before if "lora_B" in key), name
        for key, value in expected["trained"][-1].items():
            torch.testing.assert_close(result["trained"][-1][key], value, rtol=1e-3, atol=1e-4, msg=f"{name}: {key}")


@pytest.mark.slow
def test_every_nth_block_is_computed_again(ready) -> None:
    for interval in (1, 2):
        config = ready("t2i", name=str(interval), gradient_checkpointing_interval=interval)
        run = prepared(config)
        blocks, began = run.family.blocks(run.model, run.config.model.task), []
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(note, began, number))
        loop.train_step(run, run.loader.step(0))
        assert began[: len(blocks)] == [*range(len(blocks))]
        assert sorted(began[len(blocks) :]) == [*range(0, len(blocks), interval)]


@pytest.mark.slow
def test_what_the_device_lacks_is_refused_before_a_model_is_loaded(ready, make_config, capsys) -> None:
    config = ready("t2i", compile="blocks", compile_backend="none")
    with pytest.raises(RunError, match="has no backend 'none'") as caught:
        prepared(config, Console())
    assert caught.value.next_step and "loading the transformer" not in capsys.readouterr().err
    settings = make_config("t2i", offload={"blocks": True}).train
    with pytest.raises(RunError, match=r"train\.offload\.blocks: .* 2 processes"):
        blocks.check_offload(settings.offload, settings.parallel, 2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("t2i", 3),
        *(long(kind, 2) for kind in ("sana", "qwen-image", "qwen-image-2.1", "edit-plus-i2i", "wan")),
        *(long(kind, 3) for kind in ("z-image", "flux2-klein", "krea2", "flux3")),
    ],
)
def test_compiled_blocks_train_as_others_do_and_their_graphs_are_counted(ready, kind, expected, capsys) -> None:
    """Also with weights on the host. A class of blocks has one graph, or two if the first block's input has no
    gradient, for any number of blocks; the recomputation needs no further graph."""
    result = []
    for name, options in (
        ("plain", {}),
        ("compiled", {"compile": "blocks", "compile_backend": "eager", "offload": {"blocks": True}}),
    ):
        config = ready(kind, name=name, steps=1, adapter={"rank": 2}, **options)
        torch.compiler.reset()
        run = prepared(config, Console())
        numbers = loop.finish_step(run, loop.train_step(run, run.loader.step(0)))
        log = capsys.readouterr().err
        graphs = [int(number) for number in re.findall(r"torch.compile: graph (\d+) of the blocks", log)]
        assert len(graphs) == (0 if name == "plain" else expected), "two blocks of images, one of text; three of Sana"
        result.append((numbers["loss"], numbers["grad_norm"]))
    assert result[1] == pytest.approx(result[0], rel=1e-4)
