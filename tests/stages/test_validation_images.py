"""Validation prompts without an image use an image of the datasets, the same one as long as its file exists."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cache.sets import plans
from cache.sets.set_lookup import open_configured_set
from cache.store.store import Store
from stages import bucket, discover, encode_latents, encode_text, index, report
from tests.project import Project
from tests.stages.report_run import FakeRun


def planned_images(home: Project) -> dict[str, dict]:
    """(Prompt, size) -> image of the datasets in the newest plan."""
    home.run(discover.run)
    assert home.run(bucket.run).exit_code == 0
    store = Store(str(home.root))
    info = plans.load_plan(store, plans.list_plans(store)[-1]).info
    return {f"{entry.name} {entry.bucket}": entry.values().get("image") for entry in info.validation}


def colour(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 64), (value, 255 - value, 90)).save(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kandinsky5-image-i2i", "kandinsky5-video-i2v"])
def test_what_a_prompt_starts_from_is_what_training_starts_from(project: Callable[..., Project], kind: str) -> None:
    """The condition of the only sample, at its size. Another size has another condition."""
    home, video = project(kind, latents={"posterior": "mode"}), kind.endswith("i2v")
    if video:
        home.video("only.mp4", size=(64, 64), frames=12)
    else:
        home.image("only.png", (64, 64), "a picture", 1)
        home.image("../sources/only.png", (64, 64), "", 2)
        home.settings["datasets"][0]["conditioning_data"] = "sources"
    sizes = [f"64x64{'@9' * video}", f"96x64{'@9' * video}"]
    home.settings["validation"] = {"size": sizes, "prompts": [{"name": "try", "prompt": "a try"}]}
    images = planned_images(home)
    assert "validation prompt try has no image" in home.said
    assert [each["path"] for each in images.values()] == [f"only.{'mp4' if video else 'png'}"] * 2
    for program in (encode_text, encode_latents, index):
        assert home.run(program.run).exit_code == 0
    data = open_configured_set(home.config(), pytest.fail)
    exact, wide = data.validation
    (sample,) = (data.sample(row) for row in range(len(data)))
    assert exact.condition is not None and wide.condition is not None
    expected = sample.tensors["condition"]
    assert exact.condition.shape == expected.shape and exact.condition.shape != wide.condition.shape
    np.testing.assert_allclose(numbers(exact.condition), numbers(expected), atol=1e-5)
    assert [entry.values()["image"] for entry in data.meta.validation] == [*images.values()]


def numbers(array) -> np.ndarray:
    return np.frombuffer(array.data, np.float32)


def test_the_choice_stays_while_its_file_is_there(project: Callable[..., Project]) -> None:
    home = project("kandinsky5-image-i2i")
    home.settings["datasets"][0]["conditioning_data"] = "sources"
    for number in range(6):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
        colour(home.folder / "sources" / f"{number}.png", 40 * number)
    prompts = [{"name": name, "prompt": "a try"} for name in ("one", "two", "three")]
    home.settings["validation"] = {"size": "64x64", "prompts": prompts}
    first = planned_images(home)
    assert planned_images(home) == first and len({each["path"] for each in first.values()}) > 1
    home.settings["validation"]["prompts"] = [prompts[2], {"name": "four", "prompt": "more"}]
    assert planned_images(home)["three 64x64@1"] == first["three 64x64@1"], "other prompts change nothing"
    path = first["three 64x64@1"]["path"]
    for folder in (home.media, home.folder / "sources"):
        for file in folder.glob(f"{Path(path).stem}.*"):
            file.rename(file.with_name(f"moved{file.suffix}"))
    assert planned_images(home)["three 64x64@1"]["path"] == "moved.png"
    (home.media / "moved.png").unlink()
    assert planned_images(home)["three 64x64@1"]["path"] not in ("moved.png", path)


def test_held_out_samples_come_first(project: Callable[..., Project]) -> None:
    home = project("kandinsky5-image-i2i")
    home.settings["datasets"][0] |= {"conditioning_data": "sources"}
    for number in range(5):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
        colour(home.folder / "sources" / f"{number}.png", 40 * number)
    for name in ("held", "held-sources"):
        colour(home.folder / name / "apart.png", 200 + len(name))
    (home.folder / "held" / "apart.txt").write_text("apart")
    held_out = home.settings["datasets"][0] | {"id": "held", "instance_data_dir": "held", "eval": True}
    home.settings["datasets"].append(held_out | {"conditioning_data": "held-sources"})
    home.settings["validation"] = {"size": "64x64", "prompts": [{"name": "one", "prompt": "a try"}]}
    (image,) = planned_images(home).values()
    assert image == {"dataset": "held", "role": "source", "path": "apart.png"}


@pytest.mark.slow
def test_the_report_shows_the_image_and_where_it_is_from(project: Callable[..., Project]) -> None:
    home = project("kandinsky5-image-i2i", train={"run": "run"})
    home.settings["datasets"][0]["conditioning_data"] = "sources"
    colour(home.folder / "sources" / "a.png", 250)
    home.image("a.png", (64, 64))
    home.settings["validation"] = {"size": "64x64", "prompts": [{"name": "one", "prompt": "a try"}]}
    fake_run = FakeRun(home)
    dataset = home.settings["datasets"][0]["id"]
    fake_run.latent(3, "one", image={"dataset": dataset, "role": "source", "path": "a.png"})
    fake_run.picture(3, "one", (1, 2, 3))
    fake_run.latent(3, "two", image={"dataset": dataset, "role": "source", "path": "gone.png"})
    fake_run.latent(3, "three", image={"dataset": 5, "role": "../", "path": []})
    page = Path(home.run(report.run).details["page"]).read_text()
    assert f"source from {dataset}: a.png" in page and 'alt="source of one"' in page
    assert 'alt="source of two"' not in page and page.count("can&#39;t be shown") == 2
