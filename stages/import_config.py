"""import-config: the configuration of another trainer as a commented pipeline.yaml, with a line for every key: what it
became, or its value, if it is not carried over.

Files are parsed and never run. docs/coming-from.md has a section for each trainer.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from cache.store.files import explained, replacing, write_new
from schemas.catalog import FAMILIES
from schemas.cli.console import NOT_COMPUTING, Console, Options, Report, make_app
from schemas.cli.starting import print_for_reader
from schemas.config.generated import flow
from schemas.config.loading import (
    dotted_path,
    explain_error,
    parse_config,
    parse_override,
    section_fields,
    set_value,
    type_at,
)
from schemas.config.pipeline import Config
from schemas.config.yaml_reader import KeyPath
from schemas.foreign.rows import Draft, Line, Trainer
from schemas.foreign.trainers import TRAINERS
from stages.importing.files import Beside, ImportConfigError, Parsed, read_file

#: What the configuration says about a value that has no effect there either.
_IDLE = ("no effect", "it is an option of", "goes with ", "remove it")
_PLACES = ("instance_data_dir", "caption_file", "conditioning_data", "mask_data")
_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|\\\\")
WIDTH = 120
COMMENT_COLUMN = 44


def run(
    config: None,
    options: Options,
    console: Console,
    *,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", show_default=False)],
    trainer: Annotated[
        str | None,
        typer.Option("--from", metavar="NAME", help=f"{', '.join(TRAINERS)}.  [default: by the files' content]"),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            "--base",
            metavar="FOLDER",
            help="Where relative paths in the files start.  [default: the file's folder or one above, where they are]",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", "--force", help="Replace an existing file.")] = False,
) -> Report:
    parsed, target = [read_file(path) for path in files], options.config
    if not options.dry_run and target.exists() and not overwrite:
        raise _already(target)
    chosen = _choose(trainer, parsed)
    beside = Beside(files[0], base)
    draft = Draft()
    chosen.carry(draft, _roles(chosen, parsed), beside)
    for file in parsed:
        for location, why in file.problems:
            draft.say(f"{file.path.name}: {location}", "not carried over", why)
    draft.values.setdefault("root", "./work")
    draft.values.setdefault("output", "./output")
    _place_paths(draft, beside, target.absolute().parent)
    _apply(options.overrides, draft)
    _settle(draft)
    names = [str(path.name) for path in (*files, *beside.read_paths)]
    text = write_yaml(draft.values, draft.lines, chosen.name, list(dict.fromkeys(names)))
    parse_config(text, target)
    if options.dry_run and not options.json:
        print_for_reader(text, console.stdout)
    elif not options.dry_run:
        _write(target, text, overwrite)
    return _report(draft, chosen, target, text, options)


def _choose(name: str | None, parsed: Sequence[Parsed]) -> Trainer:
    if name is not None:
        if name.lower() not in TRAINERS:
            raise ImportConfigError(f"--from {name}: valid are {', '.join(TRAINERS)}")
        return TRAINERS[name.lower()]
    for trainer in TRAINERS.values():
        if any(trainer.claims(file.content) for file in parsed):
            return trainer
    raise ImportConfigError(
        f"{', '.join(str(file.path) for file in parsed)}: no trainer's configuration is recognized",
        f"Name the trainer with --from ({', '.join(TRAINERS)}), and all of its files.",
    )


def _roles(trainer: Trainer, parsed: Sequence[Parsed]) -> dict[str, Any]:
    roles: dict[str, Any] = {}
    for file in parsed:
        role = trainer.claims(file.content) or ("arguments" if isinstance(file.content, dict) else "")
        if not role:
            raise ImportConfigError(
                f"{file.path} is not a configuration of {trainer.name}",
                "Name its configuration and its datasets alone.",
            )
        if role in roles and isinstance(file.content, dict):
            roles[role] = {**roles[role], **file.content}  # a file of arguments, and a command
        else:
            roles[role] = file.content
    return roles


def _already(target: Path) -> ImportConfigError:
    return ImportConfigError(
        f"{target} exists already", "Add --overwrite to replace it, or name another file with --config."
    )


def _write(target: Path, text: str, overwrite: bool) -> None:
    with explained(str(target)):
        if overwrite:
            with replacing(target) as temporary:
                temporary.write_text(text, encoding="utf-8")
            return
        try:
            write_new(target, text)
        except FileExistsError as error:  # since the program began
            raise _already(target) from error


def _place_paths(draft: Draft, beside: Beside, folder: Path) -> None:
    """Write paths relative to the folder of the written configuration if they are below it, else as absolute ones."""
    values = draft.values

    def relocate(text: Any, key: str, look: bool = True) -> Any:
        if isinstance(text, list):
            return [relocate(item, key, look) for item in text]
        if not isinstance(text, str) or "://" in text:
            return text
        if _WINDOWS.match(text):
            draft.say(key, "not carried over", f"{text}: a Windows path; name its place on this machine")
            return text
        whole = Path(beside.place(text, look))
        return f"./{whole.relative_to(folder)}" if whole.is_relative_to(folder) else str(whole)

    def move(section: Mapping[str, Any], key: str, name: str, look: bool = True) -> None:
        if key in section:
            section[key] = relocate(section[key], name, look)  # type: ignore[index]

    for dataset in values.get("datasets", []):
        for key in _PLACES if dataset.get("source") != "huggingface" else _PLACES[1:]:
            move(dataset, key, f"{dataset.get('id')}: {key}")
    if values["output"] != "./output":
        move(values, "output", "output", look=False)
    move(values.get("train", {}).get("adapter", {}), "init", "train.adapter.init")
    model = values.get("model", {})
    move(model, "assistant", "model.assistant")
    if "path" in model and (beside.find(model["path"]) or model["path"].startswith((".", "/", "~"))):
        move(model, "path", "model.path")
    for prompt in values.get("validation", {}).get("prompts", []):
        move(prompt, "image", f"validation prompt {prompt.get('name')}")


def _apply(overrides: Sequence[str], draft: Draft) -> None:
    for text in overrides:
        try:
            key, value = parse_override(text)
            path = set_value(draft.values, key, value)
        except ValueError as error:
            raise ImportConfigError(f"--set {text.partition('=')[0]}: {error}") from error
        for line in draft.lines:
            same_section = line.to.startswith("model.") and key.startswith("model.")
            if line.outcome == "not carried over" and (line.to == key or same_section):
                line.outcome, line.note = "needs nothing", f"--set {key}"
        draft.lines.append(Line(f"--set {key}", "carried over", "", key, [path]))


def _settle(draft: Draft) -> None:
    """Set each number beyond its limit to the limit, and remove each other value that is not valid. Raises
    ImportConfigError if no configuration can be made without it."""
    problems: list[tuple[KeyPath, str, Any]] = []
    for _ in range(len(draft.lines) + 1):
        problems = list(_problems(draft.values))
        if not [problem for problem in problems if _mend(draft, *problem)]:
            break
    if problems:
        errors = [f"{dotted_path(path) or 'the configuration'}: {message}" for path, message, _ in problems]
        left = [f"{line.key}: {line.note}" for line in draft.lines if line.outcome == "not carried over"]
        step = f"Correct these with --set KEY=VALUE, for example --set model.family=NAME ({', '.join(FAMILIES)})."
        raise ImportConfigError("\n".join(["no configuration can be made:", *errors, *left]), step)


def _problems(values: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str, Any]]:
    """(path, what is wrong, the nearest valid number or None)."""
    try:
        Config.model_validate(deepcopy(dict(values)))
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            bounds = detail.get("ctx", {})
            below = bounds["lt"] * 0.99 if "lt" in bounds else None
            for path, message in explain_error(detail):
                yield path, message, bounds.get("ge", bounds.get("le", below))


def _mend(draft: Draft, path: KeyPath, message: str, limit: Any) -> bool:
    """Whether a value was changed or removed."""
    is_needed = path[:2] == ("model", "family") or (
        path[:1] == ("datasets",) and path[2:3] in (("id",), ("instance_data_dir",))
    )
    if is_needed:
        return False
    lines = [line for line in draft.lines if path in line.paths]
    if limit is not None and lines:
        for line in lines:
            line.note = "nearest to a value beyond the limit"
        draft.put(path, limit)
        return True
    is_idle = any(word in message for word in _IDLE)
    return bool([*draft.take_back(path, "needs nothing" if is_idle else "not carried over", message)])


def _report(draft: Draft, trainer: Trainer, target: Path, text: str, options: Options) -> Report:
    carried = [line for line in draft.lines if line.outcome == "carried over"]
    idle = [line for line in draft.lines if line.outcome in ("needs nothing", "secret") and not line.default]
    left = [line for line in draft.lines if line.outcome == "not carried over"]
    failed = [{"item": line.key, "reason": line.outcome, "message": line.note} for line in left]
    report = Report("import-config", done=len(carried), skipped=len(idle), failed=failed,
                    what="keys", dry_run=options.dry_run)  # fmt: skip
    report.details = {
        "trainer": trainer.name,
        "carried_over": [{"key": line.key, "becomes": _becomes(draft, line)} for line in carried],
        "not_needed": [{"key": line.key, "why": line.note} for line in idle],
        "would_write" if options.dry_run else "written": str(target),
    }
    if options.json:
        report.details["pipeline"] = text
    report.next_steps = [f"latentpress run --config {target} --dry-run"]
    return report


def _becomes(draft: Draft, line: Line) -> str:
    parts = []
    for path in line.paths:
        here: Any = draft.values
        words = []
        for step in path:
            here = here[step]
            words.append(here.get("id", step) if isinstance(step, int) and isinstance(here, dict) else step)
        shown = "..." if isinstance(here, dict | list) and len(str(here)) > 60 else str(here)
        parts.append(f"{'.'.join(map(str, words))}: {shown if len(shown) <= 60 else shown[:57] + '...'}")
    return "; ".join([*parts, *([line.note] if line.note else [])])


# -- the written file


def write_yaml(values: Mapping[str, Any], lines: Sequence[Line], trainer: str, files: Sequence[str]) -> str:
    """The values in the order of the configuration's keys, each with its key there; at the end, what is not carried
    over."""
    remarks: dict[KeyPath, str] = {}
    for line in lines:
        words = [line.key.rpartition(": ")[2], *([f"{trainer}'s default"] if line.default else []), line.note]
        for path in line.paths:
            remarks[path] = ", ".join(filter(None, [remarks.get(path), *words]))
    head = (
        f"Imported from {trainer} ({', '.join(files)}) by latentpress import-config. docs/coming-from.md explains it."
    )
    out = [*_comment(head), "# Each comment is the key that a value comes from. docs/options.md has all options.", ""]
    out += _section(values, (), "", remarks)
    if left := [line for line in lines if line.outcome in ("not carried over", "secret")]:
        out += ["", "# Not carried over:"]
        out += [part for line in left for part in _comment(f"{line.key}: {line.note}", "#   ")]
    return "\n".join(out) + "\n"


def _section(values: Mapping[str, Any], path: KeyPath, indent: str, remarks: Mapping[KeyPath, str]) -> Iterator[str]:
    kind = type_at(path) if path else Config
    order = list(section_fields(kind)) if isinstance(kind, type) and hasattr(kind, "model_fields") else []
    for key in sorted(values, key=lambda name: order.index(name) if name in order else len(order)):
        value, here = values[key], (*path, key)
        if not path and key not in ("root", "output"):
            yield ""
        if isinstance(value, dict) and value and hasattr(type_at(here), "model_fields"):
            yield f"{indent}{key}:"
            yield from _section(value, here, f"{indent}  ", remarks)
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            yield _remarked(f"{indent}{key}:", remarks.get(here, ""))
            for number, item in enumerate(value):
                lines = _section(item, (*here, number), f"{indent}    ", remarks)
                first, *rest = [line for line in lines if line.strip()]
                yield f"{indent}  - {first.lstrip()}"
                yield from rest
        else:
            yield _remarked(f"{indent}{key}: {flow(value, '{} #')}", remarks.get(here, ""))


def _remarked(line: str, remark: str) -> str:
    if not remark:
        return line
    room = max(WIDTH - max(COMMENT_COLUMN, len(line) + 2) - 2, 24)
    return f"{line.ljust(COMMENT_COLUMN - 2)}  # {textwrap.shorten(remark, room, placeholder=' ...')}"


def _comment(text: str, start: str = "# ") -> list[str]:
    below = f"{start.rstrip()}   "
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=below, break_on_hyphens=False)


app = make_app(
    "import-config",
    "The configuration of another trainer as a pipeline.yaml: SimpleTuner, musubi-tuner, ai-toolkit.",
    run,
    unused=NOT_COMPUTING,
    needs_config=False,
    examples=("config/config.json", "train.sh dataset.toml --config motion.yaml", "job.yaml --dry-run --json"),
)

if __name__ == "__main__":
    app()
