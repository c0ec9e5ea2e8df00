"""`latentpress push`: what is uploaded, the model card, and what is told where the hub refuses or the network fails."""

import getpass
import json
import os
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.numpy import save_file

from cache.sets.table_checks import Counts, SetRecord
from cache.store.store import Store
from schemas.errors import LatentpressError
from schemas.json_records import format_record
from stages import push
from tests.model_hub import TOKEN, ModelHub
from tests.project import Project
from tests.stages.report_run import FakeRun, eval_line, step_line

REPO = "me/tabby-lora"
EVALUATED = ((0, 0.5, "old"), (20, 1.5, "new"), (40, 1.75, "new"))  # step, eval loss, its eval_id
CAPTION = "a caption that nobody else should read"


@pytest.fixture
def home(project: Callable[..., Project]) -> Project:
    prompts = [{"name": "one", "prompt": "a tabby | cat", "negative_prompt": "blurry <b>"}]
    made = project(
        validation={"size": "64x48", "prompts": prompts},
        train={"run": "run", "steps": 40, "adapter": {"rank": 4}},
        hub={"repo": REPO, "license": "apache-2.0", "tags": ["cats"]},
    )
    made.image("cat.png", caption=CAPTION)
    made.config()
    return made


COMFYUI_FILE = "run-kandinsky5-image.safetensors"


def finished(home: Project, *overrides: str) -> FakeRun:
    """A run with an adapter, a validation at step 40 and the counts of its set."""
    run = FakeRun(home, "run", "train.set=0123456789abcdef", *overrides)
    run.metrics(step_line(1), eval_line(20, 0.5), eval_line(40, 0.75))
    run.latent(40, "one", prompt="a tabby | cat", negative_prompt="blurry <b>")
    run.picture(40, "one", (200, 0, 0))
    counts = Counts(samples=12, eval=2, texts=14)
    meta = SetRecord(family="kandinsky5-image", task="t2i", null_text=None, validation=[], counts=counts)
    Store(home.config().root).publish_record("sets/0123456789abcdef/set.json", meta)
    scores = [{"step": step, "scores": {"clip score": value}} for step, value in ((20, 0.75), (40, 0.5))]
    (run.folder / "scores.jsonl").write_text("".join(json.dumps(line) + "\n" for line in scores))
    (run.folder / "adapter").mkdir()
    weights = {"transformer.a.lora_A.weight": np.ones((4, 400), np.float32)}
    save_file(weights, run.folder / "adapter/pytorch_lora_weights.safetensors")
    save_file(weights, run.folder / COMFYUI_FILE)
    (run.folder / "adapter/notes.txt").write_text("not to be uploaded")
    result = {"step": 40, "result": str(run.folder / "adapter"), "weights": "trained"}
    (run.folder / "result.json").write_bytes(format_record(result))
    return run


def uploaded(hub: ModelHub) -> dict[str, bytes]:
    return hub.files(REPO)


def test_an_adapter_is_uploaded_with_its_card(home: Project, models: ModelHub) -> None:
    run = finished(home)
    report = home.run(push.run)
    files = uploaded(models)
    assert set(files) == {"README.md", "images/one.jpg", "pytorch_lora_weights.safetensors", COMFYUI_FILE}
    assert (
        files["pytorch_lora_weights.safetensors"]
        == (run.folder / "adapter/pytorch_lora_weights.safetensors").read_bytes()
    )
    assert models.log(REPO) == ["private", "Step 40 of run"]
    assert report.done == 4 and report.details["url"] == f"https://hub.invalid/{REPO}"
    assert report.details["commit"] == models.repo_info(REPO).sha
    card = ModelCard(files["README.md"].decode())
    about = card.data.to_dict()
    assert about["base_model"] == home.config().model.flavour_spec.repo and about["base_model_relation"] == "adapter"
    assert about["license"] == "apache-2.0" and about["pipeline_tag"] == "text-to-image"
    assert {"lora", "diffusers", "cats"} <= set(about["tags"]) and about["library_name"] == "diffusers"
    assert about["widget"] == [{"text": "a tabby | cat", "output": {"url": "images/one.jpg"}}]
    assert r"| a tabby \| cat<br>*negative prompt:* blurry &lt;b> |" in card.content
    assert "training samples" in card.content
    assert "Eval loss: 0.75 at step 40; lowest 0.5 at step 20." in card.content
    assert "clip score: 0.5 at step 40; best 0.75 at step 20." in card.content
    assert "| train.adapter.rank | 4 |" in card.content
    again = home.run(push.run)
    assert (again.done, again.skipped) == (0, 4) and len(models.log(REPO)) == 2
    assert again.details["commit"] == report.details["commit"]
    weights = run.folder / "adapter/pytorch_lora_weights.safetensors"
    os.utime(weights)  # as in a copy without times
    assert home.run(push.run).done == 0
    weights.write_bytes(weights.read_bytes()[::-1])
    assert home.run(push.run).done == 4, "trained anew"


@pytest.mark.parametrize("linked", ["adapter", "adapter/pytorch_lora_weights.safetensors"])
def test_what_is_elsewhere_is_not_uploaded(home: Project, models: ModelHub, linked: str) -> None:
    path = finished(home).folder / linked
    path.symlink_to(path.rename(home.folder / "elsewhere"))
    with pytest.raises(LatentpressError, match=r"weights\.safetensors is a link to a place outside"):
        home.run(push.run)
    (home.folder / "elsewhere").rename(home.folder / "away")
    with pytest.raises(LatentpressError, match=r"pytorch_lora_weights\.safetensors"):
        home.run(push.run)
    assert not models.folder.exists()


def test_a_picture_that_is_elsewhere_is_not_uploaded(home: Project, models: ModelHub) -> None:
    picture = finished(home).folder / "samples/step-000040/one.png"
    picture.symlink_to(picture.rename(home.folder / "private.png"))
    home.run(push.run)
    assert set(uploaded(models)) == {"README.md", "pytorch_lora_weights.safetensors", COMFYUI_FILE}


def test_a_result_that_is_malformed_or_a_pipe_is_named(home: Project, models: ModelHub) -> None:
    note = finished(home).folder / "result.json"
    note.write_bytes(format_record({"step": -1, "result": "", "weights": ""}))
    with pytest.raises(LatentpressError, match=r"result\.json is damaged: .*step"):
        home.run(push.run)
    note.unlink()
    os.mkfifo(note)
    with pytest.raises(LatentpressError, match=r"result\.json can"):
        home.run(push.run)


def test_nothing_private_is_uploaded(home: Project, models: ModelHub) -> None:
    finished(home)
    report = home.run(push.run)
    private = [str(home.folder), TOKEN, CAPTION, os.path.expanduser("~"), "photos"]
    private += [name for name in (getpass.getuser(), os.uname().nodename) if len(name) > 4]
    for name, content in uploaded(models).items():
        assert [each for each in private if each.encode() in content] == [], name
    assert TOKEN not in report.json() + report.summary() + home.said
    files = [path for path in home.folder.rglob("*") if path.is_file()]
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []


def test_the_lowest_eval_loss_is_of_the_samples_of_the_last_one(home: Project) -> None:
    run = finished(home)
    (run.folder / "metrics.jsonl").unlink()
    run.metrics(*(eval_line(step, loss) | {"eval_id": of} for step, loss, of in EVALUATED))
    home.run(push.run, dry_run=True)
    card = (run.folder / "hub/README.md").read_text()
    assert "Eval loss: 1.75 at step 40; lowest 1.5 at step 20." in card


def test_a_dry_run_writes_the_card_and_asks_nobody(home: Project, models: ModelHub) -> None:
    run = finished(home)
    report = home.run(push.run, dry_run=True)
    assert not models.folder.exists() and (report.done, report.remaining) == (0, 4)
    assert [row["file"] for row in report.details["files"]] == [
        *("README.md", "images/one.jpg", "pytorch_lora_weights.safetensors", COMFYUI_FILE),
    ]
    card = run.folder / "hub/README.md"
    assert report.details["card"] == str(card) and "a tabby" in card.read_text()
    assert Image.open(run.folder / "hub/images/one.jpg").size == (64, 48)
    home.run(push.run)
    assert uploaded(models)["README.md"] == card.read_bytes()


def test_the_repository_of_the_command_line(home: Project, models: ModelHub) -> None:
    finished(home)
    home.run(push.run, repo="me/other")
    assert [path.name for path in models.folder.glob("me/*/")] == ["other"]
    with pytest.raises(LatentpressError, match=r"hub\.repo") as caught:
        home.run(push.run, "hub.repo=null")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("private", [True, False])
def test_a_public_repository_is_only_written_to_where_that_is_wanted(
    home: Project,
    models: ModelHub,
    private: bool,
) -> None:
    finished(home)
    models.create_repo(REPO, private=False)
    if private:
        with pytest.raises(LatentpressError, match=r"is public, and hub\.private is true"):
            home.run(push.run)
        assert uploaded(models) == {}
    else:
        home.run(push.run, "hub.private=false")
        assert len(uploaded(models)) == 4 and models.log(REPO)[0] == "public"


FAULTS = {
    ("create_repo", 401): "the token",
    ("create_commit", 403): "to me/tabby-lora",
    ("create_commit", 412): "was changed",
    ("create_commit", "cut"): "t be uploaded: the connection failed",
    ("create_commit", 500): "answered 500",
}


@pytest.mark.parametrize("method, status", FAULTS)
def test_what_fails_is_told_and_the_next_push_does_it(
    home: Project,
    models: ModelHub,
    method: str,
    status: int | str,
) -> None:
    finished(home)
    models.failures[method] = status
    with pytest.raises(LatentpressError, match=FAULTS[method, status]) as caught:
        home.run(push.run)
    error = json.dumps(caught.value.to_dict())
    assert TOKEN not in error + home.said and caught.value.exit_code == 3 and caught.value.next_step
    models.failures.clear()
    report = home.run(push.run)
    assert report.done == 4 and len(uploaded(models)) == 4


def test_another_commit_in_between_is_not_overwritten(
    home: Project, models: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(home)
    before = models.repo_info

    def commit_right_after(repo: str) -> SimpleNamespace:
        found = before(repo)
        with (models.folder / f"{repo}.log").open("a") as log:
            log.write("another commit\n")
        return found

    monkeypatch.setattr(models, "repo_info", commit_right_after)
    with pytest.raises(LatentpressError, match="was changed"):
        home.run(push.run)
    assert uploaded(models) == {}


def test_a_run_that_is_not_finished_has_nothing_to_upload(home: Project, models: ModelHub) -> None:
    with pytest.raises(LatentpressError, match="trained run"):
        home.run(push.run)
    run = finished(home)
    (run.folder / "result.json").unlink()
    with pytest.raises(LatentpressError, match="is not finished"):
        home.run(push.run)
    assert not models.folder.exists()


def test_a_full_rank_model_is_uploaded_by_component_without_its_path(
    home: Project,
    models: ModelHub,
) -> None:
    home.settings["train"].pop("adapter")
    run = finished(home, "train.adapter.type=full")
    folder = run.folder / "model/transformer"
    folder.mkdir(parents=True)
    save_file({"a": np.ones(400, np.float32)}, folder / "diffusion_pytorch_model.safetensors")
    config = {"_class_name": "Kandinsky5Transformer3DModel", "_name_or_path": str(home.folder)}
    (folder / "notes.json").write_text("{}")
    (folder / "mine.safetensors").write_bytes(b"stale")
    (folder / "config.json").write_text("[")
    with pytest.raises(LatentpressError, match=r"config\.json can"):
        home.run(push.run)
    (folder / "config.json").write_text(json.dumps(config))
    home.run(push.run)
    files = uploaded(models)
    assert {name for name in files if "/" in name} == {
        *("images/one.jpg", "transformer/config.json", "transformer/diffusion_pytorch_model.safetensors"),
    }
    assert json.loads(files["transformer/config.json"])["_name_or_path"] == home.config().model.flavour_spec.repo
    about = ModelCard(files["README.md"].decode()).data.to_dict()
    assert about["base_model_relation"] == "finetune" and "lora" not in about["tags"]
