"""The metrics of a run's steps on the console and in the trackers."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from cache.runs.validations import best_evaluation
from schemas.cli.console import OK, Console
from trainer.run.metrics import StepTimer, read_metrics, show_metrics


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def numbers(step: int, **more: Any) -> dict[str, Any]:
    rates = {"samples_per_s": 2.0, "step_s": 0.5, "data_wait_s": 0.2, "data_wait_share": 0.1, "seconds_left": 61.0}
    return {"step": step, "loss": float(step), "grad_norm": 0.1, "lr": 1e-4, **rates, **more}


def test_without_a_terminal_there_is_a_line_every_n_steps() -> None:
    out = io.StringIO()
    with show_metrics(Console(stderr=out), 4, 25, 10) as show:
        for step in range(5, 26):
            show(numbers(step, **({"loss": float("nan"), "skipped": True} if step == 7 else {})))
        show({"step": 25, "eval_loss": 0.5})
    assert out.getvalue().splitlines() == [
        "step 5/25  loss 5  lr 0.0001  2 samples/s  waiting for data 10 %  0:01:01 left",
        "step 7/25 was skipped: its loss or gradient is not finite",
        "step 10/25  loss 7.6  lr 0.0001  2 samples/s  waiting for data 10 %  0:01:01 left",  # mean of 5, 6, 8, 9, 10
        "step 20/25  loss 12.87  lr 0.0001  2 samples/s  waiting for data 10 %  0:01:01 left",
        "step 25/25  loss 15.4  lr 0.0001  2 samples/s  waiting for data 10 %  0:01:01 left",
        "step 25/25  eval loss 0.5",
    ]


def test_speed_leaves_out_what_is_done_between_steps_and_the_time_left_has_it() -> None:
    clock = 100.0
    timer = StepTimer(10, 20, global_batch=4, clock=lambda: clock)

    def read() -> Any:
        nonlocal clock
        for waited in (0.5, 1.5):  # seconds of reading
            clock += waited
            yield None

    result = []
    for number, _ in enumerate(timer.time_waits(read()), 11):
        clock += 1.5  # seconds of computing
        result.append(timer.rates(number))
        clock += 6.0  # seconds of validation
    first = {"samples_per_s": 2.0, "step_s": 2.0, "data_wait_s": 0.5, "data_wait_share": 0.25, "seconds_left": 18.0}
    second = {"samples_per_s": 1.6, "step_s": 3.0, "data_wait_s": 1.5, "data_wait_share": 0.4}
    assert result == [first, second | {"seconds_left": 8 * (2.5 + 6.0 / 2)}]


def written_to_wandb(folder: Path) -> list[bytes]:
    sys.modules["wandb"].teardown()  # on a busy machine its service writes the rest after the run
    return [path.read_bytes() for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]


@pytest.mark.long
@pytest.mark.slow
def test_a_run_tells_what_it_does_and_its_trackers_have_the_figures(ready, make_config, program, wandb_offline) -> None:
    """Weights & Biases offline. A resumed run continues the same run there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    look = {"eval_samples": 2, "eval_sigmas": [0.5], "every": 2}
    config = ready("t2i", steps=2, validation=look, trackers=["tensorboard", "wandb"])
    folder = config.run_folder
    code, report, log = program(config)
    assert code == OK and "loading the transformer" in log and "done, after 0:00:" in log
    assert "step 0: eval loss: 2/2 samples" in log and "step 2: validation: 2/2 denoising steps" in log
    details = report["details"]
    [curve] = details["eval_by_sigma"]
    assert (curve["sigma"], curve["last"]) == (0.5, details["eval_loss"]["last"])
    assert f"eval loss {curve['first']:.4g} (0.5: {curve['first']:.4g})" in log
    best = best_evaluation(read_metrics(folder / "metrics.jsonl"))
    assert (details["best_steps"][0]["step"], details["best_steps"][0]["value"]) == best
    assert "eval_fraction: 0.05" in details["nothing_held_out"]
    places = {"validation_latents": "validation", "numbers": "metrics.jsonl", "tensorboard": "tensorboard"}
    assert {key: details[key] for key in places} == {key: str(folder / name) for key, name in places.items()}
    assert all(Path(details[key]).exists() for key in (*places, "saved", "wandb"))
    share = [line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line][-1]["data_wait_share"]
    assert details["waiting_for_data"] == f"{100 * share:.0f} %"
    finished = program(config)[1]["details"]
    assert finished["waiting_for_data"] == details["waiting_for_data"]
    assert {key: finished[key] for key in (*places, "best_steps")} == {
        key: details[key] for key in (*places, "best_steps")
    }

    config = make_config("t2i", steps=3, validation=look, trackers=["tensorboard", "wandb"])
    assert program(config)[0] == OK
    first, second = written_to_wandb(folder)
    key = (folder / "wandb-id.txt").read_bytes()
    words = (key, b"grad_norm", b"eval_loss", b"samples_per_s")
    assert [[word for word in words if word not in content] for content in (first, second)] == [[], []]
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["step_s"] >= line["data_wait_s"] >= 0 and 0 <= line["data_wait_share"] <= 1 for line in lines)
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("data_wait_share")] == [1, 2, 3]


@pytest.mark.slow
def test_wandb_that_cant_be_used_is_said_before_a_model_is_loaded(
    ready, program, tmp_path, monkeypatch, wandb_offline
) -> None:

    config = ready("t2i", steps=2, trackers=["wandb"])
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    sys.modules["wandb"].teardown()  # its earlier copy of the environment
    code, report, log = program(config)
    assert code == 2 and "loading the transformer" not in log
    assert "WANDB_MODE=offline" in report["error"]["next_step"]
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, report, log = program(config)
    assert code == 2 and "not installed" in report["error"]["message"]
    assert "pip install -e '.[wandb]'" in report["error"]["next_step"]
