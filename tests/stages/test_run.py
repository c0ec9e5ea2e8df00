"""`latentpress run` from a folder of pictures to an adapter; a second run has nothing to do."""

import fcntl
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cache.runs.training_run import LOCK_NAME
from cache.sets.set_lookup import open_configured_set
from schemas import libraries
from schemas.cli.console import Console, Options, Report, run_program
from schemas.config.loading import load_config
from schemas.errors import INCOMPLETE, INTERRUPTED, LatentpressError
from stages import bucket, decode, discover, encode_latents, encode_text, export, index, run
from stages.cli import PROGRAMS, program_module
from stages.engines.stage_processes import StageProcesses
from tests.forms import long
from tests.model_hub import ModelHub
from tests.processes import PATIENCE_S
from tests.project import Project
from tests.reports import odd_keys
from trainer.__main__ import run as train

ROOT = Path(__file__).resolve().parents[2]
STAGES = {
    "discover": discover.run,
    "bucket": bucket.run,
    "encode-text": encode_text.run,
    "encode-latents": encode_latents.run,
    "index": index.run,
    "train": train,
    "decode": decode.run,
}


def latentpress(home: Project, *arguments: str) -> tuple[int, Report, dict, str]:
    """Returns (exit code, report, its JSON, log)."""
    command = [sys.executable, "-m", "stages.cli", *arguments, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # ATEN_CPU_CAPABILITY as for the losses compared below
    process = subprocess.run(command, cwd=home.folder, capture_output=True, text=True, env=environment)
    assert process.stdout, process.stderr
    document = json.loads(process.stdout)
    assert list(odd_keys(document)) == []
    values = {key: value for key, value in document.items() if key not in ("exit_code", "error")}
    return process.returncode, Report(**values) if "error" not in document else Report("run"), document, process.stderr


@pytest.fixture
def home(project: Callable[..., Project]) -> Project:
    """Four pictures, and a configuration that encodes two additional texts."""
    prompts = [{"name": "one", "prompt": "a colour"}]
    home_project = project(
        text={"max_length": 3},
        stages={  # pictures are made only at the end, so that each stage always does the same work
            **{name: {"threads": 1} for name in ("encode-text", "encode-latents")},
            "decode": {"while_training": False},
        },
        train={"run": "first", "steps": 4, "batch_size": 2, "threads": 1, "optimizer": {"warmup": 2}},
        validation={"size": "64x64", "steps": 2, "every": 2, "eval_samples": 2, "prompts": prompts},
    )
    for number in range(4):
        home_project.image(f"{number}.png", (64, 64), f"colour number {number}", number)
    home_project.config()
    return home_project


@pytest.mark.slow
def test_from_pictures_to_an_adapter_and_the_second_time_nothing(
    forked_programs: None, home: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Programs are forks of this process; tests/test_importpath.py starts new processes, like users."""
    code, _, _, log = latentpress(home, "run", "--dry-run")
    assert code == 0, log
    code, first, _, log = latentpress(home, "run")
    assert code == 0, log
    assert (first.done, first.skipped, first.remaining, first.next_steps) == (7, 0, 0, [])
    assert first.summary().startswith("run: 7 stages done, 0 skipped, 5 truncated\n")
    counts = {row["stage"]: row["done"] for row in first.details["stages"]}
    assert list(counts) == [*STAGES] and [*counts.values()][:6] == [4, 10, 6, 4, 4, 4]
    cut = {row["path"] for row in first.truncated}
    assert {f"colour number {number}" for number in range(4)} <= cut
    check_results(home, first)

    def times() -> dict[Path, int]:  # without the files of `run` itself
        files = (path for path in home.folder.rglob("*") if path.is_file() and "logs" not in path.parts)
        return {path: path.stat().st_mtime_ns for path in files}

    before = times()
    code, second_report, _, log = latentpress(home, "run")
    assert code == 0, log
    assert (second_report.done, second_report.skipped, second_report.remaining, second_report.next_steps) == (
        0,
        7,
        0,
        [],
    )
    assert {row["path"] for row in second_report.truncated} == cut
    assert second_report.details["adapter"] == first.details["adapter"], "a finished run gives the same report"
    assert times() == before
    (home.folder / "output/preview").mkdir()
    code, report, _, _ = latentpress(home, "status")
    assert (code, report.remaining, report.details["runs"]) == (0, 0, ["first"])
    a_dry_run_of_what_is_done_does_nothing(home)
    a_run_that_is_stopped_makes_its_page(home)
    copy = a_set_elsewhere(home)
    monkeypatch.chdir(copy)
    assert run_program("train", train, Options(Path("pipeline.yaml"), json=True)) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["done"] == 4 and "warning" not in output.err
    metrics, copied_metrics = (folder / "output" / "first" / "metrics.jsonl" for folder in (home.folder, copy))
    assert losses(copied_metrics) == losses(metrics)


def check_results(home: Project, report: Report) -> None:
    lines, output = [line.strip() for line in report.summary().splitlines()], home.folder / "output/first"
    assert f"adapter: {output}/adapter" in lines
    assert (output / "adapter/pytorch_lora_weights.safetensors").exists()
    assert f"contact sheet: {output}/samples/contact-sheet.png" in lines
    assert f"pictures: {output}/samples" in lines and (output / "samples/contact-sheet.png").exists()
    assert f"report: {output}/report.html" in lines and f"checkpoints: {output}/checkpoints" in lines
    keys = [line.partition(":")[0] for line in lines[lines.index(f"adapter: {output}/adapter") :]]
    assert keys[:3] == ["adapter", "checkpoints", "best steps"] and keys.index("report") < keys.index("numbers")
    page = (output / "report.html").read_text()
    assert page.count("<img ") == 3 and "not decoded yet" not in page and page.count('class="lines"') >= 9
    logged = [json.loads(line)["stage"] for line in (output / "stages.jsonl").read_text().splitlines()]
    assert logged == [*STAGES]
    assert f"numbers: {output}/metrics.jsonl" in lines and (output / "metrics.jsonl").exists()
    steps = sorted(path.parent.name for path in (output / "samples").rglob("one.png"))
    assert steps == ["step-000000", "step-000002", "step-000004"]


def a_dry_run_of_what_is_done_does_nothing(home: Project) -> None:
    report = home.run(run.run, dry_run=True)
    assert report.summary().startswith("run (dry run): 0 stages done, 7 skipped")
    assert [(row["done"], row["remaining"]) for row in report.details["stages"]] == [(0, 0)] * 7
    for name, program in STAGES.items():
        report = home.run(program, dry_run=True)
        assert report.done == report.remaining == 0 < report.skipped, name
    place = str(home.folder / "export")
    shards = home.run(export.run, to=place, dry_run=True).remaining
    assert shards == home.run(export.run, to=place).done > 1
    report = home.run(export.run, to=place, dry_run=True)
    assert (report.done, report.remaining, report.skipped) == (0, 0, shards)
    report = home.run(run.run, "datasets.photos.prepend=new", dry_run=True)
    assert (report.done, report.skipped, report.remaining) == (0, 1, 1)  # the stages after bucket depend on its result


def a_run_that_is_stopped_makes_its_page(home: Project) -> None:
    page, run_stage = home.folder / "output/first/report.html", run.StageProcesses.run
    page.unlink()

    def stop_at_bucket(self: Any, stage: str, options: Options) -> tuple[int, dict]:
        if stage == "bucket":
            os.kill(os.getpid(), signal.SIGTERM)
        return run_stage(self, stage, options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.StageProcesses, "run", stop_at_bucket)
        patch.setattr(run, "STOPPED_S", PATIENCE_S)
        report = home.run(run.run)
    assert report.details["report"] == str(page) and page.exists()
    assert "SIGTERM" in report.details["stopped"] and report.next_steps == ["latentpress run"]


def a_set_elsewhere(home: Project) -> Path:
    """A copy of sets/, of the set's shards and of the transformer, without media, plans and encoders."""
    copy = home.folder / "away"
    shutil.copytree(home.root / "sets", copy / "work" / "sets")
    (table,) = copy.glob("work/sets/*/shards.arrow")
    for path in pa.ipc.open_file(table).read_all().column("path").to_pylist():
        (copy / "work" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(home.root / path, copy / "work" / path)
    settings = json.loads(json.dumps(home.settings))
    for part in ("transformer", "scheduler"):
        shutil.copytree(Path(settings["model"]["path"]) / part, copy / "model" / part)
    settings["model"]["path"] = "model"
    (copy / "pipeline.yaml").write_text(json.dumps(settings))
    return copy


def losses(path: Path) -> list[float]:
    return [row["loss"] for row in map(json.loads, path.read_text().splitlines()) if "loss" in row]


def test_a_failing_stage_stops_the_run_with_its_message(forked_programs: None, home: Project) -> None:
    for path in home.media.iterdir():
        path.unlink()
    home.settings["stages"]["order"] = ["discover", "bucket"]
    home.config()
    code, _, document, log = latentpress(home, "run")
    assert code == 3
    assert document["error"]["message"].startswith("discover: datasets.photos.instance_data_dir: ")
    assert log.count("does not contain images") == 1 and log.count(document["error"]["next_step"]) == 1


def test_an_output_that_is_no_folder_is_named_before_the_first_stage(home: Project) -> None:
    (home.folder / "output").write_text("in its place")
    with pytest.raises(LatentpressError, match="output"):
        home.run(run.run)
    assert not (home.folder / "work").exists()


def test_another_trainer_is_named_before_the_first_stage(home: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageProcesses, "run", lambda *_: pytest.fail("a stage was started"))
    folder = home.config().run_folder
    folder.mkdir(parents=True)
    with (folder / LOCK_NAME).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LatentpressError, match="output/first") as caught:
            home.run(run.run)
    assert "choose another train.run" in caught.value.next_step


def test_a_stage_that_a_signal_ended_is_called_so(home: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, message, code in (
        (signal.SIGINT, "checks was interrupted (SIGINT)", INTERRUPTED),
        (signal.SIGKILL, "checks was killed (SIGKILL)", INCOMPLETE),
    ):
        monkeypatch.setattr(StageProcesses, "run", lambda *_, number=number: (-number, {"error": {}}))
        with pytest.raises(LatentpressError) as caught:
            home.run(run.run)
        assert (caught.value.message, caught.value.exit_code) == (message, code)
        assert "Run the same command again" in caught.value.next_step


def test_what_is_not_installed_is_named_before_the_first_stage(
    forked_programs: None, home: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries of training are only needed if train is one of the stages."""
    find_spec = libraries.find_spec
    monkeypatch.setattr(libraries, "find_spec", lambda name: None if name in ("optimi", "decord") else find_spec(name))
    optimizer = "train.optimizer.name=optimi-adamw"
    with pytest.raises(LatentpressError) as caught:
        home.run(run.run, optimizer, "latents.decoder=decord", dry_run=True)
    for name in ("torch-optimi (train.optimizer.name optimi-adamw)", "decord (latents.decoder decord)"):
        assert name in caught.value.message
    assert all(f"[{extra}]" in caught.value.next_step for extra in ("optimizers", "decord"))
    assert not (home.folder / "work").exists()
    home.run(run.run, optimizer, "stages.order=[discover,bucket]", dry_run=True)


def test_reports_of_all_programs_have_the_same_keys() -> None:
    assert {"program", "done", "skipped", "remaining", "rejects", "failed", "damage", "next_steps"} <= set(
        Report("x").to_dict()
    )


@pytest.mark.long
def test_every_program_reports_in_snake_case(
    forked_programs: None, home: Project, models: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each level of nesting, for dry runs and real runs of all programs in the order of the pipeline."""
    monkeypatch.chdir(home.folder)
    path, out = home.folder / "pipeline.yaml", str(home.folder / "exported")
    options_by_program: dict[str, dict] = {"preview": {"plan": True}, "export": {"to": out}}
    options_by_program["push"] = {"repo": "me/first"}
    for program in (name for name in PROGRAMS if name not in ("new", "import-config")):  # these write the file
        called = train if program == "train" else importlib.import_module(program_module(program)).run
        for dry_run in (True,) if program == "ui" else (True, False):  # ui serves until it is stopped
            options = Options(path, dry_run=dry_run, json=True)
            try:
                document = called(
                    load_config(path), options, Console(json=True), **options_by_program.get(program, {})
                ).to_dict()
                assert (document["program"] == program and document["details"]) or program in ("decode", "score")
            except LatentpressError as error:
                assert program in ("features", "caption", "masks", "encode-vision"), error  # not configured here
                document = error.to_dict()
            assert list(odd_keys(document)) == [], program


@pytest.mark.long
@pytest.mark.parametrize("after", [long("discover"), long("encode-latents"), "index"])
def test_what_is_edited_between_stages_is_planned(forked_programs, home: Project, monkeypatch, after: str) -> None:
    """And encoded, even if the earlier stages had encoded the texts before the edit."""
    home.settings["validation"]["prompts_file"] = "more.yaml"
    (home.folder / "more.yaml").write_text("two: another colour\n")
    real = StageProcesses.run

    def run_stage(processes: StageProcesses, stage: str, options: Options) -> tuple[int, dict]:
        result = real(processes, stage, options)
        if stage == after:
            (home.folder / "more.yaml").write_text("two: yet another colour\n")
            home.settings["datasets"][0]["captions_per_file"] = "one"
            home.config()
        return result

    monkeypatch.setattr(StageProcesses, "run", run_stage)
    report = home.run(run.run)
    assert (report.exit_code, report.remaining) == (0, 0)
    ran = [row["stage"] for row in report.details["stages"]]
    assert ran.count("discover") == 2 and ran[-2:] == ["train", "decode"]
    (path,) = home.folder.rglob("stages.jsonl")
    log = [json.loads(line) for line in path.open()]
    assert [row["stage"] for row in log if row["failed"]] == []
    prompts = [prompt.prompt for prompt in open_configured_set(home.config(), pytest.fail).validation]
    assert "yet another colour" in prompts and "another colour" not in prompts
