"""Captions that a person edited, by media id: captions/edits/<number>.arrow under the root, of
schemas.tables.CAPTION_EDITS_SCHEMA. Edited captions take precedence over captions in the user's files, which
are not changed.

Each change writes the whole table under the next number; if several writers use the same number, one succeeds and the
other writers try again. The newest table is valid. The last KEPT_TABLES tables stay, so that damage loses only the last
change.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from cache.sets.table_checks import check_caption_edits
from cache.store import arrow_ipc
from cache.store.layout import is_project_file
from cache.store.store import Store
from schemas.errors import LatentpressError
from schemas.tables import CAPTION_EDITS_SCHEMA

FOLDER = "captions/edits"
KEPT_TABLES = 5
MAX_TRIES = 50  # attempts at one change while other processes change the table, too


class EditConflict(LatentpressError):
    """Another person or program edited the same caption."""


def list_edit_tables(store: Store) -> list[str]:
    """Return the paths of the tables, the newest last."""
    return [f"{FOLDER}/{name}" for name in store.list_names(FOLDER) if is_project_file(f"{FOLDER}/{name}")]


def read_edits(store: Store) -> pa.Table:
    """Return the table of edited captions, each media id once; empty if no caption was edited. Raises DamageError if
    the table is damaged."""
    return _read_newest(store)[1]


def _read_newest(store: Store) -> tuple[str, pa.Table]:
    """Return the newest table's path and the table; ("", empty table) if no table exists."""
    for _ in range(MAX_TRIES):
        tables = list_edit_tables(store)
        if not tables:
            break
        try:
            return tables[-1], store.read_table(tables[-1], check_caption_edits)
        except FileNotFoundError:  # many changes since the listing removed it
            continue
    return "", CAPTION_EDITS_SCHEMA.empty_table()


def apply_edits(media: pa.Table, edits: pa.Table) -> pa.Table:
    """Return a media table with the edited captions in place of the captions that `discover` found."""
    if not len(edits) or not len(media):
        return media
    row = pc.index_in(media["media_id"], value_set=edits["media_id"].combine_chunks())
    if row.null_count == len(row):
        return media
    number = media.schema.get_field_index("captions")
    edited = edits["captions"].combine_chunks().take(row.combine_chunks())
    captions = pc.if_else(edited.is_valid(), edited, media["captions"].combine_chunks())
    return media.set_column(number, media.schema.field(number), captions.cast(media.schema.field(number).type))


def write_edit(
    store: Store, media_id: str, captions: Sequence[str] | None, before: Sequence[str] | None = None
) -> None:
    """Store edited captions for an item. captions: at least one caption, or None to use the captions of the item's
    files again. before: the item's edited captions when the editor read them, or None if they were not edited. Raises
    EditConflict if the stored captions differ from `before`."""
    write_edits(store, {media_id: captions}, {media_id: before})


def write_edits(
    store: Store, captions: Mapping[str, Sequence[str] | None], before: Mapping[str, Sequence[str] | None]
) -> None:
    """Like `write_edit`, for several items at once. captions, before: media id -> captions."""
    ids = pa.array(captions, pa.string())
    expected = {media_id: list(texts) for media_id in captions if (texts := before.get(media_id)) is not None}
    for _ in range(MAX_TRIES):
        path, edits = _read_newest(store)
        is_item = pc.is_in(edits["media_id"], value_set=ids)
        current = {row["media_id"]: row["captions"] for row in edits.filter(is_item).to_pylist()}
        if current != expected:
            raise EditConflict("another person or program edited this caption", "load the page again, then edit it")
        other_edits = edits.filter(pc.invert(is_item))
        if not current and not any(captions.values()):
            return
        moment = time.time()
        rows = [
            {"media_id": media_id, "captions": list(texts), "edited": moment}
            for media_id, texts in sorted(captions.items())
            if texts is not None
        ]
        added = pa.Table.from_pylist(rows, CAPTION_EDITS_SCHEMA)
        table = pa.concat_tables([other_edits, added]).sort_by("media_id").combine_chunks()
        check_caption_edits(table)
        number = int(path[-len("000000.arrow") :].removesuffix(".arrow")) + 1 if path else 1
        if not store.create_new(f"{FOLDER}/{number:06d}.arrow", partial(arrow_ipc.write_table, table)):
            continue
        # If many changes since the table was read made this number free again, our table is not the newest table.
        stored = read_edits(store)
        if stored.filter(pc.is_in(stored["media_id"], value_set=ids)).to_pylist() != added.to_pylist():
            store.remove(f"{FOLDER}/{number:06d}.arrow")
            continue
        for old_table in list_edit_tables(store)[:-KEPT_TABLES]:
            store.remove(old_table)
        return
    raise LatentpressError(
        f"{store.path(FOLDER)} was changed by other programs {MAX_TRIES} times", "save the caption again"
    )
