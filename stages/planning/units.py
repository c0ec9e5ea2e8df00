"""Work units: runs of samples of one bucket, or of texts of similar length, of about cache.unit_mib of output."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas import identity
from schemas.catalogue import Family
from schemas.config import VALIDATION, Config
from schemas.geometry import Bucket
from schemas.tables import UNITS

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def latent_bytes(family: Family, bucket: str, condition: str, precision: str) -> int:
    """Bytes of a sample's tensors in its shard."""
    strides = family.spatial_stride, family.temporal_stride
    frames, height, width = Bucket.parse(bucket).latent_shape(*strides)
    if condition != "none":
        frames += 1
    return family.latent_channels * frames * height * width * _BYTES[precision]


def text_bytes(family: Family, texts: pa.Table, precision: str) -> np.ndarray:
    """(n,) estimated bytes of texts' tensors: about four characters a token, and an image's tokens."""
    tokens = 8 + np.asarray(pc.utf8_length(texts.column("text"))) // 4
    buckets = _image_buckets(texts).dictionary_encode().combine_chunks()
    sizes = [Bucket.parse(name) if name else None for name in buckets.dictionary.to_pylist()]
    inside = np.array([0 if size is None else (size.width // 56) * (size.height // 56) for size in sizes], np.int64)
    return (tokens + inside[np.asarray(buckets.indices)]) * family.text_width * _BYTES[precision]


def sample_units(config: Config, samples: pa.Table) -> pa.Table:
    """Divide samples into units: one bucket each, validation apart, in the order of their ids."""
    precision = config.latents.precision or config.model.precision
    bucket = pc.struct_field(samples.column("geometry"), "bucket")
    apart = pc.cast(pc.equal(samples.column("role"), VALIDATION), pa.string())
    group = pc.binary_join_element_wise(bucket, apart, samples.column("condition"), "|")
    group = group.combine_chunks().dictionary_encode()
    ids, codes = samples.column("sample_id").combine_chunks(), np.asarray(group.indices)
    order = np.lexsort((identity.heads(ids), codes))
    ends = np.cumsum(np.bincount(codes, minlength=len(group.dictionary)))
    names = group.dictionary.to_pylist()
    found: list[dict] = []
    for code in sorted(range(len(names)), key=names.__getitem__):
        size, _, condition = names[code].split("|")
        mine = ids.take(pa.array(order[ends[code - 1] if code else 0 : ends[code]]))
        each = latent_bytes(config.model.spec, size, condition, precision)
        found += _divide("latents", size, mine, np.full(len(mine), each, np.int64), config.cache.unit_mib)
    return pa.Table.from_pylist(found, schema=UNITS)


def text_units(config: Config, texts: pa.Table) -> pa.Table:
    """Divide texts into units of similar length (an image's size counts first), so that batches waste little."""
    precision = config.text.precision or config.model.precision
    sizes = text_bytes(config.model.spec, texts, precision)
    keys = pa.table(
        {
            "image": _image_buckets(texts),
            "length": pc.utf8_length(texts.column("text")),
            "id": texts.column("text_id"),
            "bytes": sizes,
        }
    )
    keys = keys.take(pc.sort_indices(keys, [(name, "ascending") for name in ("image", "length", "id")]))
    found: list[dict] = []
    for image in sorted(pc.unique(keys.column("image")).to_pylist()):
        alike = keys.filter(pc.equal(keys.column("image"), image))
        ids = alike.column("id").combine_chunks()
        found += _divide("text", "", ids, alike.column("bytes").to_numpy(), config.cache.unit_mib)
    return pa.Table.from_pylist(found, schema=UNITS)


def _image_buckets(texts: pa.Table) -> pa.ChunkedArray:
    return pc.fill_null(pc.struct_field(texts.column("image_geometry"), "bucket"), "")


def _divide(kind: str, bucket: str, ids: pa.Array, sizes: np.ndarray, unit_mib: float) -> Iterator[dict]:
    """Cut a list of ids into runs of at most unit_mib; an item larger than that is a unit of its own."""
    limit = int(unit_mib * 2**20)
    ends = np.cumsum(sizes, dtype=np.int64)
    start = 0
    while start < len(ids):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + limit, side="right")))
        members = ids.slice(start, stop - start).to_pylist()
        yield {
            "unit_id": identity.unit_id(bucket or kind, members),
            "kind": kind,
            "bucket": bucket,
            "members": members,
            "estimated_bytes": int(ends[stop - 1]) - before,
        }
        start = stop
