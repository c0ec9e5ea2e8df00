"""`latentpress score`: scored samples, samples that are not scored again, messages, and the best steps."""

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
    fake_run: FakeRun, step: int, prompts: tuple[str, ...] = ("cat", "dog"), seeds: tuple[int, ...] = (1, 2)
) -> None:
    for prompt in prompts:
        for seed in seeds:
            name = f"{prompt}_seed{seed}"
            fake_run.latent(step, name, prompt=f"a {prompt} on a mat", group=prompt, seed=seed)
            fake_run.picture(step, name, (step % 256, 40 * seed, len(prompt) * 50))


def lines(fake_run: FakeRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (fake_run.folder / SCORES_FILE).read_text().splitlines()]


def test_without_a_model_nothing_is_loaded_or_written(home: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    home.settings["validation"] = {}
    fake_run = FakeRun(home)
    add_step(fake_run, 500)
    monkeypatch.setattr(ClipScore, "load", lambda *_: pytest.fail("loaded for nothing"))
    report = home.run(score.run)
    assert (report.exit_code, report.done, report.remaining) == (0, 0, 0)
    assert "validation.scores.clip" in home.said and not (fake_run.folder / SCORES_FILE).exists()


def test_run_scores_only_where_a_model_is_named(home: Project) -> None:
    def stages_and_watchers() -> tuple[bool, bool]:
        config = home.config()
        programs = [each.program for each in watchers.WATCHERS if each.applies(config)]
        return "score" in config.stage_order, "score" in programs

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
    """The error comes before training. missing: the missing file, "" for the folder."""
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
    fake_run = FakeRun(home)
    fake_run.metrics(eval_line(500, 2.0), eval_line(1000, 1.5))
    (fake_run.folder / "checkpoints/step-001000").mkdir(parents=True)
    for step in (500, 1000):
        add_step(fake_run, step)
    assert home.run(score.run, dry_run=True).remaining == 8 and not (fake_run.folder / SCORES_FILE).exists()
    report = home.run(score.run)
    assert (report.exit_code, report.done, report.skipped) == (0, 8, 0)
    score_lines = lines(fake_run)
    assert [line["step"] for line in score_lines] == [500, 1000]
    clip = load_clip(tiny("clip"))
    for line in score_lines:
        samples = {row["name"]: row["scores"]["clip_score"] for row in line["samples"]}
        for name, value in samples.items():
            frames = read_sample(fake_run.folder / f"samples/step-{line['step']:06d}/{name}.png", 8)
            assert value == pytest.approx(clip.score(frames, f"a {name[:3]} on a mat"), abs=1e-5)
        assert line["scores"]["clip_score"] == pytest.approx(np.mean([*samples.values()]), abs=1e-5)
        seeds = [np.mean([samples[f"cat_seed{seed}"], samples[f"dog_seed{seed}"]]) for seed in (1, 2)]
        assert line["spread"]["clip_score"] == pytest.approx(np.std(seeds, ddof=1), abs=1e-5)
    best = {row["measure"]: row for row in report.details["best_steps"]}
    assert best["eval loss"]["step"] == 1000 and best["eval loss"]["checkpoint"].endswith("step-001000")
    assert best["CLIP score"]["value"] >= max(
        line["scores"]["clip_score"] for line in score_lines if line["step"] == 1000
    )
    assert "CLIP score" in report.summary()


@pytest.mark.slow
def test_only_what_is_new_or_changed_is_scored_again(home: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_run = FakeRun(home)
    add_step(fake_run, 500)
    home.run(score.run)
    before = lines(fake_run)
    with monkeypatch.context() as patch:
        patch.setattr(ClipScore, "load", lambda *_: pytest.fail("loaded for nothing"))
        report = home.run(score.run)
        assert (report.done, report.skipped) == (0, 4) and lines(fake_run) == before
    add_step(fake_run, 1000)
    fake_run.picture(500, "dog_seed2", (255, 0, 255))
    report = home.run(score.run)
    assert (report.done, report.skipped) == (8, 0), "samples of both steps"
    *_, changed, added = lines(fake_run)
    assert (changed["step"], added["step"]) == (500, 1000)
    old_scores, new_scores = (
        {row["name"]: row["scores"]["clip_score"] for row in line["samples"]} for line in (before[0], changed)
    )
    assert [name for name in old_scores if old_scores[name] != new_scores[name]] == ["dog_seed2"]
    (curve,) = read_curves(fake_run.folder)
    assert [point.value for point in curve.points] == [changed["scores"]["clip_score"], added["scores"]["clip_score"]]


@pytest.mark.long
def test_another_model_or_another_setting_scores_everything_again(home: Project, tmp_path: Path) -> None:
    from stages.rehearsing.tiny_models import build

    fake_run = FakeRun(home)
    add_step(fake_run, 500)
    home.run(score.run)
    second_model = build("clip", tmp_path / "other", seed=1)
    assert home.run(score.run, f"validation.scores.clip={second_model}").done == 4
    assert home.run(score.run, f"validation.scores.clip={second_model}").done == 0
    assert home.run(score.run, f"validation.scores.clip={second_model}", "validation.scores.frames=4").done == 4
    fingerprints = [line["measures"]["clip_score"]["fingerprint"] for line in lines(fake_run)]
    assert len(set(fingerprints)) == 3
    (curve,) = read_curves(fake_run.folder)
    assert curve.measured is not None and curve.measured.model == str(second_model)


@pytest.mark.slow
def test_clips_damaged_pictures_and_those_that_wait(home: Project, tiny: Any) -> None:
    fake_run = FakeRun(home)
    for name in ("fine", "broken"):
        fake_run.latent(500, name)
        fake_run.clip(500, name)
    fake_run.clip(500, "broken").write_bytes(f"cut off {fake_run.mark(500, 'broken')}".encode())
    add_step(fake_run, 1000, ("cat",), (1,))
    fake_run.latent(1000, "waits")
    report = home.run(score.run)
    assert report.exit_code == 3 and report.done == 1 and report.remaining == 1
    assert [(row["item"], row["step"]) for row in report.failed] == [("broken", 500)]
    assert "run `latentpress decode`" in report.failed[0]["message"]
    assert report.next_steps == ["latentpress decode", "latentpress score"]
    (line,) = lines(fake_run)
    assert line["step"] == 500 and line["missing"] == ["broken"]
    clip = load_clip(tiny("clip"))
    frames = read_sample(fake_run.folder / "samples/step-000500/fine.mp4", 3)
    assert len(frames) == 3
    assert line["scores"]["clip_score"] == pytest.approx(clip.score(frames, "a colour"), abs=1e-5)
    home.run(score.run)
    assert lines(fake_run) == [line], "there are no new samples"
    fake_run.clip(500, "broken")
    assert home.run(score.run).done == 2
    assert lines(fake_run)[-1]["missing"] == []


@pytest.mark.slow
def test_a_prompt_that_clip_cuts_is_listed(home: Project) -> None:
    fake_run = FakeRun(home)
    fake_run.latent(0, "long", prompt="a cat on a mat " * 30)
    fake_run.picture(0, "long", (1, 2, 3))
    report = home.run(score.run)
    assert [row["item"] for row in report.truncated] == ["long"]
    assert "CLIP reads the first 77" in report.truncated[0]["message"]


def test_a_model_that_is_not_there_or_no_clip_is_named(home: Project, tiny: Any, tmp_path: Path) -> None:
    fake_run = FakeRun(home)
    add_step(fake_run, 0)
    with pytest.raises(WeightsError, match="nowhere") as caught:
        home.run(score.run, f"validation.scores.clip={tmp_path / 'nowhere'}")
    assert "openai/clip-vit-large-patch14" in caught.value.next_step
    with pytest.raises(WeightsError, match="dinov2"):
        home.run(score.run, f"validation.scores.clip={tiny('dinov2')}")
    with pytest.raises(ConfigError, match=r"validation\.scores\.clip: 'vit'"):
        home.run(score.run, "validation.scores.clip=vit")


@pytest.mark.slow
def test_beside_training_a_step_is_scored_when_its_validation_is_over(
    home: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_run = FakeRun(home)
    add_step(fake_run, 0, ("cat",))
    looks: list[list[int]] = []

    def scored() -> list[int]:
        return [line["step"] for line in lines(fake_run)] if (fake_run.folder / SCORES_FILE).exists() else []

    def follow(self: watchers.Watch) -> Any:
        looks.append(scored())
        yield False  # the validation of step 0 continues: a sample of another prompt may follow
        looks.append(scored())
        fake_run.metrics(step_line(1))
        yield False
        looks.append(scored())
        add_step(fake_run, 10, ("cat",))
        fake_run.latent(10, "late")
        fake_run.metrics(step_line(11))
        yield False
        looks.append(scored())
        fake_run.picture(10, "late", (1, 1, 1))
        yield False
        looks.append(scored())
        add_step(fake_run, 20, ("cat",))
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
    fake_run = FakeRun(home)
    for step in (0, 500):
        add_step(fake_run, step)
    home.run(score.run)
    events = EventAccumulator(str(fake_run.folder / "tensorboard/scores"))
    events.Reload()
    for key, name in (("scores", "clip_score"), ("spread", "clip_score_spread")):
        values = {event.step: event.value for event in events.Scalars(f"scores/{name}")}
        assert values == pytest.approx({line["step"]: line[key]["clip_score"] for line in lines(fake_run)}, abs=1e-4)
    assert len(events.Scalars("scores/clip_score/cat")) == 2


def test_the_frames_of_a_clip_are_those(project) -> None:
    """Each of the clip's 12 frames is brighter than the previous frame."""
    clip = FakeRun(project()).clip(0, "one")
    shades = read_sample(clip, 4).mean((1, 2, 3))
    assert np.abs(shades - [number * 255 // 12 for number in (1, 4, 7, 10)]).max() < 3
    assert read_sample(clip, 100).shape == (12, 48, 64, 3)


def test_samples_say_what_they_are_and_wait_for_their_pictures(project) -> None:
    fake_run = FakeRun(project())
    for seed in (1, 2):
        fake_run.latent(500, f"cat_seed{seed}", prompt="a cat", group="cat", seed=seed)
        fake_run.picture(500, f"cat_seed{seed}", (seed, 0, 0))
    fake_run.latent(500, "late")
    fake_run.latent(500, "small")
    preview = fake_run.mark(500, "small")._replace(is_preview=True)
    write_output(fake_run.picture(500, "small", (0, 0, 0)), np.zeros((1, 8, 8, 3), np.uint8), 1, preview)
    fake_run.latent(0, "old")
    fake_run.picture(0, "old", (9, 9, 9))
    fake_run.latent(0, "old", seed=8)
    first, second = find_samples(fake_run.folder)
    assert (first.step, first.samples, first.waiting) == (0, (), ("old",)), (
        "the picture was decoded from another latent"
    )
    assert (second.step, second.waiting) == (500, ("late", "small")), "a preview is not scored"
    assert [(each.group, each.seed, each.prompt) for each in second.samples] == [
        ("cat", 1, "a cat"),
        ("cat", 2, "a cat"),
    ]
    contents = {each.content for each in second.samples}
    assert len(contents) == 2 and "" not in contents
