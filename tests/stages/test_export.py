"""`latentpress export` and `import`: what they say, do, refuse, and leave for the trainer."""

import json
from pathlib import Path
from typing import Any

import pytest

from cache.sets.samples import Location
from cache.sets.set_lookup import find_set
from cache.store.store import Store
from schemas.cli.console import INCOMPLETE, USAGE, Options, run_program
from stages import bucket, discover, encode_latents, encode_text, export, import_, index, verify
from stages.encoding.stage_options import UsageError


def command(home: Any, capsys: pytest.CaptureFixture, program: Any, *overrides: str, **own: Any) -> tuple[int, dict]:
    """A program as the command line calls it with --json: its exit code and its report."""
    dry = own.pop("dry_run", False)
    options = Options(home.folder / "pipeline.yaml", overrides, dry_run=dry, json=True)
    code = run_program(program.__name__.rpartition(".")[2].strip("_"), program.run, options, own)
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_from_media_to_an_export_and_back(project, capsys) -> None:
    prompts = {"prompts": [{"name": "cat", "prompt": "a cat"}], "size": "64x64"}
    home = project(validation=prompts, cache={"unit_mib": 0.02, "format": "webdataset"})
    for number in range(5):
        home.image(f"{number}.png", caption=("a cat", "a dog")[number % 2], seed=number)
    for program in (discover, bucket, encode_text, encode_latents, index):
        assert home.run(program.run).exit_code == 0
    model = (home.config().model.family, home.config().model.task)
    home_set = find_set(str(home.root), "current", *model)
    place = str(home.folder / "there")

    code, dry = command(home, capsys, export, dry_run=True, to=place, shard_mib=0.02)
    assert code == 0 and dry["remaining"] == 5 and not Path(place).exists()
    assert dry["details"]["estimated_mib"] > dry["details"]["estimated_texts_mib"] > 0
    code, done = command(home, capsys, export, to=place, shard_mib=0.02, with_captions=True, form="arrow")
    assert (code, done["done"], done["skipped"]) == (0, 5, 0)
    assert done["details"]["written_mib"] == pytest.approx(done["details"]["estimated_mib"], rel=0.05, abs=0.011)
    code, again = command(home, capsys, export, to=place, shard_mib=0.02, with_captions=True, form="arrow")
    assert (code, again["done"], again["skipped"]) == (0, 0, 5)
    code, other = command(home, capsys, export, to=place, shard_mib=7)
    assert code == USAGE and "--to" in other["error"]["next_step"]

    data = find_set("/nowhere", place, *model)
    assert data.id == home_set.id and data.meta["export"]["settings"]["captions"]
    row = data.read_row(Location(0, 0, None))
    assert row.info["captions"][0] in ("a cat", "a dog") and row.info["dataset"] == "photos"

    code, dry = command(home, capsys, import_, "root=other", source=place, dry_run=True)
    assert code == 0 and dry["remaining"] == 5 and not (home.folder / "other").exists()
    code, done = command(home, capsys, import_, "root=other", source=place)
    assert (code, done["done"]) == (0, 5)
    code, again = command(home, capsys, import_, "root=other", source=place)
    assert (code, again["done"], again["skipped"]) == (0, 0, 5)
    code, there = command(home, capsys, import_, source=place)
    assert (code, there["done"], there["skipped"]) == (0, 0, 5)
    back = find_set(str(home.folder / "other"), "current", *model)
    for one in (data, back):
        assert [one.sample(i) for i in range(5)] == [home_set.sample(i) for i in range(5)]
        assert one.validation == home_set.validation and one.spans == home_set.spans
    assert {name.split("/")[0] for name in Store(home.folder / "other").list_names()} == {"latents", "text", "sets"}
    assert list(Path(home.folder / "other").glob("latents/*/*.tar"))

    code, sound = command(home, capsys, verify, "root=other")
    assert code == 0 and sound["done"] > 0 and not sound["damage"]

    code, wrong = command(home, capsys, import_, source=str(home.root))
    assert code == USAGE and "root" in wrong["error"]["message"]


def test_without_a_set_it_says_what_makes_one(project, capsys) -> None:
    home = project()
    home.config()
    code, report = command(home, capsys, export)
    assert code == INCOMPLETE and "no training set" in report["error"]["message"]
    assert "latentpress index" in report["error"]["next_step"]


def test_import_asks_from_where(project, capsys) -> None:
    home = project()
    home.config()
    code, report = command(home, capsys, import_)
    assert code == USAGE and "--from" in report["error"]["next_step"]


@pytest.mark.parametrize("program", [export, import_])
def test_neither_is_divided(project, program) -> None:
    home = project()
    with pytest.raises(UsageError, match="--shard"):
        home.run(program.run, shard="0/2")
