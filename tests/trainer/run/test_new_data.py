"""`train.on_new_data: continue`: a run that resumes on another training set."""

from dataclasses import replace

import pyarrow as pa
import pytest
import torch

from cache.runs.validations import best_evaluation
from cache.store.store import Store
from schemas.tables import SAMPLES_SCHEMA
from tests.forms import long
from tests.stages.planning.draft_plans import config as plan_config
from tests.stages.planning.draft_plans import plan_rows, row
from tests.trainer.run.test_resume import kill_at
from tests.trainer.runs import lines, opened, plan_batches, train, trained_weights
from trainer.run import metrics, resume
from trainer.run.resume import ResumeError

pytestmark = pytest.mark.slow

CONTINUE = {"on_new_data": "continue", "batch_size": 2, "checkpoint_every": 2}


def write_set(make_set, helpers, config, name: str, seed: int = 0, held_out: int = 0, count: int = 12) -> None:
    """Write set `name` with other samples instead of the previous set; the last `held_out` samples are held out."""
    items, null, prompts = helpers.mixed_items(config, count, seed)
    items[count - held_out :] = [replace(item, role="eval") for item in items[count - held_out :]]
    make_set(config, items, null, prompts, name=name, ids=name)


def state(config) -> resume.CheckpointState:
    newest, _ = resume.newest_checkpoint(config.run_folder / "checkpoints")
    assert newest is not None
    return newest.state


@pytest.mark.long
@pytest.mark.parametrize("order", [long(None), 2])
def test_it_goes_on_in_a_new_order_and_the_same_after_kills(make_config, make_set, helpers, order) -> None:
    """Two changes of the data; a run that is killed after the second one ends with the same numbers, bit for bit."""
    torch.set_num_threads(1)
    ended = {}
    for name, kills in (("whole", ()), ("cut", (9, 11))):
        settings = CONTINUE | {"name": name, "shuffle_shards": order, "caption_dropout": 0.3}
        for number, steps in enumerate((3, 7, 13)):
            config = make_config("t2i", steps=steps, **settings)
            write_set(make_set, helpers, config, f"set{number}", seed=number, count=12 + number)
            for step in kills if number == 2 else ():
                kill_at(config, step)
            train(config)
        ended[name] = config
        assert [(change.step, change.set) for change in state(config).data_changes] == [(3, "set0"), (7, "set1")]
        assert state(config).terms["data"]["set"] == "set2"
        result = metrics.read_metrics(config.run_folder / "metrics.jsonl")
        assert [(line["step"], line["set"]) for line in result if "set" in line] == [(3, "set1"), (7, "set2")]
    full_run, cut = ended["whole"], ended["cut"]
    assert lines(full_run) == lines(cut) and list(lines(full_run)) == list(range(1, 14))
    for key, value in trained_weights(full_run).items():
        assert torch.equal(value, trained_weights(cut)[key])
    rates = lines(full_run, "lr")
    assert rates[13] == rates[4], "the schedule counts on: after its warmup it is constant"
    fresh = plan_batches(full_run, opened(full_run))
    buckets = {line["step"]: line["buckets"] for line in result if "buckets" in line}
    assert [buckets[8 + n] for n in range(6)] == [fresh.step_buckets(n) for n in range(6)], "the order begins anew"


def test_by_default_it_is_refused_and_what_works_is_named(ready, make_config, make_set, helpers) -> None:
    config = ready("t2i", steps=1)
    train(config)
    write_set(make_set, helpers, config, "set2", seed=1)
    with pytest.raises(ResumeError, match=r"training data: set set1 with 12 samples .* set set2") as caught:
        train(make_config("t2i", steps=2))
    command = "latentpress train --set train.on_new_data=continue"
    assert all(text in caught.value.next_step for text in (command, "train.adapter.init_from"))
    with pytest.raises(ResumeError, match=r"train\.seed: 0 in"):
        train(make_config("t2i", steps=2, seed=1, on_new_data="continue"))
    assert train(make_config("t2i", steps=2, on_new_data="continue"))["done"] == 1


@pytest.mark.long
def test_losses_of_before_are_not_compared(make_config, make_set, helpers) -> None:
    settings = CONTINUE | {"validation": {"eval_samples": 4, "eval_sigmas": [0.5], "every": 2, "steps": 1}}
    config = make_config("t2i", steps=4, **settings)
    write_set(make_set, helpers, config, "set1", held_out=4)
    train(config)
    longer = make_config("t2i", steps=6, **settings)
    write_set(make_set, helpers, longer, "set2", seed=1, held_out=4)
    train(longer)
    result = metrics.read_metrics(config.run_folder / "metrics.jsonl")
    evaluated = {line["step"]: line["eval_id"] for line in result if "eval_id" in line}
    assert evaluated[2] == evaluated[4] != evaluated[6]
    best = best_evaluation(result)
    assert best is not None and best.step == 6


def change(store: Store, rel: str, edit) -> None:
    """Edit the rows of a table."""
    table = store.read_table(rel)
    rows = table.to_pylist()
    edit(rows)
    store.write_table(rel, pa.Table.from_pylist(rows, table.schema))


@pytest.mark.parametrize(
    "case", ["other encoders", "trained sample", "trained media", "set is gone", long("gone before")]
)
def test_what_can_not_be_gone_on_with_is_named(make_config, make_set, helpers, case: str) -> None:
    config, longer = (make_config("t2i", steps=steps, on_new_data="continue") for steps in (1, 2))
    store = Store(config.root)
    make_set(config)
    train(config)
    held_out = 4 if case != "other encoders" else 0
    write_set(make_set, helpers, config, "set2", seed=1, held_out=held_out)
    if case == "trained sample":
        change(store, "sets/set2/index.arrow", lambda rows: rows[-1].update(sample_id="set1-sample3"))
    elif case == "trained media":  # at another resolution
        planned_rows = plan_rows(plan_config(), [row(1), row(2)]).samples.to_pylist()
        for number, each in ((1, planned_rows[0]), (2, planned_rows[1])):
            each["media_id"] = "0" * 32
            changed = {"sample_id": each["sample_id"]}
            change(store, f"sets/set{number}/index.arrow", lambda rows, new=changed: rows[-1].update(new))
        table = pa.Table.from_pylist(planned_rows, SAMPLES_SCHEMA)
        store.write_table("plans/000001-0123456789ab/samples.arrow", table)
        store.publish_bytes("plans/000001-0123456789ab/plan.json", b"")
    elif case == "other encoders":
        change(
            store,
            "sets/set2/shards.arrow",
            lambda rows: [e.update(path=e["path"].replace("f" * 24, "e" * 24)) for e in rows],
        )
    elif case == "set is gone":
        store.remove("sets/set1/set.json")
    messages = {
        "other encoders": "its shards of latents and text",
        "trained sample": "holds out 1 samples that this run was trained on: set1-sample",
        "trained media": "holds out 1 samples that this run was trained on: [0-9a-f]{32}",
        "set is gone": "was trained on set set1, which is missing",
    }
    if case == "gone before":  # compared before, and removed later: a run that was resumed does not end
        train(longer)
        store.remove("sets/set1/set.json")
        assert train(make_config("t2i", steps=3, on_new_data="continue"))["done"] == 1
        change(store, "sets/set2/index.arrow", lambda rows: rows[-1].update(sample_id="set1-sample3"))
        with pytest.raises(ResumeError, match="was trained on set set1, which is missing"):
            train(make_config("t2i", steps=4, on_new_data="continue"))
        return
    with pytest.raises(ResumeError, match=messages[case]):
        train(longer)
