"""Which step is the best: the lowest eval loss among those that can be compared."""

import json
import math
from pathlib import Path

import pytest

from cache.runs.validations import best_checkpoint, best_evaluation, best_steps, describe_best, loss_name


def evaluated(step: int, loss: float | None, on: str = "a") -> dict:
    return {"step": step, "eval_loss": loss, "eval_id": on}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], None),
        ([{"step": 1, "loss": 0.1}], None),
        ([evaluated(0, 0.5), evaluated(2, 0.3), evaluated(4, 0.3)], (2, 0.3)),
        ([evaluated(0, 0.1, "b"), evaluated(2, 0.3), evaluated(4, 0.4)], (2, 0.3)),
        ([evaluated(0, 0.5), evaluated(2, None), evaluated(4, math.nan)], (0, 0.5)),
        ([evaluated(0, None)], None),
    ],
    ids=["nothing", "no evaluation", "equal ones", "other samples before", "not finite", "none finite"],
)
def test_the_lowest_of_the_losses_that_can_be_compared(lines: list, expected: tuple | None) -> None:
    assert best_evaluation(lines) == expected
    assert best_evaluation(lines, []) is None


def test_its_checkpoint_and_the_best_that_has_one_are_named(tmp_path: Path) -> None:
    lines = [evaluated(0, 0.9), evaluated(10, 0.2), evaluated(20, 0.4), evaluated(30, 0.3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert best_checkpoint(tmp_path) is None and describe_best(tmp_path) == {
        "best_step": {"step": 10, "eval_loss": 0.2}
    }
    for step in (20, 30, 35):
        (tmp_path / f"checkpoints/step-{step:06d}").mkdir(parents=True)
    other = {"step": 30, "eval_loss": 0.3, "checkpoint": str(tmp_path / "checkpoints/step-000030")}
    assert best_checkpoint(tmp_path) == (30, 0.3)
    assert describe_best(tmp_path) == {"best_step": {"step": 10, "eval_loss": 0.2}, "best_checkpoint": other}
    (tmp_path / "checkpoints/step-000010").mkdir()
    best = {"step": 10, "eval_loss": 0.2, "checkpoint": str(tmp_path / "checkpoints/step-000010")}
    assert describe_best(tmp_path) == {"best_step": best}


def test_a_loss_on_training_samples_is_called_that(tmp_path: Path) -> None:
    """With the setting that changes it; the JSON of a report has no "best step" then."""
    lines = [evaluated(10, 0.2) | {"eval_on": "training samples"}]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n")
    (lowest,) = describe_best(tmp_path).values()
    assert describe_best(tmp_path).keys() == {"lowest_loss_on_training_samples"} and lowest["step"] == 10
    assert "eval_fraction: 0.05" in lowest["note"]
    assert [row["measure"] for row in best_steps(tmp_path)] == ["lowest loss on training samples"]
    assert loss_name([*lines, evaluated(20, 0.1) | {"eval_on": "held-out samples"}]) == "eval loss"
