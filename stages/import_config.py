"""import-config: converts the configuration of another trainer to a commented pipeline.yaml. Each key has a line with
the option that it became, or with its value if it is not carried over.

Files are parsed and never run. docs/coming-from.md has a section for each trainer.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from schemas.catalog import FAMILIES
from schemas.cli.console import NOT_COMPUTING, Console, Options, Report, make_app
from schemas.cli.starting import print_for_reader
from schemas.config.loading import dotted_path, explain_error, parse_config, parse_override, read_text, set_value
from schemas.config.pipeline import Config
from schemas.config.section import NoEffect
from schemas.config.yaml_editor import nest, value_at
from schemas.config.yaml_reader import KeyPath
from schemas.text_format import shorten
from stages.configuring.text import write_file, write_yaml
from stages.importing.draft import Draft, Line, Trainer
from stages.importing.files import ImportConfigError, Parsed, ReferencedFiles, read_file
from stages.importing.trainers import TRAINERS


def run(
    config: None,
    options: Options,
    console: Console,
    *,
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", show_default=False, help="Configuration files, scripts and dataset files."),
    ],
    trainer: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="NAME", help=f"Trainer: {', '.join(TRAINERS)}.  [default: detected from the files]"
        ),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            "--base",
            metavar="FOLDER",
            help="Folder of relative paths in the files.  [default: the first of the file's folder and the two "
            "folders above it in which a path exists]",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", "--force", help="Replace an existing file.")] = False,
) -> Report:
    parsed_files, target = [read_file(path) for path in files], options.config
    old_text = read_text(target) if target.exists() else None
    if not options.dry_run and old_text is not None and not overwrite:
        step = "Use --overwrite to replace it, or set --config to another file."
        raise ImportConfigError(f"{target} already exists", step)
    source = _find_trainer(trainer, parsed_files)
    path_resolver = ReferencedFiles(files[0], base, target.absolute().parent)
    draft = Draft(path_resolver, {("root",): "./work", ("output",): "./output"})
    source.carry(draft, _find_roles(source, parsed_files))
    for file in parsed_files:
        for location, reason in file.problems:
            draft.add_line(f"{file.path.name}: {location}", "not carried over", reason)
    _apply_overrides(options.overrides, draft)
    _correct_values(draft)
    text = _write_text(draft, source, [*files, *path_resolver.read_paths])
    parse_config(text, target)
    if options.dry_run and not options.json:
        print_for_reader(text, console.stdout)
    elif not options.dry_run:
        write_file(target, old_text, text)
    return _make_report(draft, source, target, text, options)


def _find_trainer(name: str | None, parsed_files: Sequence[Parsed]) -> Trainer:
    if name is not None:
        if name.lower() not in TRAINERS:
            raise ImportConfigError(f"--from {name}: unknown trainer; choose from {', '.join(TRAINERS)}")
        return TRAINERS[name.lower()]
    for trainer in TRAINERS.values():
        if any(trainer.find_role(file.content) for file in parsed_files):
            return trainer
    raise ImportConfigError(
        f"{', '.join(str(file.path) for file in parsed_files)}: not the configuration of a supported trainer",
        f"Set the trainer with --from ({', '.join(TRAINERS)}), and give all of its files.",
    )


def _find_roles(trainer: Trainer, parsed_files: Sequence[Parsed]) -> dict[str, Any]:
    """Returns role of a file in the trainer's configuration -> its content."""
    roles: dict[str, Any] = {}
    for file in parsed_files:
        role = trainer.find_role(file.content) or ("arguments" if isinstance(file.content, dict) else "")
        if not role:
            raise ImportConfigError(
                f"{file.path} is not a configuration of {trainer.name}",
                "Give only its configuration and dataset files.",
            )
        if role in roles and isinstance(file.content, dict):
            roles[role] = {**roles[role], **file.content}  # merges a file of arguments and a command
        else:
            roles[role] = file.content
    return roles


def _apply_overrides(overrides: Sequence[str], draft: Draft) -> None:
    for text in overrides:
        try:
            key, value = parse_override(text)
            path = set_value(tree := nest(draft.values), key, value)
        except ValueError as error:
            raise ImportConfigError(f"--set {text.partition('=')[0]}: {error}") from error
        for line in draft.lines:
            is_same_section = line.option.startswith("model.") and key.startswith("model.")
            if line.outcome == "not carried over" and (line.option == key or is_same_section):
                line.outcome, line.note = "needs nothing", f"--set {key}"
        path = next((parent for parent in draft.values if parent == path[: len(parent)]), path)  # a list is one value
        draft.values = {old_path: item for old_path, item in draft.values.items() if old_path[: len(path)] != path}
        draft.values[path] = value_at(tree, path)
        draft.lines.append(Line(f"--set {key}", "carried over", "", key, [path]))


def _correct_values(draft: Draft) -> None:
    """Set each number beyond its limit to the limit, and remove all other invalid values. Raises ImportConfigError if
    the configuration is then still invalid."""
    problems: list[tuple[KeyPath, str, Any]] = []
    for _ in range(len(draft.lines) + 1):
        problems = list(_problems(nest(draft.values)))
        if not [problem for problem in problems if _correct_value(draft, *problem)]:
            break
    if problems:
        errors = [f"{dotted_path(path) or 'the configuration'}: {message}" for path, message, _ in problems]
        dropped_lines = [f"{line.key}: {line.note}" for line in draft.lines if line.outcome == "not carried over"]
        step = f"Correct these with --set KEY=VALUE, for example --set model.family=NAME ({', '.join(FAMILIES)})."
        raise ImportConfigError("\n".join(["the files cannot be converted:", *errors, *dropped_lines]), step)


def _problems(values: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str, Any]]:
    """Yield (path, error message, nearest valid number or None) of each invalid value."""
    try:
        Config.model_validate(values)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            bounds = detail.get("ctx", {})
            largest = bounds["lt"] * 0.99 if "lt" in bounds else None
            for path, message in explain_error(detail):
                yield path, message, bounds.get("ge", bounds.get("le", largest))


def _correct_value(draft: Draft, path: KeyPath, message: str, limit: Any) -> bool:
    """Correct or remove a value. Returns whether it was changed or removed."""
    is_needed = path[:2] == ("model", "family") or (
        path[:1] == ("datasets",) and path[2:3] in (("id",), ("instance_data_dir",))
    )
    if is_needed:
        return False
    lines = [line for line in draft.lines if path in line.paths]
    if limit is not None and lines:
        for line in lines:
            line.note = "limited to the nearest valid value"
        draft.set(path, limit)
        return True
    return draft.remove_value(path, "needs nothing" if isinstance(message, NoEffect) else "not carried over", message)


def _make_report(draft: Draft, trainer: Trainer, target: Path, text: str, options: Options) -> Report:
    carried_lines = [line for line in draft.lines if line.outcome == "carried over"]
    idle_lines = [line for line in draft.lines if line.outcome in ("needs nothing", "secret") and not line.is_default]
    dropped_lines = [line for line in draft.lines if line.outcome == "not carried over"]
    failed = [{"item": line.key, "reason": line.outcome, "message": line.note} for line in dropped_lines]
    report = Report("import-config", done=len(carried_lines), skipped=len(idle_lines), failed=failed,
                    what="keys", dry_run=options.dry_run)  # fmt: skip
    report.details = {
        "trainer": trainer.name,
        "carried_over": [{"key": line.key, "becomes": _format_values(draft, line)} for line in carried_lines],
        "not_needed": [{"key": line.key, "why": line.note} for line in idle_lines],
        "would_write" if options.dry_run else "written": str(target),
    }
    if options.json:
        report.details["pipeline"] = text
    report.next_steps = [f"latentpress run --config {target} --dry-run"]
    return report


def _format_values(draft: Draft, line: Line) -> str:
    parts = [f"{dotted_path(path)}: {shorten(str(draft.values[path]))}" for path in line.paths]
    return "; ".join([*parts, *([line.note] if line.note else [])])


def _write_text(draft: Draft, trainer: Trainer, files: Sequence[Path]) -> str:
    """The text of pipeline.yaml. The comment of each value is the other trainer's key; a list of keys that are not
    carried over is at the end."""
    remarks: dict[KeyPath, str] = {}
    for line in draft.lines:
        words = [line.key.rpartition(": ")[2], *([f"{trainer.name}'s default"] if line.is_default else []), line.note]
        for path in line.paths:
            remarks[path] = ", ".join(filter(None, [remarks.get(path), *words]))
    names = ", ".join(dict.fromkeys(path.name for path in files))
    head = f"Imported from {trainer.name} ({names}) by latentpress import-config: docs/coming-from.md.\n"
    head += "Each comment is the key from which the value comes. docs/options.md lists all options."
    dropped_lines = [line for line in draft.lines if line.outcome in ("not carried over", "secret")]
    tail = ["Not carried over:", *(f"  {line.key}: {line.note}" for line in dropped_lines)] if dropped_lines else []
    return write_yaml(draft.values, head, remarks.get, tail, one_line=False)


app = make_app(
    "import-config",
    "Convert the configuration of another trainer to a pipeline.yaml: SimpleTuner, musubi-tuner or ai-toolkit.",
    run,
    unused=NOT_COMPUTING,
    needs_config=False,
    examples=("config/config.json", "train.sh dataset.toml --config motion.yaml", "job.yaml --dry-run --json"),
)

if __name__ == "__main__":
    app()
