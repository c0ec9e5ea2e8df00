"""A validation prompt more is another plan and another set, and the same training."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cache.sets.set_lookup import open_configured_set
from schemas.cli.console import Console, Options
from schemas.config.loading import load_config
from stages import bucket, discover, encode_latents, encode_text, index
from trainer.run.run_state import data_signature


@pytest.fixture
def made(tmp_path: Path, tiny) -> Callable[..., dict]:
    """made(**validation): what training on the set of this configuration depends on, all stages run before."""
    from PIL import Image

    (tmp_path / "media").mkdir()
    for number in range(3):
        Image.new("RGB", (64, 64), (60 * number, 20, 90)).save(tmp_path / "media" / f"picture-{number}.png")
        (tmp_path / "media" / f"picture-{number}.txt").write_text(f"colour number {number}")

    def make(captions: str = "textfile", **validation) -> dict:
        dataset = {"id": "colors", "instance_data_dir": "media", "resolution": 64, "caption_strategy": captions}
        model = {"family": "kandinsky5-image", "path": str(tiny("kandinsky5-image-t2i")), "precision": "float32"}
        settings = {"root": "work", "model": model, "datasets": [dataset], "validation": {"size": "64x64"} | validation}
        path = tmp_path / "pipeline.yaml"
        path.write_text(json.dumps(settings))
        config = load_config(path)
        for stage in (discover, bucket, encode_text, encode_latents, index):
            assert stage.run(config, Options(path), Console(stderr=io.StringIO())).exit_code == 0
        return data_signature(open_configured_set(config, pytest.fail))

    return make


@pytest.mark.slow
def test_prompts_sizes_and_steps_of_validation_change_no_training(made) -> None:
    first = made(prompts=[{"name": "one", "prompt": "a colour"}])
    two = [{"name": "one", "prompt": "a colour"}, {"name": "two", "prompt": "another colour"}]
    more = made(prompts=two, size=["96x64", "64x64"], steps=[3, 4], seed=[1, 2])
    assert more["set"] != first["set"] and more["digest"] == first["digest"]
    assert made(captions="filename")["digest"] != first["digest"]
