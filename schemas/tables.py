"""Arrow schemas of every table that crosses a machine boundary. Change one, raise TABLES_VERSION.

Tables are Arrow IPC files. docs/internals.md describes shards.
"""

from collections.abc import Collection, Sequence

import pyarrow as pa

from schemas.family import REFERENCE_PARTS, SOURCE_ROLES

FORMAT_VERSION = 1  # of shards
TABLES_VERSION = 1  # a version of its own, so that a new table leaves shards readable

_str, _int, _long, _float = pa.string(), pa.int32(), pa.int64(), pa.float64()


def _fields(type_: pa.DataType, *names: str) -> list[tuple[str, pa.DataType]]:
    return [(name, type_) for name in names]


TRAINED_ROLES = ("train", "eval")  # of samples that are in a training set, in the order of its index

_DRAWS = [("repeats", _int), ("weight", _float), ("regularization", pa.bool_())]

#: Media resized to resize_w x resize_h, then cropped to the bucket at (x, y).
GEOMETRY_TYPE = pa.struct([("bucket", _str), ("resize_w", _int), ("resize_h", _int), ("x", _int), ("y", _int)])

#: media/<dataset>/media.arrow: what discover found, one row per item, sorted by path. A path names an item within its
#: source, always with "/": a file below the folder, "shard-000.tar/000123.jpg", a row of a table. size: bytes. version:
#: changes when the item may have changed (modification time, ETag, ...). width, height: pixels as shown (orientation
#: applied). frames, rate (frames per second), duration (seconds), constant_rate (whether frames follow each other
#: evenly): null for images. track: number of the video track that is read, from 0; null if there is only one. scenes:
#: seconds at which each new scene begins, null where not looked for. captions_version: of the caption file, null where
#: the listing has the captions. source, mask: paths of companions within their own source. Further source images follow
#: as source_2, ..., the largest face as face (`media_schema`), and columns of a manifest as "extra.<name>", with their
#: own types.
MEDIA_SCHEMA = pa.schema(
    [
        ("path", _str),
        ("size", _long),
        *_fields(_str, "version", "media_id", "kind"),  # kind: image | video
        *_fields(_int, "width", "height", "frames"),
        *_fields(_float, "rate", "duration"),
        ("constant_rate", pa.bool_()),
        ("track", _int),
        ("scenes", pa.list_(_float)),
        ("captions", pa.list_(_str)),
        *_fields(_str, "captions_version", "source", "source_version", "source_id"),
        *_fields(_int, "source_width", "source_height"),
        *_fields(_str, "mask", "mask_version", "mask_id", "mask_kind"),
        *_fields(_int, "mask_width", "mask_height"),
    ]
)
EXTRA_PREFIX = "extra."
FACE = "face"
#: The kind of a mask that `masks` made, beside image and video: an image, or for each frame of the clip one.
MADE = "made"

#: Of a picture or clip, without a model. luminance, dark, bright, contrast: of 0 to 1. bar_*: shares of a side that are
#: black. motion: null for images.
MEASURES = (
    *("sharpness", "luminance", "dark", "bright", "contrast"),
    *("bar_left", "bar_right", "bar_top", "bar_bottom", "motion"),
)
#: items/<name>.arrow: what `features` made of items, one row per media id, sorted by it. outlier: distance from the
#: rest, 0 to 2. cluster: media id of the item nearest to the center of its cluster. Both null without a model.
#: duplicate_group: of near-duplicates, the media id of the best; null without any. duplicate_of: the same, null for the
#: best.
FEATURES_SCHEMA = pa.schema(
    [
        ("media_id", _str),
        *_fields(_float, *MEASURES, "outlier"),
        *_fields(_str, "cluster", "duplicate_group", "duplicate_of"),
    ]
)
FEATURE_COLUMNS = tuple(FEATURES_SCHEMA.names[1:])
GROUP = "duplicate_group"

#: captions/edits/<number>.arrow: captions that a person edited, one row per media id, sorted by it. captions: the
#: alternatives, at least one. edited: seconds since 1970.
CAPTION_EDITS_SCHEMA = pa.schema([("media_id", _str), ("captions", pa.list_(_str)), ("edited", _float)])

#: plans/<generation>/samples.arrow: samples first planned in this generation. role: train | eval | validation, or of a
#: reference image, which has a row of its own, that of its companion (`schemas.family.SOURCE_ROLES`), in whose
#: place its path is. An item plan has rows of role item: whole pictures, and a few frames of each clip.
SAMPLES_SCHEMA = pa.schema(
    [
        *_fields(_str, "sample_id", "role", "dataset", "path", "media_id", "kind"),
        ("geometry", GEOMETRY_TYPE),
        *_fields(_float, "start", "rate"),  # seconds from the first shown frame, frames per second; null for images
        *_fields(_str, "condition", "source_path", "source_id"),  # none | first-frame | source | references
        ("source_geometry", GEOMETRY_TYPE),
        *_fields(_str, "mask_path", "mask_id", "mask_kind"),
        ("mask_geometry", GEOMETRY_TYPE),
    ]
)

#: plans/<generation>/texts.arrow: texts first planned in this generation. text: cleaned. negative: rendered as the
#: pipeline renders a negative prompt. image_*: the image inside the prompt. A plan whose prompts have reference images
#: has one more column (`texts_schema`), and in image_dataset the dataset of these.
TEXTS_SCHEMA = pa.schema(
    [
        *_fields(_str, "text_id", "template", "text"),
        ("negative", pa.bool_()),
        *_fields(_str, "image_dataset", "image_path", "image_id"),
        ("image_geometry", GEOMETRY_TYPE),
    ]
)

#: plans/<generation>/units.arrow: work units first planned in this generation. kind: text | latents, of an
#: item plan items. bucket: "" for text.
UNITS_SCHEMA = pa.schema(
    [*_fields(_str, "unit_id", "kind", "bucket"), ("members", pa.list_(_str)), ("estimated_bytes", _long)]
)

#: plans/<generation>/active.arrow: every active sample with the current paths of its files, one row per item (two files
#: of the same bytes are two rows of one sample_id). role: as of samples. A plan with reference images has one more
#: column (`active_schema`), and the sizes of a sample's references in its bucket.
ACTIVE_SCHEMA = pa.schema(
    [
        *_fields(_str, "sample_id", "role", "dataset", "path", "source_path", "mask_path", "bucket"),
        *_DRAWS,
        ("texts", pa.list_(_str)),
        ("null_text", _str),
    ]
)

#: sets/<id>/index.arrow: one row per sample; first those of role "train", then "eval", each sorted by bucket, dataset,
#: repeats, weight and sample_id. Shards and texts are row numbers in the set's shards.arrow and texts.arrow.
INDEX_SCHEMA = pa.schema(
    [
        *_fields(_str, "sample_id", "role", "dataset", "bucket"),  # role: train | eval
        *_DRAWS,
        *_fields(_int, "shard", "row"),
        ("texts", pa.list_(_int)),
        ("null_text", _int),
    ]
)
SET_TEXTS_SCHEMA = pa.schema([("text_id", _str), ("shard", _int), ("row", _int)])
SET_SHARDS_SCHEMA = pa.schema([("path", _str), ("kind", _str)])

#: rejects/<stage>/...: everything set aside. retry: whether the next run tries again.
REJECTS_SCHEMA = pa.schema([*_fields(_str, "stage", "item", "path", "reason", "message"), ("retry", pa.bool_())])


def media_schema(sources: int, faces: bool = False) -> pa.Schema:
    """MEDIA_SCHEMA with the columns of so many source images, the first's it has itself, and with that of faces: x, y,
    width and height in pixels of the largest, an empty list for none, null where not looked for."""
    further = [
        pa.field(name.replace("source", role, 1), MEDIA_SCHEMA.field(name).type)
        for role in SOURCE_ROLES[1:sources]
        for name in ("source", "source_version", "source_id", "source_width", "source_height")
    ]
    return pa.schema([*MEDIA_SCHEMA, *further, *([pa.field(FACE, pa.list_(_int))] if faces else [])])


def media_schema_of(columns: Collection[str]) -> pa.Schema:
    """The `media_schema` of a table with these columns."""
    return media_schema(sum(role in columns for role in SOURCE_ROLES), FACE in columns)


def active_schema(references: bool) -> pa.Schema:
    """ACTIVE_SCHEMA; with references: and the ids of each sample's references, in their order."""
    return pa.schema([*ACTIVE_SCHEMA, *([pa.field("references", pa.list_(_str))] if references else [])])


def texts_schema(references: bool) -> pa.Schema:
    """TEXTS_SCHEMA; with references: and the ids of those in each prompt, in their order."""
    return pa.schema([*TEXTS_SCHEMA, *([pa.field("references", pa.list_(_str))] if references else [])])


def plan_schema(name: str, columns: Sequence[str]) -> pa.Schema:
    """The schema of a plan's table "samples", "texts", "units" or "active" with these columns."""
    made = {"texts": texts_schema, "active": active_schema}.get(name)
    return made("references" in columns) if made else {"samples": SAMPLES_SCHEMA, "units": UNITS_SCHEMA}[name]


def index_schema(kinds: Sequence[str], references: int = 0) -> pa.Schema:
    """INDEX_SCHEMA with <kind>_shard and <kind>_row of each further kind of shard, and <part>_id, _shard and _row of so
    many of REFERENCE_PARTS, null where a sample has fewer."""
    columns = [pa.field(f"{kind}_{column}", _int) for kind in kinds for column in ("shard", "row")]
    for part in REFERENCE_PARTS[:references]:
        columns += [pa.field(f"{part}_id", _str), *(pa.field(f"{part}_{column}", _int) for column in ("shard", "row"))]
    return pa.schema([*INDEX_SCHEMA, *columns])


def further_kinds(columns: Sequence[str]) -> list[str]:
    """The kinds for which `index_schema` has these columns."""
    added = [name.removesuffix("_shard") for name in columns if name.endswith("_shard")]
    return [kind for kind in added if kind not in REFERENCE_PARTS]


def reference_parts(columns: Sequence[str]) -> list[str]:
    """The names of REFERENCE_PARTS for which `index_schema` has these columns."""
    return [part for part in REFERENCE_PARTS if f"{part}_id" in columns]
