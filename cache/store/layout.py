"""The names that this project gives files under a root, exactly as docs/internals.md lists them.

Programs check names here before they move or remove files: a root may contain files of other programs, for example in
a folder called media/ or text/.
"""

import re

from schemas.config.section import NAME_PATTERN

#: Kind of shard -> program that writes it.
ENCODE_PROGRAMS = {"text": "encode-text", "latents": "encode-latents", "vision": "encode-vision"}
#: Kind of shard -> program, for the stages that run before a plan of samples exists. Their units consist of items.
ITEM_PROGRAMS = {"features": "features", "captions": "caption", "masks": "masks"}
STAGE_PROGRAMS = ITEM_PROGRAMS | ENCODE_PROGRAMS

UNIT_PATTERN = "[A-Za-z0-9][A-Za-z0-9@_-]*"
_FINGERPRINT, _SET, _DATASET = "[0-9a-f]{24}", "[0-9a-f]{16}", NAME_PATTERN.strip("^$")
_PLAN, _PLAN_FILES = "[0-9]{6,9}-[0-9a-f]{12}", r"(?:(?:samples|texts|units|active)\.arrow|plan\.json)"
_SHARD = rf"(?:{'|'.join(STAGE_PROGRAMS)})/{_FINGERPRINT}/{UNIT_PATTERN}"
_STAGE_OF_CACHE = rf"(?:{'|'.join(STAGE_PROGRAMS.values())})/{_FINGERPRINT}"
_PATTERNS = (
    rf"{_SHARD}\.(?:arrow|tar|tar\.json)",
    rf"(?:{'|'.join(STAGE_PROGRAMS)})/{_FINGERPRINT}/provenance\.json",
    rf"damaged/{_SHARD}\.[0-9]+\.(?:arrow|tar|tar\.json)",
    rf"damaged/plans/{_PLAN}\.[0-9]+/{_PLAN_FILES}",
    rf"media/{_DATASET}/(?:media|partial/[0-9]{{6,9}})\.arrow",
    rf"items/{_FINGERPRINT}\.arrow",
    r"captions/edits/[0-9]{6}\.arrow",
    r"damaged/captions/edits/[0-9]{6}\.[0-9]+\.arrow",
    rf"plans/{_PLAN}/{_PLAN_FILES}",
    rf"sets/{_SET}/(?:(?:index|texts|shards)\.arrow|set\.json)",
    r"sets/current-[a-z0-9-]+\.json",
    rf"rejects/(?:(?:discover|bucket)/{_DATASET}|{_STAGE_OF_CACHE}/{UNIT_PATTERN})\.arrow",
    rf"jobs/{_STAGE_OF_CACHE}/[0-9a-f]{{16}}\.json",
    r"weights/[0-9a-f]{32}\.json",
)
_PROJECT_FILES = re.compile("|".join(_PATTERNS), re.ASCII)
_SHARD_FILES = re.compile(rf"{_SHARD}\.(?:arrow|tar)", re.ASCII)


def is_project_file(rel: str) -> bool:
    """Whether a program of this project writes files of this name. rel: relative to the root."""
    return _PROJECT_FILES.fullmatch(rel) is not None


def is_shard(rel: str) -> bool:
    """Whether this is the name of a shard. The sidecar of a tar is not a shard."""
    return _SHARD_FILES.fullmatch(rel) is not None
