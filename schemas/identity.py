"""Content-based identities: media, texts, samples, units, and the fingerprints of caches; and stateless random numbers,
the same on every machine and in every release.

Each identity is a hexadecimal xxh3-128 of a canonical encoding of everything that determines the object, so all
machines agree on it without communication. The functions of this module do not read files.
"""

import binascii
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from schemas.json_records import hash_bytes, hash_json

_ROUNDS = 8
_BLOCK = 1 << 13  # positions permuted at a time, so that they stay in the processor's cache
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ROUND_NUMBERS = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def mix_bits(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    values = values ^ (values >> _SHIFTS[0])
    values *= _FACTORS[0]  # in place: half the time of new arrays
    values ^= values >> _SHIFTS[1]
    values *= _FACTORS[1]
    values ^= values >> _SHIFTS[2]
    return values


def to_unit_interval(seeds: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) from mixed seeds."""
    return (seeds >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permute(positions: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """The images of `positions` under the pseudo-random permutation of range(size) that `key` chooses: a Feistel
    network over the next power of four, repeated until the result is in range."""
    if size == 1:
        return np.zeros_like(positions)
    half = max(2, ((size - 1).bit_length() + 1) // 2)
    keys = mix_bits(_ROUND_NUMBERS ^ np.uint64(key))
    permuted = positions.astype(np.uint64)
    remaining = np.arange(len(permuted))
    while len(remaining):  # on average less than four rounds: the domain is smaller than 4 size
        for start in range(0, len(remaining), _BLOCK):
            block = remaining[start : start + _BLOCK]
            permuted[block] = _feistel(permuted[block], half, half, keys)
        remaining = remaining[permuted[remaining] >= size]
    return permuted.view(np.int64)


def permute_groups(
    positions: NDArray[np.int64], groups: NDArray[np.int64], sizes: NDArray[np.int64], keys: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """(n,) the images of `positions`, each under the permutation of range(sizes[g]) that keys[g] chooses, g being its
    number in `groups`. sizes, keys: (G,), for all groups. Fast if the numbers in `groups` are close together."""
    if not len(positions):
        return positions
    permuted, first, last = positions.astype(np.uint64), int(groups.min()), int(groups.max()) + 1
    groups, limits = groups - first, sizes[first:last].astype(np.uint64)
    bits = np.where(limits > 1, np.frexp(np.maximum(limits, 2) - 1)[1], 0)  # of the domain, less than twice the size
    rounds, group_bits = mix_bits(_ROUND_NUMBERS[:, None] ^ keys[first:last]), bits[groups]
    for count in np.unique(bits[bits > 0]).tolist():
        remaining = np.flatnonzero(group_bits == count)
        while len(remaining):
            for start in range(0, len(remaining), _BLOCK):
                block = remaining[start : start + _BLOCK]
                permuted[block] = _feistel(permuted[block], count // 2, count - count // 2, rounds[:, groups[block]])
            remaining = remaining[permuted[remaining] >= limits[groups[remaining]]]
    return permuted.view(np.int64)


def _feistel(values: NDArray[np.uint64], high: int, low: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of range(2**(high + low)): each round mixes one part of the bits into the remaining bits, in turn.
    keys: for each round, one key, or one key per value."""
    masks = [np.uint64((1 << high) - 1), np.uint64((1 << low) - 1)]
    left, right = values >> np.uint64(low), values & masks[1]
    for number, key in enumerate(keys):
        mixed = mix_bits(right ^ key)
        mixed &= masks[number % 2]
        mixed ^= left
        left, right = right, mixed
    left <<= np.uint64(low)
    left |= right
    return left


#: A sample's fields: its id is the xxh3-128 of these bytes. Little-endian; ids as 16 bytes; missing fields are 0.
#: condition: 0 none, 1 first frame, 2 source, 3 references, whose ordered ids are hashed as the source. A geometry
#: is bucket (w, h, frames), resize (w, h), crop (x, y).
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
_CHUNK_ROWS = 16384  # values that become Python objects at a time


def hash_values(values: pa.Array) -> pa.Array:
    """The xxh3-128 of each of n byte or text strings, as 32 hex digits."""
    binary = values.cast(pa.large_binary())
    chunks = (binary.slice(start, _CHUNK_ROWS).to_pylist() for start in range(0, len(binary), _CHUNK_ROWS))
    return pa.array(map(xxhash.xxh3_128_hexdigest, chain.from_iterable(chunks)), pa.string())


def text_ids(rendered: pa.Array, image: pa.Array | None = None) -> pa.Array:
    """Ids of texts to encode: hashes of the id of the prompt's image, if any, a zero byte and the rendered prompt."""
    head = pa.scalar("") if image is None else image
    return hash_values(pc.binary_join_element_wise(head, rendered, "\0"))


def prompt_image_ids(media: pa.Array, geometry: NDArray[np.integer]) -> pa.Array:
    """Ids of a text encoder's input images, from the file ids (n,) and the geometry (n, 7)."""
    record = np.zeros(len(media), SAMPLE_DTYPE)
    record["media"], record["geometry"] = id_bytes(media), geometry
    return sample_ids(record)


def sample_ids(records: np.ndarray) -> pa.Array:
    """Ids of n samples, from their records of SAMPLE_DTYPE."""
    assert records.dtype == SAMPLE_DTYPE and records.flags.c_contiguous
    ends = np.arange(len(records) + 1, dtype=np.int64) * SAMPLE_DTYPE.itemsize
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(records.view(np.uint8))]
    return hash_values(pa.Array.from_buffers(pa.large_binary(), len(records), buffers))


def id_bytes(ids: pa.Array) -> np.ndarray:
    """(n,) V16: the bytes of ids of 32 hex digits; zeros for null."""
    hexadecimal = pc.fill_null(ids, "0" * 32).cast(pa.large_binary())
    hexadecimal = hexadecimal.combine_chunks() if isinstance(hexadecimal, pa.ChunkedArray) else hexadecimal
    if not len(hexadecimal):
        return np.zeros(0, "V16")
    _, ends, digits = hexadecimal.buffers()
    first, last = np.frombuffer(ends, np.int64)[[hexadecimal.offset, hexadecimal.offset + len(hexadecimal)]]
    assert last - first == 32 * len(ids), "an id has 32 hex digits"
    return np.frombuffer(binascii.unhexlify(memoryview(digits)[first:last]), "V16")


def id_prefixes(ids: pa.Array) -> NDArray[np.uint64]:
    """(n,) the first half of each id as a number. The numbers sort like the ids."""
    return id_bytes(ids).view(">u8")[::2].astype(np.uint64)


def count_distinct(ids: pa.Array) -> int:
    """The number of distinct first halves of the ids. If it equals len(ids), all ids are distinct."""
    prefixes = np.sort(id_prefixes(ids))  # np.unique hashes, which is several times slower
    return len(prefixes) and 1 + int((prefixes[1:] != prefixes[:-1]).sum())


def derive_seeds(ids: pa.Array, purpose: str) -> NDArray[np.uint64]:
    """(n,) seeds, each a function of an id and the purpose of the random numbers."""
    halves = id_bytes(ids).view("<u8").reshape(-1, 2)
    return mix_bits(halves[:, 0] ^ mix_bits(halves[:, 1] ^ np.uint64(xxhash.xxh3_64_intdigest(purpose.encode()))))


def unit_id(prefix: str, members: Iterable[str]) -> str:
    """Id of a work unit: a readable prefix (its bucket) and a hash of its members in order."""
    return f"{prefix}-{hash_bytes(chr(10).join(members).encode())[:16]}"


def compute_fingerprint(parts: Mapping[str, Any]) -> str:
    """A cache's fingerprint: a hash of everything, beyond its inputs, that determines its bytes."""
    return hash_json(dict(parts))[:24]


def derive_seed(identity: str, purpose: str = "") -> int:
    """A 63-bit seed: a function of an identity and the purpose of the random numbers."""
    return xxhash.xxh3_64_intdigest(f"{purpose}:{identity}".encode()) >> 1
