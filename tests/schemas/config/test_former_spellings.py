"""Options under their former spelling: read as before, and the same in everything that is stored."""

from pathlib import Path

import pytest

from schemas.config.loading import ConfigError, dump_yaml, load_config
from schemas.config.pipeline import Config
from schemas.recipe import plan_key

TEXT = """
root: work
model: {family: kandinsky5-image}
datasets:
  - {id: photos, instance_data_dir: media, mask_data: masks, is_%s_data: true}
train:
  methods: {masked_loss: {%s_area: true}, %s: {weight: 2.0}}
"""
FORMER, NAMES = (
    TEXT % words
    for words in (("regularisation", "normalise", "regularisation"), ("regularization", "normalize", "regularization"))
)


def loaded(folder: Path, text: str, *overrides: str) -> Config:
    (folder / "pipeline.yaml").write_text(text)
    return load_config(folder / "pipeline.yaml", overrides)


def test_both_spellings_are_one_configuration(tmp_path: Path) -> None:
    former, now = (loaded(tmp_path, text) for text in (FORMER, NAMES))
    assert former == now and dump_yaml(former) == dump_yaml(now)
    assert "regularisation" not in dump_yaml(now) and "normalise" not in dump_yaml(now)
    assert loaded(tmp_path, dump_yaml(now)) == now


def test_what_is_stored_keeps_the_former_spelling(tmp_path: Path) -> None:
    config = loaded(tmp_path, NAMES)
    assert plan_key(config, 16) == "0c49e51fd19dd4e89927769df2c77e99"
    assert config.train.methods.used.keys() == {"masked_loss", "regularisation"}
    assert config.train.methods.used["masked_loss"].model_dump()["normalise_area"] is True


def test_an_override_may_have_either_spelling_but_not_both_with_the_file(tmp_path: Path) -> None:
    plain = NAMES.replace("normalize_area: true", "")
    for key in ("normalise_area", "normalize_area"):
        methods = loaded(tmp_path, plain, f"train.methods.masked_loss.{key}=true").train.methods
        assert methods.masked_loss is not None and methods.masked_loss.normalise_area
    with pytest.raises(ConfigError, match="normalise_area: is the former spelling of normalize_area; remove it"):
        loaded(tmp_path, NAMES, "train.methods.masked_loss.normalise_area=false")
