"""The captions of a dataset next to thumbnails: read, searched, and edited one by one.

Edits are stored in the root by the hash of the media file. They are used instead of the captions in the user's files,
which do not change; the next `bucket` plans with them.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cache.sets.caption_edits import apply_edits, read_edits, write_edit
from cache.sets.item_rows import iter_item_rows
from cache.shards.shard import ARROW_SUFFIX, TAR_SUFFIX
from cache.store.files import Entry
from cache.store.store import Store
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.json_records import parse_json
from schemas.text_format import split_lines
from stages.discovery.media_table import read_media_table
from stages.encoding.stage_registry import CAPTION
from stages.pages.ui.app import Form, Page, Site, action, get, lines_of, parse_first_item, render, site_of
from stages.pages.ui.child_programs import STAGES, Refused
from stages.pages.ui.job_cards import ACTIVE_STATES, build_job_card

PATH, JOB = "/captions", "caption-thumbnails"
MAX_SHOWN = 50  # items on one page
MAX_CHARACTERS = 100_000  # characters in all captions of an item


@dataclass(frozen=True)
class Item:
    """An item on the page. captions: the captions in use, one per line, with edits. file_captions: the captions that
    `discover` found, one per line. before: the stored edit as JSON, "" if the item was not edited."""

    media_id: str
    path: str
    about: str
    captions: str
    file_captions: str
    before: str


@lru_cache(maxsize=8)
def _store(root: str) -> Store:
    """A store that all requests share, because it reads a table again only if the table has changed."""
    return Store(root)


@dataclass
class SearchResult:
    """The result of a search in a dataset's items. names: ids of the datasets. search: values of the search form.
    items: the items on this page. total, edited: numbers of all items and of edited items in the dataset. count: number
    of items found. start: index of the page's first item among the items found."""

    names: list[str]
    search: dict[str, str]
    items: list[Item] = field(default_factory=list)
    total: int = 0
    edited: int = 0
    count: int = 0
    start: int = 0
    described_paths: frozenset[str] = frozenset()  # paths of items whose captions a model made
    model_problem: LatentpressError | None = None  # why captions that a model made can't be shown
    problem: LatentpressError | None = None


def _find(site: Site, query: Mapping[str, str]) -> SearchResult:
    names = [dataset.id for dataset in site.config().datasets if not dataset.disabled]
    dataset = query.get("dataset", "") if query.get("dataset") in names else next(iter(names), "")
    words, only_edited = query.get("words", ""), bool(query.get("edited"))
    result = SearchResult(names, {"dataset": dataset, "words": words, "edited": "1" if only_edited else ""})
    try:
        store = _store(site.root)
        edits, media = read_edits(store), read_media_table(store, dataset)
        try:
            media, result.described_paths = add_model_captions(media, read_model_captions(store, site.config()))
        except LatentpressError as error:
            result.model_problem = error
        is_edited = pc.is_in(media["media_id"], value_set=edits["media_id"].combine_chunks())
        result.total, result.edited = len(media), pc.sum(is_edited).as_py() or 0
        rows = np.flatnonzero(_matches(media, edits, words) & (np.asarray(is_edited) | (not only_edited)))
        result.count = len(rows)
        result.start = parse_first_item(query, result.count)
        result.items = list(_list_items(media.take(pa.array(rows[result.start : result.start + MAX_SHOWN])), edits))
    except LatentpressError as error:
        result.problem = error
    return result


def show(request: Request) -> Response:
    site = site_of(request)
    result, thumbnails = _find(site, request.query_params), site.thumbnails.list_known()
    has_new = any(item.media_id not in thumbnails for item in result.items)
    card = build_job_card(JOB, "thumbnails of these items", site.programs)
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
        describing=build_job_card("caption", STAGES["caption"], site.programs) if site.config().caption else None,
        is_due=has_new and site.programs.may_begin(JOB),
    )


def make_thumbnails(request: Request, form: Form) -> str:
    """Start the program that makes thumbnails of the items on the page from which the form was sent."""
    site = site_of(request)
    result = _find(site, form)
    if not result.items:
        raise Refused("no items match this search", "load the page again")
    ids = dict.fromkeys(item.media_id for item in result.items)
    site.programs.start(JOB, f"--dataset={result.search['dataset']}", *(f"--media-id={media_id}" for media_id in ids))
    return f"thumbnails of {len(ids)} items are being made"


def read_model_captions(store: Store, config: Config) -> dict[str, list[str]]:
    """Read the captions that the configured model made: media id -> captions; for a video, the captions of all its
    clips. Raises LatentpressError if a shard is damaged or the model is missing."""
    captions = dict[str, list[str]]()
    if config.caption is None:
        return captions
    cache = f"captions/{CAPTION.fingerprint(config)}"
    for file in store.list_files(cache):
        if file.name.endswith((ARROW_SUFFIX, TAR_SUFFIX)):
            for media_id, texts in _read_shard(config.root, f"{cache}/{file.name}", file):
                item_captions = captions.setdefault(media_id, [])
                item_captions += [text for text in texts if text not in item_captions]
    return captions


@lru_cache(maxsize=1000)
def _read_shard(root: str, shard: str, version: Entry) -> list[tuple[str, list[str]]]:
    """(media id, captions) of each row of a shard. They are kept in memory, because the root may be an object store.
    version: the shard's entry in the store, which changes with the shard."""
    rows = iter_item_rows(_store(root), shard.rpartition("/")[0], [shard])
    return [(row.info["media_id"], row.info["captions"]) for _, _, row in rows]


def add_model_captions(media: pa.Table, model_captions: Mapping[str, Sequence[str]]) -> tuple[pa.Table, frozenset[str]]:
    """Add captions of a model to the items without captions of their own. media: media table. model_captions: media id
    -> captions. Returns (media table, paths of the items that got captions)."""
    lacking = pc.equal(pc.fill_null(pc.list_value_length(media["captions"]), 0), 0)
    ids = [*dict.fromkeys(name for name in media["media_id"].filter(lacking).to_pylist() if name in model_captions)]
    table = pa.table({"media_id": pa.array(ids, pa.string()), "captions": [list(model_captions[name]) for name in ids]})
    described = pc.and_(lacking, pc.is_in(media["media_id"], value_set=table["media_id"].combine_chunks()))
    if not ids:
        return media, frozenset()
    captions = pc.if_else(described, apply_edits(media, table)["captions"], media["captions"])
    number = media.schema.get_field_index("captions")
    return media.set_column(number, "captions", captions), frozenset(media["path"].filter(described).to_pylist())


def _matches(media: pa.Table, edits: pa.Table, words: str) -> np.ndarray:
    """(n,) bool, whether an item's path, captions and edited captions contain all words (case-insensitive)."""
    matches = np.ones(len(media), bool)
    if not words.split():
        return matches
    row = pc.index_in(media["media_id"], value_set=edits["media_id"].combine_chunks())
    edited_captions = pc.binary_join(edits["captions"].combine_chunks(), "\n").take(row.combine_chunks())
    columns = [
        media["path"].combine_chunks(),
        pc.binary_join(media["captions"].combine_chunks(), "\n"),
        edited_captions,
    ]
    text = pc.utf8_lower(pc.binary_join_element_wise(*(pc.fill_null(column, "") for column in columns), "\n"))
    for word in words.lower().split():
        matches &= np.asarray(pc.match_substring(text, word))
    return matches


def _list_items(media: pa.Table, edits: pa.Table) -> Iterator[Item]:
    page_edits = edits.filter(pc.is_in(edits["media_id"], value_set=media["media_id"].combine_chunks()))
    captions_by_id = {row["media_id"]: row["captions"] for row in page_edits.to_pylist()}
    names = ["media_id", "path", "kind", "width", "height", "captions"]
    for row in media.select(names).to_pylist():
        edit, file_captions = captions_by_id.get(row["media_id"]), row["captions"] or []
        about = f"{row['kind']}, {row['width']}x{row['height']}"
        before = "" if edit is None else json.dumps(edit)
        yield Item(
            row["media_id"], row["path"], about, _one_a_line(edit or file_captions), _one_a_line(file_captions), before
        )


def _one_a_line(captions: Sequence[str]) -> str:
    """Captions as the form shows them, one per line. A caption from a table may have several lines, which are joined,
    so that it stays one caption."""
    return "\n".join(" ".join(split_lines(text)) for text in captions)


def save(request: Request, form: Form) -> str:
    site, media_id, verb = site_of(request), request.path_params["media_id"], request.path_params["verb"]
    if verb not in ("save", "restore") or not _is_known(site, media_id):
        raise HTTPException(404, "the item or the action does not exist")
    try:
        before = parse_json((form.get("before", "") or "null").encode())
    except ValueError as error:
        raise HTTPException(400, "'before' is not valid JSON") from error
    if before is not None and not (isinstance(before, list) and all(isinstance(text, str) for text in before)):
        raise HTTPException(400, "'before' must be null or a list of strings")
    if verb == "restore":
        write_edit(_store(site.root), media_id, None, before)
        return "the caption of the file is used again"
    captions = lines_of(form, "text")
    if not captions:
        raise Refused(
            "the caption is empty",
            "write a caption; to leave the item out, exclude it with the dataset's option `where`",
        )
    if any("\0" in text for text in captions):
        raise Refused("a caption contains a zero byte", "remove it, and save again")
    if len("".join(captions)) > MAX_CHARACTERS:
        raise Refused(f"the captions have more than {MAX_CHARACTERS} characters", "shorten them")
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


PAGE = Page(
    "Captions",
    PATH,
    (
        get(PATH, show),
        action(f"{PATH}/thumbnails", make_thumbnails, PATH),
        action(PATH + "/{media_id}/{verb}", save, PATH),
    ),
)
