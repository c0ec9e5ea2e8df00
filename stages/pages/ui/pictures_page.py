"""The validation samples of the run: every sample at every step, two steps next to each other, and one of them large
with its prompt and settings. The files themselves are served as documents are."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
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
    """The steps of a sample, the newest first. prompt: that of the newest."""

    name: str
    prompt: str
    gallery: Gallery


def make_row(site: Site, config: Config, name: str, files: dict[int, Path | None], steps: Sequence[int]) -> Row:
    """The row of one of `list_samples`. steps: those that are shown."""
    prompt = describe(config, config.run_folder, name, max(files))["prompt"]
    figures = [make_figure(site, name, step, files[step]) for step in sorted(steps, reverse=True)]
    return Row(name, prompt, Gallery(figures, "steps"))


def make_figure(site: Site, name: str, step: int, path: Path | None) -> Figure:
    """A sample at a step, which leads to the page that has it large."""
    picture, link = find_picture(site, path), link_to(site, name, step)
    pictures = () if picture is None else (picture,)
    return Figure(pictures, (f"{name} at step {step}",), f"step {step}", problem="not decoded yet", link=link)


def find_picture(site: Site, path: Path | None) -> PictureFile | None:
    return None if path is None else PictureFile(site.address_of(path), path.suffix == ".mp4")


def link_to(site: Site, name: str, step: int, beside: int | None = None) -> str:
    """The page of a sample at a step. beside: the step that it shows next to it."""
    asked = {"name": name, "step": step} | ({} if beside is None else {"beside": beside})
    return f"{site.base}{ONE}?{urlencode(asked)}"


MOST_ROWS, MOST_STEPS = 100, 24


def show_all(request: Request) -> Response:
    site = site_of(request)
    config = site.config()
    files = list_samples(config, config.run_folder)
    steps = sorted({step for paths in files.values() for step in paths})
    pair = [step for step in (_asked(request, name, steps) for name in ("step", "beside")) if step is not None]
    chosen = sorted(set(pair)) or spread(steps, MOST_STEPS)
    shown = {name: [step for step in chosen if step in paths] for name, paths in list(files.items())[:MOST_ROWS]}
    return render(
        request,
        "pictures.html",
        title="Pictures",
        rows=[make_row(site, config, name, files[name], kept) for name, kept in shown.items() if kept],
        total=len(files),
        steps=steps[::-1],
        left_out=0 if pair else len(steps) - len(chosen),
        pair=pair,
    )


def show_one(request: Request) -> Response:
    """A sample at a step, and at another beside it, the earlier one on the left."""
    site = site_of(request)
    config = site.config()
    files = list_samples(config, config.run_folder)
    name = request.query_params.get("name", "")
    steps = list(files.get(name, ()))
    step, beside = (_asked(request, key, steps) for key in ("step", "beside"))
    if step is None:
        raise HTTPException(404, "there is no such picture")
    chosen = sorted({step, step if beside is None else beside})
    names = [other for other, paths in files.items() if step in paths]
    number, position = names.index(name), steps.index(step)
    around = {
        "earlier": link_to(site, name, steps[position - 1], beside) if position else "",
        "later": link_to(site, name, steps[position + 1], beside) if position + 1 < len(steps) else "",
        "above": link_to(site, names[number - 1], step, beside) if number else "",
        "below": link_to(site, names[number + 1], step, beside) if number + 1 < len(names) else "",
    }
    return render(
        request,
        "picture.html",
        title=name,
        cells=[
            (one, find_picture(site, files[name][one]), describe(config, config.run_folder, name, one))
            for one in chosen
        ],
        name=name,
        step=step,
        beside=beside,
        steps=steps[::-1],
        around=around,
    )


def _asked(request: Request, key: str, steps: Sequence[int]) -> int | None:
    """The step that a request asks for; None where there is no such step."""
    return next((step for step in steps if str(step) == request.query_params.get(key)), None)


PAGE = Page("Pictures", PICTURES, (get(PICTURES, show_all), get(ONE, show_one)))
