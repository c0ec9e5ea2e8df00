"""The page of `latentpress report` has small pictures, and says what it leaves out."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cache.runs.validations import Mark
from schemas.catalog import FAMILIES
from schemas.config.pipeline import Config
from stages.media.image import png_info
from stages.pages import pictures
from stages.pages.report import page, samples
from tests.project import Project
from tests.stages.report_run import FakeRun, step_line


def write_noise(path: Path, seed: int, mark: Mark | None = None) -> Path:
    """A picture that is large however it is encoded. mark: of a sample, what it was made from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    info = None if mark is None else png_info(mark)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (256, 256, 3), np.uint8)).save(path, pnginfo=info)
    return path


@pytest.fixture
def run(project: Callable[..., Project]) -> FakeRun:
    """Three prompts with a source image each, of which one has clips, at 12 steps."""
    made = project("kandinsky5-image-i2i")
    made.settings["datasets"][0]["conditioning_data"] = "sources"
    sources = [str(write_noise(made.folder / f"source-{number}.png", number)) for number in range(3)]
    prompts = [{"name": f"p{number}", "prompt": "a", "image": source} for number, source in enumerate(sources)]
    made.settings["validation"] = {"size": "64x48", "prompts": prompts}
    made.config()
    run = FakeRun(made)
    run.home = made
    run.metrics(*(step_line(step) for step in range(1, 60)))
    return run


def test_runs_with_samples_of_their_own_have_all_their_steps(
    project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five runs of six samples and five steps, of which no two share a name."""
    monkeypatch.setattr(samples, "MAX_CELLS", 5 * 6 * 5)
    home, runs = project(), []
    for name in "abcde":
        run = FakeRun(home, name)
        for number in range(6):
            for step in range(5):
                run.latent(step, f"{name}{number}")
        runs.append((name, run.folder, run.config))
    grid = samples.gather_samples(runs, 10_000_000)
    assert len(grid.rows) == 5 * 6 and grid.notes == []
    assert {len(row.gallery.figures) for rows in grid.rows.values() for row in rows} == {5}
    monkeypatch.setattr(samples, "MAX_CELLS", 5 * 6 * 5 - 1)
    grid = samples.gather_samples(runs, 10_000_000)
    assert grid.notes == ["At most 4 of 5 steps are shown, spread evenly; the samples folder has all."]
    assert {len(row.gallery.figures) for rows in grid.rows.values() for row in rows} == {4}


@pytest.mark.slow
def test_what_can_not_be_small_enough_is_named(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.latent(0, "p0")
    write_noise(run.folder / "samples/step-000000/p0.png", 0, run.mark(0, "p0"))
    run.clip(0, "p2", noise=90)
    monkeypatch.setattr(samples, "MIN_CELL_BYTES", 100)
    beside = run.folder / "files", run.folder
    for given in (None, beside):
        grid = samples.gather_samples([("run", run.folder, run.config)], 450, given)
        for name in ("p0", "p2"):
            source, step = grid.rows[name][0].gallery.figures
            assert source.problem == step.problem == "too large for this page"
            assert bool(step.link) == bool(given)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("frames", "noise", "limit"), [(121, 0, 3000), (33, 90, 6000), (12, 90, 20_000)])
def test_a_clip_is_never_larger_than_it_may_be(run: FakeRun, frames: int, noise: int, limit: int) -> None:
    path = run.clip(0, "p2", frames=frames, size=(320, 240), noise=noise)
    clip = pictures.shrink_clip(path, limit)
    assert clip is not None and len(clip.data) <= limit < path.stat().st_size
    assert pictures.shrink_clip(path, 300) is None
    assert pictures.shrink_file(path, (256, 256), 20) is None


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_differs_from_the_defaults_is_what_was_set(family: str) -> None:
    """Of a resolved configuration, which has every option."""
    given: dict = {"root": "work", "model": {"family": family}, "datasets": [{"id": "a", "instance_data_dir": "a"}]}
    only_edits = [*FAMILIES[family].pipelines] == ["i2i"]
    if only_edits:
        given["datasets"][0]["conditioning_data"] = "b"
    given |= {"train": {"set": "abc", "steps": 7, "adapter": {"rank": 3}}, "stages": {"discover": {"workers": 9}}}
    given["train"] |= {"experts": "low"} if FAMILIES[family].components[1:] else {}
    resolved = Config.model_validate(Config.model_validate(given).model_dump(mode="json", by_alias=True))
    rows = {row["option"]: (row["value"], row["default"]) for row in page.differing_from_defaults(resolved)}
    required = {"root": "work", "model.family": family, "datasets.a.id": "a", "datasets.a.instance_data_dir": "a"}
    expected = {key: (value, "required") for key, value in required.items()}
    changed = {"train.steps": ("7", "1000"), "train.adapter.rank": ("3", "16"), "stages.discover.workers": ("9", "4")}
    changed |= {"datasets.a.conditioning_data": ("b", "null")} if only_edits else {}
    assert rows == expected | changed
