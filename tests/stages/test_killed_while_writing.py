"""Programs killed while they write a result: incomplete files are neither shown nor pushed, and are removed later."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from cache.store import files
from schemas.json_records import format_record
from stages import decode, notify, push, report, score
from stages.engines.stage_processes import remove_unfinished
from tests.forms import long
from tests.processes import in_child
from tests.project import Project
from tests.stages.follow.test_watchers import hold
from tests.stages.report_run import FakeRun, eval_line, step_line
from tests.stages.test_decode import write_latent

HALF = b"half of it"
PROGRAMS: dict[str, tuple[Callable[..., Any], str]] = {
    "decode": (decode.run, "dog.png"),
    "contact sheet": (decode.run, "contact-sheet.png"),
    "score": (score.run, "scores.jsonl"),
    "report": (report.run, "report.html"),
    "push": (push.run, "hub"),
}


@pytest.fixture
def home(project: Callable[..., Project], tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Project:
    """A finished run with two validations; one picture is missing."""
    prompts = [{"name": name, "prompt": f"a {name}"} for name in ("cat", "dog")]
    home_project = project(
        validation={"size": "64x64", "prompts": prompts, "scores": {"clip": str(tiny("clip"))}},
        train={"run": "run", "steps": 4, "trackers": []},
        notify={"webhooks": [{"url_env": "HOOK"}]},
        hub={"repo": "me/cats"},
    )
    monkeypatch.setenv("HOOK", "json://127.0.0.1:9/")
    run = FakeRun(home_project)
    run.metrics(step_line(1), eval_line(2, 0.5), step_line(4), eval_line(4, 0.4))
    for step in (2, 4):
        for name in ("cat", "dog"):
            write_latent(
                home_project, name, np.zeros((16, 1, 8, 8), np.float32), home_project.config().model.family, step
            )
            if (step, name) != (4, "dog"):
                run.picture(step, name, (40 * step, 0, 0), (64, 64))
    (run.folder / "adapter").mkdir()
    for file in ("adapter/pytorch_lora_weights.safetensors", "run-kandinsky5-image.safetensors"):
        save_file({"transformer.a.lora_A.weight": np.ones((4, 4), np.float32)}, run.folder / file)
    (run.folder / "result.json").write_bytes(
        format_record({"step": 4, "result": str(run.folder / "adapter"), "weights": "trained"})
    )
    return home_project


def run_folder(home: Project) -> Path:
    return home.folder / "output/run"


def kill_while_it_writes(home: Project, program: Callable[..., Any], name: str, **options: Any) -> None:
    """Kill the process after half of `name` is written."""

    def work() -> None:
        finish = files.put

        def put_half(temporary: Path, path: Path) -> None:
            if path.name != name:
                return finish(temporary, path)
            if temporary.is_file():
                temporary.write_bytes(HALF)
            os.kill(os.getpid(), signal.SIGKILL)

        def write_half(folder: Path, *arguments: Any) -> None:
            with (folder / name).open("ab") as file:
                file.write(b'{"step": 4, "scores": {"clip')
                file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

        files.put = put_half
        score.append_line = write_half  # scores.jsonl does not have a temporary file
        home.run(program, **options)

    assert in_child(work) == -signal.SIGKILL


def temporaries(home: Project) -> list[Path]:
    return sorted(run_folder(home).rglob(".*.tmp"))


def age(paths: list[Path], seconds: float) -> None:
    for path in paths:
        os.utime(path, (time.time() - seconds,) * 2)


@pytest.mark.slow
@pytest.mark.parametrize("program", [name if name == "decode" else long(name) for name in PROGRAMS])
def test_what_a_killed_program_leaves_is_not_shown_and_is_removed(home: Project, program: str) -> None:
    run, name = PROGRAMS[program]
    kill_while_it_writes(home, run, name, **({"dry_run": True} if program == "push" else {}))
    names = temporaries(home)
    assert len(names) == (program != "score")
    decode_report = home.run(decode.run)
    assert (decode_report.done, decode_report.exit_code) == (0 if program == "contact sheet" else 1, 0)
    assert Image.open(run_folder(home) / "samples/contact-sheet.png").size[0] == 2 * 160, "two steps"
    assert home.run(score.run).done == 4
    steps = [json.loads(line)["step"] for line in (run_folder(home) / "scores.jsonl").read_text().splitlines()
             if line.endswith("}")]  # fmt: skip
    assert steps == [2, 4]
    home.run(report.run)
    page = (run_folder(home) / "report.html").read_bytes()
    assert b"dog" in page and b".tmp" not in page and HALF not in page
    bodies = home.run(notify.run, dry_run=True, json=True).details["messages"]
    assert {body["event"] for body in bodies} == {"started", "validation", "finished"}
    assert ".tmp" not in json.dumps(bodies)
    pushed = home.run(push.run, dry_run=True).details["files"]
    assert [row["file"] for row in pushed] == [
        "README.md",
        "images/cat.jpg",
        "images/dog.jpg",
        "pytorch_lora_weights.safetensors",
        "run-kandinsky5-image.safetensors",
    ]

    age(names, 60.0)
    home.run(decode.run)
    assert temporaries(home) == names, "a program may still write it"
    age(names, 7200.0)
    home.run(decode.run)
    assert temporaries(home) == []


def test_nothing_is_removed_beside_a_trainer_or_of_other_names(home: Project) -> None:
    folder = run_folder(home)
    mine, notes = folder / ".report.html.0123456789abcdef.tmp", folder / ".my notes.tmp"
    for path in (mine, notes):
        path.write_text("half")
    age([mine, notes], 7200.0)
    with hold(folder):
        remove_unfinished(folder)
        assert mine.exists()
    remove_unfinished(folder)
    assert not mine.exists() and notes.exists()


def test_a_file_that_is_being_written_makes_no_page_again(home: Project) -> None:
    """Only the finished file does."""
    folder = run_folder(home)
    before = report._count_results([folder])
    temporary = files.temporary(folder / "samples/step-000004/dog.png")
    temporary.write_bytes(HALF)
    assert report._count_results([folder]) == before
    temporary.rename(folder / "samples/step-000004/dog.png")
    assert report._count_results([folder]) != before
