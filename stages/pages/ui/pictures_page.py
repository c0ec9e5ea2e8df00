"""The validation samples of the run: every sample at every step, two steps beside each other, and one of them large
with its prompt and settings. The files themselves are served as documents are."""

from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cache.runs.training_run import spread
from stages.pages.ui.app import Page, get, render, site_of
from stages.pages.ui.run_samples import ONE, PICTURES, describe, list_files, make_cell, make_row

MOST_ROWS, MOST_STEPS = 100, 24


def show_all(request: Request) -> Response:
    site = site_of(request)
    config = site.config()
    files = list_files(config)
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
    files = list_files(config)
    name = request.query_params.get("name", "")
    steps = list(files.get(name, ()))
    step, beside = (_asked(request, key, steps) for key in ("step", "beside"))
    if step is None:
        raise HTTPException(404, "there is no such picture")
    chosen = sorted({step, step if beside is None else beside})
    names = [other for other, paths in files.items() if step in paths]
    number, position = names.index(name), steps.index(step)
    around = {
        "earlier": make_cell(site, name, steps[position - 1], None, beside) if position else None,
        "later": make_cell(site, name, steps[position + 1], None, beside) if position + 1 < len(steps) else None,
        "above": make_cell(site, names[number - 1], step, None, beside) if number else None,
        "below": make_cell(site, names[number + 1], step, None, beside) if number + 1 < len(names) else None,
    }
    return render(
        request,
        "picture.html",
        title=name,
        cells=[(make_cell(site, name, shown, files[name][shown]), describe(config, name, shown)) for shown in chosen],
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
