"""How many workers a stage has where no number is given, and which cards they have."""

from typing import Any

import pytest
import torch

from schemas.config.encoding import Encoding, EngineName
from stages import encode_text
from stages.encoding.stage import choose_workers
from tests.stages.encoded_photos import IMAGE, plan_four


@pytest.mark.parametrize(
    ("cards", "given", "engine", "workers", "reason"),
    [
        (4, {}, "local", 4, "one for each accelerator"),
        (0, {}, "local", 1, "no accelerator"),
        (4, {"device": "cpu"}, "local", 1, "the device is cpu"),
        (4, {"device": "cuda:2"}, "local", 1, "the device is cuda:2"),
        (4, {"workers": 2}, "local", 2, "as given"),
        (4, {}, "ray", 1, "--workers says how many"),
    ],
)
def test_one_for_each_card_by_default(
    monkeypatch, cards: int, given: dict[str, Any], engine: EngineName, workers: int, reason: str
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: cards)
    found, why = choose_workers(engine, Encoding(**given))
    assert found == workers and reason in why


@pytest.mark.slow
def test_a_stage_says_how_many_and_why(project) -> None:
    home = project(IMAGE)
    plan_four(home)
    report = home.run(encode_text.run, device="cpu")
    assert report.done == 5 and report.details["workers"] == "1, as the device is cpu"
    assert "workers: 1, as the device is cpu" in home.said
