"""Validation prompts that join a run while it trains, or leave it: what is trained stays the same, bit for bit."""

import pytest
import torch

from cache.sets.set_lookup import open_set
from cache.store.store import Store
from schemas.cli.console import OK, Options, run_program
from schemas.config.loading import ConfigError
from schemas.config.validation import Prompt
from tests.trainer.runs import (
    check_shown,
    lines,
    on_two_ranks,
    plan_batches,
    quiet,
    train,
    trained_weights,
    write,
)
from trainer import train as loop
from trainer.__main__ import run as program_run
from trainer.run.prompt_updates import PromptUpdates

pytestmark = pytest.mark.slow

LOOK = {"eval_samples": 2, "eval_sigmas": [0.5], "every": 1, "steps": 2}
NEW = [{"name": "two", "prompt": "two", "seed": [4, 5]}]


def shown(config, step: int) -> list[str]:
    return sorted(path.stem for path in (config.run_folder / f"validation/step-{step:06d}").iterdir())


@pytest.fixture
def train_beside(make_config, make_set, made):
    """train_beside(changes): the configuration of a run at whose n-th validation the configuration has `changes[n]`, or
    raises it; and what was said. There is a set with the prompts of NEW."""

    def run(changes: list, name: str = "updated", **options):
        config = make_config("t2i", name=name, steps=len(changes) - 1, validation=LOOK, **options)
        items, null, prompts = made.mixed_items(config)
        later = make_config("t2i", name=name, steps=len(changes) - 1, validation={**LOOK, "prompts": NEW}, **options)
        make_set(later, items, null, [made.Prompt("two", "96x64", prompts[0].text)], name="set2")
        make_set(config, items, null, prompts)
        data, said, left = open_set(Store(config.root), "set1", "kandinsky5-image", "t2i"), [], list(changes)

        def reload():
            change = left.pop(0)
            if isinstance(change, Exception):
                raise change
            return config.model_copy(update={"validation": type(config.validation)(**{**LOOK, **change})})

        updates = PromptUpdates(config, data, reload, said.append)
        loop.train(config, data, plan_batches(config, data), quiet(), "cpu", updates=updates)
        assert not left
        return config, said

    return run


@pytest.mark.long
def test_prompts_join_and_leave_a_run_that_goes_on_and_losses_stay(ready, train_beside) -> None:
    look = {"prompts": NEW, "seed": 9, "eval_samples": 1, "eval_sigmas": [0.1]}
    updated, said = train_beside([{}, {"seed": [1, 2]}, look, ConfigError(["a typing error"]), {}])
    alone = ready("t2i", name="alone", steps=4, validation=LOOK)
    train(alone)
    assert shown(updated, 0) == shown(updated, 4) == ["one"]
    assert shown(updated, 1) == ["one_seed1", "one_seed2"]
    assert shown(updated, 2) == shown(updated, 3) == ["two_seed4", "two_seed5"], "those of before leave, and stay away"
    assert lines(updated) == lines(alone) and lines(updated, "grad_norm") == lines(alone, "grad_norm")
    assert lines(updated, "eval_loss") == lines(alone, "eval_loss"), "it has the samples and the seed of the beginning"
    (problem,) = said
    assert "can't be read: a typing error" in problem


def test_prompts_that_are_not_encoded_are_named_once_with_the_command(train_beside) -> None:
    more = {"prompts": [{"name": "three", "prompt": "3"}]}
    config, said = train_beside([more, more, {"prompts": NEW}])
    assert [shown(config, step) for step in range(3)] == [["one"], ["one"], ["two_seed4", "two_seed5"]]
    (line,) = said
    assert "three, which are not encoded" in line and "`latentpress run --prompts`" in line


def test_prompts_added_on_resume_change_no_loss(make_config, make_set, made, program) -> None:
    whole = make_config("t2i", name="whole", steps=4, validation=LOOK)
    cut = make_config("t2i", name="cut", steps=2, validation=LOOK)
    items, null, prompts = made.mixed_items(whole)
    for config in (whole, cut):
        make_set(config, items, null, prompts)
        assert program(config)[0] == OK
    later = make_config("t2i", name="cut", steps=4, validation={**LOOK, "prompts": NEW, "size": ["64x64", "96x64"]})
    more = [made.Prompt("two", size, prompts[0].text) for size in ("64x64", "96x64")]
    make_set(later, items, null, [*prompts, *more], name="set2")
    code, report, _ = program(later)
    assert (code, report["done"], report["skipped"]) == (OK, 2, 2)
    assert shown(cut, 2) == ["one"]
    assert shown(cut, 4) == ["one", *(f"two_{size}_seed{seed}" for size in ("64x64", "96x64") for seed in (4, 5))]
    assert lines(cut) == lines(whole) and lines(cut, "eval_loss") == lines(whole, "eval_loss")
    weights, expected = trained_weights(later), trained_weights(whole)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


@pytest.mark.long
def test_every_rank_takes_the_new_prompts(make_config, make_set, made, tmp_path, monkeypatch) -> None:
    """They divide them, and the latents are those of one process."""
    runs = [make_config("t2i", name=name, steps=1, batch_size=2, validation=LOOK) for name in ("one", "two")]
    items, null, prompts = made.mixed_items(runs[0])
    for number, config in enumerate(runs):
        look = config.validation.model_copy(update={"prompts": tuple(Prompt(**each) for each in NEW), "seed": 3})
        later = config.model_copy(update={"validation": look})
        make_set(later, items, null, [made.Prompt("two", "96x64", prompts[0].text)], name="set2")
        make_set(config, items, null, prompts)
        monkeypatch.setattr("trainer.__main__.load_config", lambda *_, later=later: later)
        path = write(config, tmp_path / f"pipeline-{number}.yaml")
        if number:
            assert on_two_ranks(path)["done"] == 1
        else:
            assert run_program("train", program_run, Options(path)) == OK
    assert shown(runs[1], 0) == ["two_seed4", "two_seed5"]
    check_shown(runs[1], runs[0], 0)
