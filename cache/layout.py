"""Which names under a root are this project's own: those of docs/cache-format.md, down to the last letter.

Whoever moves or removes files asks here first. A root may be a folder that holds much else, and a folder called media/
or text/ in it may be a person's.
"""

import re

from cache.damage import ENCODE_PROGRAMS, SHARD_PROGRAMS
from schemas.config.section import NAME_PATTERN

_FINGERPRINT, _SET = "[0-9a-f]{24}", "[0-9a-f]{16}"
UNIT_PATTERN = "[A-Za-z0-9][A-Za-z0-9@_-]*"
_SHARD = rf"(?:{'|'.join(SHARD_PROGRAMS)})/{_FINGERPRINT}/{UNIT_PATTERN}"
_PLAN, _PLAN_FILES = "[0-9]{6,9}-[0-9a-f]{12}", r"(?:(?:samples|texts|units|active)\.arrow|plan\.json)"
_DATASET = NAME_PATTERN.strip("^$")
_REJECT_LISTS = (
    rf"(?:discover|bucket)/{_DATASET}|(?:{'|'.join(ENCODE_PROGRAMS.values())})/{_FINGERPRINT}/{UNIT_PATTERN}"
)

_SHARD_FILES = re.compile(rf"{_SHARD}\.(?:arrow|tar)", re.ASCII)
_PROJECT_FILES = re.compile(
    "|".join(
        (
            rf"{_SHARD}\.(?:arrow|tar|tar\.json)",
            rf"(?:{'|'.join(ENCODE_PROGRAMS)})/{_FINGERPRINT}/provenance\.json",
            rf"damaged/{_SHARD}\.[0-9]+\.(?:arrow|tar|tar\.json)",
            rf"damaged/plans/{_PLAN}\.[0-9]+/{_PLAN_FILES}",
            rf"media/{_DATASET}/(?:media|partial/[0-9]{{6,9}})\.arrow",
            rf"plans/{_PLAN}/{_PLAN_FILES}",
            rf"sets/{_SET}/(?:(?:index|texts|shards)\.arrow|set\.json)",
            r"sets/current-[a-z0-9-]+\.json",
            rf"rejects/(?:{_REJECT_LISTS})\.arrow",
            r"weights/[0-9a-f]{32}\.json",
        )
    ),
    re.ASCII,
)


def is_project_file(rel: str) -> bool:
    """Whether a file of this name, relative to the root, is one that a program of this project writes."""
    return _PROJECT_FILES.fullmatch(rel) is not None


def is_shard(rel: str) -> bool:
    """Whether this is the name of a shard; the description beside a tar is none."""
    return _SHARD_FILES.fullmatch(rel) is not None
