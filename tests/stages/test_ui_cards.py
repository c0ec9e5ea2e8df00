"""The cards of the flow page, from `status` and the records of programs."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from schemas.cli.process_record import ProcessRecord, Task, find_process_start
from schemas.cli.report import Report
from schemas.config.encoding import StageName
from schemas.errors import LatentpressError
from stages.pages.ui.child_programs import JOBS, STAGES, ChildPrograms
from stages.pages.ui.job_cards import Card, build_cards, build_run_card
from tests.project import Project
from tests.stages.follow.notified_run import finish
from tests.stages.report_run import FakeRun, eval_line, step_line


def row(stage: str, done: int, remaining: int = 0, rejects: int = 0, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "what": "samples", "done": done, "remaining": remaining, "rejected": rejects} | more


def note(programs: ChildPrograms, job: str, program: str, **values: Any) -> None:
    fields = {"process_start": find_process_start(os.getpid()), "began": time.time() - 90} | values
    ProcessRecord(program=program, **fields).write(programs._folder / "notes" / job / f"{program}.json")


@pytest.fixture
def cards(project: Callable[..., Project]) -> Callable[..., dict[str, Card]]:
    """cards(status rows) -> name -> card."""
    home = project(train={"steps": 40})
    config = home.config()
    programs = ChildPrograms(home.folder / "output", [])

    def make(*rows: dict[str, Any], **details: Any) -> dict[str, Card]:
        status = Report("status", details={"stages": list(rows), **details})
        return {card.name: card for step in build_cards(config, programs, status) for card in step}

    make.home, make.programs, make.config = home, programs, config  # type: ignore[attr-defined]
    return make


def test_counts_rates_and_rejects(cards: Any) -> None:
    encode = row("encode-latents", 30, 70, 2, items_per_second="1.5", left="0:00:47", jobs="2 running, 1 lost")
    by_name = cards(row("discover", 6), row("bucket", 0, 0), encode, row("encode-text", 8), training_set="sets/abc")
    states = {name: card.state for name, card in by_name.items()}
    assert states == {
        "discover": "done",
        "bucket": "to do",
        "encode-text": "done",
        "encode-latents": "running",
        "index": "done",
        "train": "to do",
        "decode": "to do",
    }
    card = by_name["encode-latents"]
    assert (card.progress, card.total, card.count) == (30, 100, "30 of 100 samples")
    assert (card.rate, card.time_left, card.facts) == (
        "1.5 samples/s",
        "0:00:47 left",
        ["jobs: 2 running, 1 lost"],
    )
    assert card.rejects == 2
    assert all(card.actions == ["start"] for card in by_name.values())
    older = cards(row("discover", 6), training_set="sets/abc, of the older plan x: latentpress index")
    assert older["index"].state == "to do"


def test_every_stage_of_run_can_be_started_and_item_stages_have_a_bar(
    project: Callable[..., Project], tmp_path: Path
) -> None:
    assert {*get_args(StageName)} == {*STAGES} <= {*JOBS}
    home = project(caption={}, features={})
    status = Report("status", details={"stages": [row("caption", 3, 5), row("features", 8), row("encode-text", 8)]})
    by_name = {
        card.name: card for step in build_cards(home.config(), ChildPrograms(tmp_path, []), status) for card in step
    }
    assert (by_name["caption"].progress, by_name["caption"].total, by_name["caption"].state) == (3, 8, "to do")
    assert (by_name["features"].state, by_name["encode-text"].state) == ("done", "done")
    assert by_name["caption"].actions == by_name["features"].actions == ["start"]


def test_stages_of_a_run_are_shown_and_not_started_while_it_runs(cards: Any) -> None:
    note(cards.programs, "run", "encode-text")
    note(cards.programs, "run", "discover", exit_code=0)
    note(cards.programs, "run", "bucket", process_start="of another process")
    by_name = cards(row("encode-text", 2, 6))
    assert (by_name["encode-text"].state, by_name["encode-text"].actions, by_name["encode-text"].remark) == (
        "running",
        [],
        "for 1 min",
    )
    assert by_name["encode-text"].log == "run"
    assert by_name["discover"].state == by_name["bucket"].state == "to do"
    reading = Task(description="encode-text", state="3/8 texts, 2 texts/s", done=3, total=8)
    for tasks in ((reading, Task(description="loading", state="0:00:07", done=0)), (reading,)):
        note(cards.programs, "run", "encode-text", tasks=tasks)
        card = cards(row("encode-text", 2, 6, items_per_second="9", left="0:00:01"))["encode-text"]
        assert card.facts == [f"{tasks[-1].description}: {tasks[-1].state}"]
        assert card.rate == card.time_left == "", "the rate of earlier jobs"
    assert (card.progress, card.total) == (3, 8), "items that are not in a shard yet are counted too"


def test_a_run_and_its_pictures(cards: Any) -> None:
    run = FakeRun(cards.home, "run", "train.steps=40")
    run.metrics(eval_line(0, 2.5), *(step_line(step) for step in range(1, 11)))
    run.latent(10, "one")
    run.latent(10, "two")
    run.picture(10, "one", (255, 0, 0))
    by_name = cards()
    assert (by_name["train"].progress, by_name["train"].total, by_name["train"].state) == (10, 40, "to do")
    assert by_name["train"].facts[1] == "eval loss 2.5 at step 0"
    assert (by_name["decode"].progress, by_name["decode"].total, by_name["decode"].state) == (1, 2, "to do")
    run.picture(10, "two", (255, 0, 0))
    assert cards()["decode"].state == "done"


def test_run_is_done_when_every_stage_is(cards: Any) -> None:
    """It does not matter which program ran the stages: nothing was started from the page."""
    encoded = [row(name, 6) for name in ("discover", "bucket", "encode-text", "encode-latents")]

    def state(*rows: dict[str, Any], is_known: bool = True) -> str:
        steps = [list(cards(*rows, training_set="sets/abc").values())]
        return build_run_card(cards.programs, steps, is_known).state

    run = FakeRun(cards.home, "run", "train.steps=40")
    run.metrics(*(step_line(step) for step in range(1, 41)))
    assert state(*encoded) == "to do"
    finish(run)
    assert state(*encoded) == "done", "without validation, nothing has to be decoded"
    assert state(*encoded, is_known=False) == state(*encoded[:3], row("encode-latents", 5, 1)) == "to do"
    run.latent(40, "one")
    assert state(*encoded) == "to do"


def test_scored_pictures_are_counted(cards: Any) -> None:
    run = FakeRun(cards.home, "run", "train.steps=40", "validation.scores.clip=a/b")
    for step in (20, 40):
        run.latent(step, "one")
        run.picture(step, "one", (255, 0, 0))
    states = []
    for step in (20, 40):
        with (run.folder / "scores.jsonl").open("a") as file:
            file.write(f'{{"step": {step}, "scores": {{"clip score": 0.3}}}}\n')
        (card,) = build_cards(run.config, cards.programs, None)[-1]
        states.append((card.name, card.progress, card.total, card.state))
    assert states == [("score", 1, 2, "to do"), ("score", 2, 2, "done")]


def test_a_status_that_failed_leaves_the_buttons(cards: Any) -> None:
    steps = build_cards(cards.config, cards.programs, LatentpressError("the disk is gone"))
    assert [[card.name for card in step] for step in steps][2] == ["encode-text", "encode-latents"]
    assert all(card.actions == ["start"] for step in steps for card in step)
