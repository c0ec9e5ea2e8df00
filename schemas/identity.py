"""Names made of content: media, texts, samples, units, and the fingerprints of caches.

Every name is a hexadecimal xxh3-128 of a canonical encoding of what determines the thing named, so that two
machines that never talk agree on it. Nothing here reads a file.
"""

import binascii
import json
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from schemas.randomness import mix_bits

#: What a sample is, field by field: its id is the xxh3-128 of these bytes. Little-endian; ids are the 16 bytes that
#: their 32 hex digits stand for, zeros where there is none; clip and companions are zeros where there are none.
#: condition: 0 none, 1 first frame, 2 source. A geometry is its bucket (w, h, frames), resize (w, h), crop (x, y).
SAMPLE_DTYPE = np.dtype(
    [
        ("media", "V16"),
        ("geometry", "<i4", 7),
        ("start", "<f8"),
        ("rate", "<f8"),
        ("condition", "<i4"),
        ("source", "V16"),
        ("source_geometry", "<i4", 7),
        ("mask", "V16"),
        ("mask_geometry", "<i4", 7),
    ]
)


def hash_bytes(*parts: bytes) -> str:
    """xxh3-128 (32 hex digits) of `parts`, each after its length, so that ("ab", "c") != ("a", "bc")."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


def hash_json(value: Any) -> str:
    """xxh3-128 of `value` as canonical JSON: sorted keys, no spaces, NaN refused."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hash_bytes(text.encode())


_CHUNK_ROWS = 16384  # values that become Python objects together


def hash_values(values: pa.Array) -> pa.Array:
    """The xxh3-128 of each of n byte or text strings, as 32 hex digits."""
    whole = values.cast(pa.large_binary())
    parts = (whole.slice(start, _CHUNK_ROWS).to_pylist() for start in range(0, len(whole), _CHUNK_ROWS))
    return pa.array(map(xxhash.xxh3_128_hexdigest, chain.from_iterable(parts)), pa.string())


def text_ids(rendered: pa.Array, image: pa.Array | None = None) -> pa.Array:
    """Identities of texts to encode: of the rendered prompt's bytes after the id of the image in it, if any, and a
    zero byte (no id holds one, so that no two texts are confused)."""
    head = pa.scalar("") if image is None else image
    return hash_values(pc.binary_join_element_wise(head, rendered, "\0"))


def prompt_image_ids(media: pa.Array, geometry: NDArray[np.integer]) -> pa.Array:
    """Identities of images as a text encoder sees them: the file and how it was fitted to its bucket, (n, 7)."""
    record = np.zeros(len(media), SAMPLE_DTYPE)
    record["media"], record["geometry"] = id_bytes(media), geometry
    return sample_ids(record)


def sample_ids(records: np.ndarray) -> pa.Array:
    """Identities of n samples, from their records of dtype SAMPLE."""
    assert records.dtype == SAMPLE_DTYPE and records.flags.c_contiguous
    ends = np.arange(len(records) + 1, dtype=np.int64) * SAMPLE_DTYPE.itemsize
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(records.view(np.uint8))]
    return hash_values(pa.Array.from_buffers(pa.large_binary(), len(records), buffers))


def id_bytes(ids: pa.Array) -> np.ndarray:
    """(n,) V16: the bytes of ids of 32 hex digits; zeros for null."""
    whole = pc.fill_null(ids, "0" * 32).cast(pa.large_binary())
    whole = whole.combine_chunks() if isinstance(whole, pa.ChunkedArray) else whole
    if not len(whole):
        return np.zeros(0, "V16")
    _, ends, digits = whole.buffers()
    first, last = np.frombuffer(ends, np.int64)[[whole.offset, whole.offset + len(whole)]]
    assert last - first == 32 * len(ids), "an id has 32 hex digits"
    return np.frombuffer(binascii.unhexlify(memoryview(digits)[first:last]), "V16")


def id_prefixes(ids: pa.Array) -> NDArray[np.uint64]:
    """(n,) the first half of each id as a number; ids stand in the order of these numbers."""
    return id_bytes(ids).view(">u8")[::2].astype(np.uint64)


def count_distinct(ids: pa.Array) -> int:
    """How many different ids there are, as far as their first halves tell; if all, then they are all different."""
    found = np.sort(id_prefixes(ids))  # np.unique hashes, which is several times slower
    return len(found) and 1 + int((found[1:] != found[:-1]).sum())


def derive_seeds(ids: pa.Array, purpose: str) -> NDArray[np.uint64]:
    """(n,) seeds that depend on nothing but an id and what the randomness is for."""
    halves = id_bytes(ids).view("<u8").reshape(-1, 2)
    return mix_bits(halves[:, 0] ^ mix_bits(halves[:, 1] ^ np.uint64(xxhash.xxh3_64_intdigest(purpose.encode()))))


def unit_id(prefix: str, members: Iterable[str]) -> str:
    """Name of a work unit: a readable prefix (its bucket) and a hash of its members in order."""
    return f"{prefix}-{hash_bytes(chr(10).join(members).encode())[:16]}"


def compute_fingerprint(parts: Mapping[str, Any]) -> str:
    """Name of a cache: a hash of everything, beyond its inputs, that determines its bytes."""
    return hash_json(dict(parts))[:24]


def derive_seed(identity: str, purpose: str = "") -> int:
    """A 63-bit seed that depends on nothing but an identity and what the randomness is for."""
    return xxhash.xxh3_64_intdigest(f"{purpose}:{identity}".encode()) >> 1
