"""Work units: runs of samples of one bucket, or of texts of similar length, of about cache.unit_mib of output."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas import identity
from schemas.config.pipeline import VALIDATION, Config
from schemas.family import Family
from schemas.geometry import Bucket
from schemas.randomness import mix_bits
from schemas.tables import UNITS_SCHEMA

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def sample_tensor_bytes(config: Config, samples: pa.Table) -> np.ndarray:
    """(n,) bytes of samples' tensors in their shard: latents, the condition's, and the mask."""
    buckets = pc.struct_field(samples.column("geometry"), "bucket").combine_chunks().dictionary_encode()
    sizes = np.array([_tensor_bytes(config, name) for name in buckets.dictionary.to_pylist()], np.int64).reshape(-1, 3)
    latent, condition, mask = sizes[np.asarray(buckets.indices)].T
    conditioned = np.asarray(pc.not_equal(samples.column("condition"), "none"))
    return latent + conditioned * condition + np.asarray(pc.is_valid(samples.column("mask_id"))) * mask


def _tensor_bytes(config: Config, bucket: str) -> tuple[int, int, int]:
    """Bytes of the latents, of a condition, and of a mask as large as the latents. With its moments
    stored, latents and condition alike have twice the channels."""
    family = config.model.family_spec
    frames, height, width = Bucket.parse(bucket).latent_shape(family.spatial_stride, family.temporal_stride)
    moments = family.posterior and config.latents.posterior == "moments"
    cell = height * width * _DTYPE_BYTES[config.latents.precision or config.model.precision]
    image = family.latent_channels * (2 if moments else 1) * cell
    return image * frames, image * max(1, family.condition_frames(config.model.task)), frames * cell


def text_tensor_bytes(family: Family, texts: pa.Table, precision: str) -> np.ndarray:
    """(n,) estimated bytes of texts' tensors: about four characters a token, and an image's tokens."""
    tokens = 8 + np.asarray(pc.utf8_length(texts.column("text"))) // 4
    buckets = _image_buckets(texts).dictionary_encode().combine_chunks()
    side = family.image_token
    sizes = [Bucket.parse(name) if name else None for name in buckets.dictionary.to_pylist()]
    inside = np.array([0 if size is None else (size.width // side) * (size.height // side) for size in sizes], np.int64)
    return (tokens + inside[np.asarray(buckets.indices)]) * family.text_width * _DTYPE_BYTES[precision]


def sample_units(config: Config, samples: pa.Table) -> pa.Table:
    """Divide samples into units: one bucket each, validation apart, in the order of their ids."""
    bucket = pc.struct_field(samples.column("geometry"), "bucket")
    apart = pc.cast(pc.equal(samples.column("role"), VALIDATION), pa.string())
    group = pc.binary_join_element_wise(bucket, apart, samples.column("condition"), "|")
    group = group.combine_chunks().dictionary_encode()
    ids, codes = samples.column("sample_id").combine_chunks(), np.asarray(group.indices)
    order = np.lexsort((identity.id_prefixes(ids), codes))
    ends = np.cumsum(np.bincount(codes, minlength=len(group.dictionary)))
    names = group.dictionary.to_pylist()
    each = sample_tensor_bytes(config, samples)
    found = [UNITS_SCHEMA.empty_table()]
    for code in sorted(range(len(names)), key=names.__getitem__):
        mine = order[ends[code - 1] if code else 0 : ends[code]]
        bucket_name = names[code].split("|")[0]
        found.append(
            _split_into_units("latents", bucket_name, ids.take(pa.array(mine)), each[mine], config.cache.unit_mib)
        )
    return pa.concat_tables(found)


def text_units(config: Config, texts: pa.Table) -> pa.Table:
    """Divide texts into units of similar length, so that batches waste little. Of texts with an image its size counts
    first, then the image: its texts follow each other, in one unit where they fit, so that it is read and passes the
    vision model once."""
    precision = config.text.precision or config.model.precision
    sizes = text_tensor_bytes(config.model.family_spec, texts, precision)
    ids = texts.column("text_id").combine_chunks()
    buckets = _image_buckets(texts).combine_chunks().dictionary_encode()
    bucket = np.argsort(np.argsort(buckets.dictionary.to_pylist()))[np.asarray(buckets.indices)]
    shown = _prompt_image_keys(texts)
    # An order by numbers: sorting a million ids as text takes ten times as long.
    order = np.lexsort((identity.id_prefixes(ids), np.asarray(pc.utf8_length(texts.column("text"))), shown, bucket))
    found = [
        _split_into_units("text", "", ids.take(pa.array(alike)), sizes[alike], config.cache.unit_mib, shown[alike])
        for alike in np.split(order, np.flatnonzero(np.diff(bucket[order])) + 1)
    ]
    return pa.concat_tables(found)


def _prompt_image_keys(texts: pa.Table) -> np.ndarray:
    """(n,) a number for the image inside each prompt: for the file and how it is cut; 0 where there is none."""
    media = texts.column("image_id")
    if media.null_count == len(media):
        return np.zeros(len(media), np.uint64)
    found = mix_bits(identity.id_prefixes(media))
    for name in ("resize_w", "resize_h", "x", "y"):
        place = pc.fill_null(pc.struct_field(texts.column("image_geometry"), name), 0)
        found = mix_bits(found + np.asarray(place).astype(np.uint64))
    return found


def _image_buckets(texts: pa.Table) -> pa.ChunkedArray:
    return pc.fill_null(pc.struct_field(texts.column("image_geometry"), "bucket"), "")


def _split_into_units(
    kind: str, bucket: str, ids: pa.Array, sizes: np.ndarray, unit_mib: float, group: np.ndarray | None = None
) -> pa.Table:
    """Cut a list of ids into runs of at most unit_mib; an item larger than that is a unit of its own.

    group: (n,) numbers; items that follow each other with one number stay together where they fit into a unit.
    """
    limit = int(unit_mib * 2**20)
    ends = np.cumsum(sizes, dtype=np.int64)
    whole = np.append([] if group is None else np.flatnonzero(np.diff(group)) + 1, len(ids)).astype(np.int64)
    cuts = [0]
    while cuts[-1] < len(ids):
        before = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        cut = max(cuts[-1] + 1, int(np.searchsorted(ends, before + limit, side="right")))
        last = int(whole[max(0, int(np.searchsorted(whole, cut, side="right")) - 1)])  # end of a group
        cuts.append(last if cuts[-1] < last < cut else cut)
    members = pa.ListArray.from_arrays(pa.array(cuts, pa.int32()), ids)
    columns = {
        "unit_id": [identity.unit_id(bucket or kind, run.as_py()) for run in members],
        "kind": [kind] * len(members),
        "bucket": [bucket] * len(members),
        "members": members,
        "estimated_bytes": np.diff(np.append(0, ends)[cuts]),
    }
    return pa.table(columns, schema=UNITS_SCHEMA)
