"""The encoding stages wait for the device once a batch, when the next batch is queued."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from schemas.catalog import FAMILIES
from schemas.devices import HostCopy, to_device_together
from stages import encode_latents, encode_text, encode_vision, masks
from stages.encoding.worker import UnitWorker
from tests.accelerator.counts import counting
from tests.accelerator.tensors import NAME
from tests.forms import long
from tests.project import SETTINGS, Project
from tests.stages.encoded_photos import prepare
from tests.stages.segmenting import build_segmenter

pytestmark = pytest.mark.slow
MEMBERS = 5


@pytest.fixture
def planned(project: Callable[..., Project]) -> Callable[..., Project]:
    """planned(kind, **settings): a project of five media of one shape with their captions, in units of all."""

    def make(kind: str, **settings: Any) -> Project:
        home = project(kind, cache={"unit_mib": 1}, **settings)
        for number in range(MEMBERS):
            if FAMILIES[SETTINGS[kind]["family"]].video:
                home.video(f"{number}.mp4", size=(64, 64), caption=f"clip number {number}")
            else:
                home.image(f"{number}.png", (64, 64), f"picture number {number}", number)
        if kind.endswith("i2i"):
            home.settings["datasets"][0]["conditioning_data"] = "sources"
            for number in range(MEMBERS):
                home.image(f"../sources/{number}.png", (80, 80), "", 10 + number)
        prepare(home)
        return home

    return make


@pytest.fixture
def measure(monkeypatch) -> Callable[..., tuple[Counter[str], int]]:
    """measure(home, program, *overrides): copies by their kind, and the number of batches, each of which waited once,
    when the next one was queued."""

    def run(home: Project, program: Any, *overrides: str) -> tuple[Counter[str], int]:
        copies, order = Counter[str](), list[str]()
        batches = most = 0  # most: of a unit

        def encode_batch(self: UnitWorker, *batch: Any) -> Any:
            rows = type(self).encode(self, *batch)
            order.append("queued")
            return rows

        def wait_all(self: HostCopy, real: Any = HostCopy.wait_all) -> Any:
            order.append("taken")
            return real(self)

        def encode_unit(self: UnitWorker, *given: Any, real: Any = UnitWorker._encode) -> Any:
            nonlocal batches, most
            order.clear()
            monkeypatch.setattr(self, "encode", partial(encode_batch, self))
            with counting() as counts:
                shard = real(self, *given)
            number = order.count("queued")
            assert order == ["queued", *["queued", "taken"] * (number - 1), "taken"]
            ((kind, place),) = counts.waits
            assert (kind, counts.waits[kind, place]) == ("synchronize", number)
            assert place.startswith("schemas/devices.py")
            for (kind, _), times in counts.copies.items():
                copies[kind] += times
            batches, most = batches + number, max(most, number)
            return shard

        monkeypatch.setattr(UnitWorker, "_encode", encode_unit)
        monkeypatch.setattr(HostCopy, "wait_all", wait_all)
        report = home.run(program.run, *overrides, device=NAME)
        assert report.done and not report.set_aside and most > 1
        return copies, batches

    return run


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["kandinsky5-image-t2i", long("sana"), long("kandinsky5-video-t2v"), long("wan2.1-t2v")]
)
def test_texts(planned, measure, kind) -> None:
    """One copy of all ids and positions. Back come embeddings and, of Kandinsky, the pooled vectors. One of Sana's
    batches has a null prompt, which is read without the template's beginning."""
    copies, batches = measure(planned(kind), encode_text, "text.batch_tokens=40")
    assert copies == {"to device": batches, "to host": batches * (2 if kind.startswith("kandinsky") else 1)}


@pytest.mark.long
def test_texts_with_pictures(planned, measure) -> None:
    """One copy more of a picture that no earlier text has."""
    copies, batches = measure(planned("kandinsky5-image-i2i"), encode_text, "text.batch_tokens=1")
    assert batches == 2 * MEMBERS, "the captions and the null prompts"
    assert copies == {"to device": batches + MEMBERS, "to host": 2 * batches}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "posterior"),
    [
        long("kandinsky5-image-i2i", "sample"),
        ("kandinsky5-video-i2v", "moments"),
        long("sana", "sample"),  # it has no posterior to draw from
        long("kandinsky5-image-t2i", "mode"),
        long("kandinsky5-video-t2v", "sample"),
        long("wan2.1-t2v", "moments"),
        long("wan2.2-5b-i2v", "sample"),
    ],
)
def test_latents(planned, measure, kind, posterior) -> None:
    """Media and condition in one copy; the noise of each, which the host draws meanwhile, in one more."""
    overrides = "latents.batch_pixels=1", f"latents.posterior={posterior}"
    copies, batches = measure(planned(kind), encode_latents, *overrides)
    tensors = 2 if kind.endswith(("i2i", "i2v")) else 1
    drawn = tensors if posterior == "sample" and kind != "sana" else 0
    once = 0
    if kind.startswith("wan"):
        once = 2  # means and deviations of the channels
        drawn = min(drawn, 1)  # the condition is the mode
    assert copies == {"to device": batches * (1 + drawn) + once, "to host": batches * tensors}


@pytest.mark.long
@pytest.mark.parametrize(("kind", "passes"), [long("kandinsky5-image-t2i", 1), ("kandinsky5-video-t2v", 5)])
def test_vision(planned, measure, tiny, kind, passes) -> None:
    """A copy for each pass, as a clip may have more frames than a pass takes; once in a process the shares by which
    patches are pooled."""
    vision = {"model": str(tiny("dinov2")), "size": 84, "batch_size": 2}
    copies, batches = measure(planned(kind, vision=vision), encode_vision)
    assert copies == {"to device": batches * passes + 1, "to host": batches}


@pytest.mark.long
@pytest.mark.parametrize(("kind", "classes"), [("segformer", ["person"]), ("clipseg", ["a cat", "a dog"])])
def test_masks(planned, measure, kind, classes) -> None:
    """A copy of each pass's pictures. Mask2Former's and SAM's rules, by their processors, ask the device more."""
    home = planned("kandinsky5-image-t2i")
    model = build_segmenter(kind, home.folder / "segmenter")
    home.settings["masks"] = {"model": str(model), "classes": classes, "batch_size": 2, "min_area": 0, "resolution": 64}
    copies, batches = measure(home, masks)
    assert copies == {"to device": batches, "to host": batches}


def test_tensors_that_go_together() -> None:
    host = [
        torch.arange(3),
        torch.tensor(2.5),
        torch.zeros(0, 4),
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor([True]),
    ]
    with counting() as counts:
        moved = to_device_together(host, torch.device(NAME))
    assert sum(counts.copies.values()) == 1 and not counts.waits
    with counting() as counts:
        copied = HostCopy(*moved).wait_all()
    assert sum(counts.copies.values()) == len(host) and sum(counts.waits.values()) == 1
    for tensor, there, back in zip(host, moved, copied, strict=True):
        assert there.device.type == NAME and back.dtype == tensor.dtype and torch.equal(back, tensor)
