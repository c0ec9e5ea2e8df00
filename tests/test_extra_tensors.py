"""A tensor that a stage writes reaches the batch by its name, through every file between: no place between names it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cache.order.schedule import BatchSchedule
from cache.sets.set_lookup import find_set, open_configured_set, open_set
from cache.sets.trainset import SetNotFound, TrainSet
from cache.shards.shard import ShardRow
from cache.shards.shard_io import open_reader
from cache.shards.tensors import Array
from cache.store.store import Store
from schemas.errors import INCOMPLETE
from stages import bucket, discover, encode_latents, encode_text, encode_vision, export, index
from stages.encoding.text.worker import TextWorker
from stages.encoding.vae.worker import LatentsWorker
from trainer.batch import Batch
from trainer.data import BatchLoader, to_tensor
from trainer.run.run_state import data_signature

STAGES = (discover, bucket, encode_text, encode_latents, index)


def invented(name: str, first: float) -> Array:
    """A tensor that no part of the project knows: of a row's id, so that each has its own."""
    return Array.from_numpy(np.float32([[first, int(name[:6], 16), len(name)]]))


class Deeper(LatentsWorker):
    tensors = (*LatentsWorker.tensors, "depth")

    def encode(self, *given: Any) -> Iterator[ShardRow]:
        for row in super().encode(*given):
            yield ShardRow(row.id, row.tensors | {"depth": invented(row.id, 1)}, row.info)


class Wordier(TextWorker):
    tensors = (*TextWorker.tensors, "tone")

    def encode(self, *given: Any) -> Iterator[ShardRow]:
        for row in super().encode(*given):
            yield ShardRow(row.id, row.tensors | {"tone": invented(row.id, 2)}, row.info)


def sets(home: Any, folder: Path) -> Iterator[TrainSet]:
    """The set of the root, and its exported copy."""
    model = (home.config().model.family, home.config().model.task)
    yield open_set(Store(home.root), "current", *model)
    home.run(export.run, to=str(folder))
    yield find_set(home.root, str(folder), *model)


def batches(data: TrainSet) -> list[Batch]:
    feed = BatchLoader(data, BatchSchedule(data.spans, 0, 2, 2), 0.0)
    return [part.batch for step in feed.steps(0, 3) for part in step.micro_batches]


@pytest.mark.slow
def test_an_invented_tensor_reaches_the_batch(project: Callable, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("stages.encoding.vae.worker.LatentsWorker", Deeper)
    monkeypatch.setattr("stages.encoding.text.worker.TextWorker", Wordier)
    home = project()
    for number in range(4):
        home.image(f"{number}.png", seed=number)
    assert [home.run(program.run).exit_code for program in STAGES] == [0] * len(STAGES)
    seen = 0
    for data in sets(home, tmp_path / "elsewhere"):
        for batch in batches(data):
            wanted = [invented(name, 1).numpy() for name in batch.ids]
            assert np.array_equal(batch.extras["depth"].numpy(), np.stack(wanted))
            assert batch.extras["text.tone"].shape == (2, 1, 3) and (batch.extras["text.tone"][..., 0] == 2).all()
            assert batch.to("cpu", torch.bfloat16).extras["depth"].dtype == torch.bfloat16
            seen += 1
    assert seen == 6


@pytest.mark.slow
@pytest.mark.long
def test_a_tensor_that_half_of_a_batch_lacks_is_named(project: Callable, monkeypatch) -> None:
    monkeypatch.setattr("stages.encoding.vae.worker.LatentsWorker", Deeper)
    home = project()
    home.image("0.png")
    assert [home.run(program.run).exit_code for program in STAGES] == [0] * len(STAGES)
    monkeypatch.undo()
    home.image("1.png", seed=1)
    assert [home.run(program.run).exit_code for program in STAGES] == [0] * len(STAGES)
    (data, *_) = sets(home, home.folder)
    (lacking,) = [sample.id for sample in (data.sample(0), data.sample(1)) if "depth" not in sample.tensors]
    with pytest.raises(ValueError, match=f"sample {lacking} has no depth"):
        batches(data)


@pytest.mark.slow
def test_vision_features_reach_the_batch(project: Callable, tiny: Callable, tmp_path: Path) -> None:
    """Not before they are encoded; a sample whose features were rejected is in no set."""
    home = project(vision={"model": str(tiny("dinov2")), "size": 84})
    home.settings["stages"]["encode-vision"] = {"threads": 1}
    for number in range(5):
        home.image(f"{number}.png", seed=number)
    reports = [home.run(program.run) for program in STAGES]
    assert [report.exit_code for report in reports] == [0] * 4 + [INCOMPLETE]
    assert reports[-1].next_steps[0] == "latentpress encode-vision   # 5 vision features of samples are not encoded yet"
    assert len(reports[-1].details["first_missing_vision"]) == 5
    plain = home.run(index.run, "vision.model=null")
    with pytest.raises(SetNotFound, match="in the configuration"):
        open_configured_set(home.config(), pytest.fail)
    (home.media / "4.png").write_bytes((home.media / "4.png").read_bytes()[:-20])
    assert list(home.rejects(home.run(encode_vision.run))) == ["4.png"]
    report = home.run(index.run)
    assert (report.done, home.rejects(report)) == (4, {"4.png": "changed"})
    readers = [open_reader(Store(home.root), f"vision/{name}") for name in home.shards("vision")]
    stored = {row.id: row.tensors["vision"] for shard in readers for row in map(shard.read, range(len(shard)))}
    digests = set()
    for data in sets(home, tmp_path / "elsewhere"):
        digests.add((data_signature(data)["digest"], data_signature(data, {"vision"})["digest"]))
        assert data.id == report.details["set"].removeprefix("sets/") and data.kinds == ["vision"]
        for batch in batches(data):
            wanted = torch.stack([to_tensor(stored[name]).float() for name in batch.ids])
            assert torch.equal(batch.extras["vision"], wanted)
    chosen = [open_configured_set(home.config(*change), pytest.fail).id for change in ((), ("vision.model=null",))]
    assert [f"sets/{id}" for id in chosen] == [report.details["set"], plain.details["set"]]
    with pytest.raises(SetNotFound, match=r"vision\.size is 84 in the set and 98 in the configuration"):
        open_configured_set(home.config("vision.size=98"), pytest.fail)
    for program in (encode_vision, index):
        home.run(program.run, "vision.size=98")
    other = open_configured_set(home.config("vision.size=98"), pytest.fail)
    ((alone, used),) = digests
    assert alone == data_signature(other)["digest"] and used != data_signature(other, {"vision"})["digest"]
