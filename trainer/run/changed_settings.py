"""Differences between two configurations of one run: when it was last started and now, or of two ranks."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from cache.runs.training_checks import RunError
from cache.sets.trainset import TrainSet
from schemas.config.pipeline import PACKAGES, Config
from schemas.identity import hash_json
from schemas.text_format import escape_unprintable, shorten
from trainer.run.new_data import held_out_digest

SECTIONS = ("train", "validation")
NOT_COMPARED = ("train.set",)  # config.yaml has the id of the set; other data can't be gone on with
#: What belongs to a machine, so that ranks may differ in it. Their sets and initial adapters are compared by content.
MACHINE_OPTIONS = frozenset(
    ("train.set", "train.adapter.init", "train.device", "train.threads", "train.reading", "train.local_cache")
) | {"train.parallel.timeout", "validation.preview_autoencoder", "validation.scores"}
HASHES = ("code", "training data", "held-out samples", "validation prompts", "initial adapter", "base weights")
#: Options whose keys are not those of the schema: each is compared as one value.
FREE_KEYS = frozenset(("train.adapter.rank_pattern", "train.adapter.alpha_pattern", "train.optimizer.arguments")) | {
    "validation.placeholders"
}


def find_changed_settings(file: Path, config: Config) -> list[str]:
    """`train.optimizer.lr: 0.0001, now 0.0005` for each; none where the run's config.yaml, `file`, can't be read."""
    from ruamel.yaml import YAML, YAMLError

    try:
        before = YAML(typ="safe").load(file)
    except (OSError, ValueError, YAMLError):
        return []
    if not isinstance(before, Mapping):
        return []
    now = config.model_dump(mode="json", by_alias=True)
    differences = (change for section in SECTIONS for change in _compare(section, before.get(section), now[section]))
    return [f"{key}: {_format(old)}, now {_format(new)}" for key, old, new in differences if key not in NOT_COMPARED]


def describe_rank(config: Config, data: TrainSet, signature: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that must be equal on all ranks before the base weights are read: settings, code, training set."""
    values = config.model_dump(mode="json", by_alias=True, exclude={"validation": {"prompts": {"__all__": {"image"}}}})
    code = xxhash.xxh3_64()
    packages = (package for package in PACKAGES if package.name != "stages")
    for path in sorted(path for package in packages for path in package.rglob("*.py")):
        code.update(path.read_bytes())
    return {
        "code": code.hexdigest(),
        "training data": signature["data"]["digest"],
        "held-out samples": held_out_digest(data),
        "validation prompts": hash_json(data.meta["validation"]),
        "initial adapter": signature["initial adapter"],
        "model": {key: values["model"][key] for key in ("family", "flavour", "precision")},
        **{section: values[section] for section in SECTIONS},
    }


def refuse_differences(ranks: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> None:
    """RunError with each rank, key and both values where the ranks have other values than rank 0 has."""
    lines = []
    for rank, values in enumerate(ranks):
        for key, first, other in _compare("", ranks[0], values):
            both = "differ" if key in HASHES else f"{_format(first)} on rank 0, {_format(other)} on rank {rank}"
            if not any(f"{key}.".startswith(f"{option}.") for option in MACHINE_OPTIONS):
                lines.append(f"  rank {rank} on {hosts[rank]}: {key}: {both}")
    if lines:
        raise RunError(
            "\n".join(["the ranks do not train the same:", *lines]),
            "Start all of them with one configuration, the same code, training set and checkpoint.",
        )


def _compare(key: str, before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """(option, value before, value now) of each that differs."""
    if isinstance(before, Mapping) and isinstance(now, Mapping) and key not in FREE_KEYS:
        for name in now:
            if name in before:  # others are of another release
                yield from _compare(f"{key}.{name}".lstrip("."), before[name], now[name])
    elif before != now:
        yield key, before, now


def _format(value: Any) -> str:
    return "null" if value is None else escape_unprintable(shorten(str(value)))
