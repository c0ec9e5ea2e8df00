"""The items of a dataset with captions that a person reads and edits: captions of files, edits, captions of a model;
and the items that `discover` rejected because they have no caption.

Edits are stored in the root by the hash of the media file. A rejected item was not hashed: its caption is written into
a new file next to it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.sets.caption_edits import EditConflict, apply_edits
from cache.sets.item_rows import iter_item_rows
from cache.shards.shard import ARROW_SUFFIX, TAR_SUFFIX
from cache.store.files import Entry
from cache.store.store import Store
from schemas.config.loading import read_text
from schemas.config.pipeline import Config
from schemas.errors import UsageError
from schemas.text_format import split_lines
from stages.configuring.text import write_file
from stages.discovery.sources.captions import MISSING_REASONS
from stages.encoding.stage_registry import CAPTION
from stages.maintenance.rejected_items import RejectedItem
from stages.pages.thumbnails import can_have_thumbnail, thumbnail_id

MAX_CHARACTERS = 100_000  # characters in all captions of an item


@dataclass(frozen=True)
class Item:
    """An item on the page. captions: the captions in use, one per line, with edits. file_captions: the captions that
    `discover` found, one per line. before: the stored edit as JSON, "" if the item was not edited. file: for an item
    that was rejected because it has no caption, the file into which its caption is written."""

    media_id: str
    path: str
    about: str
    captions: str
    file_captions: str
    before: str
    file: Path | None = None


@lru_cache(maxsize=8)
def open_store(root: str) -> Store:
    """A store that all requests share, because it reads a table again only if the table has changed."""
    return Store(root)


def list_uncaptioned(config: Config, rejected: Iterable[RejectedItem], dataset: str = "") -> dict[str, Item]:
    """The items that `discover` rejected because they have no caption, if it can be written into a file next to them:
    id of the thumbnail -> item. dataset: id of the dataset, "" for all."""
    folders = {
        one.id: Path(one.root)
        for one in config.datasets
        if dataset in ("", one.id) and (one.resolved_source, one.resolved_caption_strategy) == ("folder", "textfile")
    }
    items: dict[str, Item] = {}
    for item in rejected:
        if item.stage == "discover" and item.reason in MISSING_REASONS and item.dataset in folders:
            file = (folders[item.dataset] / item.path).with_suffix(".txt")
            is_inside = file.parent.resolve().is_relative_to(folders[item.dataset].resolve())
            if can_have_thumbnail(item.path) and is_inside and not file.is_symlink():  # a link is never replaced
                lines = split_lines(read_text(file)) if file.is_file() else []
                before = json.dumps(lines) if lines else ""
                about = f"written into {file.name}" if lines else "no caption"
                items[thumbnail_id(item)] = Item(
                    thumbnail_id(item), item.path, about, "\n".join(lines), "", before, file
                )
    return items


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
    rows = iter_item_rows(open_store(root), shard.rpartition("/")[0], [shard])
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


def find_matches(media: pa.Table, edits: pa.Table, words: str) -> np.ndarray:
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


def list_items(media: pa.Table, edits: pa.Table) -> Iterator[Item]:
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


def check_captions(captions: Sequence[str]) -> None:
    """Raise UsageError if captions are not valid."""
    if not captions:
        raise UsageError(
            "the caption is empty",
            "write a caption; to leave the item out, exclude it with the dataset's option `where`",
        )
    if any("\0" in text for text in captions):
        raise UsageError("a caption contains a zero byte", "remove it, and save again")
    if len("".join(captions)) > MAX_CHARACTERS:
        raise UsageError(f"the captions have more than {MAX_CHARACTERS} characters", "shorten them")


def write_caption_file(item: Item, captions: Sequence[str], before: Sequence[str] | None) -> str:
    """Write the caption of a rejected item into the file next to it, which must have `before` as its content."""
    assert item.file is not None
    if item.before != (json.dumps(before) if before else ""):
        raise EditConflict("another person or program edited this caption", "load the page again, then edit it")
    write_file(item.file, read_text(item.file) if item.file.exists() else None, "".join(f"{one}\n" for one in captions))
    return f"written into {item.file.name}; the next discover reads it"
