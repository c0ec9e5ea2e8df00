"""The captions of a dataset: read, searched, and edited one by one.

Edits are kept under the root, by the content of the file, and used before the captions of the user's files, which stay
as they are; the next `bucket` plans with them.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cache.sets.caption_edits import read_edits, write_edit
from cache.store.store import Store
from schemas.errors import LatentpressError
from stages.discovery.media_table import read_media_table
from stages.pages.ui.app import Form, Page, Site, action, get, render, site_of
from stages.pages.ui.child_programs import Refused

PATH = "/captions"
MOST_SHOWN = 50  # items on one page
MOST_CHARACTERS = 100_000  # of the captions of an item


@dataclass(frozen=True)
class Item:
    """captions: those that are used, one a line, as edited; of_file: what `discover` found. before: the edit that is
    there, as JSON, "" where there is none."""

    media_id: str
    path: str
    about: str
    captions: str
    of_file: str
    before: str


@lru_cache(maxsize=8)
def _store(root: str) -> Store:
    """One for all requests: it reads a table again only when it changed."""
    return Store(root)


def show(request: Request) -> Response:
    site = site_of(request)
    config, query = site.config(), request.query_params
    names = [dataset.id for dataset in config.datasets if not dataset.disabled]
    chosen = query.get("dataset", "") if query.get("dataset") in names else next(iter(names), "")
    words, only_edited = query.get("words", ""), bool(query.get("edited"))
    problem, items, total, count, edited, start = None, list[Item](), 0, 0, 0, 0
    try:
        store = _store(site.root)
        edits, media = read_edits(store), read_media_table(store, chosen)
        is_edited = pc.is_in(media["media_id"], value_set=edits["media_id"].combine_chunks())
        total, edited = len(media), pc.sum(is_edited).as_py() or 0
        rows = np.flatnonzero(_matches(media, edits, words) & (np.asarray(is_edited) | (not only_edited)))
        count = len(rows)
        first = query.get("first", "")
        start = min(int(first), count) if first.isdecimal() and len(first) < 10 else 0
        items = list(_items(media.take(pa.array(rows[start : start + MOST_SHOWN])), edits))
    except LatentpressError as error:
        problem = error
    given = {"dataset": chosen, "words": words, "edited": "1" if only_edited else ""}
    values = {"total": total, "count": count, "edited": edited, "start": start, "end": start + len(items)}
    return render(
        request,
        "captions.html",
        title="Captions",
        problem=problem,
        items=items,
        names=names,
        given=given,
        step=MOST_SHOWN,
        **values,
    )


def _matches(media: pa.Table, edits: pa.Table, words: str) -> np.ndarray:
    """(n,) bool: the items whose path, captions or edited captions have all words, in any case."""
    matches = np.ones(len(media), bool)
    if not words.split():
        return matches
    row = pc.index_in(media["media_id"], value_set=edits["media_id"].combine_chunks())
    written = pc.binary_join(edits["captions"].combine_chunks(), "\n").take(row.combine_chunks())
    columns = [media["path"].combine_chunks(), pc.binary_join(media["captions"].combine_chunks(), "\n"), written]
    text = pc.utf8_lower(pc.binary_join_element_wise(*(pc.fill_null(column, "") for column in columns), "\n"))
    for word in words.lower().split():
        matches &= np.asarray(pc.match_substring(text, word))
    return matches


def _items(media: pa.Table, edits: pa.Table) -> Iterator[Item]:
    wanted = edits.filter(pc.is_in(edits["media_id"], value_set=media["media_id"].combine_chunks()))
    written = {row["media_id"]: row["captions"] for row in wanted.to_pylist()}
    names = ["media_id", "path", "kind", "width", "height", "captions"]
    for row in media.select(names).to_pylist():
        edit, found = written.get(row["media_id"]), row["captions"] or []
        about = f"{row['kind']}, {row['width']}x{row['height']}"
        before = "" if edit is None else json.dumps(edit)
        yield Item(row["media_id"], row["path"], about, "\n".join(edit or found), "\n".join(found), before)


def save(request: Request, form: Form) -> str:
    site, media_id, verb = site_of(request), request.path_params["media_id"], request.path_params["verb"]
    if verb not in ("save", "restore") or not _is_known(site, media_id):
        raise HTTPException(404, "there is no such item, or nothing that does this to it")
    try:
        before = json.loads(form.get("before", "") or "null")
    except ValueError as error:
        raise HTTPException(400, "this is no form of the page") from error
    if before is not None and not (isinstance(before, list) and all(isinstance(text, str) for text in before)):
        raise HTTPException(400, "this is no form of the page")
    if verb == "restore":
        write_edit(_store(site.root), media_id, None, before)
        return "the caption of the file is used again"
    captions = [line.strip() for line in form.get("text", "").splitlines() if line.strip()]
    if not captions:
        raise Refused("a caption has to have words", "to leave the item out, exclude it with `where`")
    if len("".join(captions)) > MOST_CHARACTERS:
        raise Refused(f"the captions have more than {MOST_CHARACTERS} characters", "shorten them")
    write_edit(_store(site.root), media_id, captions, before)
    return "saved; the next run plans with it"


def _is_known(site: Site, media_id: str) -> bool:
    if not re.fullmatch("[0-9a-f]{32}", media_id, re.ASCII):
        return False
    for dataset in site.config().datasets:
        try:
            ids = read_media_table(_store(site.root), dataset.id)["media_id"]
        except LatentpressError:
            continue
        if pc.any(pc.equal(ids, media_id)).as_py():
            return True
    return False


PAGE = Page("Captions", PATH, (get(PATH, show), action(PATH + "/{media_id}/{verb}", save, PATH)))
