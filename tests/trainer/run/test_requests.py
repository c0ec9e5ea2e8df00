"""Requests to a trainer that is running: a sample, a checkpoint, its end."""

import pytest

from cache.runs.requests import CHECKPOINT, REQUESTS, SAMPLE, STOP, ask_trainer
from cache.runs.training_run import CHECKPOINTS, checkpoint_step, list_checkpoints
from tests.trainer.runs import lines
from trainer import train as loop
from trainer.run.interruption import StopRequest

pytestmark = pytest.mark.slow


def test_requests_are_served_once_after_the_step(ready, program, monkeypatch) -> None:
    config = ready(
        "t2i",
        steps=9,
        checkpoint_every=100,
        validation={"eval_samples": 2, "eval_sigmas": [0.5], "every": 100, "steps": 1},
    )
    config.run_folder.mkdir(parents=True, exist_ok=True)
    ask_trainer(config.run_folder, STOP)  # of an earlier trainer
    asked_at = {2: SAMPLE, 4: CHECKPOINT, 6: STOP}
    real = loop.train_step

    def step(run, batches, earlier=None):
        numbers = real(run, batches, earlier)
        if request := asked_at.get(batches.step + 1):
            ask_trainer(config.run_folder, request)
        return numbers

    monkeypatch.setattr(loop, "train_step", step)
    code, report, _ = program(config)
    assert report["details"]["stopped"].startswith("by a request; nothing is lost") and code
    assert list(lines(config)) == [1, 2, 3, 4, 5, 6] and set(lines(config, "eval_loss")) == {0, 3}
    steps = [checkpoint_step(path) for path in list_checkpoints(config.run_folder / CHECKPOINTS)]
    assert steps == [5, 6]
    assert not any((config.run_folder / f".request-{name}").exists() for name in REQUESTS)
    assert {path.parent.name for path in (config.run_folder / "validation").glob("*/*.safetensors")} == {
        "step-000000",
        "step-000003",
    }


class Ranks:
    """An accelerator of two ranks, of which the other one is asked for nothing."""

    num_processes, is_main_process, device = 2, True, "cpu"

    def reduce(self, tensor, kind):
        return tensor


def test_all_ranks_serve_the_requests_of_the_first(tmp_path) -> None:
    import torch

    stop = StopRequest(ranks=2)
    stop.finish_steps(Ranks(), torch.nn.Identity(), folder=tmp_path)
    ask_trainer(tmp_path, SAMPLE)
    assert stop.check() == {SAMPLE} and stop.check() == set()
