"""Work units: samples of one bucket, or texts, with about cache.unit_mib of output.

Samples are in the order of their ids, and texts in the order of the samples that use them, so that the texts of a unit
of samples are in few units. Training that reads few shards of samples at a time (`train.shuffle_shards`) then also
reads few shards of texts. Among the texts of TEXT_GROUP units, texts of similar length share a unit, so that batches
need little padding. Units without a shard can be divided again, for jobs that are too short for them.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.sets.plans import Plan, Unit
from cache.sets.text_lengths import image_buckets, image_tokens
from cache.shards.shard import unit_name
from cache.store.layout import ENCODE_PROGRAMS
from schemas import identity
from schemas.config.encoding import Latents, Model, Text
from schemas.config.pipeline import VALIDATION
from schemas.family import SOURCE_ROLES
from schemas.geometry import Bucket
from schemas.identity import mix_bits
from schemas.tables import SAMPLES_SCHEMA, TEXTS_SCHEMA, UNITS_SCHEMA, texts_schema
from stages.planning.candidates import drop_duplicate_ids
from stages.planning.samples import list_ids

TEXT_GROUP = 4  # units among which texts are sorted by length; for the cost of padding, see docs/internals.md
MAX_MEMBERS = 256  # members of a unit of items, also for small pictures; a kill loses at most one unit
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}


def sample_tensor_bytes(model: Model, latents: Latents, samples: pa.Table) -> np.ndarray:
    """(n,) bytes of each sample's tensors in its shard: latent, condition and mask."""
    family = model.family_spec
    moments = family.posterior and latents.posterior == "moments"
    channels = family.latent_channels * (2 if moments else 1)
    buckets = pc.struct_field(samples.column("geometry"), "bucket").combine_chunks().dictionary_encode()
    shapes = [
        Bucket.parse(name).latent_shape(family.spatial_stride, family.temporal_stride)
        for name in buckets.dictionary.to_pylist()
    ]
    frames, height, width = np.array(shapes, np.int64).reshape(-1, 3)[np.asarray(buckets.indices)].T
    frame_bytes = height * width * _DTYPE_BYTES[latents.precision or model.precision]
    conditioned = np.asarray(pc.is_in(samples.column("condition"), value_set=pa.array(["source", "first-frame"])))
    condition_frames = family.condition_frames(model.task)
    stored_frames = conditioned * (frames if condition_frames is None else max(1, condition_frames))
    mask_frames = np.asarray(pc.is_valid(samples.column("mask_id"))) * frames
    return ((frames + stored_frames) * channels + mask_frames) * frame_bytes


def text_tensor_bytes(model: Model, text: Text, texts: pa.Table) -> np.ndarray:
    """(n,) estimated bytes of each text's tensors, with one token per four characters and the tokens of the image."""
    tokens = 8 + np.asarray(pc.utf8_length(texts.column("text"))) // 4 + image_tokens(model, texts)
    template = text.stored_template(model.template)
    if template.padded:
        tokens = np.full_like(tokens, text.max_length or template.max_length)
    width = model.family_spec.published_text_width(model.flavour_spec)
    scale = 0 if text.storage == "exact" else _DTYPE_BYTES["float32"] * len(template.layers)
    return tokens * (width * _DTYPE_BYTES[text.embeds_dtype(text.precision or model.precision)] + scale)


def sample_units(samples: pa.Table, sizes: np.ndarray, limit: int) -> pa.Table:
    """Divide samples into units of at most `limit` bytes and one bucket each, in the order of their ids. References and
    samples of validation prompts get separate units. sizes: (n,) bytes of each sample."""
    bucket = pc.struct_field(samples.column("geometry"), "bucket")
    validation = pc.cast(pc.equal(samples.column("role"), VALIDATION), pa.string())
    references = pc.is_in(samples.column("role"), value_set=pa.array(SOURCE_ROLES))
    kind = pc.if_else(references, "reference", validation)
    group = pc.binary_join_element_wise(bucket, kind, samples.column("condition"), "|")
    return _divide_groups("latents", samples, group, sizes, limit)


def item_units(samples: pa.Table, limit: int) -> pa.Table:
    """Divide the members of an item plan into units of pictures of one size, in the order of their ids. A unit has at
    most `limit` bytes of pixels and at most MAX_MEMBERS members."""
    buckets = pc.struct_field(samples.column("geometry"), "bucket")
    sources = pc.fill_null(pc.struct_field(samples.column("source_geometry"), "bucket"), "")
    group = pc.binary_join_element_wise(buckets, sources, "|")
    coded = group.combine_chunks().dictionary_encode()
    pictures = ([Bucket.parse(part) for part in name.split("|") if part] for name in coded.dictionary.to_pylist())
    pixels = [sum(picture.width * picture.height * picture.frames for picture in sizes) for sizes in pictures]
    sizes = np.maximum(3 * np.array(pixels, np.int64), -(-limit // MAX_MEMBERS))[np.asarray(coded.indices)]
    return _divide_groups("items", samples, group, sizes, limit)


def _divide_groups(kind: str, samples: pa.Table, group: pa.ChunkedArray, sizes: np.ndarray, limit: int) -> pa.Table:
    """Units of each group of samples, in the order of their ids. group: (n,) name of each sample's group: its bucket,
    optionally followed by "|" and further keys. sizes: (n,) bytes of each sample."""
    coded = group.combine_chunks().dictionary_encode()
    ids, codes = samples.column("sample_id").combine_chunks(), np.asarray(coded.indices)
    order = np.lexsort((identity.id_prefixes(ids), codes))
    ends = np.cumsum(np.bincount(codes, minlength=len(coded.dictionary)))
    units = [UNITS_SCHEMA.empty_table()]
    for name, code in sorted((name, code) for code, name in enumerate(coded.dictionary.to_pylist())):
        rows = order[ends[code - 1] if code else 0 : ends[code]]
        units.append(split_into_units(kind, name.partition("|")[0], ids.take(pa.array(rows)), sizes[rows], limit))
    return pa.concat_tables(units)


def text_units(texts: pa.Table, active: pa.Table, sizes: np.ndarray, limit: int) -> pa.Table:
    """Divide texts into units of at most `limit` bytes.

    Texts without an image are in the order of the first of the `active` samples that use them, and sorted by length
    among about TEXT_GROUP units. Texts with an image are sorted by the image's size, or the number of references, and
    then in the order of the image's first sample. Texts with the same image share a unit if they fit, so that the image
    is read and encoded only once.

    active: rows of an `active_schema`. sizes: (n,) bytes of each text.
    """
    if not len(texts):
        return UNITS_SCHEMA.empty_table()
    ids = texts.column("text_id").combine_chunks()
    buckets = image_buckets(texts)
    bucket = np.argsort(np.argsort(buckets.dictionary.to_pylist()))[np.asarray(buckets.indices)]
    prefixes, lengths = identity.id_prefixes(ids), np.asarray(pc.utf8_length(texts.column("text")))
    places = _first_uses(ids, active)
    image = np.zeros(len(ids), np.uint64)  # a number for the image (file and crop) in each prompt; 0 without image
    group = np.zeros(len(ids), np.int64)  # texts of a group are sorted by length
    lists = texts.column("references").combine_chunks() if "references" in texts.column_names else None
    if lists is not None or texts.column("image_id").null_count < len(ids):
        if lists is not None:
            image = mix_bits(list_ids(lists).view("<u8")[::2].astype(np.uint64))
            bucket = np.asarray(pc.list_value_length(lists)).astype(np.int64)
        else:
            image = mix_bits(identity.id_prefixes(texts.column("image_id")))
            for name in ("resize_w", "resize_h", "x", "y"):
                values = pc.fill_null(pc.struct_field(texts.column("image_geometry"), name), 0)
                image = mix_bits(image + np.asarray(values).astype(np.uint64))
        image_number = np.unique(image, return_inverse=True)[1]
        first = np.full(image_number.max() + 1, places.max())
        np.minimum.at(first, image_number, places)
        group = first[image_number]
    else:
        # A group fits into TEXT_GROUP units of sorted texts, even if each unit has unused space for almost one text.
        group_limit = TEXT_GROUP * limit - (TEXT_GROUP - 1) * min(limit, int(sizes.max()))
        order = np.lexsort((prefixes, places))
        cuts = _cut(np.cumsum(sizes[order]), group_limit)
        group[order] = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
    # The ids are sorted as numbers, because sorting a million ids as text takes ten times longer.
    order = np.lexsort((prefixes, lengths, image, group, bucket))
    borders = np.diff(bucket[order]) != 0 if image.any() else np.diff(group[order]) != 0
    return split_into_units("text", "", ids.take(pa.array(order)), sizes[order], limit, image[order], borders)


def _first_uses(ids: pa.Array, active: pa.Table) -> NDArray[np.int64]:
    """(n,) the place of the first sample that uses each text, in the order in which `sample_units` lists samples; -1
    for a text that no sample uses."""
    bucket = active.column("bucket").combine_chunks().dictionary_encode()
    ranks = np.argsort(np.argsort(bucket.dictionary.to_pylist()))
    validation = np.asarray(pc.equal(active.column("role"), VALIDATION))
    samples = identity.id_prefixes(active.column("sample_id"))
    order = np.lexsort((samples, validation, ranks[np.asarray(bucket.indices)] if len(bucket) else validation))
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    first = np.full(len(ids), len(places))
    null_texts = active.column("null_text")
    counts = np.asarray(pc.fill_null(pc.list_value_length(active.column("texts")), 0))
    for names, used_at in (
        (pc.list_flatten(active.column("texts")), np.repeat(places, counts)),
        (null_texts.drop_null(), places[np.asarray(null_texts.is_valid())]),
    ):
        at = pc.index_in(names, value_set=ids)
        np.minimum.at(first, np.asarray(at.drop_null()), used_at[np.asarray(at.is_valid())])
    first[first == len(places)] = -1
    return first


def split_into_units(
    kind: str,
    bucket: str,
    ids: pa.Array,
    sizes: np.ndarray,
    limit: int,
    group: np.ndarray | None = None,
    borders: np.ndarray | None = None,
) -> pa.Table:
    """Cut a list of ids into units of at most `limit` bytes. A larger member has a separate unit.

    group: (n,) numbers; neighbors with the same number share a unit if they fit into one. borders: (n - 1,) whether a
    unit ends after a member.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    cuts = _cut(ends, limit, None if group is None else np.diff(group) != 0, borders)
    members = pa.ListArray.from_arrays(pa.array(cuts, pa.int32()), ids)
    columns = {
        "unit_id": [identity.unit_id(bucket or kind, unit.as_py()) for unit in members],
        "kind": [kind] * len(members),
        "bucket": [bucket] * len(members),
        "members": members,
        "estimated_bytes": np.diff(np.append(0, ends)[cuts]),
    }
    return pa.table(columns, schema=UNITS_SCHEMA)


def _cut(
    ends: NDArray[np.int64],
    limit: int,
    preferred: NDArray[np.bool_] | None = None,
    required: NDArray[np.bool_] | None = None,
) -> list[int]:
    """The positions at which to cut a list into pieces of at most `limit` bytes, or of one member, from 0 to the list's
    length.

    ends: (n,) cumulative bytes up to the end of each member. preferred: (n - 1,) whether a cut after the member is
    preferred. required: (n - 1,) whether the list must be cut after the member.
    """
    preferred_cuts = np.append([] if preferred is None else np.flatnonzero(preferred) + 1, len(ends)).astype(np.int64)
    borders = np.append([] if required is None else np.flatnonzero(required) + 1, len(ends)).astype(np.int64)
    cuts = [0]
    while cuts[-1] < len(ends):
        before = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        cut = max(cuts[-1] + 1, int(np.searchsorted(ends, before + limit, side="right")))
        cut = min(cut, int(borders[np.searchsorted(borders, cuts[-1], side="right")]))
        preferred_cut = int(preferred_cuts[max(0, int(np.searchsorted(preferred_cuts, cut, side="right")) - 1)])
        cuts.append(preferred_cut if cuts[-1] < preferred_cut < cut else cut)
    return cuts


@dataclass(frozen=True)
class OpenMembers:
    """The members of units that will be divided. samples, texts: rows of SAMPLES_SCHEMA and `texts_schema`. unit_ids:
    ids of the units."""

    samples: pa.Table
    texts: pa.Table
    unit_ids: list[str]


def find_open_members(plan: Plan | None, limit: int) -> OpenMembers:
    """The members of the plan's units that are larger than `limit` bytes, have more than one member, and have no shard
    in any cache, of any fingerprint. Makes one listing for each kind of shard."""
    if plan is None:
        return OpenMembers(SAMPLES_SCHEMA.empty_table(), TEXTS_SCHEMA.empty_table(), [])
    names = [name.rpartition("/")[2] for kind in ENCODE_PROGRAMS for name in plan.store.list_names(kind)]
    encoded_units = {unit_name(name) for name in names}

    def is_open(unit: Unit) -> bool:
        return unit.estimated_bytes > limit and len(unit.members) > 1 and unit.unit_id not in encoded_units

    own_texts = texts_schema("references" in plan.own_table("texts").column_names)
    units = {kind: [unit for unit in plan.units(kind) if is_open(unit)] for kind in ("latents", "text")}

    def rows(table: pa.Table, key: str, kind: str) -> pa.Table:
        ids = pa.array([name for unit in units[kind] for name in unit.members], pa.string())
        return drop_duplicate_ids(table.filter(pc.is_in(table.column(key), value_set=ids)), key)

    return OpenMembers(
        rows(plan.sample_table, "sample_id", "latents").cast(SAMPLES_SCHEMA),
        rows(plan.text_table.select(own_texts.names), "text_id", "text").cast(own_texts),
        sorted(unit.unit_id for open_units in units.values() for unit in open_units),
    )
