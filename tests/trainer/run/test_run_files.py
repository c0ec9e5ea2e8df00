"""Ranks with output folders of their own, as machines have that share only the root."""

import json
from pathlib import Path

import pytest

from schemas.errors import USAGE
from tests.trainer.runs import check_result, check_shown, lines, on_ranks, train

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_rank_0_writes_everything_and_sends_what_the_others_need(make_config, make_set, tmp_path: Path) -> None:
    """The run goes on from a checkpoint that the other can't see; a run with other ranks is not begun again."""
    look = {"eval_samples": 0, "every": 4, "steps": 1}
    common = {"steps": 4, "batch_size": 2, "checkpoint_every": 2, "ema": {"decay": 0.5}, "validation": look}
    alone = make_config(name="alone", accumulate=2, **common)
    made = make_config(name="two", **common)
    make_set(alone)
    make_set(made)
    train(alone)
    paths = [tmp_path / name / "pipeline.yaml" for name in ("first", "second")]
    for steps in (2, 4):
        for path in paths:
            path.parent.mkdir(exist_ok=True)
            settings = json.loads(json.dumps(made.model_dump(mode="json", by_alias=True, exclude_unset=True)))
            settings["train"]["steps"], settings["output"] = steps, str(path.parent / "output")
            path.write_text(json.dumps(settings))
        report = on_ranks(paths)
        assert (report["done"], report["skipped"]) == (2, steps - 2)
    first = made.model_copy(update={"output": str(paths[0].parent / "output")})
    assert lines(first) == pytest.approx(lines(alone), rel=1e-5) and len(lines(first)) == 4
    check_result(first, alone)
    check_shown(first, alone, 4)
    other = paths[1].parent / "output" / "run"
    assert [path for path in other.rglob("*") if path.is_file() or path.name.startswith(".received")] == []
    report = on_ranks(paths)
    assert (report["done"], report["skipped"]) == (0, 4)
    report = on_ranks(paths[::-1], (USAGE, USAGE))
    assert "has a checkpoint of step 4" in report["error"]["message"] and "has none" in report["error"]["message"]
    settings["train"]["parallel"] = {"strategy": "fsdp2"}
    paths[1].write_text(json.dumps(settings))
    settings["output"] = str(paths[0].parent / "output")
    paths[0].write_text(json.dumps(settings))
    report = on_ranks(paths, (USAGE, USAGE))
    assert "train.parallel.strategy: fsdp2 needs one `output`" in report["error"]["message"]
