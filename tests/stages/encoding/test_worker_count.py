"""How many workers a stage has where no number is given, and which cards they have."""

from typing import Any

import pytest
import torch

from schemas.config.encoding import Encoding
from stages import encode_text
from stages.encoding.stage_options import choose_workers
from tests.stages.encoded_photos import IMAGE, plan_four


@pytest.mark.parametrize(
    ("cards", "given", "overrides", "workers", "reason"),
    [
        (4, {}, [], 4, "one for each accelerator"),
        (0, {}, [], 1, "no accelerator"),
        (4, {"device": "cpu"}, [], 1, "the device is cpu"),
        (4, {"device": "cuda:2"}, [], 1, "the device is cuda:2"),
        (4, {"workers": 2}, [], 2, "as given"),
        (4, {}, ["stages.engine=ray"], 1, "--workers says how many"),
    ],
)
def test_one_for_each_card_by_default(
    project, monkeypatch, cards: int, given: dict[str, Any], overrides: list[str], workers: int, reason: str
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: cards)
    found, why = choose_workers(project(IMAGE).config(*overrides), Encoding(**given))
    assert found == workers and reason in why


@pytest.mark.slow
def test_a_stage_says_how_many_and_why(project) -> None:
    home = project(IMAGE)
    plan_four(home)
    report = home.run(encode_text.run, device="cpu")
    assert report.done == 5 and report.details["workers"] == "1, as the device is cpu"
    assert "workers: 1, as the device is cpu" in home.said
