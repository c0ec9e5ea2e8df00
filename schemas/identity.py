"""Names made of content: media, texts, samples, units, and the fingerprints of caches.

Every name is a hexadecimal xxh3-128 of a canonical encoding of what determines the thing named, so that two
machines that never talk agree on it. Nothing here reads a file.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import xxhash


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


def text_id(rendered: str, images: Sequence[str] = ()) -> str:
    """Identity of one text to encode: the rendered prompt's bytes and the identity of each image in it."""
    return hash_bytes(rendered.encode(), *(image.encode() for image in images))


def image_in_prompt_id(media_id: str, geometry: Mapping[str, Any]) -> str:
    """Identity of an image as a text encoder sees it: the file and how it was fitted to its bucket."""
    return hash_json({"media": media_id, "geometry": dict(geometry)})


def sample_id(
    media_id: str,
    geometry: Mapping[str, Any],
    clip: Mapping[str, Any] | None = None,
    companions: Mapping[str, Any] | None = None,
) -> str:
    """Identity of one training sample: the media, its geometry, the chosen frames, and its companions.

    `geometry` holds bucket and crop; `clip` holds start and rate (None for an image); `companions` maps a
    role ("source") to that file's media id and geometry.
    """
    return hash_json(
        {"media": media_id, "geometry": dict(geometry), "clip": clip, "companions": dict(companions or {})}
    )


def unit_id(prefix: str, members: Iterable[str]) -> str:
    """Name of a work unit: a readable prefix (its bucket) and a hash of its members in order."""
    return f"{prefix}-{hash_bytes(*(member.encode() for member in members))[:16]}"


def fingerprint(parts: Mapping[str, Any]) -> str:
    """Name of a cache: a hash of everything, beyond its inputs, that determines its bytes."""
    return hash_json(dict(parts))[:24]


def seed_of(identity: str, purpose: str = "") -> int:
    """A 63-bit seed that depends on nothing but an identity and what the randomness is for."""
    return xxhash.xxh3_64_intdigest(f"{purpose}:{identity}".encode()) >> 1
