"""What a run was made on, and whether it is finished: answered from files, without torch.

A checkpoint's state.json holds the terms that a continuation must share; see `trainer/checkpoint.py`.
"""

import json
import os
from pathlib import Path
from typing import Any

from cache.plan import Plan
from cache.trainset import TrainSet
from schemas.config import Config
from schemas.errors import USAGE, LatentpressError


class PrecisionError(LatentpressError):
    """A precision that training does not have."""

    exit_code = USAGE


def terms(config: Config, set_id: str, plan: Plan) -> dict[str, Any]:
    """The terms of a run that its configuration and training set determine (the transformer's shape joins them)."""
    return {
        "set": set_id,
        "family": config.model.family,
        "task": config.model.task,
        "seed": plan.seed,
        "global batch": plan.global_batch,
        "caption_dropout": config.train.caption_dropout,
        "shift": shift(config),
        "adapter": config.train.adapter.model_dump(mode="json"),
    }


def shift(config: Config) -> float:
    """The training shift of sigma: as configured, else the flavour's."""
    return config.train.shift or config.model.chosen.shift


def precision(config: Config) -> str:
    """In which the transformer computes: train.precision, else model.precision."""
    name = config.train.precision or config.model.precision
    if name == "float16":
        raise PrecisionError(
            "training has no float16, which model.precision names: it needs loss scaling",
            "Set train.precision to bfloat16 or float32.",
        )
    return name


def regularisation_note(data: TrainSet) -> str | None:
    """What is to be said of regularisation data in the set."""
    count = data.regularisation
    if not count:
        return None
    return f"{count} samples are regularisation data; this release trains on them as on any other"


def result(config: Config) -> Path:
    """The folder of what the run saves at its end: adapter/ for a LoRA, model/transformer/ for a full-rank run."""
    folder = Path(config.output) / config.train.run
    return folder / "model" / "transformer" if config.train.adapter.type == "full" else folder / "adapter"


def newest_state(config: Config) -> dict[str, Any] | None:
    """state.json of the run's newest checkpoint; None where there is none or train.resume is false."""
    folder = Path(config.output) / config.train.run / "checkpoints"
    found = sorted(folder.glob("step-*/state.json"), key=lambda path: int(path.parent.name.removeprefix("step-")))
    return json.loads(found[-1].read_bytes()) if found and config.train.resume else None


def write_config(config: Config, set_id: str) -> None:
    """<run>/config.yaml: every setting as resolved, with the set's id in place of "current"; a path or URL stays."""
    from ruamel.yaml import YAML

    folder = Path(config.output) / config.train.run
    folder.mkdir(parents=True, exist_ok=True)
    values = config.model_dump(mode="json", by_alias=True)
    if "/" not in config.train.set:
        values["train"]["set"] = set_id
    temp = folder / f".config.yaml.{os.getpid()}"
    with temp.open("w") as file:
        YAML(typ="safe").dump(values, file)
    temp.replace(folder / "config.yaml")


def note_result(config: Config, step: int) -> None:
    """Record, once the result is saved whole, after how many steps it was."""
    path = _note(config)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps({"step": step, "result": str(result(config))}))
    temporary.replace(path)


def finished(config: Config, set_id: str, plan: Plan) -> bool:
    """Whether the run has done its steps on these terms and the result of these steps is saved."""
    state = newest_state(config)
    if state is None or state["step"] < config.train.steps or not result(config).is_dir():
        return False
    if not _note(config).exists() or json.loads(_note(config).read_bytes())["step"] != state["step"]:
        return False
    mine = terms(config, set_id, plan)
    return {key: state["terms"].get(key) for key in mine} == mine


def _note(config: Config) -> Path:
    return Path(config.output) / config.train.run / "result.json"
