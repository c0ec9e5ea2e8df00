"""The order of magnitude of a training's time: each recipe has one, and published step times lie in it."""

import pytest

from schemas.config.loading import load_config
from stages.configuring.choice import FOLDER, list_recipes
from stages.configuring.duration import TIMES, describe_duration, likely_cards, step_operations, step_seconds
from tests.forms import long


@pytest.mark.parametrize("row", TIMES["published"], ids=lambda row: row["model"])
def test_a_published_step_time_is_in_the_range(row: dict) -> None:
    low, high = step_seconds(row["operations"], [row["card"]])
    assert low <= row["seconds"] <= high <= 4 * low


@pytest.mark.parametrize("name", [name if n % 4 == 0 else long(name) for n, name in enumerate(list_recipes())])
def test_a_recipe_has_a_time_that_grows_with_its_steps(name: str) -> None:
    config = load_config(FOLDER / f"{name}.yaml")
    more = config.changed(train=config.train.changed(accumulate=2 * config.train.accumulate))
    assert step_operations(more) == 2 * (step_operations(config) or 0) > 0
    assert "magnitude" in describe_duration(config, "", 16.0)


def test_the_cards_are_those_that_were_named_or_have_as_much_memory() -> None:
    assert likely_cards("NVIDIA GeForce RTX 4090", 23.6) == ["4090"]
    assert likely_cards("16", 16.0) == ["5080", "4080"] == likely_cards("", 15.7)
    assert likely_cards("my card", 1000.0) == ["h200"]


def test_a_flavour_without_a_row_has_no_time() -> None:
    config = load_config(FOLDER / "z-image-lora-16gb.yaml", ["model.flavour=z-image-turbo"])
    assert step_operations(config) is None and describe_duration(config, "4090", 24.0).startswith("unknown")
