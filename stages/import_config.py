"""import-config: the configuration of another trainer as a commented pipeline.yaml, with a line for every key: what it
became, or why it is not carried over.

Files are parsed and never run. docs/coming-from.md has a section for each trainer.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from cache.store.files import replacing
from schemas.cli.console import NOT_DIVIDED, Console, Options, Report, make_app
from schemas.cli.starting import print_for_reader
from schemas.config.error_messages import dotted_path, explain_error
from schemas.config.loading import parse_config, parse_override, set_value
from schemas.config.pipeline import Config
from schemas.config.yaml_reader import KeyPath
from schemas.foreign.draft import Draft, Line
from schemas.foreign.models import CHOOSE
from schemas.foreign.trainers import TRAINERS, Trainer
from stages.importing.files import Beside, ImportConfigError, Parsed, read_file
from stages.importing.yaml_text import write_yaml

#: What a value that the configuration refuses asks for, where it has no effect there either.
_IDLE = ("no effect", "it is an option of", "goes with ", "remove it")
_PATHS = ("instance_data_dir", "caption_file", "conditioning_data", "mask_data")


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
    overwrite: Annotated[bool, typer.Option("--overwrite", "--force", help="Replace a file that is there.")] = False,
) -> Report:
    parsed, target = [read_file(path) for path in files], options.config
    if not options.dry_run and target.exists() and not overwrite:
        raise ImportConfigError(
            f"{target} is there already", "Add --overwrite to replace it, or name another file with --config."
        )
    chosen = _choose(trainer, parsed)
    beside = Beside(files[0], base)
    draft = Draft()
    chosen.carry(draft, _roles(chosen, parsed), beside)
    for file in parsed:
        for location, why in file.problems:
            draft.say(f"{file.path.name}: {location}", "refused", why)
    draft.values.setdefault("root", "./work")
    draft.values.setdefault("output", "./output")
    _place_paths(draft.values, beside, target.absolute().parent)
    _apply(options.overrides, draft)
    _drop_refused(draft, target)
    names = [str(path.name) for path in (*files, *beside.read_paths)]
    text = write_yaml(draft.values, draft.lines, chosen.name, list(dict.fromkeys(names)))
    parse_config(text, target)
    if options.dry_run and not options.json:
        print_for_reader(text, console.stdout)
    elif not options.dry_run:
        with replacing(target) as temporary:
            temporary.write_text(text)
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
                f"{file.path} is no configuration of {trainer.name}", "Name its configuration and its datasets alone."
            )
        if role in roles and isinstance(file.content, dict):
            roles[role] = {**roles[role], **file.content}  # a file of arguments, and a command
        else:
            roles[role] = file.content
    return roles


def _place_paths(values: dict[str, Any], beside: Beside, folder: Path) -> None:
    """Paths from the place of the configuration that is written, where they are below it, else absolute ones."""

    def relocate(text: Any) -> Any:
        if isinstance(text, list):
            return [relocate(item) for item in text]
        if not isinstance(text, str) or "://" in text:
            return text
        whole = Path(beside.place(text))
        return f"./{whole.relative_to(folder)}" if whole.is_relative_to(folder) else str(whole)

    for dataset in values.get("datasets", []):
        for key in _PATHS if dataset.get("source") != "huggingface" else _PATHS[1:]:
            if key in dataset:
                dataset[key] = relocate(dataset[key])
    if values["output"] != "./output":
        values["output"] = relocate(values["output"])
    adapter = values.get("train", {}).get("adapter", {})
    if "init" in adapter:
        adapter["init"] = relocate(adapter["init"])
    model = values.get("model", {})
    if "path" in model and (beside.find(model["path"]) or model["path"].startswith((".", "/", "~"))):
        model["path"] = relocate(model["path"])
    for prompt in values.get("validation", {}).get("prompts", []):
        if "image" in prompt:
            prompt["image"] = relocate(prompt["image"])


def _apply(overrides: Sequence[str], draft: Draft) -> None:
    for text in overrides:
        try:
            key, value = parse_override(text)
            path = set_value(draft.values, key, value)
        except ValueError as error:
            raise ImportConfigError(f"--set {text.partition('=')[0]}: {error}") from error
        for line in draft.lines:
            if line.outcome == "refused" and key.startswith("model.") and CHOOSE in line.text:
                line.outcome, line.text = "not needed", f"--set {key}"
        draft.lines.append(Line(f"--set {key}", "carried over", "", [path]))


def _drop_refused(draft: Draft, target: Path) -> None:
    """Take back each value that the configuration refuses. ImportConfigError where none can be made without it."""
    for _ in range(len(draft.lines) + 1):
        problems = list(_problems(draft.values))
        taken = [line for path, reason in problems for line in _take_back(draft, path, reason)]
        if not taken:
            break
    if problems:
        errors = [f"{dotted_path(path) or 'the configuration'}: {message}" for path, message in problems]
        refused = [f"{line.key}: {line.text}" for line in draft.lines if line.outcome == "refused"]
        step = "Correct these with --set KEY=VALUE, for example --set model.family=NAME; or name all files."
        raise ImportConfigError("\n".join(["no configuration can be made:", *errors, *refused]), step)


def _problems(values: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    try:
        Config.model_validate(deepcopy(dict(values)))
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            yield from explain_error(detail)


def _take_back(draft: Draft, path: KeyPath, reason: str) -> list[Line]:
    if (path[:1] == ("datasets",) and path[2:3] in (("id",), ("instance_data_dir",))) or path[:2] == (
        "model",
        "family",
    ):
        return []
    taken = list(draft.refuse(path, reason))
    for line in taken:
        if any(word in reason for word in _IDLE):
            line.outcome = "not needed"
    return taken


def _report(draft: Draft, trainer: Trainer, target: Path, text: str, options: Options) -> Report:
    def rows(*outcomes: str) -> list[dict[str, Any]]:
        return [{"key": line.key, "becomes": _becomes(draft, line)} for line in draft.lines if line.outcome in outcomes]

    failed = [
        {"item": line.key, "reason": line.outcome, "message": line.text}
        for line in draft.lines
        if line.outcome in ("refused", "unknown")
    ]
    carried = rows("carried over")
    report = Report("import-config", done=len(carried), skipped=len(rows("not needed", "secret")), failed=failed,
                    what="keys", dry_run=options.dry_run)  # fmt: skip
    report.details = {"trainer": trainer.name, "carried_over": carried}
    report.details["not_needed"] = [
        {"key": line.key, "why": line.text} for line in draft.lines if line.outcome in ("not needed", "secret")
    ]
    report.details["would_write" if options.dry_run else "written"] = str(target)
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
    return "; ".join([*parts, *([line.text] if line.text else [])])


app = make_app(
    "import-config",
    "The configuration of another trainer as a pipeline.yaml: SimpleTuner, musubi-tuner, ai-toolkit.",
    run,
    unused=NOT_DIVIDED,
    needs_config=False,
    examples=("config/config.json", "train.sh dataset.toml --config motion.yaml", "job.yaml --dry-run --json"),
)

if __name__ == "__main__":
    app()
