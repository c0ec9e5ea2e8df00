"""Which names under a root are this project's own: those of docs/cache-format.md, down to the last letter.

Whoever moves or removes files asks here first. A root may be a folder that holds much else, and a folder called media/
or text/ in it may be a person's.
"""

import re

from cache.damage import ENCODERS, MAKERS
from schemas.section import NAME_PATTERN

_FINGERPRINT, _SET = "[0-9a-f]{24}", "[0-9a-f]{16}"
UNIT = "[A-Za-z0-9][A-Za-z0-9@_-]*"
_SHARD = rf"(?:{'|'.join(MAKERS)})/{_FINGERPRINT}/{UNIT}"
_PLAN, _OF_PLAN = "[0-9]{6,9}-[0-9a-f]{12}", r"(?:(?:samples|texts|units|active)\.arrow|plan\.json)"
_DATASET = NAME_PATTERN.strip("^$")
_LISTED = rf"(?:discover|bucket)/{_DATASET}|(?:{'|'.join(ENCODERS.values())})/{_FINGERPRINT}/{UNIT}"

_SHARDS = re.compile(rf"{_SHARD}\.(?:arrow|tar)", re.ASCII)
_OURS = re.compile(
    "|".join(
        (
            rf"{_SHARD}\.(?:arrow|tar|tar\.json)",
            rf"(?:{'|'.join(ENCODERS)})/{_FINGERPRINT}/provenance\.json",
            rf"damaged/{_SHARD}\.[0-9]+\.(?:arrow|tar|tar\.json)",
            rf"damaged/plans/{_PLAN}\.[0-9]+/{_OF_PLAN}",
            rf"media/{_DATASET}/(?:media|partial/[0-9]{{6,9}})\.arrow",
            rf"plans/{_PLAN}/{_OF_PLAN}",
            rf"sets/{_SET}/(?:(?:index|texts|shards)\.arrow|set\.json)",
            r"sets/current-[a-z0-9-]+\.json",
            rf"rejects/(?:{_LISTED})\.arrow",
            r"weights/[0-9a-f]{32}\.json",
        )
    ),
    re.ASCII,
)


def is_ours(rel: str) -> bool:
    """Whether a file of this name, relative to the root, is one that a program of this project writes."""
    return _OURS.fullmatch(rel) is not None


def is_shard(rel: str) -> bool:
    """Whether this is the name of a shard; the description beside a tar is none."""
    return _SHARDS.fullmatch(rel) is not None
