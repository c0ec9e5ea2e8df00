"""`latentpress report`: the content of the page, its size, and its sentences about missing content."""

import base64
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from cache.runs.scores import Measured, SampleScores, append_line, summarize_scores
from cache.runs.training_run import StageRun, append_stage
from cache.runs.validations import Mark
from cache.store.store import Store
from schemas.catalog import FAMILIES
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from stages import bucket, discover, encode_text, report
from stages.encoding.job_reports import JobReport
from stages.encoding.stage_registry import TEXT
from stages.media.image import png_info
from stages.pages import pictures
from stages.pages.charts import build_charts
from stages.pages.report import page, samples
from tests.project import Project
from tests.stages.html_page import ESCAPED, HOSTILE, Page, alike, curves
from tests.stages.report_run import FakeRun, eval_line, step_line

CUT_ROW = r'<tr>\s*<td class="n">(\d+)</td>\s*<td class="n">(\d+)</td>\s*<td>(.*?)</td>\s*</tr>'


def page_of(home: Project, *overrides: str, **options: Any) -> tuple[str, list[str]]:
    """The text of the page and the sentences about missing content."""
    result = home.run(report.run, *overrides, **options)
    return Path(result.details["page"]).read_text(), result.details.get("missing", [])


@pytest.fixture
def home(project: Callable[..., Project]) -> Project:
    prompts = [{"name": "one", "prompt": "a colour"}, {"name": "two", "prompt": "another"}]
    new_project = project(validation={"size": "64x48", "prompts": prompts}, train={"run": "run", "steps": 40})
    new_project.image("red cat.png", (64, 48), "a red cat on a mat", 1)
    new_project.image("red dog.png", (64, 48), "a red dog on a mat", 2)
    new_project.image("house.png", (48, 64), "an old house by the sea in the evening light", 3)
    new_project.config()
    return new_project


@pytest.mark.slow
def test_a_finished_run(home: Project) -> None:
    (home.media / "broken.png").write_bytes(b"no picture")
    home.image("tiny.png", (8, 8), "small")
    home.settings["datasets"][0]["minimum_image_size"] = 16
    home.run(discover.run)
    home.run(bucket.run)
    run = FakeRun(home, "run", "train.optimizer.lr=3e-4")
    run.metrics(eval_line(0, 2.0), *(step_line(step) for step in range(1, 41)), eval_line(40, 1.5))
    for step in (0, 40):
        run.latent(step, "one", negative_prompt="blurred")
        run.picture(step, "one", (200, step, 90))
    run.latent(40, "two")
    (run.folder / "result.json").write_text('{"step": 40}')
    (run.folder / "scores.jsonl").write_text('{"step": 40, "scores": {"clip score": 0.3}}\n')
    append_stage(run.folder, StageRun(stage="score", began=0.0, seconds=7.0, done=1, failed=False))
    for seconds in (61.0, 60.0):
        append_stage(run.folder, StageRun(stage="discover", began=0.0, seconds=seconds, done=1, failed=False))
    fingerprint, store = TEXT.fingerprint(run.config), Store(run.config.root)
    for number, seconds in enumerate((200.0, 5.0)):  # of two machines
        job = JobReport(
            program="encode-text", engine="local", workers=1, shard=f"{number}/2", exit_code=0, seconds=seconds
        )
        store.publish_record(f"jobs/encode-text/{fingerprint}/{number:016x}.json", job)
    text, gaps = page_of(home)
    assert (run.folder / "report.html").stat().st_size < 10_000_000
    charts, page = curves(text), Page(text)

    assert np.allclose(charts["loss"]["each step"], [1 / step for step in range(1, 41)], atol=1e-3)
    averages = charts["loss"]["average"]
    assert abs(averages[-1] - 1 / 40) < 2e-3, "it does not lag"
    assert charts["eval"]["Eval loss"] == [2.0, 1.5] and charts["eval-bucket"] == {"64x48@1": [2.0, 1.5]}
    assert charts["eval-sigma"] == {"0.2": [2.0, 1.5], "0.8": [2.0, 1.5]}
    assert charts["wait"]["Waiting for data"] == [25.0] * 40 and charts["memory"]["host memory"] == [2.0] * 40
    assert charts["score-0"] == {"Score: clip score": [0.3]}
    assert {"lr", "grad-norm", "speed"} <= charts.keys()

    assert alike(page.pictures("one at step 40")[0], np.full((48, 64, 3), (200, 40, 90)))
    for words in ("a colour", "blurred", "seed 7", "size 64x48@1", "steps 2", "guidance 3.5", "not decoded yet"):
        assert words in page.text, words
    assert "1.5 at step 40" in page.text and len(gaps) == 2
    assert "1 of 3 samples" in gaps[0] and "latentpress decode" in gaps[0] and "No text" in gaps[1]

    assert "3 samples in 2 buckets." in page.text and "By dataset: photos 3." in page.text
    assert "3 different captions of 6 to 10 words" in page.text
    # {a, red, on, mat} of {a, red, on, mat, cat, dog}
    assert page.text.index("67 %") < page.text.index("a red cat on a mat") < page.text.index("a red dog on a mat")
    assert re.search(r'<div class="empty">no picture</div>\s*<div><b>broken.png</b><p class="problem">discover:', text)
    assert len(page.pictures("tiny.png")) == 1, "rejected, and it can be shown"

    scores_bytes = (run.folder / "scores.jsonl").stat().st_size
    assert re.search(rf"<td>score</td>\s*<td>0:00:07</td>\s*<td>{scores_bytes} bytes</td>", text)
    assert "0:02:01" in page.text and "not recorded" in page.text and "0:00:20" in page.text, (
        "40 steps of half a second"
    )
    assert "0:03:25" in page.text, "of the text's two jobs"
    rows = re.findall(r"<tr>\s*<td>([\w.-]+)</td>\s*<td>(.*?)</td>\s*<td>(.*?)</td>", text)
    assert ("train.optimizer.lr", "0.0003", "0.0001") in rows
    assert not any(key == "train.optimizer.schedule" for key, *_ in rows), "it is the default"


def test_a_run_that_has_not_begun_and_one_that_does_not_exist(home: Project) -> None:
    text, gaps = page_of(home)
    assert curves(text) == {}
    assert "config.yaml" in gaps[0]
    assert any(line.startswith("Training loss: no steps") for line in gaps)
    assert any("no samples: no validation was made yet" in line for line in gaps)
    FakeRun(home, "other")
    with pytest.raises(LatentpressError, match="'absent'") as error:
        home.run(report.run, runs=["absent"])
    assert "other" in error.value.next_step


def test_losses_that_are_not_finite_and_damaged_files(home: Project) -> None:
    run = FakeRun(home)
    run.metrics(*(step_line(step, loss=None if step in (3, 5) else 1.0) for step in range(1, 8)), eval_line(7, None))
    with (run.folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 8, "loss": \xff')
    run.latent(7, "one")
    (run.folder / "validation/step-000007/two.safetensors").write_bytes(b"\xff" * 30)
    for name, path in (("one", run.picture(7, "one", (0, 0, 0))), ("two", run.clip(7, "two"))):
        path.write_bytes(f"cut off {run.mark(7, name)}".encode())
    text, _ = page_of(home)
    charts = curves(text)
    assert charts["loss"] == {"each step": [1.0] * 5, "average": [1.0] * 7}
    assert "not finite at 2 steps: 3, 5." in text and "eval" not in charts
    assert Page(text).text.count("can't be shown: ") == 2


@pytest.mark.slow
def test_scores_with_their_spread_and_the_best_steps(home: Project) -> None:
    run = FakeRun(home)
    run.metrics(eval_line(0, 2.0), eval_line(20, 1.5), eval_line(40, 1.6))
    for step in (20, 40):
        (run.folder / f"checkpoints/step-{step:06d}").mkdir(parents=True)
    measured = {"clip_score": Measured("f1", "org/clip")}
    for step, score in ((0, 33.0), (20, 20.0), (40, 30.0)):
        samples = [SampleScores(f"{prompt}_seed{seed}", prompt, seed, "", {"clip_score": score + more + seed})
                   for prompt, more in (("cat", 10), ("dog", 0)) for seed in (1, 3)]  # fmt: skip
        append_line(run.folder, summarize_scores(step, samples, measured))
    text, _ = page_of(home)
    assert curves(text)["score-0"] == {"Score: CLIP score": [40.0, 27.0, 37.0]}
    assert curves(text)["score-0-prompts"] == {"cat": [45.0, 32.0, 42.0], "dog": [35.0, 22.0, 32.0]}
    assert text.count('class="band"') == 1, "only of the score, because its seeds differ"
    page = Page(text).text
    assert "one standard deviation over 2 seeds" in page and "Model: org/clip." in page
    rows = re.findall(
        r"<tr>\s*<td>([\w ]+)</td>\s*<td class=\"n\">(\d+)</td>\s*<td>(.*?)</td>\s*<td>(.*?)</td>\s*<td>(.*?)</td>",
        text,
    )
    assert [(*row[:4], Path(row[4]).name) for row in rows] == [
        ("eval loss", "20", "1.5", "", "step-000020"),
        ("CLIP score", "0", "40", "1.4", "none"),
        ("CLIP score", "40", "37", "1.4", "step-000040"),
    ]


def test_a_step_after_which_the_data_are_others_is_marked(home: Project) -> None:
    lines = [{"step": step, "loss": 1.0 / step, "lr": 0.1} for step in range(1, 6)] + [{"step": 3, "set": "abc"}]
    charts = {chart.key: chart for chart in build_charts([("run", lines)])}
    assert charts["loss"].marks == (3,) and "trained on other data after step 3: set abc." in charts["loss"].notes
    assert charts["lr"].marks == () and charts["eval"].marks == ()
    assert charts["loss"].mark_places == [500]


@pytest.mark.long
def test_two_runs_side_by_side(home: Project) -> None:
    first, second = (
        FakeRun(home, "first", "train.adapter.rank=32"),
        FakeRun(home, "second", "train.adapter.rank=8", "train.optimizer.lr=1e-3"),
    )
    for number, run in enumerate((first, second)):
        run.metrics(*(step_line(step, loss=number + 1.0) for step in range(1, 4)), eval_line(3, number + 1.0))
        run.latent(3, "one")
        run.picture(3, "one", (50 + 100 * number, 0, 0))
    text, _ = page_of(home, runs=["first", str(second.folder)])
    charts, page = curves(text), Page(text)
    assert charts["eval"] == {"first": [1.0], "second": [2.0]}
    assert charts["loss"]["second: average"] == [2.0] * 3
    pictures = page.pictures("one at step 3")
    assert [round(float(picture[..., 0].mean()), -1) for picture in pictures] == [50, 150]
    table = text[text.index("Differences between the runs") :]
    table = table[: table.index("</table>")]
    keys = re.findall(r"<td>([\w.]+)</td>\s*<td>(.*?)</td>\s*<td>(.*?)</td>", table)
    assert ("train.adapter.rank", "32", "8") in keys and ("train.optimizer.lr", "0.0001", "0.001") in keys
    assert {key for key, *_ in keys} == {"train.run", "train.adapter.rank", "train.optimizer.lr"}


@pytest.mark.long
def test_two_experts_side_by_side(project: Callable[..., Project]) -> None:
    """Called without the names of the experts; only the expert differs between the runs."""
    home = project("wan2.2-a14b-t2v", train={"run": "run", "steps": 3, "experts": "both"})
    for expert in ("high", "low"):
        run = FakeRun(home, "run", f"train.experts={expert}")
        run.metrics(*(step_line(step) for step in range(1, 4)), eval_line(3, 1.0))
        run.latent(3, "one", guidance=4.0, guidance_low=3.0)
        run.picture(3, "one", (50, 0, 0))
        (run.folder / "result.json").write_text('{"step": 3}')
    page = Path(home.run(report.run).details["page"])
    text, gaps = page_of(home)
    assert page == home.folder / "output/report.html" and not any("config.yaml" in text for text in gaps)
    assert text.count("wan2.2-a14b t2v-a14b, high, lora") == text.count("wan2.2-a14b t2v-a14b, low, lora") == 1
    assert "by <code>latentpress report" in text and "report run" not in text
    assert "guidance 4, guidance_low 3" in text
    for row in ("<dt>state</dt> <dd>finished</dd>", "<dt>step</dt> <dd>3 of 3</dd>"):
        assert text.count(row) == 2
    table = text[text.index("Differences between the runs") :]
    assert re.findall(r"<td>([\w.]+)</td>", table[: table.index("</table>")]) == ["train.experts", "high", "low"]


@pytest.mark.long
def test_many_steps_and_samples_stay_small_and_keep_every_peak(home: Project, often) -> None:
    run = FakeRun(home)
    steps = often(5_000, 100_000)
    peak, every = steps // 2 + 321, steps // 40
    lines = [step_line(step, loss=9.0 if step == peak else 1.0) for step in range(1, steps + 1)]
    run.metrics(*lines)
    generator = np.random.default_rng(0)
    for step in range(0, steps + 1, every):
        run.latent(step, "one")
    noise = generator.integers(0, 256, (320, 320, 3), np.uint8)
    for step in range(0, steps + 1, every):
        path = run.picture(step, "one", (0, 0, 0))
        Image.fromarray(noise).save(path, pnginfo=png_info(run.mark(step, "one")))
    text, _ = page_of(home)
    assert (run.folder / "report.html").stat().st_size < 10_000_000
    charts, images = curves(text), Page(text).of("img")
    assert max(charts["loss"]["each step"]) == 9.0 and len(charts["loss"]["each step"]) <= 2000
    assert f"of {steps} points" in text and "16 of 41 steps" in text
    columns = [int(image["alt"].rpartition(" ")[2]) for image in images]
    assert len(columns) == 16 and columns[0] == 0 and columns[-1] == steps


@pytest.mark.long
def test_clips_are_small_and_whole_ones_lie_beside_the_page(home: Project) -> None:
    run = FakeRun(home)
    for step in (0, 5):
        run.latent(step, "one")
    small, big = run.clip(0, "one"), run.clip(5, "one", frames=40, size=(640, 480), noise=90)
    assert big.stat().st_size > 2_000_000
    text, _ = page_of(home, pictures_folder=True)
    first, last = [base64.b64decode(video["src"].partition(",")[2]) for video in Page(text).of("video")]
    assert first == small.read_bytes() and len(last) <= 300_000
    with av.open(io.BytesIO(last)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert max(frames[0].shape[:2]) <= 256 and frames[0].shape[1] * 3 == frames[0].shape[0] * 4
    assert frames[-1].mean() > frames[0].mean() + 100, "the preview becomes brighter like the clip"
    assert not any(key == "autoplay" for video in Page(text).of("video") for key in video)
    links = [each["href"] for each in Page(text).of("a") if each["href"].startswith("report-files")]
    assert len(links) == 2 and all((run.folder / link).is_file() for link in links)
    assert (run.folder / links[1]).read_bytes() == big.read_bytes()


@pytest.mark.slow
def test_nothing_hostile_gets_out_of_its_place(home: Project) -> None:
    text = HOSTILE.replace("\x00", "").replace("\udcff", "")
    home.image("a.png", (64, 48), text)
    home.settings["validation"]["prompts"][0]["prompt"] = text
    home.run(discover.run)
    home.run(bucket.run)
    run = FakeRun(home)
    odd = "</script><b>"
    run.metrics(step_line(1), {"step": 1, "eval_loss": 1.0, "eval_by_bucket": {odd: 1.0, HOSTILE: 2.0}})
    run.latent(1, "one", prompt=HOSTILE, negative_prompt=HOSTILE, bucket=HOSTILE, steps=HOSTILE)
    run.picture(1, "one", (0, 0, 0))
    run.picture(1, "<img src=x onerror=alert(1)>", (0, 0, 0))
    (run.folder / "scores.jsonl").write_text(json.dumps({"step": 1, "scores": {HOSTILE: 1.0}}))
    text, _ = page_of(home)
    page = Page(text)
    assert len(re.findall(r"<script\b", text)) == 1
    assert not [value for _, attributes in page.tags for key, value in attributes.items() if key.startswith("on")]
    assert ESCAPED in page.text, "neither a tag nor a template's expression"
    assert odd in [name for chart in curves(text).values() for name in chart]


def test_secrets_of_addresses_stay_out(home: Project) -> None:
    secret = "s3cr3tsignature"
    url = f"https://host.example/set.csv?X-Amz-Signature={secret}"
    home.settings["datasets"].append({"id": "far", "source": "manifest", "instance_data_dir": url, "disabled": True})
    run = FakeRun(home)
    run.metrics(step_line(1))
    text, _ = page_of(home)
    assert secret not in text and "host.example/set.csv" in text


@pytest.mark.slow
def test_the_seeds_of_a_sample_are_a_group(home: Project) -> None:
    """Seeds have one heading and the prompt once; a sample that the configuration does not have is below them."""
    home.settings["validation"]["seed"] = [1, 2]
    run = FakeRun(home)
    for seed in (2, 1):
        run.latent(40, f"one_seed{seed}", seed=seed, group="one", prompt_name="one")
        run.picture(40, f"one_seed{seed}", (seed, 20, 90))
    run.picture(40, "gone", (1, 2, 3))
    text, _ = page_of(home)
    articles = re.findall(r'<article class="prompt"><h3>(.*?)</h3>(.*?)</article>', text, re.DOTALL)
    assert [name for name, _ in articles] == ["one", "gone"]
    content = articles[0][1]
    assert content.index("seed 1, ") < content.index("seed 2, ") and content.count("a colour") == 1


@pytest.mark.slow
def test_captions_that_the_encoder_cut_off(project: Callable[..., Project]) -> None:
    home = project(text={"max_length": 6})
    longest = "a grey cat that sleeps on a red mat beside an old house by the sea"
    for number, caption in enumerate(("a cat", "a grey cat that sleeps on a red mat", longest)):
        home.image(f"{number}.png", (64, 64), caption, number)
    for program in (discover, bucket, encode_text):
        encoded = home.run(program.run)
    text, _ = page_of(home)
    rows = [(int(tokens), int(kept), caption) for tokens, kept, caption in re.findall(CUT_ROW, text)]
    assert rows[0][2] == longest and rows[0][0] > rows[1][0] > 6 and {kept for _, kept, _ in rows} == {6}
    assert f"{len(rows)} captions and prompts were truncated" in text
    assert len(rows) == len(encoded.truncated) and "a cat" not in [caption for *_, caption in rows]


@pytest.mark.slow
def test_a_rejected_clip_is_shown_by_its_middle_frame(project: Callable[..., Project]) -> None:
    home = project("kandinsky5-video-t2v", stages={"max_reject_fraction": 1.0})
    home.video("long.mp4", 24)
    home.video("short.mp4", 3)
    home.run(discover.run)
    home.run(bucket.run)
    page = Page(page_of(home)[0])
    (thumbnail,) = page.pictures("short.mp4")
    assert "bucket: too-short: " in page.text and "long.mp4" not in page.text
    assert thumbnail.shape == (48, 64, 3) and abs(float(thumbnail[:, 40:].mean()) - 85) < 6, "the second frame"


def write_noise(path: Path, seed: int, mark: Mark | None = None) -> Path:
    """Write a picture that is large in every encoding. mark: the mark of a validation sample."""
    path.parent.mkdir(parents=True, exist_ok=True)
    info = None if mark is None else png_info(mark)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (256, 256, 3), np.uint8)).save(path, pnginfo=info)
    return path


def test_runs_with_samples_of_their_own_have_all_their_steps(
    project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five runs of six samples and five steps; all names of samples differ."""
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
    assert len(grid.notes) == 1 and "4 of 5 steps" in grid.notes[0]
    assert {len(row.gallery.figures) for rows in grid.rows.values() for row in rows} == {4}


@pytest.mark.slow
def test_what_can_not_be_small_enough_is_named(
    project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = project("kandinsky5-image-i2i")
    home.settings["datasets"][0]["conditioning_data"] = "sources"
    sources = {name: str(write_noise(home.folder / f"{name}.png", number)) for number, name in enumerate(("p0", "p2"))}
    prompts = [{"name": name, "prompt": "a", "image": source} for name, source in sources.items()]
    home.settings["validation"] = {"size": "64x48", "prompts": prompts}
    run = FakeRun(home)
    run.latent(0, "p0")
    write_noise(run.folder / "samples/step-000000/p0.png", 0, run.mark(0, "p0"))
    run.clip(0, "p2", noise=90)
    monkeypatch.setattr(samples, "MIN_CELL_BYTES", 100)
    for copy_folders in (None, (run.folder / "files", run.folder)):
        grid = samples.gather_samples([("run", run.folder, run.config)], 450, copy_folders)
        for name in sources:
            source, step = grid.rows[name][0].gallery.figures
            assert source.problem == step.problem == "too large for this page"
            assert bool(step.link) == bool(copy_folders)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("frames", "noise", "limit"), [(121, 0, 3000), (33, 90, 6000), (12, 90, 20_000)])
def test_a_clip_is_never_larger_than_it_may_be(home: Project, frames: int, noise: int, limit: int) -> None:
    path = FakeRun(home).clip(0, "p2", frames=frames, size=(320, 240), noise=noise)
    clip = pictures.shrink_clip(path, limit)
    assert clip is not None and len(clip.data) <= limit < path.stat().st_size
    assert pictures.shrink_clip(path, 300) is None
    assert pictures.shrink_file(path, (256, 256), 20) is None


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_differs_from_the_defaults_is_what_was_set(family: str) -> None:
    """The configuration is resolved, so it has every option."""
    settings: dict = {"root": "work", "model": {"family": family}, "datasets": [{"id": "a", "instance_data_dir": "a"}]}
    only_edits = [*FAMILIES[family].pipelines] == ["i2i"]
    if only_edits:
        settings["datasets"][0]["conditioning_data"] = "b"
    settings |= {"train": {"set": "abc", "steps": 7, "adapter": {"rank": 3}}, "stages": {"discover": {"workers": 9}}}
    settings["train"] |= {"experts": "low"} if FAMILIES[family].components[1:] else {}
    resolved = Config.model_validate(Config.model_validate(settings).model_dump(mode="json", by_alias=True))
    rows = {row["option"]: (row["value"], row["default"]) for row in page.list_changed_options(resolved)}
    required = {"root": "work", "model.family": family, "datasets.a.id": "a", "datasets.a.instance_data_dir": "a"}
    expected = {key: (value, "required") for key, value in required.items()}
    changed = {"train.steps": ("7", "1000"), "train.adapter.rank": ("3", "16"), "stages.discover.workers": ("9", "4")}
    changed |= {"datasets.a.conditioning_data": ("b", "null")} if only_edits else {}
    assert rows == expected | changed
