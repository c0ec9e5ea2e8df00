"""`latentpress run`, as a user starts it: from a folder of pictures to an adapter, then nothing the second time."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from schemas.console import Console, Options, Report, execute
from schemas.errors import LatentpressError
from schemas.loading import load
from stages.cli import PROGRAMS, module_of
from tests.reports import odd_keys
from trainer.__main__ import run as train

ROOT = Path(__file__).resolve().parent.parent
ORDER = ["discover", "bucket", "encode-text", "encode-latents", "index", "train", "decode"]


def latentpress(folder: Path, *arguments: str) -> tuple[int, dict, str]:
    """Exit code, the JSON report, and the log."""
    command = [sys.executable, "-m", "stages.cli", *arguments, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert list(odd_keys(report)) == []
    return done.returncode, report, done.stderr


@pytest.fixture
def home(tmp_path: Path, tiny):
    from PIL import Image

    media = tmp_path / "media"
    media.mkdir()
    for number in range(4):
        Image.new("RGB", (64, 64), (60 * number, 20, 90)).save(media / f"{number}.png")
        (media / f"{number}.txt").write_text(f"colour number {number}")
    settings = {
        "root": "work",
        "model": {"family": "kandinsky5-image", "path": str(tiny("kandinsky5-image-t2i")), "precision": "float32"},
        "text": {"max_length": 3},
        "datasets": [{"id": "colours", "instance_data_dir": "media", "resolution": 64}],
        "train": {"run": "first", "steps": 6, "batch_size": 2, "threads": 1, "optimizer": {"warmup": 2}},
        "validation": {
            "size": "64x64",
            "steps": 2,
            "every": 3,
            "eval_samples": 2,
            "prompts": [{"name": "one", "prompt": "a colour"}],
        },
    }
    (tmp_path / "pipeline.yaml").write_text(json.dumps(settings))
    return tmp_path


@pytest.mark.slow
def test_from_pictures_to_an_adapter_and_the_second_time_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report, log = latentpress(home, "run", "--dry-run")
    assert code == 0, log
    code, report, log = latentpress(home, "run")
    assert code == 0, log
    stages = {row["stage"]: row for row in report["details"]["stages"]}
    assert list(stages) == ORDER
    assert (stages["discover"]["done"], stages["encode-text"]["done"], stages["encode-latents"]["done"]) == (4, 6, 4)
    cut = {row["path"] for row in report["truncated"]}
    assert {f"colour number {number}" for number in range(4)} <= cut
    run = home / "output" / "first"
    assert (run / "adapter" / "pytorch_lora_weights.safetensors").exists()
    assert sorted(path.parent.name for path in (run / "samples").rglob("one.png")) == [
        "step-000000",
        "step-000003",
        "step-000006",
    ]
    before = {path: path.stat().st_mtime_ns for path in home.rglob("*") if path.is_file()}
    code, report, log = latentpress(home, "run")
    assert code == 0, log
    assert (report["done"], report["remaining"]) == (0, 0)
    assert {row["path"] for row in report["truncated"]} == cut
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*") if path.is_file()} == before
    code, report, _ = latentpress(home, "status")
    assert (code, report["remaining"]) == (0, 0)
    away = a_set_elsewhere(home)
    monkeypatch.chdir(away)
    assert execute("train", train, Options(Path("pipeline.yaml"), json=True)) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["done"] == 6 and "warning" not in said.err
    here, there = (folder / "output" / "first" / "metrics.jsonl" for folder in (home, away))
    assert losses(there) == losses(here)


def a_set_elsewhere(home: Path) -> Path:
    """A copy of sets/, the shards that the set names and the transformer, without media, plans and encoders."""
    away = home / "away"
    shutil.copytree(home / "work" / "sets", away / "work" / "sets")
    (table,) = away.glob("work/sets/*/shards.arrow")
    for path in pa.ipc.open_file(table).read_all().column("path").to_pylist():
        (away / "work" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(home / "work" / path, away / "work" / path)
    settings = json.loads((home / "pipeline.yaml").read_text())
    for part in ("transformer", "scheduler"):
        shutil.copytree(Path(settings["model"]["path"]) / part, away / "model" / part)
    settings["model"]["path"] = "model"
    (away / "pipeline.yaml").write_text(json.dumps(settings))
    return away


def losses(path: Path) -> list[float]:
    return [row["loss"] for row in map(json.loads, path.read_text().splitlines()) if "loss" in row]


def test_a_failing_stage_stops_the_run_with_its_message(home: Path) -> None:
    for path in (home / "media").iterdir():
        path.unlink()
    code, report, log = latentpress(home, "run")
    assert code == 3
    assert report["error"]["message"].startswith("discover: datasets.colours.instance_data_dir: ")
    assert log.count("holds no images") == 1 and log.count(report["error"]["next_step"]) == 1


def test_reports_of_all_programs_have_the_same_keys() -> None:
    assert {"program", "done", "skipped", "remaining", "set_aside", "failed", "damage", "next_steps"} <= set(
        Report("x").document()
    )


@pytest.mark.slow
def test_every_program_reports_in_snake_case(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every level of nesting, of a dry run and of a true one: one after the other, they are the whole pipeline."""
    monkeypatch.chdir(home)
    config, out = load(home / "pipeline.yaml"), str(home / "exported")
    own: dict[str, dict] = {"preview": {"plan": True}, "export": {"to": out}, "import": {"source": out}}
    for program in PROGRAMS:
        run = train if program == "train" else importlib.import_module(module_of(program)).run
        for dry_run in (True, False):
            options = Options(home / "pipeline.yaml", dry_run=dry_run, json=True)
            try:
                document = run(config, options, Console(json=True), **own.get(program, {})).document()
                assert (document["program"] == program and document["details"]) or program == "decode"
            except LatentpressError as error:
                assert program == "encode-vision", error  # which this configuration does not want
                document = error.document()
            assert list(odd_keys(document)) == [], program
