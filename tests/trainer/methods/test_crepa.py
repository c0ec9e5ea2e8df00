"""CREPA against its formula, computed token by token, and what does not change it: how blocks are computed, where a run
is cut and how many processes share it."""

import json
import math
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from schemas.config.methods import CREPA
from tests.forms import long
from tests.trainer.methods.crepa_by_hand import loss_by_hand
from tests.trainer.runs import (
    lines,
    move_adapter,
    prepared,
    train,
    trained_weights,
)
from trainer import train as loop
from trainer.methods.crepa import CREPAMethod

WIDTH = 12  # of the features


def with_features(helpers, config, coarse: int = 1, masks: bool = False) -> tuple:
    """Items of random features: on the grid of tokens, or with `coarse` times fewer columns and rows."""
    (items, null, prompts), spec = helpers.mixed_items(config, 8), config.model.family_spec
    rng, patch = np.random.default_rng(1), spec.side_multiple // spec.spatial_stride
    for item in items:
        item.regularization = config.train.methods.regularization is not None
        _, frames, rows, columns = item.latent.shape
        grid = (frames, max(1, rows // patch // coarse), max(1, columns // patch // coarse))
        item.vision = rng.normal(size=(*grid, WIDTH)).astype(np.float32)
        item.mask = rng.random(item.latent.shape[1:], dtype=np.float32) if masks else None
    return items, null, prompts


CASES = {
    "t2v": ("t2v", {}, 1),
    "neighbors": ("t2v", {"adjacent_distance": 2, "adjacent_tau": 0.5, "cumulative_neighbors": True}, 2),
    "sum": ("t2v", {"adjacent_distance": 3, "adjacent_tau": 2.0, "normalize_by_frames": False, "weight": 2.0}, 2),
    "masked": ("i2v", {"adjacent_distance": 0}, 1),
    "sana": ("sana", {}, 2),
    "joint": ("z-image", {}, 2),
    "references last": ("edit-plus-i2i", {}, 2),
    "references in a stream of their own": ("flux3-i2i", {}, 2),
    "tread": ("i2v", {}, 2),
    "tread of both kinds of blocks": ("flux2-klein", {}, 1),
    "tread of a stream": ("flux3-i2i", {}, 1),
    "rollout": ("t2v", {}, 1),
    "regularization": ("t2i", {}, 1),
}
LONG = ("t2v", "sana", "joint", "tread", "tread of a stream")
ROUTE = {"selection_ratio": 0.5, "start_layer_idx": 0}


@pytest.mark.slow
@pytest.mark.parametrize("case", [long(case) if case in LONG else case for case in CASES])
def test_loss_and_gradients_are_those_of_the_formula(make_config, make_set, helpers, monkeypatch, case) -> None:
    kind, options, coarse = CASES[case]
    index = 1 if kind == "sana" else 0
    methods: dict[str, Any] = {"crepa": {"block_index": index, **options}}
    if case == "masked":
        methods["masked_loss"] = {"unmasked_weight": 0.0}
    if case.startswith("tread"):  # it ends with the tapped block
        methods["tread"] = {"routes": [{**ROUTE, "end_layer_idx": index}]}
    if case == "rollout":
        methods |= {"scheduled_sampling": {"probability": 1.0}, "input_perturbation": {}}
    if case == "regularization":
        methods["regularization"] = {}
    config = make_config(kind, batch_size=2, methods=methods, adapter={"rank": 2})
    if kind in ("t2v", "i2v", "wan", "wan-a14b-i2v"):  # four latent frames
        mixed = helpers.mixed_items
        monkeypatch.setattr(helpers, "mixed_items", lambda *given: longer(helpers, config, mixed(*given)))
    make_set(config, *with_features(helpers, config, coarse, case == "masked"))
    run = prepared(config)
    move_adapter(run)
    step = loop.start_step(run, 0, run.loader.step(0).micro_batches[0])
    method, seen = run.methods["crepa"], []
    block = run.family.visual_blocks(run.model)[index]
    tokens = run.family.block_tokens(block)
    block.register_forward_hook(lambda _, inputs, output: seen.append(tokens.read_output(output)))
    before = step.noisy_BCTHW, step.target_BCTHW
    for each in run.methods.values():
        each.prepare(step)
    changed = [case] if not all(map(torch.equal, before, (step.noisy_BCTHW, step.target_BCTHW))) else []
    assert changed == [name for name in ("rollout", "regularization") if name == case]
    seen.clear()
    with ExitStack() as stack:
        for each in run.methods.values():
            stack.enter_context(each.around(step))
        run.denoiser(step.noisy_BCTHW, step.sigma_B, step.batch)
        step.weight_BTHW = step.batch.extras.get("mask")
        found = method.loss(step)
        grid, (hidden, *_) = step.grid, seen
        assert step.batch.extras["vision"].shape[2] == max(1, grid.rows // coarse)
        everywhere = torch.arange(grid.tokens).expand(len(step.batch), -1)
        places = step.kept_tokens.get(index, everywhere)
        assert (places.shape == everywhere.shape) == (not case.startswith("tread"))
        hidden, _ = tokens.divide(hidden, places.shape[1])  # without a text or references beside them
        wanted, similar = loss_by_hand(hidden, places, grid, step.batch, method.modules(), config.train.methods.crepa)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(step.logged["crepa_similarity"], similar.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(step.logged["crepa_loss"], found.detach())
        weights = [*run.trainable.values()]
        ours = torch.autograd.grad(found.sum(), weights, retain_graph=True, allow_unused=True)
        theirs = torch.autograd.grad(wanted.sum(), weights, allow_unused=True)
    reached = 0
    for name, one, other in zip(run.trainable, ours, theirs, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            assert (one - other).norm() <= 1e-3 * other.norm().clamp(min=1e-3), name
            reached += bool(other.norm() > 0)
    assert reached >= 6, "the adapters of the tapped block, and the projection"


def longer(helpers, config, given: tuple) -> tuple:
    """Clips of 13 frames in place of 5."""
    items, null, prompts = given
    rng, shown = np.random.default_rng(2), config.model.family_spec.condition_frames(config.model.task)
    for item in items:
        item.bucket = f"{item.bucket.partition('@')[0]}@13"
        item.latent = helpers.latent(rng, config, item.bucket)
        item.condition = None if item.condition is None else item.latent[:, :shown]
    return items, null, prompts


# --- schedule and cut-offs ---


def weights(options: dict[str, Any], steps: int) -> list[float]:
    method = CREPAMethod(CREPA(**options))
    return [method.weight(number, steps) for number in range(steps)]


def test_the_weight_follows_its_schedule() -> None:
    assert weights({}, 3) == [0.5] * 3
    assert weights({"weight": 1.0, "warmup": 2}, 4) == [0.5, 1, 1, 1]
    assert weights({"weight": 1.0, "warmup": 1, "schedule": "linear"}, 5) == [1, 1, 0.75, 0.5, 0.25]
    decayed = {"weight": 1.0, "weight_end": 0.5, "decay_steps": 2}
    assert weights({**decayed, "schedule": "linear", "warmup": 1}, 5) == [1, 1, 0.75, 0.5, 0.5]
    assert weights({**decayed, "schedule": "cosine"}, 4) == pytest.approx([1, 0.75, 0.5, 0.5])
    assert weights({**decayed, "schedule": "polynomial", "power": 2}, 4) == [1, 0.625, 0.5, 0.5]
    assert weights({"cutoff_step": 2}, 4) == [0.5, 0.5, 0, 0]


@pytest.mark.parametrize("mode", ["permanent", "recoverable"])
def test_a_similarity_ends_it_and_may_start_it_again(mode: str) -> None:
    """The average: 0.5, 0.7, then 0.5 again."""
    options = {"similarity_threshold": 0.6, "similarity_ema_decay": 0.5, "threshold_mode": mode}
    method, seen = CREPAMethod(CREPA(**options)), []
    for number, similarity in enumerate((0.5, math.nan, 0.9, 0.3, 0.3)):
        seen.append((method.weight(number, 9), method.measures(number, 9)))
        method.finish_step({"loss": 1.0, "crepa_similarity": similarity} if seen[-1][1] else {"loss": 1.0})
        again = CREPAMethod(CREPA(**options))
        again.load_state(json.loads(json.dumps(method.state())))
        assert again.weight(number + 1, 9) == method.weight(number + 1, 9)
    after = (0.0, False) if mode == "permanent" else (0.5, True)
    assert seen == [(0.5, True)] * 3 + [(0.0, mode == "recoverable"), after]


# --- runs ---


@pytest.mark.long
def test_a_resumed_run_is_the_same_bit_for_bit(make_config, make_set, helpers) -> None:
    """With the average that ends it, which a checkpoint keeps, and a rate of its own for the projection."""
    groups = [{"match": r"methods\.crepa\..*", "lr": 0.01}]
    methods = {"crepa": {"block_index": 0, "similarity_threshold": 0.02, "similarity_ema_decay": 0.5}}
    options = {"methods": methods, "adapter": {"rank": 2}, "optimizer": {"lr": 2e-3, "warmup": 0, "groups": groups}}
    found = []
    for name, ends in (("whole", [8]), ("cut", [3, 5, 8])):
        for steps in ends:
            config = make_config("t2i", name=name, batch_size=2, steps=steps, checkpoint_every=1, **options)
            if steps == ends[0]:
                make_set(config, *with_features(helpers, config))
            train(config)
        found.append((lines(config), lines(config, "crepa_weight"), lines(config, "crepa_similarity"), config))
    assert found[0][:3] == found[1][:3]
    assert found[0][1][1] == 0.5 and found[0][1][8] == 0, "it ended between"
    assert len(found[0][2]) == sum(weight > 0 for weight in found[0][1].values())
    whole, cut = (trained_weights(each[3]) for each in found)
    assert whole.keys() == cut.keys() and all(torch.equal(whole[name], cut[name]) for name in whole)
    assert {name for name in whole if "crepa" in name} == {
        f"methods.crepa.{name}" for name in ("norm.weight", "norm.bias", "linear.weight", "linear.bias")
    }
    adapter = load_file(config.run_folder / "adapter/pytorch_lora_weights.safetensors")
    assert adapter and not [name for name in adapter if "crepa" in name or "methods" in name]
