"""The validation samples of a run for the page: a row for each, and what is known of one at a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from cache.runs.validations import describe_sample, latent_path, list_validations
from schemas.config.pipeline import Config
from stages.pages.ui.app import Site

PICTURES = "/pictures"
ONE = f"{PICTURES}/one"
SETTINGS = ("seed", "size", "steps", "guidance", "guidance_low")


@dataclass(frozen=True)
class Cell:
    """A sample at a step. url: of its picture or clip, "" where it is not decoded. link: to the page that has it
    large."""

    name: str
    step: int
    url: str
    link: str
    is_clip: bool


@dataclass(frozen=True)
class Row:
    """The steps of a sample, the newest first. prompt: that of the newest."""

    name: str
    prompt: str
    cells: Sequence[Cell]


def list_files(config: Config) -> dict[str, dict[int, Path | None]]:
    """name -> step, ascending -> picture or clip, None where it is not decoded. In the order of the configuration's
    samples, and then of names that it does not have."""
    order = {sample.name: number for number, sample in enumerate(config.validation_samples())}
    rows: dict[str, dict[int, Path | None]] = {}
    for file in list_validations(config.run_folder):
        rows.setdefault(file.name, {})[file.step] = file.picture
    return dict(sorted(rows.items(), key=lambda row: (order.get(row[0], len(order)), row[0])))


def make_row(site: Site, config: Config, name: str, files: dict[int, Path | None], steps: Sequence[int]) -> Row:
    """The row of one of `list_files`. steps: those that are shown."""
    about = describe_sample(config, latent_path(config.run_folder, max(files), name))
    cells = [make_cell(site, name, step, files[step]) for step in sorted(steps, reverse=True)]
    return Row(name, str(about.get("prompt") or ""), cells)


def make_cell(site: Site, name: str, step: int, path: Path | None, beside: int | None = None) -> Cell:
    """beside: the step that its page shows beside it."""
    asked = {"name": name, "step": step} | ({} if beside is None else {"beside": beside})
    url = "" if path is None else site.address_of(path)
    return Cell(name, step, url, f"{site.base}{ONE}?{urlencode(asked)}", path is not None and path.suffix == ".mp4")


def describe(config: Config, name: str, step: int) -> dict[str, Any]:
    """prompt, negative_prompt, and those of SETTINGS that are known."""
    known = describe_sample(config, latent_path(config.run_folder, step, name))
    known["size"] = known.get("bucket")
    settings = {key: known[key] for key in SETTINGS if known.get(key) is not None}
    prompts = {key: str(known.get(key) or "") for key in ("prompt", "negative_prompt")}
    return prompts | {key: f"{value:g}" if isinstance(value, float) else value for key, value in settings.items()}
