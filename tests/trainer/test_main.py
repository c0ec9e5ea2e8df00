"""The program `train`: settings that it refuses before a model is loaded, and checkpoints from which it resumes."""

import fcntl
import io
import json
import os
import re
import shutil

import pytest

from schemas.cli.console import DAMAGE, INCOMPLETE, OK, USAGE, Console
from tests.trainer.runs import LOADS, moved
from trainer.__main__ import warn_of_learning_rate
from trainer.run import metrics
from trainer.run.run_state import LOCK_NAME


@pytest.mark.parametrize(("kind", "second_kind"), [("i2v", "t2v"), ("i2i", "t2i"), ("t2i", "i2i"), ("t2v", "i2v")])
def test_a_checkpoint_of_another_task_is_refused(ready, checkpoints, program, kind, second_kind) -> None:
    config = ready(kind)
    code, report, log = program(moved(config, checkpoints(second_kind)))
    assert code == USAGE and LOADS not in log
    assert f"is a checkpoint for {config.model.family} {second_kind}" in report["error"]["message"]
    assert "model.flavour" in report["error"]["next_step"] and not config.run_folder.exists()


@pytest.mark.parametrize(
    ("kind", "second_kind", "message"),
    [
        ("i2i", "t2i", "visual_cond = False"),
        ("t2i", "i2i", "visual_cond = True"),
        ("t2i", "sana", "is a SanaTransformer2DModel"),
        ("t2v", None, "in_visual_dim = 4"),
        ("sana", None, "in_channels = 4"),
        ("t2i", "nothing", "lacks transformer"),
        ("t2i", "no JSON", "can't be read"),
        ("t2i", "a list", "can't be read"),
    ],
)
def test_without_a_model_index_the_transformers_config_tells(
    ready, checkpoints, program, tmp_path, kind, second_kind, message
) -> None:
    config = ready(kind)
    folder, real = tmp_path / "model", checkpoints(second_kind if second_kind in ("t2i", "i2i", "sana") else kind)
    shutil.copytree(real, folder, ignore=shutil.ignore_patterns("model_index.json"))
    file = folder / "transformer" / "config.json"
    if second_kind is None:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"in_visual_dim": 4, "in_channels": 4}))
    elif second_kind == "nothing":
        shutil.rmtree(folder / "transformer")
    elif second_kind in ("no JSON", "a list"):
        file.write_text("[1]" if second_kind == "a list" else "{")
    code, report, log = program(moved(config, folder))
    assert code in (USAGE, INCOMPLETE) and LOADS not in log
    assert message in report["error"]["message"] and report["error"]["next_step"]


@pytest.mark.slow
def test_what_needs_no_model_is_compared_before_one_is_loaded(ready, make_config, program) -> None:
    config = ready("t2i", steps=1, shuffle_shards=4)
    assert program(config)[0] == OK
    for change, words in (
        ({"shuffle_shards": 2}, "train.shuffle_shards.shards: 4 in the checkpoint, 2 now"),
        ({"shuffle_shards": None}, "shuffle_shards: {"),
        ({"adapter": {"rank": 4}}, "train.adapter.rank: 16 in the checkpoint, 4 now"),
        ({"caption_dropout": 0.5}, "train.caption_dropout: 0.1 in the checkpoint, 0.5 now"),
        ({"resume": False}, "train.resume is false"),
    ):
        for dry_run in (True, False):
            code, report, log = program(make_config("t2i", steps=2, **{"shuffle_shards": 4, **change}), dry_run=dry_run)
            assert code == USAGE and LOADS not in log and words in report["error"]["message"]
            assert "another train.run" in report["error"]["next_step"]


@pytest.mark.parametrize("output", ["a file", "below a file", "/proc/nowhere", "a dangling link"])
def test_an_output_that_cant_be_written_is_found_before_a_model_is_loaded(ready, program, tmp_path, output) -> None:
    config = ready("t2i")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "no" / "where")
    place = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "x", "a dangling link": tmp_path / "link"}
    config = config.model_copy(update={"output": str(place.get(output, output))})
    code, report, log = program(config)
    assert code == INCOMPLETE and LOADS not in log
    assert "can't be written to" in report["error"]["message"] and "output" in report["error"]["next_step"]


@pytest.mark.slow
def test_a_second_trainer_in_the_folder_refuses(ready, program, quick_estimates) -> None:
    config = ready("t2i", steps=1)
    config.run_folder.mkdir(parents=True)
    with (config.run_folder / LOCK_NAME).open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        code, report, log = program(config)
        assert code == INCOMPLETE and LOADS not in log
        assert f"another trainer is running in {config.run_folder}" in report["error"]["message"]
        assert program(config, dry_run=True)[0] == OK
    assert program(config)[0] == OK


@pytest.mark.slow
def test_lines_that_cant_be_read_are_passed_over(ready, make_config, program) -> None:
    damage = b"\xff\xfe\n[1]\n{}\n" + b"[" * 99_999 + b"\n" + b"\0" * 9 + b'\n{"step": 1, "lo'
    config = ready("t2i", steps=1)
    assert program(config)[0] == OK
    path = config.run_folder / "metrics.jsonl"
    before = path.read_bytes() + damage
    path.write_bytes(before)
    code, report, _ = program(make_config("t2i", steps=2))
    assert code == OK and report["details"]["loss"]["first"] is not None
    assert path.read_bytes().startswith(before)
    assert [line["step"] for line in metrics.read_metrics(path) if "loss" in line] == [1, 2]


@pytest.mark.slow
def test_a_damaged_checkpoint_costs_its_steps_alone(ready, make_config, program) -> None:
    """The run resumes from the previous checkpoint and reports it; if no checkpoint is intact, the damage is reported
    as in all programs."""
    config = ready("t2i", steps=2, checkpoint_every=1)
    assert program(config)[0] == OK
    folder = config.run_folder / "checkpoints"
    weights = folder / "step-000002" / "pytorch_lora_weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    code, report, log = program(make_config("t2i", steps=3))
    assert (code, report["done"], report["skipped"]) == (OK, 2, 1)
    assert (
        "step-000002 is damaged (pytorch_lora_weights.safetensors is damaged" in log
        and "resumes from step-000001" in log
    )
    assert (folder / "damaged-step-000002.1").is_dir()
    for state in folder.glob("step-*/state.json"):
        state.write_text("")
    for dry_run in (True, False):
        code, report, log = program(make_config("t2i", steps=4), dry_run=dry_run)
        assert code == DAMAGE and "is intact" in report["error"]["message"] and LOADS not in log
        assert "train.run" in report["error"]["next_step"]


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/step-000002", "adapter", "validation"])
def test_a_file_where_a_folder_belongs_is_named(ready, program, name) -> None:
    config = ready("t2i", steps=2)
    path = config.run_folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("a note")
    code, report, log = program(config)
    assert (code, report["error"]["path"]) == (INCOMPLETE, str(path)) and LOADS not in log
    assert f"{path} is a file, not a folder" in report["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "adapter"), [("t2i", {"rank": 2}), ("sana", {"type": "full"})])
def test_files_have_the_permissions_of_the_umask(ready, program, kind, adapter) -> None:
    """Weights too: adapters, whole models, checkpoints, validation latents."""
    config = ready(kind, steps=1, adapter=adapter, validation={"eval_samples": 0})
    before = os.umask(0o027)
    try:
        assert program(config)[0] == OK
    finally:
        os.umask(before)
    files = [path for path in config.run_folder.rglob("*") if path.is_file()]
    assert len([path for path in files if path.suffix == ".safetensors"]) >= 4
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == dict.fromkeys(
        (path.name for path in files), "0o640"
    )


@pytest.mark.parametrize(
    ("adapter", "optimizer", "warned"),
    [
        ("full", {"lr": 6e-5}, "train.optimizer.lr is 6e-05, a rate for LoRA.*1e-05"),
        ("full", {"lr": 5e-5}, None),
        ("lora", {"lr": 1e-4}, None),
        ("full", {"name": "optimi-lion", "lr": 2e-5}, "optimi-lion.*2e-06"),
        ("full", {"lr": 1e-5, "groups": [{"match": ".*", "lr": 1e-4}]}, "groups.0.lr is 0.0001, a rate for"),
        ("full", {"name": "prodigy", "lr": 1e-4}, "lr is 0.0001, and prodigy multiplies.*1 is usual"),
        ("full", {"name": "prodigy"}, None),
    ],
)
def test_a_learning_rate_for_another_optimizer_or_adapter_is_warned_of(make_config, adapter, optimizer, warned) -> None:
    log = warnings_of(make_config("sana", adapter={"type": adapter}, optimizer=optimizer))
    assert re.search(warned, log) if warned else "train.optimizer" not in log


def warnings_of(config) -> str:
    """Warnings about the learning rate."""
    with io.StringIO() as stream:
        warn_of_learning_rate(config.train, Console(stderr=stream))
        return " ".join(stream.getvalue().split())
