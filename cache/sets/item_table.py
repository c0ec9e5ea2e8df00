"""The table that `features` makes of a configuration's items: items/<name>.arrow, of schemas.tables.FEATURES_SCHEMA,
one row of each media id. The name is a hash of what the rows were made of, among it the items."""

import pyarrow as pa
import pyarrow.compute as pc

from cache.sets.table_checks import check_items
from cache.store.store import Store
from schemas.tables import EXTRA_PREFIX, FEATURE_COLUMNS, GROUP


def item_table_path(name: str) -> str:
    return f"items/{name}.arrow"


def read_item_table(store: Store, name: str) -> pa.Table | None:
    """None where it was not made. DamageError where it is not as it was written."""
    try:
        return store.read_table(item_table_path(name), check_items)
    except FileNotFoundError:
        return None


def join_item_table(media: pa.Table, items: pa.Table) -> pa.Table:
    """A media table with the columns of `items`, as those of a manifest, of which one of the same name stays; and with
    GROUP, by which near-duplicates stay together."""
    row = pc.index_in(media["media_id"], value_set=items["media_id"].combine_chunks())
    for name in FEATURE_COLUMNS:
        values = items[name].take(row)
        if EXTRA_PREFIX + name not in media.column_names:
            media = media.append_column(EXTRA_PREFIX + name, values)
        if name == GROUP:
            media = media.append_column(GROUP, values)
    return media
