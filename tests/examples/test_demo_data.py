"""The demo of the stages before training: captions that fit, near-duplicates and masks."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from cache.sets.item_rows import read_item_table
from cache.store.store import Store
from examples import demo, demo_data
from schemas.config.loading import load_config
from stages.discovery.media_table import read_configured_media
from stages.encoding.item_plans import find_item_table
from tests.stages.describing import captions_by_path

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("skimage") is None, reason="needs the demo extra (scikit-image)"),
]


def test_photographs_are_described_and_masked_and_near_duplicates_found(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.demo", demo_data.NAME, "--out", str(tmp_path)]
    said = subprocess.run(command, cwd=demo.ROOT, check=True, capture_output=True, text=True).stdout
    assert 'where: "duplicate_of is null"' in said and "data/plan.html" in said
    config = load_config(tmp_path / "data" / "pipeline.yaml")
    store, media = Store(config.root), read_configured_media(Store(config.root), config.datasets[0])
    paths = dict(zip(media["media_id"].to_pylist(), media["path"].to_pylist(), strict=True))
    page = (tmp_path / "data" / "plan.html").read_text()
    assert len(paths) == 20 and all(path in page for path in paths.values())
    assert page.count("mask: made by a model") >= 16

    def photograph(path: str) -> str:
        return Path(path).stem.partition("-")[0]

    captions_of = captions_by_path(store, config)
    of = {photograph(name): caption for name, (caption, _) in demo_data.PHOTOGRAPHS.items()}
    assert sum(captions == [of[photograph(path)]] for path, captions in captions_of.items()) >= 16, captions_of
    table = read_item_table(store, find_item_table(config, {config.datasets[0].id: media}))
    assert table is not None
    best = zip(table["media_id"].to_pylist(), table["duplicate_of"].to_pylist(), strict=True)
    copies = [(paths[item], paths[duplicate]) for item, duplicate in best if duplicate is not None]
    assert len(copies) >= 10 and all(photograph(item) == photograph(duplicate) for item, duplicate in copies), copies
