"""A configuration's text: a new one, commented, or a user's own with other values; and the difference of two."""

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from schemas.config.loading import parse_config
from schemas.config.yaml_editor import CannotEdit, quote, set_value, value_at
from schemas.config.yaml_reader import KeyPath, parse_yaml
from schemas.errors import USAGE, LatentpressError
from stages.configuring.recipes import DATASET, SAVERS, Settings

HEADER = """\
# {what}
# By `latentpress configure`; run again, it proposes changes and shows them first.
# What is not here has its default: docs/configuration.md.
"""
INDENT, COLUMN = "  ", 38  # where remarks begin, if lines are short enough
#: Path, without numbers -> the remark behind it; of a section on one line the remark of the section.
REMARKS: dict[tuple[str, ...], str] = {
    ("root",): "caches; the run itself is in `output`",
    ("datasets", "instance_data_dir"): "docs/datasets.md",
    ("datasets", "conditioning_data"): "pictures before the edit, named alike",
    ("datasets", "instance_prompt"): "of every item, without caption files",
    ("datasets", "resolution"): "edge of a square of a bucket's area",
    ("datasets", "buckets"): "the sizes that the model was made with",
    ("datasets", "eval_fraction"): "held out, for the eval loss",
    ("text", "offload"): "weights wait on the host",
    ("text", "storage"): "captions in 8 bits: less disk",
    ("latents",): "the autoencoder in parts: less memory",
    ("train", "accumulate"): "as a batch of so many, in less memory",
    ("train", "shift"): "of the noise levels, as published",
    ("train", "base_precision"): "of the frozen weights: less memory",
    ("train", "quantize_via"): "only quantized weights reach the card",
    ("train", "gradient_checkpointing_interval"): "of every so many blocks",
    ("train", "offload"): "what waits on the host",
    ("train", "adapter"): "a higher rank holds more",
    ("train", "checkpoint_every"): "steps; each checkpoint can be used",
    ("train", "experts"): "one after the other",
    ("validation", "prompts"): "of your captions; write what you will ask",
    ("validation", "every"): "steps",
}
#: Of these a file keeps its own values; a proposal only adds them.
KEPT: tuple[KeyPath, ...] = (
    ("root",),
    (*DATASET, "id"),
    (*DATASET, "eval_fraction"),
    (*DATASET, "caption_strategy"),
    (*DATASET, "instance_prompt"),
    ("output",),
    ("train", "run"),
    ("train", "steps"),
    ("train", "batch_size"),
    ("train", "accumulate"),
    ("train", "adapter"),
    ("train", "optimizer"),
    ("train", "checkpoint_every"),
    ("validation",),
)
#: Removed from a file where the proposal does not have them.
REMOVED: tuple[KeyPath, ...] = (
    *(path for paths in SAVERS.values() for path in paths),
    ("model", "flavour"),
    ("train", "gradient_checkpointing_interval"),
    ("train", "experts"),
    (*DATASET, "resolution"),
    (*DATASET, "buckets"),
    (*DATASET, "conditioning_data"),
)


class NotChanged(LatentpressError):
    """A file that configure can't change."""

    exit_code = USAGE


def write_text(settings: Settings, what: str) -> str:
    """A new file. what: is trained, for its first line."""
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        here: Any = tree
        for key, following in zip(path, (*path[1:], ""), strict=True):
            if following == "":
                here[key] = value
            elif isinstance(here, list):
                here.extend([{}] * (int(key) + 1 - len(here)))
                here[int(key)] = here[int(key)] or {}
                here = here[int(key)]
            else:
                here = here.setdefault(key, [] if isinstance(following, int) else {})
    order = ("root", "output", "model", "datasets", "text", "latents", "train", "validation")
    lines: list[str] = []
    for key in (key for key in order if key in tree):
        lines += [""] if key not in ("root", "output", "latents") or (key == "latents" and "text" not in tree) else []
        lines += _lines(key, tree[key], (key,), 0)
    return HEADER.format(what=what) + "\n".join(lines) + "\n"


def _lines(key: str, value: Any, path: tuple[str, ...], depth: int) -> Iterable[str]:
    """The lines of a key: in sections below the first level, and short ones in it, on one line."""
    indent, remark = INDENT * depth, REMARKS.get(path, "")
    flow = isinstance(value, dict) and (depth > 0 or path[0] in ("text", "latents"))
    if not isinstance(value, dict | list) or flow:
        line = f"{indent}{key}: {_flow(value)}"
        inside = value if isinstance(value, dict) else ()
        remark = remark or next((REMARKS[*path, name] for name in inside if (*path, name) in REMARKS), "")
        yield f"{line:<{COLUMN}}  # {remark}" if remark else line
        return
    line = f"{indent}{key}:"
    yield f"{line:<{COLUMN}}  # {remark}" if remark else line
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _lines(name, inner, (*path, name), depth + 1)
        return
    for item in value:
        inner = [line for name, child in item.items() for line in _lines(name, child, (*path, name), depth + 2)]
        start = len(indent) + len(INDENT)
        yield f"{inner[0][:start]}- {inner[0][start + 2 :]}"
        yield from inner[1:]


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    return quote(value) if isinstance(value, str) else json.dumps(value)


def change_text(text: str, settings: Settings, dataset: int) -> tuple[str, list[str]]:
    """A user's file with the settings in force, comments and everything else as they are; and what has to be done by
    hand. dataset: the number of the one that is meant."""
    by_hand = []
    there = parse_yaml(text).value
    other_family = value_at(there, ("model", "family")) != settings["model", "family"]
    removed = [*REMOVED, *([("model", "path"), ("model", "revision"), ("train", "shift")] if other_family else [])]
    changes = {path: value for path, value in settings.items()}
    changes |= {path: None for path in removed if path not in settings}
    has_prompts = bool(value_at(there, ("validation", "prompts")) or value_at(there, ("validation", "prompts_file")))
    for path, value in changes.items():
        placed = (path[0], dataset, *path[2:]) if path[:2] == DATASET else path
        now = value_at(there, placed)
        kept = any(path[: len(prefix)] == prefix for prefix in KEPT)
        if now == value or (kept and now is not None) or (path[:2] == ("validation", "prompts") and has_prompts):
            continue
        try:
            text = set_value(text, placed, None if value is None else _flow(value), False)
            if value is None and value_at(parse_yaml(text).value, placed[:-1]) == {}:
                text = set_value(text, placed[:-1], None, False)
        except CannotEdit as error:
            where = ".".join(map(str, placed))
            by_hand.append(f"{where}: {'remove it' if value is None else _flow(value)} ({error})")
    return text, by_hand


def find_dataset(text: str, path: Path, folder: Path) -> int:
    """The number of the dataset in a file whose media are in `folder`, or which is the only one. NotChanged where
    there are several others."""
    datasets = parse_config(text, path).datasets
    if not datasets:
        raise NotChanged(f"{path} has no dataset, but a training set by its path", "Write another file with --config.")
    places = [Path(dataset.root).resolve() for dataset in datasets]
    if folder.resolve() in places:
        return places.index(folder.resolve())
    if len(datasets) > 1:
        ids = ", ".join(dataset.id for dataset in datasets)
        raise NotChanged(
            f"{path} has several datasets ({ids}), and none of them has its media in {folder}",
            "Add the dataset in the file (docs/datasets.md), or write another file with --config.",
        )
    return 0


def compare_texts(before: str, after: str, name: str) -> str:
    """A unified diff; "" where they are equal."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"{name}, now", f"{name}, proposed", lineterm="", n=2
    )
    return "\n".join(lines)
