"""The captions of a dataset next to pictures: items without a caption first; read, searched, and edited one by one or
all at once. The next `bucket` plans with edited captions.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cache.sets.caption_edits import read_edits, write_edit, write_edits
from schemas.config.encoding import CAPTION_MODEL, CAPTION_MODEL_GB, caption_settings
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.json_records import parse_json
from schemas.tables import MEDIA_SCHEMA
from schemas.text_format import split_lines
from stages.discovery.media_table import NotDiscovered, read_media_table
from stages.pages.captioned_items import (
    Item,
    add_model_captions,
    check_captions,
    find_matches,
    list_items,
    list_uncaptioned,
    open_store,
    read_model_captions,
    write_caption_file,
)
from stages.pages.ui.app import Form, Page, Site, action, get, lines_of, parse_first_item, render, site_of
from stages.pages.ui.child_programs import STAGES, Refused
from stages.pages.ui.job_cards import ACTIVE_STATES, build_job_card
from stages.pages.ui.settings_page import set_options

PATH, JOB = "/captions", "caption-thumbnails"
MAX_SHOWN = 50  # items on one page
MAX_TRIGGER = 200  # characters of a trigger


@dataclass
class SearchResult:
    """The result of a search in a dataset's items. names: ids of the datasets. search: values of the search form.
    items: the items on this page, those without a caption first. total, edited, lacking, rejected: numbers of all
    items, and of items that are edited, lack a caption, or were rejected because of this. count: number of items found.
    start: index of the page's first item among the items found. trigger: the dataset's option `trigger`."""

    names: list[str]
    search: dict[str, str]
    items: list[Item] = field(default_factory=list)
    total: int = 0
    edited: int = 0
    lacking: int = 0
    rejected: int = 0
    count: int = 0
    start: int = 0
    trigger: str = ""
    described_paths: frozenset[str] = frozenset()  # paths of items whose captions a model made
    model_problem: LatentpressError | None = None  # why captions that a model made can't be shown
    problem: LatentpressError | None = None


def _find(site: Site, query: Mapping[str, str], limit: int = MAX_SHOWN) -> SearchResult:
    """limit: largest number of items on the page."""
    datasets = {dataset.id: dataset for dataset in site.config().datasets if not dataset.disabled}
    dataset = query.get("dataset", "") if query.get("dataset") in datasets else next(iter(datasets), "")
    words, shown = query.get("words", ""), query.get("shown", "")
    result = SearchResult(list(datasets), {"dataset": dataset, "words": words, "shown": shown})
    result.trigger = datasets[dataset].trigger if dataset else ""
    try:
        store = open_store(site.root)
        rejected = list(list_uncaptioned(site.config(), site.list_rejects(), dataset).values()) if dataset else []
        try:
            edits, media = read_edits(store), read_media_table(store, dataset)
        except LatentpressError:
            if not rejected:
                raise
            edits, media = read_edits(store), MEDIA_SCHEMA.empty_table()
        try:
            media, result.described_paths = add_model_captions(media, read_model_captions(store, site.config()))
        except LatentpressError as error:
            result.model_problem = error
        is_edited = np.asarray(pc.is_in(media["media_id"], value_set=edits["media_id"].combine_chunks()))
        is_lacking = ~is_edited & (np.asarray(pc.fill_null(pc.list_value_length(media["captions"]), 0)) == 0)
        result.total, result.edited, result.rejected = len(media) + len(rejected), int(is_edited.sum()), len(rejected)
        result.lacking = int(is_lacking.sum()) + sum(not item.captions for item in rejected)
        matches = find_matches(media, edits, words) & {"edited": is_edited, "lacking": is_lacking}.get(shown, True)
        rows = np.flatnonzero(matches)
        rows = rows[np.argsort(~is_lacking[rows], kind="stable")]
        search_words = words.lower().split()
        found = [
            item
            for item in rejected
            if shown != "edited" and all(word in f"{item.path}\n{item.captions}".lower() for word in search_words)
        ]
        result.count = len(found) + len(rows)
        start = result.start = parse_first_item(query, result.count)
        first_row = max(0, start - len(found))
        result.items = found[start : start + limit]
        rows = rows[first_row : first_row + limit - len(result.items)]
        result.items += list_items(media.take(pa.array(rows)), edits)
    except LatentpressError as error:
        result.problem = error
    return result


def show(request: Request) -> Response:
    site = site_of(request)
    result, thumbnails = _find(site, request.query_params), site.thumbnails.list_known()
    has_new = any(item.media_id not in thumbnails for item in result.items)
    card = build_job_card(JOB, "pictures of these items", site.programs)
    is_unread = isinstance(result.problem, NotDiscovered)
    jobs = [*(["discover"] if result.rejected or is_unread else []), *(["caption"] if site.config().caption else [])]
    return render(
        request,
        "captions.html",
        title="Captions",
        result=result,
        step=MAX_SHOWN,
        end=result.start + len(result.items),
        thumbnails=thumbnails,
        card=card,
        can_start=card.state not in ACTIVE_STATES,
        has_new=has_new,
        is_unread=is_unread,
        jobs=[build_job_card(job, STAGES[job], site.programs) for job in jobs],
        model="" if site.config().caption else _describe_model(site.config()),
        is_due=has_new and site.programs.may_begin(JOB),
    )


def _describe_model(config: Config) -> str:
    """The model that would describe pictures, and the size of its download."""
    if caption_settings(config.model.family_spec).get("model") == CAPTION_MODEL:
        return f"{CAPTION_MODEL}, a download of {CAPTION_MODEL_GB} GB if it is not on this machine"
    return f"the text encoder of {config.model.family}, without a further download"


def describe_all(request: Request, form: Form) -> str:
    """Choose a model for captions, and start the programs that describe items without a caption."""
    site = site_of(request)
    config = site.config()
    if config.caption is None:
        settings = caption_settings(config.model.family_spec)
        set_options(site, {("caption", option): value for option, value in settings.items()})
    site.programs.start("run", "--set=stages.order=[discover, caption]")
    return "items without a caption are being described; the page Run shows the progress"


def set_trigger(request: Request, form: Form) -> str:
    """Set the words that are put before captions of a dataset that lack them, and that items without a caption get."""
    site, words = site_of(request), " ".join(form.get("trigger", "").split())
    ids = [dataset.id for dataset in site.config().datasets]
    if form.get("dataset") not in ids or not 0 < len(words) <= MAX_TRIGGER:
        raise Refused("no words were given", f"write a name or a few words, at most {MAX_TRIGGER} characters")
    set_options(site, {("datasets", ids.index(form["dataset"]), "trigger"): words})
    return f"the next run puts {words!r} before captions that lack it; items without a caption get it as theirs"


def replace(request: Request, form: Form) -> str:
    """Replace a text in all captions of a dataset."""
    site, old, new = site_of(request), form.get("find", ""), form.get("with", "")
    items = [item for item in _find(site, form, sys.maxsize).items if old and old in item.captions]
    captions = {item.media_id: split_lines(item.captions.replace(old, new)) for item in items}
    if not captions:
        raise Refused(f"no caption contains {old!r}" if old else "no text was given", "check the text; case matters")
    for texts in captions.values():
        check_captions(texts)
    for item in items:
        if item.file is not None:
            write_caption_file(item, captions.pop(item.media_id), json.loads(item.before))
    before = {item.media_id: json.loads(item.before or "null") for item in items}
    write_edits(open_store(site.root), captions, before)
    return f"replaced in the captions of {len(items)} items"


def make_thumbnails(request: Request, form: Form) -> str:
    """Start the program that makes thumbnails of the items on the page from which the form was sent."""
    site = site_of(request)
    result = _find(site, form)
    if not result.items:
        raise Refused("no items match this search", "load the page again")
    ids = dict.fromkeys(item.media_id for item in result.items)
    site.programs.start(JOB, f"--dataset={result.search['dataset']}", *(f"--media-id={media_id}" for media_id in ids))
    return f"thumbnails of {len(ids)} items are being made"


def save(request: Request, form: Form) -> str:
    site, media_id, verb = site_of(request), request.path_params["media_id"], request.path_params["verb"]
    if verb not in ("save", "restore") or not (
        _is_known(site, media_id) or media_id in list_uncaptioned(site.config(), site.list_rejects())
    ):
        raise HTTPException(404, "the item or the action does not exist")
    try:
        before = parse_json((form.get("before", "") or "null").encode())
    except ValueError as error:
        raise HTTPException(400, "'before' is not valid JSON") from error
    if before is not None and not (isinstance(before, list) and all(isinstance(text, str) for text in before)):
        raise HTTPException(400, "'before' must be null or a list of strings")
    if verb == "restore":
        write_edit(open_store(site.root), media_id, None, before)
        return "the caption of the file is used again"
    captions = lines_of(form, "text")
    check_captions(captions)
    if item := list_uncaptioned(site.config(), site.list_rejects()).get(media_id):
        return write_caption_file(item, captions, before)
    write_edit(open_store(site.root), media_id, captions, before)
    return "saved; the next run plans with it"


def _is_known(site: Site, media_id: str) -> bool:
    if not re.fullmatch("[0-9a-f]{32}", media_id, re.ASCII):
        return False
    for dataset in site.config().datasets:
        try:
            ids = read_media_table(open_store(site.root), dataset.id)["media_id"]
        except LatentpressError:
            continue
        if pc.any(pc.equal(ids, media_id)).as_py():
            return True
    return False


PAGE = Page(
    "Captions",
    PATH,
    (
        get(PATH, show),
        action(f"{PATH}/thumbnails", make_thumbnails, PATH),
        action(f"{PATH}/describe", describe_all, PATH),
        action(f"{PATH}/trigger", set_trigger, PATH),
        action(f"{PATH}/replace", replace, PATH),
        action(PATH + "/{media_id}/{verb}", save, PATH),
    ),
)
