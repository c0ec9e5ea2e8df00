"""Runs whose numbers must not depend on the use of the card: offload, compilation, fused and paged optimizers, a
kill."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import sana
from benchmarks.gpu.training import Case, Model, forget_models, measure_steps, predict, prepare
from schemas.config.pipeline import Config
from stages.rehearsing.tiny_shapes import SHAPES
from tests.trainer.runs import lines, train, write
from trainer.run.resume import newest_checkpoint

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
STEPS = 3


def on(device: str, **settings: dict) -> dict:
    return {"device": device, "steps": STEPS, "adapter": {"rank": 2}, **settings}


@pytest.mark.long
def test_offload_and_compilation_change_no_loss(ready, device) -> None:
    """On a CPU one case, because tests/trainer/setup/ has all cases there."""
    on_card = device == "cuda"
    compiled = {"compile": "blocks"}
    blocks = {"blocks": True, "streams": on_card}
    result, options = {}, {"plain": {"gradient_checkpointing": False}}
    if on_card:
        options["blocks"] = {"offload": {"blocks": True}}
        options["blocks with streams"] = {"offload": blocks}
        options["activations"] = {"offload": {"activations": True}, "gradient_checkpointing": False}
        options["compiled"] = compiled
        options["int8, compiled"] = {"base_precision": "int8-torchao", **compiled}
        options["compiled, offloaded"] = {**compiled, "offload": blocks}
    options["blocks and activations"] = {"offload": {**blocks, "activations": True}}
    for name, each in options.items():
        config = ready("t2i", name=name, **on(device, **each))
        train(config)
        result[name] = lines(config)
    assert len(result["plain"]) == STEPS and len({*result["plain"].values()}) == STEPS
    for name, losses in result.items():
        tolerance = 0.02 if "int8" in name else 1e-3 if "compiled" in name else 1e-4
        assert losses == pytest.approx(result["plain"], rel=tolerance), name


@pytest.mark.long
@pytest.mark.parametrize("name", ["adamw-fused", "bnb-adamw8bit-paged", "bnb-lion8bit"])
def test_an_optimizer_on_a_device_goes_on_after_a_stop(make_config, make_set, device, name) -> None:
    """At a width at which bitsandbytes keeps its states in 8 bits. On a CPU one case, because test_optimizers.py has
    all cases."""
    if device == "cpu" and name != "bnb-adamw8bit-paged":
        pytest.skip("tests/trainer/setup/test_optimizers.py has it")
    settings = {"optimizer": {"name": name, "lr": 1e-3, "warmup": 1}, "adapter": {"rank": 64}, "checkpoint_every": 2}
    full_run, cut = (make_config("sana", name=run, **on(device, **settings)) for run in ("whole", "cut"))
    for config in (full_run, cut):
        make_set(config)
    train(full_run)
    train(cut.model_copy(update={"train": cut.train.model_copy(update={"steps": 2})}))
    train(cut)
    assert lines(cut) == pytest.approx(lines(full_run), rel=1e-4)


@pytest.mark.long
def test_a_run_that_is_killed_goes_on_with_the_same_losses(make_config, make_set, device, tmp_path, request) -> None:
    if device == "cpu":
        request.getfixturevalue("forked_programs")

    def config(name: str, steps: int) -> Config:
        return make_config("t2i", name=name, **on(device, steps=steps, checkpoint_every=4, keep_checkpoints=1000))

    killed = config("killed", 100_000)
    make_set(killed)
    path = write(killed, tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-m", "trainer", "--config", str(path), "--json"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    folder, deadline = killed.run_folder / "checkpoints", time.monotonic() + 90
    try:
        while newest_checkpoint(folder)[0] is None:
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        child.kill()
    assert child.wait() == -signal.SIGKILL
    last_step = newest_checkpoint(folder)[0].step
    after, full_run = config("killed", last_step + 3), config("whole", last_step + 3)
    make_set(full_run)
    train(after)
    train(full_run)
    assert [*lines(after)] == [*lines(full_run)] == [*range(1, last_step + 4)]
    assert lines(after) == pytest.approx(lines(full_run), rel=1e-4)


@pytest.mark.long
def test_the_predicted_memory_is_within_15_percent_of_the_peak(device, tmp_path) -> None:
    """For a fifth of Sana 1.6B; on a CPU, where torch does not count memory, only checks that both are computed."""
    model = sana.model(tiny=True)
    if device == "cuda":
        model = Model("sana", model.flavour, SHAPES["true"]["sana"] | {"num_layers": 4}, "1024x1024", 300)
    for name, settings in (
        ("LoRA", {"adapter": {"rank": 32}, "batch_size": 2, "gradient_checkpointing": False}),
        ("full", sana.full("adamw-fused", batch_size=2)),
    ):
        case = Case(name, settings)
        forget_models()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0  # memory of other tests
        measured = measure_steps(prepare(model, case, tmp_path / name, device))
        predicted = predict(model, case)
        assert measured.seconds > 0 and predicted.device > 0
        if device == "cuda":
            assert predicted.device == pytest.approx(measured.peak - before, rel=0.15)
