"""The validation samples of the run: every sample at every step, two steps next to each other, and a single sample in
full size with its prompt and settings. The files are served by the route of documents.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cache.runs.training_run import spread
from schemas.config.pipeline import Config
from stages.pages.html import Figure, Gallery, PictureFile
from stages.pages.pictures import describe, list_samples
from stages.pages.ui.app import Page, Site, get, render, site_of

PICTURES = "/pictures"
ONE = f"{PICTURES}/one"


@dataclass(frozen=True)
class Row:
    """A sample at several steps, from the oldest to the newest. prompt: prompt of the newest step."""

    name: str
    prompt: str
    gallery: Gallery


def make_row(site: Site, config: Config, name: str, files: dict[int, Path | None], steps: Sequence[int]) -> Row:
    """Make the row of a sample. files: step -> file, as returned by `list_samples`. steps: steps to show."""
    prompt = describe(config, config.run_folder, name, max(files))["prompt"]
    figures = [make_figure(site, name, step, files[step]) for step in sorted(steps)]
    return Row(name, prompt, Gallery(figures, "steps"))


def make_figure(site: Site, name: str, step: int, path: Path | None) -> Figure:
    """Make the figure of a sample at a step, which links to the page of the sample in full size."""
    picture, link = find_picture(site, path), make_link(site, name, step)
    pictures = () if picture is None else (picture,)
    return Figure(pictures, (f"{name} at step {step}",), f"step {step}", problem="not decoded yet", link=link)


def find_picture(site: Site, path: Path | None) -> PictureFile | None:
    return None if path is None else PictureFile(site.make_address(path), path.suffix == ".mp4")


def make_link(site: Site, name: str, step: int, second_step: int | None = None) -> str:
    """The address of the page of a sample at a step. second_step: a second step to show on the page, None for none."""
    query = {"name": name, "step": step} | ({} if second_step is None else {"second": second_step})
    return f"{site.base}{ONE}?{urlencode(query)}"


MAX_ROWS, MAX_STEPS = 100, 24


def show_all(request: Request) -> Response:
    site = site_of(request)
    config = site.config()
    files = list_samples(config, config.run_folder)
    steps = sorted({step for paths in files.values() for step in paths})
    pair = [step for step in (find_step(request, name, steps) for name in ("step", "second")) if step is not None]
    shown_steps = sorted(set(pair)) or spread(steps, MAX_STEPS)
    steps_by_name = {
        name: [step for step in shown_steps if step in paths] for name, paths in list(files.items())[:MAX_ROWS]
    }
    rows = [make_row(site, config, name, files[name], row) for name, row in steps_by_name.items() if row]
    left_out = 0 if pair else len(steps) - len(shown_steps)
    content: dict[str, Any] = {"rows": rows, "total": len(files), "steps": steps[::-1], "pair": pair}
    return render(request, "pictures.html", title="Pictures", left_out=left_out, **content)


def show_one(request: Request) -> Response:
    """Answer with a sample at one step, or at two steps side by side, the earlier step on the left."""
    site = site_of(request)
    config = site.config()
    files = list_samples(config, config.run_folder)
    name = request.query_params.get("name", "")
    steps = list(files.get(name, ()))
    step, second_step = (find_step(request, key, steps) for key in ("step", "second"))
    if step is None:
        raise HTTPException(404, "the picture does not exist")
    shown_steps = sorted({step, step if second_step is None else second_step})
    names = [sample for sample, paths in files.items() if step in paths]
    number, position = names.index(name), steps.index(step)
    around = {
        "earlier": make_link(site, name, steps[position - 1], second_step) if position else "",
        "later": make_link(site, name, steps[position + 1], second_step) if position + 1 < len(steps) else "",
        "above": make_link(site, names[number - 1], step, second_step) if number else "",
        "below": make_link(site, names[number + 1], step, second_step) if number + 1 < len(names) else "",
    }
    cells = [
        (one, find_picture(site, files[name][one]), describe(config, config.run_folder, name, one))
        for one in shown_steps
    ]
    content: dict[str, Any] = {"cells": cells, "name": name, "step": step, "second_step": second_step}
    return render(request, "picture.html", title=name, steps=steps[::-1], around=around, **content)


def find_step(request: Request, key: str, steps: Sequence[int]) -> int | None:
    """The step that the request's query parameter `key` names; None if the sample does not have the step."""
    return next((step for step in steps if str(step) == request.query_params.get(key)), None)


PAGE = Page("Pictures", PICTURES, (get(PICTURES, show_all), get(ONE, show_one)))
