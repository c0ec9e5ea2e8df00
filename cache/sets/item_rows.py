"""Rows that an item stage makes from items, in a cache such as captions/<fingerprint>/, by the ids of its item plan.

A row's info identifies the row's item (`item_info`): its media id and, for a clip, the seconds that it spans. This file
also reads the table that `features` makes for a configuration's items: items/<name>.arrow, of
schemas.tables.FEATURES_SCHEMA, with one row for each media id; the name is a hash of all inputs, including the items.
"""

import errno
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cache.sets.table_checks import check_items
from cache.shards.shard import SUFFIXES, ShardRow, find_done_units
from cache.shards.shard_io import open_reader
from cache.store.damage import DamageError
from cache.store.json_checks import check_list, check_text
from cache.store.store import Store
from schemas.tables import EXTRA_PREFIX, FEATURE_COLUMNS, GROUP, MEASURES

PNG = "png"  # the tensor of a mask: the bytes of a gray PNG; for a clip, an animated PNG with a frame for each mask
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
CAPTIONS_SCHEMA = pa.schema([("sample_id", pa.string()), ("captions", pa.list_(pa.string()))])


def item_info(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a row's info that identifies its item. sample: the item's row of SAMPLES_SCHEMA."""
    if sample["kind"] == "image":
        return {"media_id": sample["media_id"]}
    frames = int(sample["geometry"]["bucket"].rpartition("@")[2])
    end = sample["start"] + (frames - 1) / sample["rate"]
    return {"media_id": sample["media_id"], "span": [round(sample["start"], 3), round(end, 3)]}


def iter_item_rows(store: Store, cache: str, paths: Iterable[str] | None = None) -> Iterator[tuple[str, int, ShardRow]]:
    """Yield (shard, row number, row) for every row of `cache`, or only of its shards at `paths`. Raises DamageError for
    a damaged row."""
    for path in sorted(find_done_units(store, cache).values()) if paths is None else paths:
        with open_reader(store, path) as shard:
            for number in range(len(shard)):
                yield path, number, shard.read(number)


def read_captions(store: Store, fingerprint: str) -> pa.Table:
    """Return a table of CAPTIONS_SCHEMA: the captions of every item of captions/<fingerprint>/. Raises DamageError for
    a damaged row and for a row with invalid values."""
    ids, captions = list[str](), list[list[str]]()
    for path, number, row in iter_item_rows(store, f"captions/{fingerprint}"):
        try:
            check_caption_row(row)
        except ValueError as error:
            raise DamageError(store.path(path), str(error), number, row.id) from error
        ids.append(row.id)
        captions.append(row.info["captions"])
    return pa.table([ids, captions], schema=CAPTIONS_SCHEMA)


def list_masks(store: Store, fingerprint: str) -> pa.Table:
    """Return a table with columns sample_id and path: every item of masks/<fingerprint>/ that has a mask, and the
    mask's path for `read_mask`. Reads only the shards' descriptions. Raises DamageError if a description can't be
    read."""
    cache, ids, paths = f"masks/{fingerprint}", list[str](), list[str]()
    for unit, path in sorted(find_done_units(store, cache).items()):
        with open_reader(store, path) as shard:
            ids += shard.meta.ids
            paths += [f"{cache}/{unit}/{name}" for name in shard.meta.ids]
    return pa.table([pa.array(ids, pa.string()), pa.array(paths, pa.string())], ["sample_id", "path"])


def read_mask(root: str, path: str) -> bytes:
    """Return the PNG at a path from `list_masks`. Raises FileNotFoundError if the shard or row does not exist, and
    DamageError if it is damaged."""
    store, (unit, _, name) = Store(root), path.rpartition("/")
    shard_path = next((unit + suffix for suffix in SUFFIXES.values() if store.exists(unit + suffix)), None)
    if shard_path is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), store.path(unit))
    with open_reader(store, shard_path) as shard:
        if name not in shard.meta.ids:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), store.path(path))
        row = shard.read(shard.meta.ids.index(name))
        try:
            check_mask_row(row)
        except ValueError as error:
            raise DamageError(store.path(shard_path), str(error), shard.meta.ids.index(name), name) from error
        return bytes(row.tensors[PNG].raw())


def check_mask_row(row: ShardRow) -> None:
    """Raise ValueError unless `row` is a valid row of a masks shard."""
    array = row.tensors.get(PNG)
    if array is None or len(row.tensors) > 1 or array.dtype != "uint8" or len(array.shape) != 1:
        raise ValueError("its tensors are not the bytes of a PNG")
    if bytes(array.raw()[: len(PNG_SIGNATURE)]) != PNG_SIGNATURE:
        raise ValueError("its mask is not a PNG")


def check_features_row(row: ShardRow) -> None:
    """Raise ValueError unless `row` is a valid row of a features shard."""
    measures = row.info.get("measures")
    if not isinstance(measures, dict) or measures.keys() != set(MEASURES):
        raise ValueError(f"its measures are not {', '.join(MEASURES)}")
    for name, value in measures.items():
        if not (type(value) is float and math.isfinite(value)) and not (name == "motion" and value is None):
            raise ValueError(f"its {name} is not a finite number")
    if "layouts" not in row.tensors or not row.tensors.keys() <= {"layouts", "features"}:
        raise ValueError("it lacks its layouts, or has further tensors")
    for name, array in row.tensors.items():
        if array.dtype != "float16" or len(array.shape) != (2 if name == "layouts" else 1):
            raise ValueError(f"its {name} are {array.dtype} of shape {array.shape}")


def check_caption_row(row: ShardRow) -> None:
    """Raise ValueError unless `row` is a valid row of a captions shard."""
    captions = check_list(row.info.get("captions"), "its captions")
    if not captions or row.tensors:
        raise ValueError("it lacks captions, or has tensors")
    for caption in captions:
        if not check_text(caption, "a caption").strip():
            raise ValueError("a caption is empty")


def item_table_path(name: str) -> str:
    return f"items/{name}.arrow"


def read_item_table(store: Store, name: str) -> pa.Table | None:
    """Return the table items/<name>.arrow, or None if it does not exist. Raises DamageError if it is damaged."""
    try:
        return store.read_table(item_table_path(name), check_items)
    except FileNotFoundError:
        return None


def join_item_table(media: pa.Table, items: pa.Table) -> pa.Table:
    """Return a media table with the columns of `items` added like columns of a manifest; a manifest column of the same
    name is kept. The column GROUP keeps near-duplicates together."""
    row = pc.index_in(media["media_id"], value_set=items["media_id"].combine_chunks())
    for name in FEATURE_COLUMNS:
        values = items[name].take(row)
        if EXTRA_PREFIX + name not in media.column_names:
            media = media.append_column(EXTRA_PREFIX + name, values)
        if name == GROUP:
            media = media.append_column(GROUP, values)
    return media
