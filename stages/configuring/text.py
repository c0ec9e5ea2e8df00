"""Text of a configuration: a new commented file, a changed file of the user, and the difference of two texts."""

import difflib
import json
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from textwrap import wrap

from ruamel.yaml.comments import CommentedMap, CommentedSeq

from cache.store.files import explained, make_folders, replacing
from schemas.config.encoding import PART_OPTIONS
from schemas.config.loading import (
    ConfigError,
    is_section,
    parse_config,
    parse_override,
    read_text,
    section_fields,
    set_value,
    type_at,
)
from schemas.config.pipeline import Config
from schemas.config.yaml_editor import CannotEdit, YamlEditor, nest, round_trip, value_at
from schemas.config.yaml_reader import KeyPath, parse_yaml
from schemas.errors import USAGE, LatentpressError
from schemas.text_format import shorten
from stages.configuring.choice import DATASET, Settings

HEADER = """\
{description}
Made by `latentpress new`. If you run it again, it shows changes before it writes them.
Options that are not in this file have their defaults: docs/configuration.md."""
COLUMN = 40  # column of comments, if lines are short enough
WIDTH, MAX_WORDS, SHORT = 120, 90, 50  # characters of a line, of a comment after a value, and of a description
#: Options whose values in a file do not change; a proposal only adds them if they are not set.
PRESERVED: tuple[KeyPath, ...] = (
    *(("root",), ("output",), ("caption",), ("validation",), (*DATASET, "id"), (*DATASET, "eval_fraction")),
    *((*DATASET, "trigger"), ("train", "run"), ("train", "steps")),
    *(("train", "batch_size"), ("train", "accumulate"), ("train", "adapter"), ("train", "optimizer")),
    ("train", "checkpoint_every"),
)
#: Options that are removed from a file if the proposal does not have them: they save memory, or belong to a recipe.
REMOVED: tuple[KeyPath, ...] = (
    *(("text", "offload"), ("text", "batch_tokens"), ("latents", "chunk_frames"), ("latents", "tiling")),
    *(("train", key) for key in ("base_precision", "quantize_via", "gradient_checkpointing_interval", "experts")),
    *(("train", "offload", key) for key in ("blocks", "streams", "activations")),
    *(("model", "flavour"), (*DATASET, "resolution"), (*DATASET, "buckets"), (*DATASET, "conditioning_data")),
)


class NotChanged(LatentpressError):
    """Raised if a file can't be changed."""

    exit_code = USAGE


def write_text(settings: Settings, description: str) -> str:
    """Write the text of a new file. description: first line, the task and the model that is trained."""
    return write_yaml(settings, HEADER.format(description=description), _describe_option)


def _describe_option(path: KeyPath) -> str:
    """The description of an option; "" if it is long, or if the option is in a list other than the datasets."""
    kind = type_at(path[:-1]) if path[1:] else Config
    if path[0] != "datasets" and any(isinstance(step, int) for step in path):
        return ""
    descriptions = {info.alias or name: info.description or "" for name, info in kind.model_fields.items()}
    return descriptions[str(path[-1])] if len(descriptions[str(path[-1])]) <= SHORT else ""


def write_yaml(
    values: Settings,
    head: str,
    remark: Callable[[KeyPath], str | None],
    end_comments: Sequence[str] = (),
    one_line: bool = True,
) -> str:
    """A configuration with comments, in the order of the options. remark: comment after a key. end_comments: comments
    at the end. one_line: whether sections below the first level and short sections are written on one line."""

    def add_comments(section: CommentedMap, path: KeyPath) -> None:
        for key, value in section.items():
            words = remark((*path, key))
            if one_line and isinstance(value, CommentedMap) and (path or key in ("text", "latents", "caption")):
                value.fa.set_flow_style()
                words = words or (remark((*path, key, *value)) if len(value) == 1 else "")
            elif isinstance(value, CommentedMap):
                add_comments(value, (*path, key))
            elif isinstance(value, CommentedSeq):
                for number, item in enumerate(value):
                    add_comments(item, (*path, key, number))
            if words:
                section.yaml_add_eol_comment(shorten(words, MAX_WORDS), key, column=COLUMN)

    tree = nest({path: values[path] for path in sorted(values, key=_position)}, CommentedMap, CommentedSeq)
    add_comments(tree, ())
    tree.yaml_set_start_comment(head)
    for key in tree:
        if key not in ("root", "output", "latents") or (key == "latents" and "text" not in tree):
            tree.yaml_set_comment_before_after_key(key, before="\n")
    out = StringIO()
    round_trip().dump(tree, out)
    for line in ["", *end_comments] if end_comments else ():
        out.write("\n".join([*wrap(line, WIDTH, initial_indent="# ", subsequent_indent="#     "), ""]))
    return out.getvalue()


def _position(path: KeyPath) -> list[int]:
    """The positions of an option and of the sections above it, to sort by."""
    sections = [type_at(path[:depth]) if depth else Config for depth in range(len(path))]
    names_by_depth = [list(section_fields(kind)) if is_section(kind) else [] for kind in sections]
    return [
        key if isinstance(key, int) else names.index(key) if key in names else 0
        for key, names in zip(path, names_by_depth, strict=True)
    ]


def change_text(text: str, settings: Settings, dataset: int, overrides: Sequence[str]) -> tuple[str, list[str]]:
    """Write settings and overrides into the text of a user's file. Comments and all other parts do not change. Returns
    (text, changes that the user has to make by hand). dataset: index of the dataset that is changed."""
    by_hand, editor, values = list[str](), YamlEditor(text), parse_yaml(text).value
    is_new_family = value_at(values, ("model", "family")) != settings["model", "family"]
    removed = list(REMOVED)
    if is_new_family:
        removed += [*(("model", name) for name in ("path", "revision", *PART_OPTIONS)), ("train", "shift")]
    has_prompts = bool(value_at(values, ("validation", "prompts")) or value_at(values, ("validation", "prompts_file")))
    for path, value in {**settings, **{path: None for path in removed if path not in settings}}.items():
        placed = (path[0], dataset, *path[2:]) if path[:2] == DATASET else path
        current = value_at(values, placed)
        is_kept = current is not None and any(path[: len(prefix)] == prefix for prefix in PRESERVED)
        if current == value or is_kept or (path[:2] == ("validation", "prompts") and has_prompts):
            continue
        try:
            if value is None:
                editor.remove(placed)
            else:
                editor.set(placed, json.dumps(value))
        except CannotEdit as error:
            option = ".".join(map(str, placed))
            by_hand.append(f"{option}: {'remove it' if value is None else json.dumps(value)} ({error})")
    try:
        return add_overrides(editor.text(), overrides), by_hand
    except CannotEdit as error:
        raise NotChanged(f"the file can't be changed: {error}", "Write another file with --config.") from error


def add_overrides(text: str, overrides: Sequence[str]) -> str:
    """Write overrides of the command line into a text."""
    editor = YamlEditor(text)
    for override in overrides:
        try:
            key, value = parse_override(override)
            editor.set(set_value(parse_yaml(text).value or {}, key, value), override.partition("=")[2])
        except (CannotEdit, ValueError) as error:
            raise ConfigError([f"--set {override.partition('=')[0].strip()}: {error}"]) from error
    return editor.text() if overrides else text


def find_dataset(text: str, path: Path, folder: Path) -> int:
    """The index of the dataset in a file whose media are in `folder`, or of the only dataset. Raises NotChanged if the
    file has several datasets, but none with this folder."""
    datasets = parse_config(text, path).datasets
    if not datasets:
        raise NotChanged(
            f"{path} has a training set by its path instead of datasets", "Write another file with --config."
        )
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
    """The unified diff of two texts; "" if they are equal."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"{name}, now", f"{name}, proposed", lineterm="", n=2
    )
    return "\n".join(lines)


def write_file(file: Path, before: str | None, proposed: str) -> None:
    """Write a file if it has not changed. before: its expected text, None if it should not exist. Raises
    LatentpressError if the file has changed."""
    change_error = LatentpressError(f"{file} has changed since it was read", "make the proposal again")
    with explained(str(file)):
        make_folders(file.parent)
        if before is None:
            try:
                with file.open("x", encoding="utf-8", newline="\n") as output:
                    output.write(proposed)
            except FileExistsError as error:
                raise change_error from error
            return
        if not file.exists() or read_text(file) != before:
            raise change_error
        with replacing(file) as temporary:
            temporary.write_text(proposed, encoding="utf-8", newline="\n")
