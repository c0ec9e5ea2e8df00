"""Shards whose checksums are right and whose tensors can't be trained on: each is named, before a gradient."""

from pathlib import Path

import numpy as np
import pytest

from cache.sets.set_lookup import find_set
from cache.store.damage import DamageError
from schemas.cli.console import DAMAGE
from trainer.run import metrics


def craft(items, null, part: str, change) -> None:
    """Change a tensor of the first sample, or "wide": the latent of the first of bucket 96x64, "null": the null
    prompt's text. change: array -> array; None removes the tensor."""
    wide = next(item for item in items if item.bucket.startswith("96x64"))
    texts = {"null": null, "embeds": items[0].texts[0], "pooled": items[0].texts[0]}
    if part in texts:
        key = "pooled" if part == "pooled" else "embeds"
        array = texts[part].pop(key)
        texts[part] |= {} if change is None else {key: change(array)}
        return
    item, name = (wide, "latent") if part == "wide" else (items[0], part)
    setattr(item, name, change and change(getattr(item, name)))


def put(place: tuple[int, ...], value: float):
    """Give a function that sets one number."""

    def change(array: np.ndarray) -> np.ndarray:
        array[place] = value
        return array

    return change


NO_TEXT = ("embeds", lambda array: array[:0])
SWAPPED = ("wide", lambda array: array.swapaxes(2, 3))
NOT_A_NUMBER = ("latent", put((3, 0, 2, 1), np.nan))
THREE_TIMES = ("latent", lambda array: np.concatenate([array] * 3))
CASES = [
    ("t2i", *NO_TEXT, "embeds has shape (0, 64)"),
    ("t2i", "null", lambda array: array[:0], "embeds has shape (0, 64)"),
    ("t2i", "embeds", np.ravel, "instead of (tokens, width)"),
    ("t2i", "embeds", put((1, 3), np.inf), "embeds has numbers that are NaN or infinite"),
    ("t2i", "pooled", None, "it lacks its pooled"),
    ("t2i", "pooled", lambda array: array.reshape(4, -1), "pooled has shape (4, 8)"),
    ("t2i", *SWAPPED, "instead of (16, 1, 8, 12) for bucket 96x64"),
    ("t2v", "latent", lambda array: array.swapaxes(0, 1), "latent has shape (2, 16, 8, 8)"),
    ("t2i", *NOT_A_NUMBER, "latent has numbers that are NaN or infinite"),
    ("t2i", "latent", lambda array: array[:4], "latent has shape (4, 1, 8, 8)"),
    ("t2i", *THREE_TIMES, "latent has shape (48, 1, 8, 8)"),
    ("sana", *THREE_TIMES, "latent has shape (96, 1, 2, 2)"),
    ("i2i", "condition", None, "it lacks its condition"),
    ("i2v", "condition", lambda array: array[:, :, :-1], "condition has shape (16, 1, 7, 8)"),
]


@pytest.mark.parametrize(
    ("case", "form"), [(number, ("arrow", "webdataset")[number % 2]) for number in range(len(CASES))]
)
def test_what_cant_be_trained_on_is_named(make_config, make_set, made, case, form) -> None:
    kind, part, change, said = CASES[case]
    config = make_config(kind)
    items, null, _ = made.mixed_items(config)
    craft(items, null, part, change)
    make_set(config, items, null, [], form=form)
    data = find_set(config.root, "current", config.model.family, config.model.task)
    data.text_widths = {}
    damages = []
    for row in range(len(data)):
        try:
            data.sample(row, "null" if part == "null" else "text0")
        except DamageError as damage:
            damages.append(damage)
    assert len(damages) == (12 if part == "null" else 1)
    damage = damages[0]
    assert said in damage.reason and Path(damage.path).exists()
    assert damage.id.startswith("set1-") and damage.row is not None and f"row {damage.row}" in str(damage)


@pytest.mark.parametrize("part", ["text", "condition"])
def test_a_crafted_validation_prompt_is_named(make_config, make_set, made, part) -> None:
    config = make_config("i2v")
    items, null, prompts = made.mixed_items(config)
    if part == "text":
        prompts[0].text["embeds"][0, 0] = np.nan
    else:
        prompts[0].condition = np.repeat(prompts[0].condition, 2, 1)
    make_set(config, items, null, prompts)
    data = find_set(config.root, "current", config.model.family, config.model.task)
    data.text_widths = {}
    with pytest.raises(DamageError, match=r"row \d+, id set1-.*(NaN|condition has shape \(16, 2, 8, 8\))"):
        _ = data.validation


@pytest.mark.slow
def test_training_ends_as_damage_does(make_config, make_set, made, program) -> None:
    """Not one step was taken on it."""
    config = make_config("t2i", steps=40, caption_dropout=0.0, validation={"eval_samples": 0})
    items, null, _ = made.mixed_items(config)
    craft(items, null, *NOT_A_NUMBER)
    make_set(config, items, null, [])
    code, report, _ = program(config)
    assert code == DAMAGE
    damage = report["damage"][0]
    assert damage["item"].startswith("set1-") and f"row {damage['row']}: " in damage["message"]
    assert "--repair" in report["next_steps"][0]
    lines = metrics.read_metrics(config.run_folder / "metrics.jsonl")
    assert all(not line.get("skipped") for line in lines)
