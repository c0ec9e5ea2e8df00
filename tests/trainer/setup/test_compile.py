"""Compiled blocks compute what blocks compute, and the graphs that they need are counted."""

import re

import pytest
import torch

from cache.order.schedule import BatchSchedule
from schemas.cli.console import Console
from tests.forms import long
from tests.trainer.runs import opened
from trainer import train as loop
from trainer.setup.blocks import compile_blocks


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t2i", long("sana")])
def test_compiled_blocks_train_as_others_do_and_their_graphs_are_counted(make_config, make_set, kind, capsys) -> None:
    """Also where their weights are on the host. A class of blocks is one graph, or two where the first block's input
    has no gradient, however many blocks there are, and computing them again needs no other."""
    found = []
    for name, options in (
        ("plain", {}),
        ("compiled", {"compile": "blocks", "compile_backend": "eager", "offload": {"blocks": True}}),
    ):
        config = make_config(kind, name=name, steps=1, adapter={"rank": 2}, **options)
        make_set(config)
        data = opened(config)
        torch.compiler.reset()
        run = loop.prepare_training(config, data, BatchSchedule(data.spans, 0, 1, 1), Console(), "cpu")
        numbers = loop.train_step(run, run.loader.step(0))
        said = capsys.readouterr().err
        graphs = [int(number) for number in re.findall(r"torch.compile: graph (\d+) of the blocks", said)]
        expected = {"t2i": [1, 2, 3], "sana": [1, 2]}[kind]
        assert graphs == ([] if name == "plain" else expected), "two blocks of images, one of text; three of Sana"
        found.append((numbers["loss"], numbers["grad_norm"]))
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.slow
def test_more_shapes_than_torch_compiles_by_default_have_graphs_too() -> None:
    said: list[str] = []
    torch.compiler.reset()
    block = torch.nn.Tanh()
    compile_blocks([block], "eager", said.append)
    for dimensions in range(1, 12):
        x = torch.ones([2] * dimensions)
        assert torch.equal(block(x), x.tanh())
    assert len(said) == 11 and "another shape may need another" in said[0]
