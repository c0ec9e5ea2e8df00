"""`latentpress export`: reports, errors, and training on a copy."""

import json
from pathlib import Path
from typing import Any

import pytest

from cache.sets.set_lookup import find_set
from cache.store.store import Store
from schemas.cli.console import INCOMPLETE, USAGE, Options, run_program
from stages import bucket, discover, encode_latents, encode_text, export, index, verify


def command(home: Any, capsys: pytest.CaptureFixture, *overrides: str, **arguments: Any) -> tuple[int, dict]:
    """Run `export` like the command line with --json. Returns (exit code, report)."""
    dry = arguments.pop("dry_run", False)
    options = Options(home.folder / "pipeline.yaml", overrides, dry_run=dry, json=True)
    code = run_program("export", export.run, options, arguments)
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_from_media_to_a_copy_that_can_be_trained_on(project, capsys) -> None:
    prompts = {"prompts": [{"name": "cat", "prompt": "a cat"}], "size": "64x64"}
    home = project(validation=prompts, cache={"unit_mib": 0.02, "format": "webdataset"})
    for number in range(5):
        home.image(f"{number}.png", caption=("a cat", "a dog")[number % 2], seed=number)
    for program in (discover, bucket, encode_text, encode_latents, index):
        assert home.run(program.run).exit_code == 0
    model = (home.config().model.family, home.config().model.task)
    home_set = find_set(str(home.root), "current", *model)
    shards, place = home_set.tables["shards"].num_rows, str(home.folder / "there")

    code, dry = command(home, capsys, dry_run=True, to=place)
    assert (code, dry["remaining"]) == (0, shards) and not Path(place).exists()
    code, report = command(home, capsys, to=place)
    assert (code, report["done"], report["skipped"]) == (0, shards, 0) and place in report["next_steps"][0]
    code, second_report = command(home, capsys, to=place)
    assert (code, second_report["done"], second_report["skipped"]) == (0, 0, shards)
    data = find_set("/nowhere", place, *model)
    assert data.id == home_set.id
    assert [data.sample(i) for i in range(5)] == [home_set.sample(i) for i in range(5)]
    assert data.validation == home_set.validation and data.spans == home_set.spans
    assert {name.split("/")[0] for name in Store(place).list_names()} == {"latents", "text", "sets"}
    report = home.run(verify.run, f"root={place}")
    assert report.exit_code == 0 and report.done > 0 and not report.damage

    code, itself = command(home, capsys, to=str(home.root))
    assert code == USAGE and "--to" in itself["error"]["next_step"]
    code, tars = command(home, capsys, to=place, webdataset=True, with_captions=True, shard_mib=0.02)
    assert code == 0 and tars["done"] == len(list(Path(place).glob("webdataset/*/*.tar"))) > 1
    code, tars = command(home, capsys, to=place, webdataset=True, with_captions=True, shard_mib=0.02)
    assert (code, tars["done"]) == (0, 0)
    code, tar_report = command(home, capsys, to=place, webdataset=True)
    assert code == USAGE and "--to" in tar_report["error"]["next_step"]


def test_without_a_set_it_names_the_program_that_makes_one(project, capsys) -> None:
    home = project()
    home.config()
    code, report = command(home, capsys)
    assert code == INCOMPLETE and "latentpress index" in report["error"]["next_step"]
