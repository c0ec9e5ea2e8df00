"""`latentpress score`: what is scored and what is not again, what is said, and the best steps."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.models.weights import WeightsError
from cache.runs.scores import SCORES_FILE, read_curves
from schemas.config.loading import ConfigError
from schemas.errors import LatentpressError
from stages import run, score
from stages.follow import watchers
from stages.follow.clip_score import ClipScore
from stages.pages.pictures import write_output
from stages.score import find_samples, read_sample
from tests.project import Project
from tests.stages.clip import load_clip
from tests.stages.report_run import FakeRun, eval_line, step_line


@pytest.fixture
def home(project: Callable[..., Project], tiny: Any) -> Project:
    return project(
        validation={"scores": {"clip": str(tiny("clip")), "frames": 3}}, train={"run": "run", "trackers": []}
    )


def add_step(
    made: FakeRun, step: int, prompts: tuple[str, ...] = ("cat", "dog"), seeds: tuple[int, ...] = (1, 2)
) -> None:
    for prompt in prompts:
        for seed in seeds:
            name = f"{prompt}_seed{seed}"
            made.latent(step, name, prompt=f"a {prompt} on a mat", group=prompt, seed=seed)
            made.picture(step, name, (step % 256, 40 * seed, len(prompt) * 50))


def lines(made: FakeRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (made.folder / SCORES_FILE).read_text().splitlines()]


def test_without_a_model_nothing_is_loaded_or_written(home: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    home.settings["validation"] = {}
    made = FakeRun(home)
    add_step(made, 500)
    monkeypatch.setattr(ClipScore, "load", lambda *_: pytest.fail("loaded for nothing"))
    report = home.run(score.run)
    assert (report.exit_code, report.done, report.remaining) == (0, 0, 0)
    assert "names no model" in home.said and not (made.folder / SCORES_FILE).exists()


def test_run_scores_only_where_a_model_is_named(home: Project) -> None:
    def stages_and_watchers() -> tuple[bool, bool]:
        config = home.config()
        beside = [each.program for each in watchers.WATCHERS if each.applies(config)]
        return "score" in config.stage_order, "score" in beside

    assert stages_and_watchers() == (True, True)
    home.settings["validation"] = {}
    assert stages_and_watchers() == (False, False)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("", "validation.scores.clip"),
        ("config.json", "config.json"),
        ("model.safetensors", r"has no \*\.safetensors"),
        ("preprocessor_config.json", "has no preprocessor_config.json"),
    ],
)
def test_run_notices_before_it_starts_that_the_model_is_missing(
    home: Project, tiny: Any, monkeypatch: pytest.MonkeyPatch, missing: str, message: str
) -> None:
    """Not after hours of training. missing: the file, "" for all of it."""
    folder = home.folder / "clip"
    if missing:
        shutil.copytree(tiny("clip"), folder)
        (folder / missing).unlink()
    home.settings["validation"]["scores"]["clip"] = str(folder)
    monkeypatch.setattr(run.StageProcesses, "run", lambda *_: pytest.fail("a stage was started"))
    with pytest.raises(LatentpressError, match=message) as caught:
        home.run(run.run)
    assert caught.value.next_step and not home.root.exists()
    home.settings["stages"]["order"] = ["index"]
    with pytest.raises(pytest.fail.Exception, match="a stage was started"):
        home.run(run.run)


@pytest.mark.slow
def test_each_step_is_scored_once_with_its_seeds_and_prompts(home: Project, tiny: Any) -> None:
    made = FakeRun(home)
    made.metrics(eval_line(500, 2.0), eval_line(1000, 1.5))
    (made.folder / "checkpoints/step-001000").mkdir(parents=True)
    for step in (500, 1000):
        add_step(made, step)
    assert home.run(score.run, dry_run=True).remaining == 8 and not (made.folder / SCORES_FILE).exists()
    report = home.run(score.run)
    assert (report.exit_code, report.done, report.skipped) == (0, 8, 0)
    found = lines(made)
    assert [line["step"] for line in found] == [500, 1000]
    clip = load_clip(tiny("clip"))
    for line in found:
        samples = {row["name"]: row["scores"]["clip_score"] for row in line["samples"]}
        for name, value in samples.items():
            frames = read_sample(made.folder / f"samples/step-{line['step']:06d}/{name}.png", 8)
            assert value == pytest.approx(clip.score(frames, f"a {name[:3]} on a mat"), abs=1e-5)
        assert line["scores"]["clip_score"] == pytest.approx(np.mean([*samples.values()]), abs=1e-5)
        seeds = [np.mean([samples[f"cat_seed{seed}"], samples[f"dog_seed{seed}"]]) for seed in (1, 2)]
        assert line["spread"]["clip_score"] == pytest.approx(np.std(seeds, ddof=1), abs=1e-5)
    best = {row["measure"]: row for row in report.details["best_steps"]}
    assert best["eval loss"]["step"] == 1000 and best["eval loss"]["checkpoint"].endswith("step-001000")
    assert best["CLIP score"]["value"] >= max(line["scores"]["clip_score"] for line in found if line["step"] == 1000)
    assert "CLIP score" in report.summary()


@pytest.mark.slow
def test_only_what_is_new_or_changed_is_scored_again(home: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    made = FakeRun(home)
    add_step(made, 500)
    home.run(score.run)
    before = lines(made)
    with monkeypatch.context() as patch:
        patch.setattr(ClipScore, "load", lambda *_: pytest.fail("loaded for nothing"))
        report = home.run(score.run)
        assert (report.done, report.skipped) == (0, 4) and lines(made) == before
    add_step(made, 1000)
    made.picture(500, "dog_seed2", (255, 0, 255))
    report = home.run(score.run)
    assert (report.done, report.skipped) == (8, 0), "both steps"
    *_, changed, added = lines(made)
    assert (changed["step"], added["step"]) == (500, 1000)
    old, new = ({row["name"]: row["scores"]["clip_score"] for row in line["samples"]} for line in (before[0], changed))
    assert [name for name in old if old[name] != new[name]] == ["dog_seed2"]
    (curve,) = read_curves(made.folder)
    assert [point.value for point in curve.points] == [changed["scores"]["clip_score"], added["scores"]["clip_score"]]


@pytest.mark.long
def test_another_model_or_another_setting_scores_everything_again(home: Project, tmp_path: Path) -> None:
    from stages.rehearsing.tiny_models import build

    made = FakeRun(home)
    add_step(made, 500)
    home.run(score.run)
    other = build("clip", tmp_path / "other", seed=1)
    assert home.run(score.run, f"validation.scores.clip={other}").done == 4
    assert home.run(score.run, f"validation.scores.clip={other}").done == 0
    assert home.run(score.run, f"validation.scores.clip={other}", "validation.scores.frames=4").done == 4
    fingerprints = [line["measures"]["clip_score"]["fingerprint"] for line in lines(made)]
    assert len(set(fingerprints)) == 3
    (curve,) = read_curves(made.folder)
    assert curve.measured is not None and curve.measured.model == str(other)


@pytest.mark.slow
def test_clips_damaged_pictures_and_those_that_wait(home: Project, tiny: Any) -> None:
    made = FakeRun(home)
    for name in ("fine", "broken"):
        made.latent(500, name)
        made.clip(500, name)
    made.clip(500, "broken").write_bytes(f"cut off {made.mark(500, 'broken')}".encode())
    add_step(made, 1000, ("cat",), (1,))
    made.latent(1000, "waits")
    report = home.run(score.run)
    assert report.exit_code == 3 and report.done == 1 and report.remaining == 1
    assert [(row["item"], row["step"]) for row in report.failed] == [("broken", 500)]
    assert "delete it, and run `latentpress decode`" in report.failed[0]["message"]
    assert report.next_steps == ["latentpress decode", "latentpress score"]
    (line,) = lines(made)
    assert line["step"] == 500 and line["missing"] == ["broken"]
    clip = load_clip(tiny("clip"))
    frames = read_sample(made.folder / "samples/step-000500/fine.mp4", 3)
    assert len(frames) == 3
    assert line["scores"]["clip_score"] == pytest.approx(clip.score(frames, "a colour"), abs=1e-5)
    home.run(score.run)
    assert lines(made) == [line], "nothing new is known"
    made.clip(500, "broken")
    assert home.run(score.run).done == 2
    assert lines(made)[-1]["missing"] == []


@pytest.mark.slow
def test_a_prompt_that_clip_cuts_is_listed(home: Project) -> None:
    made = FakeRun(home)
    made.latent(0, "long", prompt="a cat on a mat " * 30)
    made.picture(0, "long", (1, 2, 3))
    report = home.run(score.run)
    assert [row["item"] for row in report.truncated] == ["long"]
    assert "of which CLIP reads 77" in report.truncated[0]["message"]


def test_a_model_that_is_not_there_or_no_clip_is_named(home: Project, tiny: Any, tmp_path: Path) -> None:
    made = FakeRun(home)
    add_step(made, 0)
    with pytest.raises(WeightsError, match="neither a directory nor a repository") as caught:
        home.run(score.run, f"validation.scores.clip={tmp_path / 'nowhere'}")
    assert "openai/clip-vit-large-patch14" in caught.value.next_step
    with pytest.raises(WeightsError, match="is a dinov2"):
        home.run(score.run, f"validation.scores.clip={tiny('dinov2')}")
    with pytest.raises(ConfigError, match="neither a directory nor a repository"):
        home.run(score.run, "validation.scores.clip=vit")


@pytest.mark.slow
def test_beside_training_a_step_is_scored_when_its_validation_is_over(
    home: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = FakeRun(home)
    add_step(made, 0, ("cat",))
    looks: list[list[int]] = []

    def scored() -> list[int]:
        return [line["step"] for line in lines(made)] if (made.folder / SCORES_FILE).exists() else []

    def follow(self: watchers.Watch) -> Any:
        looks.append(scored())
        yield False  # the validation of step 0 goes on: another prompt may come
        looks.append(scored())
        made.metrics(step_line(1))
        yield False
        looks.append(scored())
        add_step(made, 10, ("cat",))
        made.latent(10, "late")
        made.metrics(step_line(11))
        yield False
        looks.append(scored())
        made.picture(10, "late", (1, 1, 1))
        yield False
        looks.append(scored())
        add_step(made, 20, ("cat",))
        yield True

    monkeypatch.setattr(watchers.Watch, "__iter__", follow)
    report = home.run(score.run, watch=True)
    assert looks == [[], [], [0], [0], [0, 10]]
    assert scored() == [0, 10, 20] and report.done == 2 + 3 + 2


@pytest.mark.long
@pytest.mark.slow
def test_the_trackers_get_scores_with_their_spread(home: Project) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    home.settings["train"]["trackers"] = ["tensorboard"]
    made = FakeRun(home)
    for step in (0, 500):
        add_step(made, step)
    home.run(score.run)
    events = EventAccumulator(str(made.folder / "tensorboard/scores"))
    events.Reload()
    for key, name in (("scores", "clip_score"), ("spread", "clip_score_spread")):
        found = {event.step: event.value for event in events.Scalars(f"scores/{name}")}
        assert found == pytest.approx({line["step"]: line[key]["clip_score"] for line in lines(made)}, abs=1e-4)
    assert len(events.Scalars("scores/clip_score/cat")) == 2


def test_the_frames_of_a_clip_are_those(project) -> None:
    """Each of its 12 frames is brighter than the one before."""
    clip = FakeRun(project()).clip(0, "one")
    shades = read_sample(clip, 4).mean((1, 2, 3))
    assert np.abs(shades - [number * 255 // 12 for number in (1, 4, 7, 10)]).max() < 3
    assert read_sample(clip, 100).shape == (12, 48, 64, 3)


def test_samples_say_what_they_are_and_wait_for_their_pictures(project) -> None:
    made = FakeRun(project())
    for seed in (1, 2):
        made.latent(500, f"cat_seed{seed}", prompt="a cat", group="cat", seed=seed)
        made.picture(500, f"cat_seed{seed}", (seed, 0, 0))
    made.latent(500, "late")
    made.latent(500, "small")
    preview = made.mark(500, "small")._replace(is_preview=True)
    write_output(made.picture(500, "small", (0, 0, 0)), np.zeros((1, 8, 8, 3), np.uint8), 1, preview)
    made.latent(0, "old")
    made.picture(0, "old", (9, 9, 9))
    made.latent(0, "old", seed=8)
    first, second = find_samples(made.folder)
    assert (first.step, first.samples, first.waiting) == (0, (), ("old",)), "its picture is of another latent"
    assert (second.step, second.waiting) == (500, ("late", "small")), "a preview is not scored"
    assert [(each.group, each.seed, each.prompt) for each in second.samples] == [
        ("cat", 1, "a cat"),
        ("cat", 2, "a cat"),
    ]
    contents = {each.content for each in second.samples}
    assert len(contents) == 2 and "" not in contents
