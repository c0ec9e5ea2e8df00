"""Work units: samples of one bucket, or texts of similar length, of about cache.unit_mib of output."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas import identity
from schemas.config.pipeline import VALIDATION, Config
from schemas.geometry import Bucket
from schemas.randomness import mix_bits
from schemas.tables import UNITS_SCHEMA

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def sample_tensor_bytes(config: Config, samples: pa.Table) -> np.ndarray:
    """(n,) bytes of samples' tensors in their shard: latent, condition and mask."""
    family = config.model.family_spec
    moments = family.posterior and config.latents.posterior == "moments"
    channels = family.latent_channels * (2 if moments else 1)
    buckets = pc.struct_field(samples.column("geometry"), "bucket").combine_chunks().dictionary_encode()
    shapes = [
        Bucket.parse(name).latent_shape(family.spatial_stride, family.temporal_stride)
        for name in buckets.dictionary.to_pylist()
    ]
    frames, height, width = np.array(shapes, np.int64).reshape(-1, 3)[np.asarray(buckets.indices)].T
    frame_bytes = height * width * _DTYPE_BYTES[config.latents.precision or config.model.precision]
    conditioned = np.asarray(pc.not_equal(samples.column("condition"), "none"))
    condition_frames = conditioned * max(1, family.condition_frames(config.model.task))
    mask_frames = np.asarray(pc.is_valid(samples.column("mask_id"))) * frames
    return ((frames + condition_frames) * channels + mask_frames) * frame_bytes


def text_tensor_bytes(config: Config, texts: pa.Table) -> np.ndarray:
    """(n,) estimated bytes of texts' tensors: a token for every four characters, and the tokens of the image."""
    tokens = 8 + np.asarray(pc.utf8_length(texts.column("text"))) // 4
    buckets = _image_buckets(texts)
    sizes = [Bucket.parse(name or "1x1") for name in buckets.dictionary.to_pylist()]  # 1x1: no image, 0 tokens
    family, precision = config.model.family_spec, config.text.precision or config.model.precision
    side = family.image_token
    image_tokens = np.array([size.width // side * (size.height // side) for size in sizes], np.int64)
    return (tokens + image_tokens[np.asarray(buckets.indices)]) * family.text_width * _DTYPE_BYTES[precision]


def sample_units(config: Config, samples: pa.Table) -> pa.Table:
    """Divide samples into units of one bucket each, in the order of their ids; validation samples get their own."""
    bucket = pc.struct_field(samples.column("geometry"), "bucket")
    validation = pc.cast(pc.equal(samples.column("role"), VALIDATION), pa.string())
    group = pc.binary_join_element_wise(bucket, validation, samples.column("condition"), "|")
    group = group.combine_chunks().dictionary_encode()
    ids, codes = samples.column("sample_id").combine_chunks(), np.asarray(group.indices)
    order = np.lexsort((identity.id_prefixes(ids), codes))
    ends = np.cumsum(np.bincount(codes, minlength=len(group.dictionary)))
    sizes = sample_tensor_bytes(config, samples)
    units = [UNITS_SCHEMA.empty_table()]
    for name, code in sorted((name, code) for code, name in enumerate(group.dictionary.to_pylist())):
        rows = order[ends[code - 1] if code else 0 : ends[code]]
        members = ids.take(pa.array(rows))
        units.append(_split_into_units("latents", name.split("|")[0], members, sizes[rows], config.cache.unit_mib))
    return pa.concat_tables(units)


def text_units(config: Config, texts: pa.Table) -> pa.Table:
    """Divide texts into units of similar length, so that batches need little padding. Texts with an image are sorted
    by its size, then by the image, and share a unit where they fit: the image is then read and encoded once."""
    sizes = text_tensor_bytes(config, texts)
    ids = texts.column("text_id").combine_chunks()
    buckets = _image_buckets(texts)
    bucket = np.argsort(np.argsort(buckets.dictionary.to_pylist()))[np.asarray(buckets.indices)]
    image = np.zeros(len(ids), np.uint64)  # a number for the image in each prompt, file and crop; 0 without one
    if texts.column("image_id").null_count < len(ids):
        image = mix_bits(identity.id_prefixes(texts.column("image_id")))
        for name in ("resize_w", "resize_h", "x", "y"):
            values = pc.fill_null(pc.struct_field(texts.column("image_geometry"), name), 0)
            image = mix_bits(image + np.asarray(values).astype(np.uint64))
    # Sorted by numbers: sorting a million ids as text takes ten times as long.
    order = np.lexsort((identity.id_prefixes(ids), np.asarray(pc.utf8_length(texts.column("text"))), image, bucket))
    units = [
        _split_into_units("text", "", ids.take(pa.array(rows)), sizes[rows], config.cache.unit_mib, image[rows])
        for rows in np.split(order, np.flatnonzero(np.diff(bucket[order])) + 1)
    ]
    return pa.concat_tables(units)


def _image_buckets(texts: pa.Table) -> pa.DictionaryArray:
    buckets = pc.fill_null(pc.struct_field(texts.column("image_geometry"), "bucket"), "")
    return buckets.combine_chunks().dictionary_encode()


def _split_into_units(
    kind: str, bucket: str, ids: pa.Array, sizes: np.ndarray, unit_mib: float, group: np.ndarray | None = None
) -> pa.Table:
    """Cut a list of ids into units of at most unit_mib; a larger member is a unit of its own.

    group: (n,) numbers; neighbours with the same number share a unit if they fit into one.
    """
    limit = int(unit_mib * 2**20)
    ends = np.cumsum(sizes, dtype=np.int64)
    group_ends = np.append([] if group is None else np.flatnonzero(np.diff(group)) + 1, len(ids)).astype(np.int64)
    cuts = [0]
    while cuts[-1] < len(ids):
        before = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        cut = max(cuts[-1] + 1, int(np.searchsorted(ends, before + limit, side="right")))
        group_end = int(group_ends[max(0, int(np.searchsorted(group_ends, cut, side="right")) - 1)])
        cuts.append(group_end if cuts[-1] < group_end < cut else cut)
    members = pa.ListArray.from_arrays(pa.array(cuts, pa.int32()), ids)
    columns = {
        "unit_id": [identity.unit_id(bucket or kind, unit.as_py()) for unit in members],
        "kind": [kind] * len(members),
        "bucket": [bucket] * len(members),
        "members": members,
        "estimated_bytes": np.diff(np.append(0, ends)[cuts]),
    }
    return pa.table(columns, schema=UNITS_SCHEMA)
