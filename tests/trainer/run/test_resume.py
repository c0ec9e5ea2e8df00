"""Runs that stop and resume: exact, each step recorded once, with the configured checkpoints, refused for other
settings."""

import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from schemas.cli.console import OK
from tests.forms import long
from tests.processes import Child
from tests.trainer.runs import lines, moved, train, trained_weights
from trainer import train as loop
from trainer import validation
from trainer.run import metrics
from trainer.run.resume import ResumeError

pytestmark = pytest.mark.slow

DROPOUT = {"rank": 4, "dropout": 0.3}


def killable(ready, name: str, **settings):
    common = {"steps": 9, "batch_size": 2, "checkpoint_every": 3, "caption_dropout": 0.3, "adapter": DROPOUT}
    return ready("t2i", name=name, **common | settings)


def kill_at(config, step: int) -> None:
    """Train in a forked child and SIGKILL it once it has recorded `step`, and before it begins the last step."""
    real = loop.train_step

    def wait(run, batches, *earlier):
        if batches.step + 1 == config.train.steps:
            signal.pause()
        return real(run, batches, *earlier)

    def work() -> None:
        loop.train_step = wait
        train(config)

    child = Child(work)
    assert child.until(lambda: max(lines(config), default=0) >= step) and child.kill()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_killed_and_resumed_gives_the_same_losses(ready) -> None:
    """Bit for bit, with dropout in the adapter and of captions, in the order of shards."""
    torch.set_num_threads(1)
    full_run, cut = (killable(ready, name, shuffle_shards=2, steps=6, checkpoint_every=2) for name in ("whole", "cut"))
    train(full_run)
    kill_at(cut, 3)
    assert max(lines(cut)) < 6, "work was really cut off"
    result = train(cut)
    assert 0 < result["skipped"] < 6 and result["done"] == 6 - result["skipped"]
    assert lines(cut) == lines(full_run) and list(lines(cut)) == list(range(1, 7))
    for name, value in trained_weights(full_run).items():
        assert torch.equal(value, trained_weights(cut)[name])


def scalars(config) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's values of a run: name -> (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(config.run_folder / "tensorboard"))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_resumed_run_tells_every_step_once(ready) -> None:
    """In metrics.jsonl and in TensorBoard, although steps after the checkpoint were recorded before."""
    torch.set_num_threads(1)
    look = {"eval_samples": 1, "eval_sigmas": [0.5], "every": 2}
    config = killable(ready, "told", validation=look)
    kill_at(config, 5)
    time.sleep(1.1)  # TensorBoard reads its files in the order of the second in which they were created
    with (config.run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    assert train(config)["skipped"] == 3
    lines_told = metrics.read_metrics(config.run_folder / "metrics.jsonl")
    assert [line["step"] for line in lines_told if "loss" in line] == list(range(1, 10))
    assert [line["step"] for line in lines_told if "eval_loss" in line] == [0, 2, 4, 6, 8, 9]
    values = scalars(config)
    assert {"loss", "grad_norm", "lr", "eval_loss"} <= values.keys()
    assert {"eval_by_sigma/0.5", "loss_by_bucket/64x64"} <= values.keys()
    for name in ("loss", "grad_norm", "lr", "eval_loss"):
        assert dict(values[name]) == pytest.approx(lines(config, name), rel=1e-6), name
        assert len(values[name]) == len(dict(values[name])), f"{name}: a step stands twice"


def test_a_disk_without_room_for_checkpoints_is_warned_of(ready, program, monkeypatch) -> None:
    config = ready("t2i", steps=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1024))
    log = " ".join(program(config)[2].split())
    assert "has 1.0 KiB, so saving a checkpoint may fail; free space, or set `output`" in log


def test_settings_that_changed_are_named_where_a_run_goes_on(ready, program) -> None:
    config = ready("t2i", steps=1)
    assert "changed since" not in program(config)[2]
    optimizer = config.train.optimizer.model_copy(update={"lr": 0.25})
    later = config.train.model_copy(update={"steps": 2, "optimizer": optimizer})
    code, _, log = program(config.model_copy(update={"train": later}))
    was = config.train.optimizer.lr
    assert code == OK and f"train.steps: 1, now 2; train.optimizer.lr: {was}, now 0.25" in " ".join(log.split())


@pytest.mark.parametrize(
    ("settings", "steps_kept"),
    [
        long({"checkpoint_every": 1, "keep_checkpoints": 2}, [1, 5, 6]),
        ({"checkpoint_every": 4, "keep_checkpoints": 1, "keep_every": 3}, [3, 4, 6]),  # 2.5, 2.3, 2.4
        long({"checkpoint_every": 5, "keep_checkpoints": 1}, [5, 6]),  # 2.2, 2.4
    ],
)
def test_the_newest_and_the_best_checkpoint_and_those_of_keep_every_are_kept(
    make_config, make_set, helpers, monkeypatch, settings, steps_kept
) -> None:
    """With eval losses of which the loss of step 1 is the lowest."""
    eval_losses = iter([3.0, 1.0, 2.0, 2.5, 2.3, 2.2, 2.4])
    monkeypatch.setattr(validation, "compute_eval_loss", lambda *_: {"eval_loss": next(eval_losses), "eval_id": "one"})
    config = make_config("t2i", steps=6, validation={"eval_samples": 2, "every": 1}, **settings)
    items, null, _ = helpers.mixed_items(config)
    make_set(config, items, null, [])
    result, folder = train(config), config.run_folder / "checkpoints"
    assert [int(path.name[5:]) for path in sorted(folder.iterdir())] == steps_kept
    best, *tail = result["best_steps"]
    assert (best["step"], best["value"]) == (1, 1.0) and (not tail) == (1 in steps_kept)
    named = tail[0] if tail else best
    assert (
        named["checkpoint"] == str(folder / f"step-{named['step']:06d}")
        and named["step"] == steps_kept[0 if 1 in steps_kept else -2]
    )


@pytest.mark.long
def test_fewer_steps_than_were_done_change_nothing_and_are_said(ready, make_config, program) -> None:
    config = ready("t2i", steps=3)
    train(config)
    saved = config.run_folder / "adapter" / "pytorch_lora_weights.safetensors"
    for is_note_missing in (
        False,
        True,
    ):  # with the note of the result the run is finished, without it the result is saved again
        if is_note_missing:
            (config.run_folder / "result.json").unlink()
        code, report, _ = program(make_config("t2i", steps=2))
        assert (code, report["done"], report["remaining"]) == (OK, 0, 0)
        with safe_open(saved, "pt") as file:
            assert file.metadata()["latentpress.steps"] == "3"
    log = program(make_config("t2i", steps=2), dry_run=True)[2]
    assert "has done 3 steps, more than train.steps (2)" in log


def test_other_base_weights_are_refused(ready, make_config, tmp_path) -> None:
    """The weights of another checkpoint of the same shape; a copy of the same weights, at another path and in bfloat16,
    is valid."""
    from stages.rehearsing.tiny_models import build

    config = ready("t2i", steps=1)
    train(config)

    def changed_config(path: Path, **settings):
        changed = make_config("t2i", steps=2, **settings)
        return moved(changed, path)

    build("kandinsky5-image-t2i", tmp_path / "other", seed=1, only=["transformer", "scheduler"])
    with pytest.raises(ResumeError, match=r"the base weights are different\n.*model\.path"):
        train(changed_config(tmp_path / "other"))
    shutil.copytree(Path(config.model.path), tmp_path / "same")
    assert train(changed_config(tmp_path / "same", precision="bfloat16"))["done"] == 1
    weights = tmp_path / "same" / "transformer" / "diffusion_pytorch_model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(ResumeError, match=r"the base weights are different\n.*model\.path"):
        train(changed_config(tmp_path / "same"))
