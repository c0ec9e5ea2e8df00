"""Ranks and strengths that an adapter file's header says, as peft's configurations. Without torch."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cache.store.json_checks import check_count, check_object, parse_json, printable

METADATA_KEY = "lora_adapter_metadata"
MAX_ALPHA = 1e30  # well below float32's largest number, as which other programs read alpha
MAX_PATTERNS = 10_000


def check_alpha(value: Any, what: str) -> float:
    if type(value) not in (int, float) or not abs(value) <= MAX_ALPHA:
        raise ValueError(f"{what} is no number up to {MAX_ALPHA:g}: {printable(repr(value))}")
    return float(value)


def read_configs(
    header: Mapping[str, str], names: Iterable[str]
) -> Callable[[str, int | None], tuple[int | None, float]]:
    """strength_of(name, rank of the tensors or None): rank and scale by the header's peft configurations. ValueError
    where they are malformed. names: all that it may be asked for, "<component>.<module path>"."""
    text = header.get(METADATA_KEY)
    whole = {} if text is None else check_object(parse_json(text.encode()), METADATA_KEY)

    @cache
    def config_of(part: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        # The keys have no component where the transformer's own save_lora_adapter wrote them.
        config = {key.removeprefix(f"{part}."): value for key, value in whole.items() if key.startswith(f"{part}.")}
        config = config or whole
        modules = [name.removeprefix(f"{part}.") for name in names if name.startswith(f"{part}.")]
        ranks, alphas = (_by_pattern(config.get(key) or {}, key, modules) for key in ("rank_pattern", "alpha_pattern"))
        return config, ranks, alphas

    def strength_of(name: str, rank: int | None) -> tuple[int | None, float]:
        part, _, module = name.partition(".")
        config, ranks, alphas = config_of(part)
        if not config:
            return rank, 1.0
        said = check_count(ranks.get(module, config.get("r")), f"the header's rank of {name}")
        if rank not in (None, said) or not said:
            raise ValueError(f"the header says rank {said} for {module}, and its tensors have {rank or 'another'}")
        alpha = alphas.get(module, config.get("lora_alpha", config.get("alpha")))  # the latter of a LoKr
        return said, check_alpha(alpha, "lora_alpha") / (math.sqrt(said) if config.get("use_rslora") else said)

    return strength_of


def _by_pattern(patterns: Any, what: str, modules: list[str]) -> dict[str, Any]:
    """Module -> the value of the first pattern that matches the path's end, as peft's get_pattern_key. By RE2, which
    takes time in proportion to the text, whatever the pattern is; Python's own takes for ever over some."""
    if len(check_object(patterns, what)) > MAX_PATTERNS:
        raise ValueError(f"{what} has {len(patterns)} patterns, more than {MAX_PATTERNS}")
    found, paths = dict[str, Any](), pa.array(modules, pa.string())
    for key, value in reversed(patterns.items()):
        try:
            matched = pc.match_substring_regex(paths, pattern=rf"^(.*\.)?({key})$")
        except pa.ArrowInvalid as error:
            raise ValueError(f"a pattern of {what} is no regular expression of RE2: {error}") from error
        found |= dict.fromkeys(paths.filter(matched).to_pylist(), value)
    return found
