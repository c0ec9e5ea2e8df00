"""A full disk or too little memory ends training with a message, and earlier checkpoints stay."""

import json
import os
import resource
import shutil
import signal

import pytest
import torch

from cache.runs.training_run import ResultNote
from cache.store.files import StoreError
from schemas.cli.console import INCOMPLETE, OK, USAGE
from schemas.geometry import Bucket
from tests.forms import long
from tests.processes import in_child
from tests.trainer.runs import moved, opened, plan_batches, train
from trainer import train as loop
from trainer.memory.out_of_memory import DeviceOutOfMemory
from trainer.run import checkpoint


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("t2i", "num_visual_blocks", "x"),
        ("sana", "patch_size", 0),
    ],
)
def test_a_config_that_diffusers_cant_use_is_named(
    make_config, make_set, checkpoints, program, tmp_path, kind, key, value, dry_run
) -> None:
    config, folder = make_config(kind), shutil.copytree(checkpoints(kind), tmp_path / "model")
    make_set(config)
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    config = moved(config, folder)
    code, report, _ = program(config, dry_run=dry_run)
    assert code == INCOMPLETE
    assert "transformer/config.json has a value" in report["error"]["message"]
    assert "replace it" in report["error"]["next_step"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["checkpoint", long("result")])
def test_a_full_disk_is_said_and_the_checkpoint_before_stays(ready, monkeypatch, victim) -> None:
    """A file-size limit during the second checkpoint, or during the result; a later run continues to the end."""
    config = ready("t2i", steps=4, checkpoint_every=2)
    owner, name = (checkpoint, "save") if victim == "checkpoint" else (loop, "save_result")
    real, calls = getattr(owner, name), iter(range(9))

    def limited(*args, **options):
        if victim == "result" or next(calls) == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        return real(*args, **options)

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        monkeypatch.setattr(owner, name, limited)
        with pytest.raises(StoreError, match="file-size limit") as caught:
            train(config)
        assert str(config.run_folder) in str(caught.value) and "run the same command" in str(caught.value)

    assert in_child(work) == 0
    folder = config.run_folder
    last_step = 2 if victim == "checkpoint" else 4
    assert sorted(path.name for path in (folder / "checkpoints").iterdir())[-1] == f"step-{last_step:06d}"
    assert not list(folder.glob("checkpoints/.*")) and not (folder / "result.json").exists()
    assert not list(folder.glob("adapter/*.safetensors"))
    result = train(config)
    assert (result["skipped"], result["done"]) == (last_step, 4 - last_step)
    assert (folder / "adapter" / "pytorch_lora_weights.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "adapter"), [("t2i", {"rank": 2}), long("sana", {"type": "full"})])
@pytest.mark.usefixtures("quick_estimates")
def test_killed_while_the_result_is_saved(ready, program, monkeypatch, kind, adapter) -> None:
    """The next start saves the result and trains nothing again; a second start does nothing."""
    config = ready(kind, steps=2, adapter=adapter)

    def work() -> None:
        monkeypatch.setattr(ResultNote, "write", lambda *_: os._exit(7))
        train(config)

    assert in_child(work) == 7
    assert program(config, dry_run=True)[1]["skipped"] == 2
    for _ in range(2):
        code, report, _ = program(config)
        assert (code, report["done"], report["skipped"]) == (OK, 0, 2)
    assert json.loads((config.run_folder / "result.json").read_text())["step"] == 2


def test_no_memory_is_said_with_what_to_lower(ready, monkeypatch) -> None:
    """The largest bucket is the first one; options in use are not named."""
    config = ready("t2i", batch_size=2, accumulate=2, gradient_checkpointing=True, offload={"activations": True})
    largest = max(
        plan_batches(config, opened(config)).buckets, key=lambda bucket: Bucket.parse(bucket.name).pixels
    ).name

    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(loop, "backward", exhausted)
    with pytest.raises(DeviceOutOfMemory) as caught:
        train(config)
    expected = f"the device ran out of memory in step 1, with 2 samples of {largest}: CUDA out of memory"
    assert caught.value.message == expected
    step = caught.value.next_step
    assert "Set train.offload.blocks true; the run then continues" in step and "activations" not in step
    assert "train.batch_size 1 and train.accumulate 4, train.base_precision int8-torchao" in step
    full = ready("t2i", name="full", adapter={"type": "full"})
    with pytest.raises(DeviceOutOfMemory) as caught:
        train(full)
    assert "train.adapter.type lora" in caught.value.next_step and "batch_size" not in caught.value.next_step


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_not_replaced_by_the_cpu(ready, program, device) -> None:
    config = ready("t2i")
    code, report, _ = program(config, device=device)
    assert code == USAGE and f"device {device} is not available" in report["error"]["message"]
