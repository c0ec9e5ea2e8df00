"""The memory that is predicted from shapes is the memory that a step takes, as torch's profiler sees it."""

import io
import json
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from cache.schedule import BatchSchedule
from cache.set_lookup import open_set
from cache.store import Store
from examples.tiny_shapes import SHAPES
from schemas.cli.console import OK, Console, Options, run_program
from schemas.optimizers import OPTIMIZERS as ROWS
from tests.conftest import LONG
from trainer import train as loop
from trainer.__main__ import run as program_run
from trainer.families.base import module_of
from trainer.memory_estimate import OPTIMIZERS, MemoryEstimate, estimate_memory

#: Large enough that what a step allocates is not lost among small things.
MIDDLE = {
    "t2i": SHAPES["tiny"]["image"] | {"model_dim": 192, "ff_dim": 768, "num_visual_blocks": 4, "visual_cond": False},
    "sana": SHAPES["tiny"]["sana"]
    | {"num_attention_heads": 6, "num_cross_attention_heads": 6, "cross_attention_dim": 192, "num_layers": 4},
}
SIZES = {"t2i": ("256x256", "256x384", "128x128"), "sana": ("768x768", "512x768", "256x256")}
LORA, FULL = {"type": "lora", "rank": 8}, {"type": "full"}
GRID = [
    {"adapter": adapter, "batch_size": batch, "precision": precision, **checkpointing}
    for adapter in (LORA, FULL)
    for batch, precision, checkpointing in (
        (1, "float32", {"gradient_checkpointing": True}),
        (1, "float32", {"gradient_checkpointing": False}),
        (3, "float32", {"gradient_checkpointing_interval": 2}),
        (2, "float32", {"gradient_checkpointing_interval": 3, "accumulate": 2}),
        (1, "bfloat16", {"gradient_checkpointing": False}),
    )
]


def measure(run) -> int:
    """Bytes of the weights, the optimizer's state, and what its second step allocates beyond them at most."""
    loop.train_step(run, run.loader.step(0))
    state = [value for values in run.optimizer.state.values() for value in values.values()]
    kept = sum(each.numel() * each.element_size() for each in [*run.model.parameters(), *state])
    data = run.loader.step(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loop.train_step(run, data)
    path = run.folder / "trace.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    sizes = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
    return kept + int(np.cumsum(sizes).max())


@pytest.mark.slow
def test_a_dry_run_shows_it_and_loads_nothing(make_config, make_set, tmp_path, capsys) -> None:
    shown = {}
    for name, options in (("less", {}), ("more", {"gradient_checkpointing": False, "batch_size": 4})):
        config = make_config("i2v", name=name, **options)
        make_set(config)
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps(config.model_dump(mode="json", by_alias=True)))
        assert run_program("train", program_run, Options(path, json=True, dry_run=True)) == OK
        said = capsys.readouterr()
        details = json.loads(said.out)["details"]
        assert "loading the transformer" not in said.err and details["memory_of_bucket"] == "96x64@5"
        shown[name] = {row["part"]: row["mib"] for row in details["memory"]}
        assert [*shown[name]] == [field.name for field in fields(MemoryEstimate)][:-1]
    assert shown["more"]["activations"] > shown["less"]["activations"]


@pytest.mark.slow
def test_offload_takes_from_the_device_what_it_adds_to_the_host(make_config) -> None:
    """Frozen weights of all blocks but one, and activations; trained weights stay."""
    plain, blocks, both = (
        estimate_memory(make_config("t2i", offload=offload), MIDDLE["t2i"], ["512x512"], 64)
        for offload in ({}, {"blocks": True}, {"blocks": True, "activations": True})
    )
    assert blocks.activations == plain.activations and plain.weights > 2 * blocks.weights
    assert (blocks.gradients, blocks.optimizer) == (plain.gradients, plain.optimizer)
    assert both.activations < blocks.activations and both.host > blocks.host


@pytest.mark.slow
def test_a_transformer_made_from_shapes_has_the_dtypes_of_a_loaded_one(make_config, checkpoints) -> None:
    for kind in ("t2i", "sana"):
        family = module_of(make_config(kind).model.family_spec)
        loaded = family.load(str(checkpoints(kind)), dtype=torch.bfloat16)
        with torch.device("meta"):
            made = family.untrained(loaded.config, torch.bfloat16)
        expected = {name: (weight.dtype, weight.shape) for name, weight in loaded.named_parameters()}
        assert {name: (weight.dtype, weight.shape) for name, weight in made.named_parameters()} == expected


@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="torch's profiler sometimes loses events where other work runs")
@pytest.mark.parametrize("kind", ["t2i", "sana"])
def test_the_prediction_is_within_15_percent_of_what_training_takes(
    make_config, make_set, made, tmp_path, kind
) -> None:
    family = module_of(make_config(kind).model.family_spec)
    torch.manual_seed(0)
    family.untrained(MIDDLE[kind]).save_pretrained(tmp_path / "model" / "transformer")
    shape = json.loads((tmp_path / "model" / "transformer" / "config.json").read_text())
    rng, said = np.random.default_rng(0), []
    for number, settings in enumerate(GRID):
        config = make_config(kind, name=str(number), **settings)
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path / "model")})})
        bucket = SIZES[kind][2 if settings["precision"] == "bfloat16" else number % 2]  # slow on old CPUs
        caption = lambda length: made.caption(rng, length, kind != "sana")  # noqa: E731
        items = [made.Item(bucket, made.latent(rng, config, bucket), [caption(64)]) for _ in range(6)]
        make_set(config, items, caption(64))
        data = open_set(Store(config.root), config.train.set, config.model.family, config.model.task)
        size = config.train.batch_size
        plan = BatchSchedule(data.spans, 0, size, size * config.train.accumulate)
        run = loop.prepare_training(config, data, plan, Console(stderr=io.StringIO()), "cpu")
        measured, predicted = measure(run), estimate_memory(config, shape, [bucket], 64)
        said.append((round(predicted.device / measured, 3), measured >> 20, vars(predicted), settings))
    wrong = [row for row in said if not 0.85 < row[0] < 1.15]
    assert len(said) == len(GRID) and not wrong, wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_an_optimizers_state_is_as_large_as_counted(name) -> None:
    """Scalars and tables of 256 numbers apart."""
    module, _, cls = ROWS[name].path.rpartition(".")
    weight = torch.nn.Parameter(torch.randn(256, 256))
    optimizer = getattr(pytest.importorskip(module), cls)([weight], lr=1e-3, **ROWS[name].arguments)
    if hasattr(optimizer, "train"):
        optimizer.train()
    weight.grad = torch.randn(256, 256)
    optimizer.step()
    state = [value for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor)]
    per_weight = sum(value.numel() * value.element_size() for value in state if value.numel() > 256) / weight.numel()
    assert per_weight == pytest.approx(OPTIMIZERS.get(name, OPTIMIZERS["adamw"])[0], rel=0.06)
