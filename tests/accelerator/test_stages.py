"""The stages that compute on a device give the numbers of the CPU on the emulated one."""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cache.shards.shard_io import open_reader
from cache.store.store import Store
from schemas.devices import HostCopy, to_device_together
from stages import caption, decode, discover, encode_latents, encode_text, encode_vision, masks, score
from stages.media.image import png_info
from tests.accelerator.counts import counting
from tests.accelerator.runs import DEVICES
from tests.accelerator.tensors import NAME
from tests.forms import long
from tests.project import SETTINGS, Project
from tests.stages.captioners import CAPTIONERS
from tests.stages.describing import describing, written
from tests.stages.encoded_photos import prepare
from tests.stages.report_run import FakeRun
from tests.stages.segmenting import build_segmenter, made
from tests.stages.test_decode import random_latent, write_latent
from tests.stages.test_decode_watch import make_tiny

pytestmark = pytest.mark.slow
NUMBER = re.compile(r"\d+\.\d+")


@pytest.fixture
def planned(project: Callable[..., Project]) -> Callable[..., Project]:
    """planned(kind, **settings): a project of two media and their captions, with one validation prompt."""

    def make(kind: str, **settings: Any) -> Project:
        home, video = project(kind, **settings), "video" in kind
        for number in range(2):
            if video:
                home.video(f"{number}.mp4", caption=f"clip {number}")
            else:
                home.image(f"{number}.png", (64, 64), f"picture {number} of two", number)
        prompt = {"name": "try", "prompt": "a try"}
        edits = kind.startswith("qwen-image-edit")
        if kind.endswith("i2i") or edits:
            home.settings["datasets"][0]["conditioning_data"] = "sources"
            for number in range(2):
                home.image(f"../sources/{number}.png", (80, 80), "", 10 + number)
        if kind.endswith(("i2i", "i2v")) or edits:
            home.image("../first.png", (70, 64), "")
            prompt["image"] = "first.png"
        home.settings["validation"] = {"size": "64x64@9" if video else "64x64", "prompts": [prompt]}
        prepare(home)
        return home

    return make


@contextmanager
def computing_on(device: str) -> Iterator[None]:
    """What runs in this block copies something to the device, or nothing if that is the CPU."""
    with counting() as counts:
        yield
    assert any(kind.startswith("to device") for kind, _ in counts.copies) is (device == NAME)


def rows(home: Project, kind: str) -> dict[tuple[str, str], np.ndarray]:
    """(member, tensor) -> its numbers. Shards name the device that made them, so their own bytes differ."""
    found = {}
    for name in home.shards(kind):
        shard = open_reader(Store(home.root), f"{kind}/{name}")
        for row in map(shard.read, range(len(shard))):
            found |= {(row.id, tensor): array.numpy() for tensor, array in row.tensors.items()}
    return found


def encode_on_both(home: Project, program: Any, kind: str, *overrides: str) -> None:
    """Rows of both devices are equal but for rounding: a CPU's kernels may depend on where a tensor is in memory."""
    encoded = []
    for device in DEVICES:
        with computing_on(device):
            report = home.run(program.run, *overrides, device=device)
        assert report.done and not report.rejects
        encoded.append(rows(home, kind))
        shutil.rmtree(home.root / kind)
    assert encoded[0].keys() == encoded[1].keys()
    for name, values in encoded[0].items():
        np.testing.assert_allclose(encoded[1][name], values, rtol=1e-5, atol=1e-5, err_msg=str(name))


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [
        "kandinsky5-image-t2i",
        "kandinsky5-image-i2i",
        "sana",
        long("kandinsky5-video-t2v"),
        long("kandinsky5-video-i2v"),
        long("qwen-image"),
        long("qwen-image-edit-plus"),
        long("flux2-klein"),
        long("krea2"),
        long("flux3"),
    ],
)
def test_texts(planned, kind) -> None:
    """With the shared beginning of the template computed once; of i2i with pictures in the prompt."""
    encode_on_both(planned(kind), encode_text, "text")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "seed", "classes"),
    [
        ("segformer", 0, ["person", "cat"]),
        ("mask2former", 5, ["wall", "person", "cat"]),
        ("clipseg", 0, ["a cat"]),
        ("sam", 1, []),
    ],
)
def test_masks(planned, kind, seed, classes) -> None:
    """The same masks, but for pixels at an edge."""
    home = planned("kandinsky5-image-t2i")
    section = {"model": str(build_segmenter(kind, home.folder / "segmenter", seed)), "resolution": 64}
    home.settings["masks"] = section | {"classes": classes}
    home.settings["stages"]["max_reject_fraction"] = 1.0
    found = []
    for device in DEVICES:
        with computing_on(device):
            home.run(masks.run, device=device)
        found.append(made(home))
        shutil.rmtree(home.root / "masks")
    assert found[0].keys() == found[1].keys() and found[0]
    assert all((found[1][path] == mask).mean() > 0.99 for path, mask in found[0].items())


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "posterior"),
    [
        ("kandinsky5-image-t2i", "sample"),
        ("kandinsky5-video-i2v", "moments"),
        ("sana", "sample"),  # it has no posterior to draw from
        long("kandinsky5-image-i2i", "mode"),
        long("kandinsky5-image-i2i", "moments"),
        long("kandinsky5-video-t2v", "sample"),
        long("kandinsky5-video-i2v", "mode"),
        long("qwen-image", "sample"),
        long("flux2-klein", "moments"),
    ],
)
def test_latents(planned, kind, posterior) -> None:
    encode_on_both(planned(kind), encode_latents, "latents", f"latents.posterior={posterior}")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["kandinsky5-image-t2i", long("kandinsky5-video-t2v")])
def test_vision(planned, tiny, kind) -> None:
    vision = {"model": str(tiny("dinov2")), "size": 84, "batch_size": 4}
    encode_on_both(planned(kind, vision=vision), encode_vision, "vision")


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen", "llava", "gemma3"])
def test_captions(project, tiny, tmp_path, name) -> None:
    """Drawn ones, of two prompts: of a Qwen2.5-VL also those of a clip."""
    model = None if name == "qwen" else str(CAPTIONERS[name](tmp_path / name))
    home = describing(project, tiny, "kandinsky5-video-t2v", prompts=["plain", "motion"], temperature=1.0, model=model)
    for number in range(3):
        home.image(f"{number}.png", (64, 48), None, number)
    if model is None:
        home.video("clip.mp4", caption="")
        (home.media / "clip.txt").unlink()
    home.run(discover.run)
    found = []
    for device in DEVICES:
        with computing_on(device):
            assert home.run(caption.run, device=device).done
        found.append(written(home))
        shutil.rmtree(home.root / "captions")
    assert found[0] == found[1]


LATENTS = {
    "kandinsky5-image-t2i": (16, 1, 4, 4),
    "kandinsky5-video-t2v": (16, 2, 4, 4),
    "sana": (32, 1, 2, 2),
}


@pytest.mark.parametrize(
    ("kind", "preview"), [("kandinsky5-video-t2v", False), long("sana", False), ("kandinsky5-image-t2i", True)]
)
def test_validation_latents(project, monkeypatch, kind, preview) -> None:
    """preview: decoded by a tiny autoencoder."""
    home = project(kind)
    own: dict[str, Any] = {}
    write_latent(home, "one", random_latent(*LATENTS[kind]), SETTINGS[kind]["family"])
    if preview:
        home.settings["validation"] = {"preview_autoencoder": str(make_tiny(home.folder / "taef"))}
        own = {"preview": True}
    written = []

    def write_output(path: Path, frames_THWC: np.ndarray, *others, real=decode.write_output) -> None:
        written.append((path, frames_THWC))
        real(path, frames_THWC, *others)

    monkeypatch.setattr(decode, "write_output", write_output)
    for device in DEVICES:
        with computing_on(device):
            assert home.run(decode.run, device=device, **own).done == 1
        written[-1][0].unlink()
    (_, expected), (_, found) = written
    assert expected.any() and np.abs(found.astype(int) - expected).max() <= 1


def test_scores(project, tiny) -> None:
    home = project(validation={"scores": {"clip": str(tiny("clip"))}}, train={"run": "run", "trackers": []})
    made = FakeRun(home)
    made.latent(1, "cat", prompt="a cat on a mat", group="cat", seed=1)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8))
    noise.save(made.picture(1, "cat", (0, 0, 0)), pnginfo=png_info(made.mark(1, "cat")))
    found = []
    for device in DEVICES:
        with computing_on(device):
            assert home.run(score.run, device=device).done == 1
        found.append((made.folder / score.SCORES_FILE).read_text())
        (made.folder / score.SCORES_FILE).unlink()
    figures = [[float(number) for number in NUMBER.findall(text)] for text in found]
    words = [NUMBER.sub("", text) for text in found]
    assert figures[0] == pytest.approx(figures[1], rel=1e-4) and words[0] == words[1]


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
