"""The files of a training set, sets/<id>: its tables and set.json, read and checked."""

import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from cache.sets.table_checks import check_index, check_set_shards, check_set_texts
from cache.store.damage import as_damage
from cache.store.json_checks import (
    check_count,
    check_list,
    check_name,
    check_names,
    check_object,
    check_prompt_image,
    check_text,
)
from cache.store.store import Store
from schemas.config.section import NAME_PATTERN

PLANNED = "rolling"  # in set.json of a set that was made of the plan, and whose shards come and go (cache.rolling)

TABLE_CHECKS = {"index": check_index, "texts": check_set_texts, "shards": check_set_shards}
PROMPT_NAME_PATTERN = re.compile(NAME_PATTERN, re.ASCII)  # files are named after prompts


def read_set_table(store: Store, id: str, name: str) -> pa.Table:
    """The table "index", "texts" or "shards" of a set. DamageError where it is not as it was written."""
    rel = f"sets/{id}/{name}.arrow"
    with as_damage(store.path(rel), "it can't be read"):
        return store.read_table(rel, TABLE_CHECKS[name])


def check_set_json(meta: Mapping[str, Any], texts: int, shards: int) -> None:
    """One of PARSE_ERRORS where set.json refers to a text or shard beyond the `texts` and `shards` that the set has."""
    numbers = [] if meta["null_text"] is None else [meta["null_text"]]
    for entry in check_list(meta["validation"], "validation"):
        prompt = check_object(entry, "a validation prompt")
        if not PROMPT_NAME_PATTERN.fullmatch(check_name(prompt["name"], "the name of a validation prompt")):
            raise ValueError(f"{prompt['name']!r} can't be the name of a validation prompt")
        check_name(prompt["bucket"], "the bucket of a validation prompt")
        numbers += [prompt["text"], prompt["negative"]]
        for key in ("prompt", "negative_prompt"):
            check_text(prompt[key], key)
        check_prompt_image(prompt)
        if prompt["condition"] is not None:
            image = check_object(prompt["condition"], "a condition")
            check_count(image["row"], "the row of a condition")
            if check_count(image["shard"], "the shard of a condition") >= shards:
                raise ValueError(f"a condition in shard {image['shard']} of {shards}")
    if PLANNED in meta:
        planned = check_object(meta[PLANNED], PLANNED)
        check_names(planned["tensors"], "tensors")
        if len([check_count(size, "bytes") for size in check_list(planned["bytes"], "bytes")]) != shards:
            raise ValueError(f"it has sizes of {len(planned['bytes'])} shards, and there are {shards}")
    if any(check_count(number, "the number of a text") >= texts for number in numbers):
        raise ValueError(f"it names a text beyond the {texts} of the set")
