"""Every option of the configuration, changed after everything was made: refused, to be made again, or without effect.

The options and what a change affects are taken from the schema. Nothing is encoded a second time: programs are asked by
--dry-run.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from cache.sets.trainset import SetNotFound
from schemas.config.loading import ConfigError
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from stages import bucket, discover, encode_latents, encode_text, encode_vision, export, index, status
from tests.forms import long
from tests.option_table import TABLE, Option
from tests.project import Project
from trainer.__main__ import run as train
from trainer.memory import estimate as memory_estimate
from trainer.memory.estimate import MemoryEstimate, estimate_memory

SOURCES = Path(__file__).resolve().parent.parent
EFFECTS = {"media", "captions", "masks", "features", "plan", "text", "latents", "vision", "set", "run", "nothing"}


def test_every_option_has_what_a_change_affects() -> None:
    assert {effect for option in TABLE.values() for effect in option.affects} == EFFECTS


@pytest.mark.slow
def test_no_option_is_one_that_nothing_reads() -> None:
    paths = [path for top in ("stages", "trainer", "cache", "schemas") for path in SOURCES.glob(f"{top}/**/*.py")]
    read = {word for path in paths for word in re.findall(r'[."](\w+)', path.read_text())}
    assert [name for name in TABLE if name.rpartition(".")[2].replace("-", "_") not in read] == []


@pytest.fixture(scope="module")
def predictions() -> dict[str, MemoryEstimate]:
    return {}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> tuple[Project, str]:
    """A clip, everything made of it, and the id of its set."""
    folder = tmp_path_factory.mktemp("options")
    dataset: dict[str, Any] = {"id": "clips", "instance_data_dir": "media", "dataset_type": "video", "resolution": 64}
    dataset |= {"allow_upscale": True, "video": {"num_frames": 9, "frame_rate": 12.0}}
    prompt = {"name": "one", "prompt": "a try", "image": "first.png"}
    settings = {
        "root": "work",
        "cache": {"unit_mib": 0.02},
        "model": {"family": "kandinsky5-video", "flavour": "i2v-lite-5s", "precision": "float32"},
        "datasets": [dataset],
        "vision": {"model": str(tiny("dinov2")), "size": 56},
        "validation": {"size": "64x64@9", "prompts": [prompt]},
    }
    settings["model"]["path"] = str(tiny("kandinsky5-video-i2v"))  # type: ignore[index]
    home = Project(folder, settings)
    home.video("a.mp4")
    home.video("../other/a.mp4")
    for name in ("first", "second"):
        home.image(f"../{name}.png", caption="", seed=len(name))
    (folder / "prompts.yaml").write_text("more: {prompt: a <token>, image: second.png}")
    shutil.copytree(tiny("kandinsky5-video-i2v"), folder / "copy")
    shutil.copytree(tiny("dinov2"), folder / "dino")
    for weights in (*(folder / "copy").glob("*/*.safetensors"), *(folder / "dino").glob("*.safetensors")):
        weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    for program in (discover, bucket, encode_text, encode_latents, encode_vision, index):
        report = home.run(program.run)
        assert report.exit_code == 0
    return home, report.details["set"]


@pytest.fixture(autouse=True)
def predicted_once(monkeypatch: pytest.MonkeyPatch, predictions: dict[str, MemoryEstimate]) -> None:
    """What a dry run of training predicts for equal settings is predicted once: most of the time of these tests."""

    def predict(config: Config, *rest: Any) -> MemoryEstimate:
        key = repr((config.model, config.train.model_copy(update=dict.fromkeys(NO_MEMORY)), rest))
        if key not in predictions:
            predictions[key] = estimate_memory(config, *rest)
        return predictions[key]

    monkeypatch.setattr(memory_estimate, "estimate_memory", predict)


NO_MEMORY = ("timesteps", "local_cache", "set")  # sections of training that no memory depends on
PLANNED = {"media": "discover", "captions": "discover", "masks": "bucket", "plan": "bucket"}  # the first program
ENCODED = {"text": "encode-text", "latents": "encode-latents", "vision": "encode-vision"}
STAGES = {"encode-text": encode_text, "encode-latents": encode_latents, "encode-vision": encode_vision, "index": index}


#: Options of a run that do not go with the changes of the others.
ALONE = {
    *(f"train.timesteps.{name}" for name in ("sampling", "mode_scale", "alpha", "values", "auto_shift")),
    *(f"train.adapter.{name}" for name in ("type", "decompose_factor", "decompose_both", "dora")),
    *("model.transformer", "train.weight_precision", "train.gradient_checkpointing_interval"),
}


def are_together(name: str, option: Option) -> bool:
    is_alone = name in ALONE or name.startswith(("train.parallel.", "train.offload.", "train.local_cache."))
    return option.affects == {"run"} and not option.is_refused and not is_alone


def changes() -> list[Any]:
    """Options whose change matters; of the short form the first of each kind of change."""
    rows = {name: option for name, option in TABLE.items() if not are_together(name, option)}
    short = {option.affects | {option.is_refused}: name for name, option in reversed(rows.items())}.values()
    return [name if name in short else long(name) for name in rows]


@pytest.mark.slow
@pytest.mark.parametrize("option", changes())
def test_a_change_is_refused_made_again_or_without_effect(made: tuple[Project, str], option: str) -> None:
    home, name = made
    affects, change, is_refused = TABLE[option]
    places = {"COPY": str(home.folder / "copy"), "DINO": str(home.folder / "dino")}
    values = [re.sub("COPY|DINO", lambda found: places[found[0]], part) for part in _split(change)]
    if is_refused:
        with pytest.raises((ConfigError, LatentpressError)):
            home.run(train, *values, dry_run=True)
        return
    if affects <= {"features", "run", "nothing"}:
        _same_set(home, name, values)
    else:
        for program, more in ((train, {}), (export.run, {"to": str(home.folder / "out")})):
            with pytest.raises(SetNotFound) as caught:
                home.run(program, *values, dry_run=True, **more)
            assert caught.value.exit_code == 3 and "latentpress" in caught.value.next_step
    if affects & PLANNED.keys():
        _refused_without_a_plan(home, affects, values)
    else:
        _made_again(home, affects, values)


@pytest.mark.slow
def test_options_of_training_and_validation_need_nothing_made_again(made: tuple[Project, str]) -> None:
    """All of them at once; whatever one of them asks for shows."""
    home, name = made
    values = [part for key, option in TABLE.items() if are_together(key, option) for part in _split(option.change)]
    assert len(values) > 30
    _same_set(home, name, values)
    _made_again(home, frozenset({"run"}), values)


def _split(given: str) -> list[str]:
    """The overrides of a row."""
    return re.split(r" (?=(?:datasets|train|validation)\.)", given)


def _same_set(home: Project, name: str, values: list[str]) -> None:
    assert home.run(train, *values, dry_run=True).details["set"] == name
    assert home.run(export.run, *values, dry_run=True, to=str(home.folder / "out")).details["set"] == name


def _refused_without_a_plan(home: Project, affects: frozenset[str], values: list[str]) -> None:
    for program in STAGES.values():
        with pytest.raises(LatentpressError, match="does not have a plan") as caught:
            home.run(program.run, *values, dry_run=True)
        assert caught.value.exit_code == 3 and "latentpress bucket" in caught.value.next_step
    assert home.run(status.run, *values).exit_code == 3
    if any(PLANNED.get(effect) == "discover" for effect in affects):
        with pytest.raises(LatentpressError, match="discovered") as caught:
            home.run(bucket.run, *values, dry_run=True)
        assert "latentpress discover" in caught.value.next_step
    else:
        try:
            assert home.run(bucket.run, *values, dry_run=True).details["buckets"]
        except LatentpressError as error:  # it looked at the option, and nothing is left to train on
            assert "discovered" not in error.message


def _made_again(home: Project, affects: frozenset[str], values: list[str]) -> None:
    remaining = {stage: home.run(program.run, *values, dry_run=True).remaining for stage, program in STAGES.items()}
    again = {ENCODED[effect] for effect in affects & ENCODED.keys()}
    index = set() if affects <= {"features", "run", "nothing"} else {"index"}
    assert {stage for stage, count in remaining.items() if count} == again | index
    assert home.run(bucket.run, *values, dry_run=True).remaining == 0
    stages = {row["stage"]: row["remaining"] for row in home.run(status.run, *values).details["stages"]}
    assert {stage for stage, count in stages.items() if count} == again | (affects & {"features"})
