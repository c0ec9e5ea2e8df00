"""Shards whose checksums are right and whose tensors can't be trained on: each is named, before a gradient."""

from pathlib import Path

import numpy as np
import pytest

from cache.sets.set_lookup import find_set
from cache.store.damage import DamageError
from schemas.cli.console import DAMAGE
from trainer.run import metrics


def no_text(items, null, prompts) -> None:
    items[0].texts[0]["embeds"] = items[0].texts[0]["embeds"][:0]


def no_null_text(items, null, prompts) -> None:
    null["embeds"] = null["embeds"][:0]


def text_lines(items, null, prompts) -> None:
    items[0].texts[0]["embeds"] = items[0].texts[0]["embeds"].ravel()


def text_infinite(items, null, prompts) -> None:
    items[0].texts[0]["embeds"][1, 3] = np.inf


def no_pooled(items, null, prompts) -> None:
    del items[0].texts[0]["pooled"]


def pooled_square(items, null, prompts) -> None:
    items[0].texts[0]["pooled"] = items[0].texts[0]["pooled"].reshape(4, -1)


def swapped(items, null, prompts) -> None:
    wide = next(item for item in items if item.bucket.startswith("96x64"))
    wide.latent = wide.latent.swapaxes(2, 3)


def swapped_frames(items, null, prompts) -> None:
    items[0].latent = items[0].latent.swapaxes(0, 1)


def not_a_number(items, null, prompts) -> None:
    items[0].latent[3, 0, 2, 1] = np.nan


def another_depth(items, null, prompts) -> None:
    items[0].latent = items[0].latent[:4]


def three_times(items, null, prompts) -> None:
    items[0].latent = np.concatenate([items[0].latent] * 3)


def no_condition(items, null, prompts) -> None:
    items[0].condition = None


def condition_cut(items, null, prompts) -> None:
    items[0].condition = items[0].condition[:, :, :-1]


CASES = [
    ("t2i", no_text, "embeds is of shape (0, 64)"),
    ("t2i", no_null_text, "embeds is of shape (0, 64)"),
    ("t2i", text_lines, "should be (tokens, width)"),
    ("t2i", text_infinite, "embeds has numbers that are NaN or infinite"),
    ("t2i", no_pooled, "it lacks its pooled"),
    ("t2i", pooled_square, "pooled is of shape (4, 8)"),
    ("t2i", swapped, "and of bucket 96x64 it is (16, 1, 8, 12)"),
    ("t2v", swapped_frames, "latent is of shape (2, 16, 8, 8)"),
    ("t2i", not_a_number, "latent has numbers that are NaN or infinite"),
    ("t2i", another_depth, "latent is of shape (4, 1, 8, 8)"),
    ("t2i", three_times, "latent is of shape (48, 1, 8, 8)"),
    ("sana", lambda items, *_: three_times(items, *_), "latent is of shape (96, 1, 2, 2)"),
    ("i2i", no_condition, "it lacks its condition"),
    ("i2v", condition_cut, "condition is of shape (16, 1, 7, 8)"),
]


@pytest.mark.parametrize("form", ["arrow", "webdataset"])
@pytest.mark.parametrize(("kind", "craft", "said"), CASES)
def test_what_cant_be_trained_on_is_named(make_config, make_set, made, kind, craft, said, form) -> None:
    config = make_config(kind)
    items, null, prompts = made.mixed_items(config)
    craft(items, null, prompts)
    make_set(config, items, null, [], form=form)
    data = find_set(config.root, "current", config.model.family, config.model.task)
    data.text_widths = {}
    found = []
    for row in range(len(data)):
        try:
            data.sample(row, "null" if craft is no_null_text else "text0")
        except DamageError as damage:
            found.append(damage)
    assert len(found) == (12 if craft is no_null_text else 1)
    damage = found[0]
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
    with pytest.raises(DamageError, match=r"row \d+, id set1-.*(NaN|condition is of shape \(16, 2, 8, 8\))"):
        _ = data.validation


def narrow(items, null, prompts) -> None:
    for text in (null, prompts[0].text, *(text for item in items for text in item.texts)):
        text["embeds"] = text["embeds"][:, :48]


@pytest.mark.slow
@pytest.mark.parametrize("craft", [no_text, swapped, not_a_number, narrow])
def test_training_ends_as_damage_does(make_config, make_set, made, program, craft) -> None:
    """Not one step was taken on it. Texts of another width than the transformer reads are damage to it as well."""
    config = make_config("t2i", steps=40, caption_dropout=0.0, validation={"eval_samples": 0})
    items, null, prompts = made.mixed_items(config)
    craft(items, null, prompts)
    make_set(config, items, null, [])
    code, report, _ = program(config)
    assert code == DAMAGE
    damage = report["damage"][0]
    assert damage["item"].startswith("set1-") and f"row {damage['row']}: " in damage["message"]
    assert "--repair" in report["next_steps"][0]
    lines = metrics.read_metrics(config.run_folder / "metrics.jsonl")
    assert all(not line.get("skipped") for line in lines)
    assert craft is not narrow or ("48 wide, and the transformer reads 64" in damage["message"] and not lines)
