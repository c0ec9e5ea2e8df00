"""The result of the demo: trained on the shards alone, each caption gives its photograph, edited picture or clip.

A clip moves like its original: the same regions change from frame to frame (`Likeness.motion`).

The short form tests a reduced text to image; the long form tests every flavour with the settings of `make demo`.
"""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from examples import demo
from examples.demo_check import measure_likeness
from examples.demo_media import write_media
from stages import bucket, decode, discover, encode_latents, encode_text, index
from tests.project import Project

MOTION = 0.5  # a clip without motion has 0, and a clip with different motion about 0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("skimage", "skvideo")),
        reason="needs the demo extra (scikit-image, scikit-video)",
    ),
]


def check(run: Path, name: str) -> None:
    results = measure_likeness(run)
    assert len(results) == len(demo.demo_prompts(name, run))
    assert [result.nearest for result in results] == [result.name for result in results], results
    assert all(result.motion is None or result.motion > MOTION for result in results), results


@pytest.mark.long
def test_each_caption_gives_back_its_photograph(
    tmp_path: Path, one_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 64x64 pixels and an autoencoder for these photographs alone, fewer steps are enough."""
    from examples.demo_models import RECIPES, build_checkpoint, train_autoencoder
    from trainer.__main__ import run as train

    write_media(tmp_path / "media")
    flavour = replace(demo.FLAVOURS["t2i"], size=(64, 64), lr=5e-3)
    recipe = replace(RECIPES[flavour.autoencoder], media=("images",), size=(64, 64, 1))
    monkeypatch.setitem(demo.FLAVOURS, "t2i", flavour)
    monkeypatch.setitem(RECIPES, flavour.autoencoder, recipe)
    autoencoder = train_autoencoder(flavour.autoencoder, tmp_path / "media", tmp_path / "vae", steps=80)
    build_checkpoint(flavour.kind, autoencoder, tmp_path / "models" / flavour.kind)
    settings = demo.pipeline_settings("t2i", tmp_path)
    settings["train"] |= {"steps": 300, "checkpoint_every": 300}
    settings["validation"] |= {"every": 300, "eval_samples": 1}
    home = Project(tmp_path, settings)
    for program in (discover.run, bucket.run, encode_text.run, encode_latents.run, index.run, train, decode.run):
        assert home.run(program).exit_code == 0
    check(tmp_path / "output/demo", "t2i")
    before = measure_likeness(tmp_path / "output/demo", step=0)
    assert sum(one.nearest == one.name for one in before) < len(before), (
        "an untrained transformer does not find them all"
    )


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], [demo.FASTEST]),
        (["t2i", "t2i"], ["t2i"]),
        (["data"], ["data"]),
        (["t2i", "all"], [*demo.FLAVOURS, "data"]),
    ],
)
def test_one_flavour_is_shown_unless_others_are_named(tmp_path: Path, arguments: list[str], names: list[str]) -> None:
    assert demo.parse_arguments([*arguments, "--out", str(tmp_path)]) == (names, tmp_path)


def test_models_of_other_code_or_media_are_made_again(tmp_path: Path) -> None:
    def make() -> Path:
        (tmp_path / "t2i/work").mkdir(parents=True, exist_ok=True)
        (tmp_path / "models/flux_vae").mkdir(parents=True, exist_ok=True)
        return tmp_path / "models/flux_vae"

    (tmp_path / "media").mkdir()
    (tmp_path / "media/cat.txt").write_text("A cat.")
    model = make()
    demo.discard_outdated(tmp_path)
    assert not model.exists() and not (tmp_path / "t2i").exists(), (
        "an older demo did not record the code and media of its models"
    )
    model = make()
    demo.discard_outdated(tmp_path)
    assert model.exists() and (tmp_path / "t2i/work").exists()
    (tmp_path / "media/cat.txt").write_text("A dog.")
    demo.discard_outdated(tmp_path)
    assert not model.exists() and not (tmp_path / "t2i").exists() and (tmp_path / "media").exists()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all flavours share, so that each autoencoder is trained once."""
    out = tmp_path_factory.mktemp("demo")
    write_media(out / "media")
    return out


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", list(demo.FLAVOURS))
def test_every_flavour(home: Path, name: str) -> None:
    demo.build_models(home, [name])
    demo.run_flavour(name, home)
    check(home / name / "output/demo", name)
