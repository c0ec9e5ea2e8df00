"""The Run page of `latentpress ui` in the states of a run: to start, running in a terminal, failed, finished."""

import os
import re
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from cache.runs.requests import REQUESTS
from cache.runs.training_run import record_failure
from schemas.cli.process_record import ProcessRecord, find_process_start
from stages import discover
from tests.project import Project
from tests.stages.follow.notified_run import trained, training
from tests.stages.ui_server import UiServer


@pytest.fixture
def home(project: Callable[..., Project]) -> Project:
    new_project = project(train={"steps": 40})
    new_project.config()
    return new_project


def find_filled(text: str) -> list[str]:
    """The texts of the filled buttons."""
    return re.findall(r'<(?:a|button)[^>]*class="[^"]*filled[^>]*>([^<]*)<', text)


def test_one_filled_button_and_six_places(home: Project, server: UiServer) -> None:
    text = server.get("/").text
    assert find_filled(text) == ["Start training"] and '<details id="stages"><summary' in text
    places = re.findall(r">([^<]*)</a>", text[text.index('aria-label="Pages"') : text.index("</nav>")])
    assert places == ["Projects", "Run", "Data", "Pictures", "Settings", "Queue", "Logs"]
    text = server.get("/rejected").text
    tabs = re.findall(r">([^<]*)</a>", text[text.index('class="tabs"') : text.index("<h1>")])
    assert tabs == ["Plan", "Captions", "Rejected", "Preview"] and text.count("aria-current=") == 2
    run = trained(home)
    (run.folder / "result.json").unlink()
    assert find_filled(server.get("/").text) == ["Continue"]


def test_a_run_in_a_terminal(home: Project, server: UiServer) -> None:
    run = trained(home)
    for program in ("run", "encode-text"):
        record = ProcessRecord(program=program, process_start=find_process_start(os.getpid()), began=time.time() - 90)
        record.write(run.folder / "logs" / f"{program}.json")
    text = server.get("/").text
    assert text.count("for 1 min, in a terminal") == 2 and "encode-text running" in text and "start-run" not in text
    assert server.post("/training/sample").status == 409, "training is not running"
    with training(run):
        text = server.get("/").text
        for request in REQUESTS:
            assert f"/training/{request}" in text and server.post(f"/training/{request}").status == 200
            assert (run.folder / f".request-{request}").exists()
        assert server.post("/training/report").status == 404


def test_a_failure_in_a_terminal_is_at_the_top_and_on_the_card(home: Project, server: UiServer) -> None:
    run = trained(home)
    (run.folder / "result.json").unlink()
    record_failure(run.folder, "train", "the card is <b>full", "set train.batch_size: 1")
    text = server.get("/").text
    assert text.count("the card is &lt;b&gt;full") == 3 and "set train.batch_size: 1" in text
    assert "train failed" in text and find_filled(text) == ["Try again"]
    assert "training failed" in server.get("/projects").text
    with training(run):
        assert 'id="failure"' not in server.get("/").text


def test_a_failure_of_a_stage_of_the_page(home: Project, server: UiServer, forked_programs: None) -> None:
    assert server.post("/jobs/bucket/start").status == 200
    server.wait_for_end("bucket")
    text = server.get("/").text
    assert "bucket failed" in text and "latentpress discover" in text
    home.image("a.png")
    home.run(discover.run)


def test_a_result_is_downloaded_under_the_name_of_the_run(home: Project, server: UiServer) -> None:
    run = trained(home)
    (run.folder / "adapter").mkdir()
    (run.folder / "adapter/pytorch_lora_weights.safetensors").write_bytes(b"diffusers")
    (run.folder / "adapter/secret.safetensors").symlink_to(home.folder / "pipeline.yaml")
    text = server.get("/").text
    assert "Your LoRA" in text and "Best step by" in text and "secret" not in text
    name = "run-kandinsky5-image.safetensors"
    (run.folder / name).write_bytes(b"comfyui")
    text = server.get("/").text
    assert find_filled(text) == ["Download"] and "models/loras" in text
    answer = server.get(f"/result/{name}")
    assert (answer.status, answer.text) == (200, "comfyui") and name in answer.headers["content-disposition"]
    for absent in ("secret.safetensors", "..%2Fconfig.yaml", "pytorch_lora_weights.safetensors"):
        assert server.get(f"/result/{absent}").status == 404
    assert (
        server.post("/queue/add", run="run-2", overrides=f"train.adapter.init_from={run.folder}/adapter").status == 200
    )


def test_memory_and_load_of_the_card(server: UiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "GiB, load" not in server.get("/").text, "no library or card"
    library = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetMemoryInfo=lambda card: SimpleNamespace(used=3 << 30, total=16 << 30),
        nvmlDeviceGetUtilizationRates=lambda card: SimpleNamespace(gpu=97),
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert ">3.0 of 16.0 GiB, load 97 %<" in server.get("/").text
