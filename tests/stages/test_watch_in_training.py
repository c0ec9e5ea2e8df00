"""Pictures and scores while several ranks train, and while shards are encoded during training, in real processes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import trainer.__main__  # noqa: F401 (programs are forks of this process)
from cache.runs.scores import SCORES_FILE
from schemas.errors import LatentpressError
from stages import bucket, discover, encode_latents, encode_text, index, run
from stages.follow import watchers
from tests.background import LIMIT_S, until
from tests.processes import ForkedProgram
from tests.project import Project
from tests.stages.test_decode_watch import decoded, picture
from tests.trainer.runs import on_two_ranks
from trainer import validation

pytestmark = pytest.mark.slow
TRAINING = {"run": "run", "steps": 2, "batch_size": 1, "threads": 1, "trackers": []}
STEPS = (0, 2)  # steps with a validation


def validated(*names: str, **more: Any) -> dict[str, Any]:
    prompts = [{"name": name, "prompt": f"a {name}"} for name in names]
    return {"size": "64x64", "steps": 2, "every": 2, "eval_samples": 0, "prompts": prompts, **more}


def before_latents(wait: Callable[[str, int], None]) -> None:
    """Call wait(name, step) before the trainer writes a validation latent."""
    write = validation.write_tensors

    def wait_and_write(tensors: Any, path: Path, metadata: Any) -> None:
        if path.parent.name.startswith("step-") and path.parent.parent.name == "validation":
            wait(path.name.split(".")[1], int(path.parent.name.removeprefix("step-")))
        write(tensors, path, metadata)

    validation.write_tensors = wait_and_write


def wait_long_for_training() -> None:
    watchers.START_S = LIMIT_S


def start(home: Project, program: str) -> subprocess.Popen:
    command = [sys.executable, "-P", "-m", f"stages.{program}", "--config", str(home.folder / "pipeline.yaml")]
    return subprocess.Popen(
        [*command, "--watch", "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def check_pictures(home: Project, *names: str) -> None:
    for step in STEPS:
        for name in names:
            latent = home.folder / f"output/run/validation/step-{step:06}/{name}.safetensors"
            np.testing.assert_array_equal(np.asarray(Image.open(picture(home, name, step))), decoded(home, latent))


@pytest.mark.long
def test_latents_of_two_ranks_are_decoded_once_and_a_step_is_scored_whole(
    forked_programs: None,
    project: Callable[..., Project],
    tiny: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 denoises `one` and rank 1 `two`. Rank 1 writes its latent after the latent of rank 0 was decoded."""
    home = project(train=TRAINING, validation=validated("one", "two", scores={"clip": str(tiny("clip"))}))
    scores = home.folder / "output/run" / SCORES_FILE
    for number in range(2):
        home.image(f"{number}.png", (64, 64), "a colour", number)
    for program in (discover, bucket, encode_text, encode_latents, index):
        home.run(program.run)
    monkeypatch.setattr(ForkedProgram, "prepare", staticmethod(wait_long_for_training))
    log_folder = home.folder / "seen"

    def wait(name: str, step: int) -> None:
        assert (name == "two") == (os.environ["RANK"] == "1")
        if name == "two":
            until(picture(home, "one", step).exists)
            with log_folder.open("a") as file:
                file.write(f"{step} {scores.exists() and scores.read_text().count('step')}\n")
        if step == STEPS[-1]:
            until(scores.exists)

    monkeypatch.setattr(validation, "write_tensors", validation.write_tensors)
    before_latents(wait)
    watching = [start(home, program) for program in ("decode", "score")]
    on_two_ranks(home.folder / "pipeline.yaml")
    reports = [json.loads(process.communicate()[0]) for process in watching]
    assert (reports[0]["done"], reports[0]["exit_code"]) == (4, 0), "each latent is decoded once"
    assert log_folder.read_text().splitlines()[0] == "0 False", "step 0 was not scored before all samples were decoded"
    first = json.loads(scores.read_text().splitlines()[0])
    assert first["step"] == 0 and [sample["name"] for sample in first["samples"]] == ["one", "two"]
    check_pictures(home, "one", "two")


def wait_for(first: Path) -> None:
    before_latents(lambda name, step: None if step == 0 else until(first.exists))


def test_run_is_not_started_once_for_each_rank(
    project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank would start all stages and watchers."""
    home = project()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LatentpressError, match="2 ranks") as caught:
        home.run(run.run)
    assert caught.value.exit_code == 2 and "latentpress train" in caught.value.next_step
    assert not home.root.exists() and not (home.folder / "output").exists()
