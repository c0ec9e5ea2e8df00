"""scores.jsonl: means, spreads over seeds, comparable points, and lines of other programs and of killed programs."""

import json
from pathlib import Path
from statistics import stdev

import pytest

from cache.runs.scores import (
    SCORES_FILE,
    Measured,
    SampleScores,
    append_line,
    read_curves,
    summarize_scores,
)
from cache.runs.validations import best_steps

CLIP = {"clip_score": Measured("f1", "org/clip")}


def sample(prompt: str, seed: int, score: float, content: str = "x") -> SampleScores:
    return SampleScores(f"{prompt}_seed{seed}", prompt, seed, content, {"clip_score": score})


def add(
    folder: Path, step: int, *samples: SampleScores, model: Measured = CLIP["clip_score"], missing: str = ""
) -> None:
    append_line(folder, summarize_scores(step, samples, {"clip_score": model}, [missing] if missing else []))


def test_a_score_is_the_mean_over_prompts_and_its_spread_that_of_the_seeds() -> None:
    samples = [sample("cat", 1, 30.0), sample("cat", 2, 32.0), sample("dog", 1, 20.0), sample("dog", 2, 26.0)]
    line = summarize_scores(0, samples, CLIP)
    assert line.scores == {"clip_score": 27.0}
    assert line.spread["clip_score"] == pytest.approx(stdev([25.0, 29.0]))  # all prompts with seed 1, with seed 2
    prompts = {
        prompt: (scores["clip_score"].mean, scores["clip_score"].spread) for prompt, scores in line.prompts.items()
    }
    assert prompts == {"cat": (31.0, pytest.approx(stdev([30, 32]))), "dog": (23.0, pytest.approx(stdev([20, 26])))}
    line = summarize_scores(0, [sample("cat", 0, 30.0), sample("dog", 0, 20.0)], CLIP)
    assert line.spread == {"clip_score": None}, "one seed"
    line = summarize_scores(0, samples[:3], CLIP)
    assert line.spread == {"clip_score": None}, "only seeds of every prompt count"
    assert line.scores == {"clip_score": 25.5}, "a prompt counts once, however many seeds it has"


def test_scores_of_different_models_are_never_on_one_curve(tmp_path: Path) -> None:
    for step in (0, 500, 1000):
        add(tmp_path, step, sample("cat", 0, 30.0))
    add(tmp_path, 500, sample("cat", 0, 0.5), model=Measured("f2", "org/other"))
    (curve,) = read_curves(tmp_path)
    assert [(point.step, point.value) for point in curve.points] == [(500, 0.5)]
    assert curve.measured == Measured("f2", "org/other")


def test_only_steps_with_the_samples_of_the_last_whole_one_are_compared(tmp_path: Path) -> None:
    add(tmp_path, 0, sample("easy", 0, 40.0))
    add(tmp_path, 500, sample("easy", 0, 31.0), sample("hard", 0, 21.0))
    add(tmp_path, 1000, sample("easy", 0, 30.0), sample("hard", 0, 20.0))
    add(tmp_path, 1500, sample("easy", 0, 39.0), missing="hard_seed0")
    (curve,) = read_curves(tmp_path)
    best = curve.best()
    assert best is not None and (best.step, best.value) == (500, 26.0)
    best = curve.best([0, 1000])
    assert best is not None and best.step == 1000
    assert curve.best([0]) is None


def test_lines_that_were_cut_off_and_those_of_other_programs(tmp_path: Path) -> None:
    path = tmp_path / SCORES_FILE
    path.write_bytes(b'{"step": 1, "scores": {"beauty": 0.5}}\n{"step": 2, "scores": {"beauty": NaN}}\n{"step": 3, "sc')
    add(tmp_path, 4, sample("cat", 0, 30.0))
    with path.open("ab") as file:
        file.write(
            b'{"step": 5, "scores": {"beauty": 0.7}}\n{"step": 6, "scores": {"beauty": 1}, "spread": 3}\n{"step": 7}'
        )
    curves = {curve.name: curve for curve in read_curves(tmp_path)}
    assert [(point.step, point.value) for point in curves["beauty"].points] == [(1, 0.5), (5, 0.7)]
    assert [point.step for point in curves["clip_score"].points] == [4]
    assert curves["beauty"].measured is None


def test_the_best_step_by_each_and_its_checkpoint(tmp_path: Path) -> None:
    lines = [{"step": step, "eval_loss": loss, "eval_id": "a"} for step, loss in ((0, 0.9), (10, 0.3), (20, 0.4))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, score in ((0, 33.0), (10, 25.0), (20, 30.0)):
        add(tmp_path, step, sample("cat", 1, score), sample("cat", 2, score + 2))
    for step in (10, 20):
        (tmp_path / f"checkpoints/step-{step:06d}").mkdir(parents=True)
    rows = best_steps(tmp_path)
    assert [(row["measure"], row["step"], row["value"], Path(row["checkpoint"]).name) for row in rows] == [
        ("eval loss", 10, 0.3, "step-000010"),
        ("CLIP score", 0, 34.0, ""),
        ("CLIP score", 20, 31.0, "step-000020"),
    ]
    assert rows[0]["spread"] == "" and rows[1]["spread"] == pytest.approx(2**0.5)
    assert best_steps(tmp_path / "nothing") == []
