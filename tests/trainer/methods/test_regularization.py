"""Regularization data, compared with the base model, loaded a second time without an adapter."""

import json

import numpy as np
import pytest
import torch

from schemas.cli.console import Options, run_program
from schemas.errors import OK, USAGE
from tests.forms import long
from tests.trainer.methods.test_crepa import with_features
from tests.trainer.runs import lines, move_adapter, on_two_ranks, prepared, train, trained_weights, write
from trainer import train as loop
from trainer.__main__ import run as program_run
from trainer.methods import METHODS

pytestmark = pytest.mark.slow

ROLLOUT = {"scheduled_sampling": {"probability": 0.6, "max_step_offset": 2, "schedule_steps": 10}}
ROUTE = {"tread": {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": 1}]}}


def marked(helpers, config, every: int = 2):
    """Items of which every `every`-th is regularization data, with masks if they are used."""
    items, null, prompts = helpers.mixed_items(config)
    for number, item in enumerate(items if config.train.methods.masked_loss else ()):
        item.mask = np.random.default_rng(number).random(item.latent.shape[1:], dtype=np.float32)
    for item in items[::every]:
        item.regularization = True
    return items, null, prompts


@pytest.mark.parametrize(
    ("kind", "adapter", "options"),
    [
        ("t2i", {"type": "lokr"}, {"target": "data", "weight": 3.0}),
        ("i2v", {"dora": True}, {"weight": 0.25}),
        ("sana", {"type": "lokr"}, {}),
    ],
)
def test_the_target_is_the_prediction_of_the_base_model(make_config, make_set, helpers, kind, adapter, options) -> None:
    """In a batch with other samples, with the same noise, sigma and text, which may be the null prompt."""
    masked = kind == "t2i"
    methods = {"regularization": options} if options else {}
    methods |= {"masked_loss": {"unmasked_weight": 0.5}} if masked else {}
    adapter = {"rank": 2, **adapter}
    config = make_config(kind, steps=1, batch_size=6, caption_dropout=0.4, adapter=adapter, methods=methods)
    make_set(config, *marked(helpers, config))
    run = prepared(config)
    move_adapter(run)
    [part] = run.loader.step(0).micro_batches
    step, losses = loop.start_step(run, 0, part), []
    base, task = run.family.load(config.model.path).eval(), config.model.task
    marks = part.batch.extras["regularization"].tolist()
    assert {*marks} == {True, False}
    for row, mark in enumerate(marks):
        one = torch.tensor([row])
        inputs = step.noisy_BCTHW[one], step.sigma_B[one], part.batch.select(one), task
        with torch.no_grad():
            predicted, reference = (run.family.predict(model, *inputs) for model in (run.model, base))
        target = part.noise_BCTHW[one] - part.batch.latents_BCTHW[one]
        target = reference if mark and options.get("target") != "data" else target
        squared = (predicted - target)[:, :, run.skip_frames :].square()
        weight = 0.5 + 0.5 * part.batch.extras["mask"][one, None] if masked else 1.0
        losses.append((weight * squared).mean().item() * (options.get("weight", 1.0) if mark else 1.0))
    before = [parameter.clone() for parameter in run.trainable.values()]
    assert loop.finish_step(run, loop.train_step(run, run.loader.step(0)))["loss"] == pytest.approx(
        sum(losses) / 6, rel=1e-4
    )
    assert not all(torch.equal(*pair) for pair in zip(before, run.trainable.values(), strict=True)), "it is trained"


@pytest.mark.long
@pytest.mark.parametrize("strategy", [long("ddp"), "fsdp2"])
def test_with_all_methods_two_ranks_train_as_one_process_and_a_resumed_run_as_a_whole_one(
    make_config, make_set, helpers, tmp_path, strategy
) -> None:
    methods = ROLLOUT | ROUTE | {"crepa": {"block_index": 1}, "masked_loss": {"unmasked_weight": 0.5}}
    methods |= {"input_perturbation": {"decay_steps": 4}, "regularization": {}}
    assert {*methods, "guidance"} == METHODS.keys()
    common = {
        "guidance": {"scale": 2.0},
        "batch_size": 2,
        "caption_dropout": 0.3,
        "adapter": {"rank": 2},
        "methods": methods,
        "checkpoint_every": 1,
    }
    alone = make_config("t2i", name="alone", accumulate=4, steps=2, **common)
    two = make_config("t2i", name="two", accumulate=2, steps=2, parallel={"strategy": strategy}, **common)
    cut = make_config("t2i", name="cut", accumulate=4, steps=1, **common)
    items, *arguments = with_features(helpers, alone, masks=True)
    items[0].regularization = items[5].regularization = True
    for config in (alone, two, cut):
        make_set(config, items, *arguments)
    train(alone)
    assert on_two_ranks(write(two, tmp_path))["done"] == 2
    assert lines(two) == pytest.approx(lines(alone), rel=1e-4)
    if strategy == "fsdp2":
        return
    train(cut)
    full_run = make_config("t2i", name="cut", accumulate=4, steps=2, **common)
    assert train(full_run)["skipped"] == 1
    assert lines(full_run) == lines(alone)
    for name, value in trained_weights(alone).items():
        assert torch.equal(value, trained_weights(full_run)[name])


@pytest.mark.parametrize(
    ("every", "settings", "message"),
    [
        (2, {"adapter": {"type": "full"}}, "train.adapter.type: full"),
        long(2, {"adapter": {"init_weights": "olora"}}, "train.adapter.init_weights: olora"),
        (99, {"methods": {"regularization": {}}}, "needs regularization, which no sample of set set1 has"),
    ],
)
@pytest.mark.usefixtures("quick_estimates")
def test_what_has_no_base_is_refused_before_a_model_is_loaded(
    make_config, make_set, helpers, tmp_path, capsys, monkeypatch, every, settings, message
) -> None:
    monkeypatch.setattr(loop, "prepare_training", lambda *parts: pytest.fail("a model is loaded"))
    path = tmp_path / "pipeline.yaml"
    items, null, prompts = marked(helpers, make_config("t2i"), every)
    items[0].regularization = every < 99
    config = make_config("t2i", **settings)
    make_set(config, items, null, prompts)
    write(config, path)
    assert run_program("train", program_run, Options(path)) == USAGE
    printed = " ".join(capsys.readouterr().err.split())
    assert "train.methods.regularization" in printed and message in printed
    if every < 99:
        assert "set train.methods.regularization.target to data" in printed
        allowed = make_config("t2i", **settings, methods={"regularization": {"target": "data"}})
        write(allowed, path)
        assert run_program("train", program_run, Options(path, dry_run=True, json=True)) == OK
        assert json.loads(capsys.readouterr().out)["details"]["methods"] == "regularization"
    assert not (config.run_folder / "checkpoints").exists()
