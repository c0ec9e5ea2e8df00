"""Which step is the best: the lowest eval loss among those that can be compared."""

import json
import math
from pathlib import Path

import pytest

from cache.runs.validations import best_checkpoint, best_evaluation, best_steps, loss_name


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

    def best() -> list[tuple]:
        return [(row["step"], row["value"], Path(row["checkpoint"]).name) for row in best_steps(tmp_path)]

    assert best_checkpoint(tmp_path) is None and best() == [(10, 0.2, "")]
    for step in (20, 30, 35):
        (tmp_path / f"checkpoints/step-{step:06d}").mkdir(parents=True)
    assert best_checkpoint(tmp_path) == (30, 0.3) and best() == [(10, 0.2, ""), (30, 0.3, "step-000030")]
    (tmp_path / "checkpoints/step-000010").mkdir()
    assert best() == [(10, 0.2, "step-000010")]


def test_a_loss_on_training_samples_is_called_that(tmp_path: Path) -> None:
    line = evaluated(10, 0.2) | {"eval_on": "training samples"}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert [row["measure"] for row in best_steps(tmp_path)] == ["lowest loss on training samples"]
    assert loss_name([line, evaluated(20, 0.1) | {"eval_on": "held-out samples"}]) == "eval loss"
