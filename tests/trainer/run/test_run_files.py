"""Training on several machines needs one output folder."""

import json
from pathlib import Path

import pytest

from schemas.errors import USAGE
from tests.trainer.runs import on_ranks

pytestmark = pytest.mark.slow


def test_ranks_with_output_folders_of_their_own_are_refused(make_config, make_set, tmp_path: Path) -> None:
    config = make_config(steps=1, batch_size=2, validation={"eval_samples": 0})
    make_set(config)
    paths = [tmp_path / name / "pipeline.yaml" for name in ("first", "second")]
    for path in paths:
        path.parent.mkdir()
        settings = json.loads(json.dumps(config.model_dump(mode="json", by_alias=True, exclude_unset=True)))
        path.write_text(json.dumps(settings | {"output": str(path.parent / "output")}))
    report = on_ranks(paths, (USAGE, USAGE))
    assert str(paths[0].parent / "output") in report["error"]["message"] and "`output`" in report["error"]["next_step"]
