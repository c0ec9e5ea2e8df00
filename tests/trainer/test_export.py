"""A root, an export of it, and an import of that train alike: the same losses and gradients bit by bit."""

import json
from pathlib import Path

import pytest

from cache.sets.exporter import Exporter
from cache.sets.importer import Importer
from cache.sets.set_lookup import find_set
from cache.sets.trainset import TrainSet
from cache.store.store import Store
from schemas.cli.console import DAMAGE, OK, Options
from schemas.config.pipeline import Config
from tests.forms import long
from tests.trainer.runs import quiet
from trainer.__main__ import run
from trainer.run import metrics


def found(config: Config) -> TrainSet:
    return find_set(config.root, config.train.set, config.model.family, config.model.task)


def export(config: Config, target: Path, form: str) -> None:
    exporter = Exporter(found(config), Store(target), form, 0.01, False)
    for piece in exporter.shards:
        exporter.write(piece)
    exporter.write_prompts()
    exporter.publish()


def import_(config: Config, target: Path) -> None:
    importer = Importer(found(config), Store(target), "arrow")
    for part in importer.shards:
        importer.write(part)
    importer.publish(importer.write_prompts())


def at(config: Config, place: str, name: str) -> Config:
    """To train on the set at `place`, with no root, no datasets and no plan."""
    values = config.model_dump(mode="json", by_alias=True, exclude={"root", "datasets"})
    values["train"] |= {"set": place}
    return Config.model_validate({**values, "output": str(Path(config.output) / name)})


@pytest.fixture
def three(ready, tmp_path: Path, request) -> list[Config]:
    """Configurations that train on a root, on an export of it, and on an import of that."""
    kind, form = request.param
    look = {"eval_samples": 2, "eval_sigmas": [0.5], "every": 100}
    config = ready(kind, validation=look, steps=3, batch_size=2, caption_dropout=0.3, adapter={"rank": 2})
    export(config, tmp_path / "export", form)
    exported = at(config, str(tmp_path / "export"), "exported")
    import_(exported, tmp_path / "import")
    return [config, exported, at(config, str(tmp_path / "import" / "sets" / "set1"), "imported")]


@pytest.mark.slow
@pytest.mark.parametrize("three", [long(("t2i", "arrow")), ("i2v", "webdataset")], indirect=True)
def test_losses_are_the_same(three: list[Config]) -> None:
    losses = []
    for config in three:
        report = run(config, Options(config=Path("pipeline.yaml")), quiet())
        assert report.exit_code == OK and report.done == 3
        lines = metrics.read_metrics(config.run_folder / "metrics.jsonl")
        losses.append([(line.get("loss"), line.get("eval_loss"), line.get("grad_norm")) for line in lines])
    assert losses[1] == losses[0] == losses[2] and len(losses[0]) > 3


@pytest.mark.slow
@pytest.mark.parametrize("three", [("t2i", "arrow")], indirect=True)
def test_damage_to_an_export_ends_the_run(three: list[Config]) -> None:
    config = three[1]
    for path in Path(config.train.set).glob("samples/*/*.arrow"):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    report = run(config, Options(config=Path("pipeline.yaml")), quiet())
    assert report.exit_code == DAMAGE and "latentpress export" in report.next_steps[0]
    assert "/samples/" in report.damage[0]["path"]


@pytest.mark.parametrize("three", [("t2i", "arrow")], indirect=True)
def test_the_resolved_configuration_still_says_where_the_set_lies(three: list[Config]) -> None:
    from ruamel.yaml import YAML

    from trainer.run.run_state import write_config

    write_config(three[1], found(three[1]))
    path = three[1].run_folder / "config.yaml"
    again = YAML(typ="safe").load(path.read_text())
    assert again["train"]["set"] == three[1].train.set
    assert json.dumps(again) and Config.model_validate(again) == three[1]
