"""Arrow schemas of every table that crosses a machine boundary. Change one, raise TABLES_VERSION.

Tables are Arrow IPC files. Shards (the encoded tensors) are described in `cache/` and docs/cache-format.md.
"""

from collections.abc import Sequence

import pyarrow as pa

#: Of shards (`cache/`), and apart from it, so that a new table makes no shard unreadable, of the tables here.
FORMAT_VERSION = 1
TABLES_VERSION = 3
#: Of a training set: TABLES_VERSION, or 4 where its samples have rows in shards of further kinds (`index_schema`).
SET_VERSIONS = (TABLES_VERSION, 4)

_str, _int, _long, _float = pa.string(), pa.int32(), pa.int64(), pa.float64()

#: An image or clip as it will be cut: whole media resized to resize_w x resize_h, then cropped at (x, y).
GEOMETRY_TYPE = pa.struct(
    [("bucket", _str), ("resize_w", _int), ("resize_h", _int), ("x", _int), ("y", _int)],
)

#: media/<dataset>/media.arrow: what discover found, one row an item, sorted by path. A path names an item within
#: its source, with "/" whatever the system: a file below the folder, "shard-000.tar/000123.jpg", a row of a table.
#: size in bytes; version changes when the item may have changed (modification time, ETag, ...). width, height:
#: pixels as shown (orientation applied). frames, rate (frames per second), duration (seconds), constant_rate (whether
#: frames follow each other evenly) are null for images.
#: scenes: seconds at which a new scene begins, null where they were not looked for. source, mask: companions.
#: Columns of a manifest follow as "extra.<name>", of whatever type they have.
MEDIA_SCHEMA = pa.schema(
    [
        ("path", _str),
        ("size", _long),
        ("version", _str),
        ("media_id", _str),
        ("kind", _str),  # image | video
        ("width", _int),
        ("height", _int),
        ("frames", _int),
        ("rate", _float),
        ("duration", _float),
        ("constant_rate", pa.bool_()),
        ("scenes", pa.list_(_float)),
        ("captions", pa.list_(_str)),
        ("captions_version", _str),  # of the caption file; null where captions come with the listing
        ("source", _str),  # path of the i2i source image within the companions' own source
        ("source_version", _str),
        ("source_id", _str),
        ("source_width", _int),
        ("source_height", _int),
        ("mask", _str),
        ("mask_version", _str),
        ("mask_id", _str),
        ("mask_kind", _str),
        ("mask_width", _int),
        ("mask_height", _int),
    ]
)
EXTRA_PREFIX = "extra."

#: plans/<generation>/samples.arrow: samples first planned in this generation. role: train | eval | validation.
SAMPLES_SCHEMA = pa.schema(
    [
        ("sample_id", _str),
        ("role", _str),
        ("dataset", _str),
        ("path", _str),
        ("media_id", _str),
        ("kind", _str),
        ("geometry", GEOMETRY_TYPE),
        ("start", _float),  # seconds from the first shown frame; null for images
        ("rate", _float),  # frames per second at which frames are chosen; null for images
        ("condition", _str),  # none | first-frame | source
        ("source_path", _str),
        ("source_id", _str),
        ("source_geometry", GEOMETRY_TYPE),
        ("mask_path", _str),
        ("mask_id", _str),
        ("mask_kind", _str),
        ("mask_geometry", GEOMETRY_TYPE),
    ]
)

#: plans/<generation>/texts.arrow: texts first planned in this generation. `text` is cleaned, `negative` says
#: that it is rendered as the pipeline renders a negative prompt. An image inside the prompt is named by
#: dataset, path, media id and geometry.
TEXTS_SCHEMA = pa.schema(
    [
        ("text_id", _str),
        ("template", _str),
        ("text", _str),
        ("negative", pa.bool_()),
        ("image_dataset", _str),
        ("image_path", _str),
        ("image_id", _str),
        ("image_geometry", GEOMETRY_TYPE),
    ]
)

#: plans/<generation>/units.arrow: work units first planned in this generation.
UNITS_SCHEMA = pa.schema(
    [
        ("unit_id", _str),
        ("kind", _str),  # text | latents
        ("bucket", _str),  # "" for text
        ("members", pa.list_(_str)),
        ("estimated_bytes", _long),
    ]
)

#: plans/<generation>/active.arrow: every sample of the training set as of this generation, one row for each
#: item (two files of the same bytes are two rows of one sample_id), with where its files lie now.
ACTIVE_SCHEMA = pa.schema(
    [
        ("sample_id", _str),
        ("role", _str),  # train | eval | validation
        ("dataset", _str),
        ("path", _str),
        ("source_path", _str),
        ("mask_path", _str),
        ("bucket", _str),
        ("repeats", _int),
        ("weight", _float),
        ("regularisation", pa.bool_()),
        ("texts", pa.list_(_str)),
        ("null_text", _str),
    ]
)

#: sets/<id>/index.arrow: one row for each sample; first those of role "train", then "eval", each sorted by bucket,
#: dataset, repeats, weight and sample_id. Shards and texts are numbers of rows in shards.arrow and texts.arrow of
#: the same set.
INDEX_SCHEMA = pa.schema(
    [
        ("sample_id", _str),
        ("role", _str),  # train | eval
        ("dataset", _str),
        ("bucket", _str),
        ("repeats", _int),
        ("weight", _float),
        ("regularisation", pa.bool_()),
        ("shard", _int),
        ("row", _int),
        ("texts", pa.list_(_int)),
        ("null_text", _int),
    ]
)
SET_TEXTS_SCHEMA = pa.schema([("text_id", _str), ("shard", _int), ("row", _int)])
SET_SHARDS_SCHEMA = pa.schema([("path", _str), ("kind", _str)])

#: rejects/<stage>/...: everything set aside. retry: tried again by itself when the plan still wants it.
REJECTS_SCHEMA = pa.schema(
    [
        ("stage", _str),
        ("item", _str),
        ("path", _str),
        ("reason", _str),
        ("message", _str),
        ("retry", pa.bool_()),
    ]
)


def index_schema(kinds: Sequence[str]) -> pa.Schema:
    """INDEX of a set whose samples also have a row in shards of these kinds: <kind>_shard and <kind>_row of each."""
    return pa.schema(
        [*INDEX_SCHEMA, *(pa.field(f"{kind}_{what}", _int) for kind in kinds for what in ("shard", "row"))]
    )


def further_kinds(columns: Sequence[str]) -> list[str]:
    """The kinds of `index_schema`, of an index with these columns."""
    return [
        name.removesuffix("_shard") for name in columns if name not in INDEX_SCHEMA.names and name.endswith("_shard")
    ]
