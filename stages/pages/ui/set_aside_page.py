"""The page of what was set aside, by stage and reason, with the remedy; searched by words."""

from collections.abc import Iterable, Sequence

from starlette.requests import Request
from starlette.responses import Response

from schemas.errors import LatentpressError
from stages.maintenance.set_aside import CSV_COLUMNS, SetAside, group_by_reason
from stages.pages.ui.app import Page, get, render, site_of

PATH = "/set-aside"
MOST_SHOWN = 200  # items on one page


def show(request: Request) -> Response:
    given = {name: request.query_params.get(name, "") for name in ("words", "stage", "reason")}
    items: Sequence[SetAside] = ()
    error: LatentpressError | None = None
    try:
        items = site_of(request).set_aside()
    except LatentpressError as problem:
        error = problem
    chosen = search(items, **given)
    first = request.query_params.get("first", "")
    start = min(int(first), len(chosen)) if first.isdecimal() and len(first) < 10 else 0
    return render(
        request,
        "set_aside.html",
        title="Set aside",
        error=error,
        total=len(items),
        count=len(chosen),
        groups=group_by_reason(chosen[start : start + MOST_SHOWN]),
        start=start,
        end=min(start + MOST_SHOWN, len(chosen)),
        step=MOST_SHOWN,
        stages=list(dict.fromkeys(item.stage for item in items)),
        reasons=sorted({item.reason for item in items}),
        given=given,
    )


def search(items: Iterable[SetAside], words: str, stage: str, reason: str) -> list[SetAside]:
    """Find the items of a stage and reason, where these are given, that have each of the words, in any case."""
    wanted = words.casefold().split()
    chosen = [item for item in items if stage in ("", item.stage) and reason in ("", item.reason)]
    if not wanted:
        return chosen
    texts = ("\n".join(getattr(item, column) for column in CSV_COLUMNS).casefold() for item in chosen)
    return [item for item, text in zip(chosen, texts, strict=True) if all(word in text for word in wanted)]


PAGE = Page("Set aside", PATH, (get(PATH, show),))
