"""The training sample that a validation prompt names: found by its caption, decoded from its shard, shown in front."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from stages import bucket, decode, discover, encode_latents, report
from stages.media.sample_reader import read_cropped_image
from stages.media.video import probe_video
from stages.pages.training_samples import FOLDER
from tests.stages.html_page import Page, alike
from tests.stages.plan_previews import rows
from tests.stages.test_preview_latents import MODE, reconstruct


def validation(size: str, **prompts: str) -> dict[str, Any]:
    return {"size": size, "prompts": [{"name": name, "prompt": text} for name, text in prompts.items()]}


def encode_and_validate(home, *shape: int) -> Path:
    """Returns the folder of the training samples, after a validation was decoded."""
    for program in (discover.run, bucket.run, encode_latents.run):
        home.run(program, MODE)
    for prompt in home.settings["validation"]["prompts"]:
        path = home.folder / f"output/run/validation/step-000003/{prompt['name']}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"latentpress": json.dumps({"family": home.config().model.family, "prompt": prompt["prompt"]})}
        save_file({"latent": np.zeros(shape, np.float32)}, path, about)
    assert home.run(decode.run, MODE).exit_code == 0
    return home.folder / "output/run" / FOLDER


@pytest.mark.slow
def test_a_prompt_that_is_a_caption_has_its_sample_in_front(project) -> None:
    home = project(validation=validation("64x64", cat="a red cat", other="nothing that is there"))
    home.settings["datasets"][0]["crop_aspect"] = "square"
    home.image("cat.png", (150, 64), "a red cat", seed=1)
    home.image("dog.png", (64, 64), "a blue dog", seed=2)
    folder = encode_and_validate(home, 16, 1, 8, 8)
    assert [path.name for path in folder.iterdir()] == ["cat"]
    original = read_cropped_image(home.media / "cat.png", rows(home, MODE)["cat.png"]["geometry"])
    [reconstruction] = reconstruct(home, original[None])
    for name, wanted in (("original", original), ("reconstruction", reconstruction[0])):
        shown = np.asarray(Image.open(folder / f"cat/{name}.png")).astype(int)
        assert np.abs(shown - wanted).max() <= (name == "reconstruction"), "a decoded level may be rounded otherwise"
    assert json.loads((folder / "cat/sample.json").read_text())["path"] == "cat.png"

    home.run(report.run, MODE)
    page = Page((home.folder / "output/run/report.html").read_text(encoding="utf-8"))
    assert alike(page.pictures("cat: original")[0], original) and not page.pictures("other: original")
    assert len(page.pictures("cat: reconstruction")) == len(page.pictures("cat at step 3")) == 1
    text = str(page.text)
    assert text.index("original") < text.index("step 3")


@pytest.mark.slow
def test_the_caption_of_another_file_replaces_it_and_a_missing_original_leaves_the_reconstruction(project) -> None:
    home = project(validation=validation("64x64", cat="a red cat"))
    home.settings["datasets"][0]["crop_aspect"] = "square"
    home.image("first.png", (64, 64), "a red cat", seed=1)
    home.image("second.png", (64, 64), "a blue dog", seed=2)
    folder = encode_and_validate(home, 16, 1, 8, 8)
    before = (folder / "cat/reconstruction.png").read_bytes()
    (home.media / "first.txt").write_text("a blue dog")
    (home.media / "second.txt").write_text("a red cat")
    home.run(discover.run, MODE)
    home.run(bucket.run, MODE)
    home.image("second.png", (64, 64), "a red cat", seed=3)  # no longer the file that was encoded
    home.run(decode.run, MODE)
    assert json.loads((folder / "cat/sample.json").read_text())["path"] == "second.png"
    assert (folder / "cat/reconstruction.png").read_bytes() != before
    assert not (folder / "cat/original.png").exists()
    home.settings["validation"] = validation("64x64", cat="no caption")
    home.run(bucket.run, MODE)
    assert home.run(decode.run, MODE).exit_code == 0 and not (folder / "cat").exists()


@pytest.mark.long
@pytest.mark.slow
def test_a_clip_is_a_clip(project) -> None:
    home = project("kandinsky5-video-t2v", validation=validation("64x48@9", clip="a clip"))
    home.video("clip.mp4")
    folder = encode_and_validate(home, 16, 3, 6, 8)
    found = [probe_video(folder / f"clip/{name}.mp4") for name in ("original", "reconstruction")]
    assert [(info.width, info.height, round(info.duration * 12)) for info in found] == [
        (80, 48, 9)
    ] * 2  # the bucket of the sample
