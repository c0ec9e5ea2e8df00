"""Rank and strength of a module in an adapter file, by the peft configurations in its header. Without torch."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from cache.json_checks import check_count, check_object, parse_json, printable

METADATA_KEY = "lora_adapter_metadata"
MAX_ALPHA = 1e9  # beyond it the strength, times a --scale, may not be finite in float32
PATTERNS_S = 5.0  # seconds for all patterns of a file's header: some regular expressions take years


def read_strength(header: Mapping[str, str]) -> Callable[[str, str, int | None], tuple[int | None, float]]:
    """strength_of(component, module, rank of the tensors or None): rank and scale by the header's peft configurations.
    ValueError where they are malformed."""
    text = header.get(METADATA_KEY)
    whole = {} if text is None else check_object(parse_json(text.encode()), METADATA_KEY)
    find = _PatternFinder()

    def strength_of(part: str, module: str, rank: int | None) -> tuple[int | None, float]:
        # The keys have no component where the transformer's own save_lora_adapter wrote them.
        config = {key.removeprefix(f"{part}."): value for key, value in whole.items() if key.startswith(f"{part}.")}
        config = config or whole
        if not config:
            return rank, 1.0
        ranks = check_object(config.get("rank_pattern") or {}, "rank_pattern")
        alphas = check_object(config.get("alpha_pattern") or {}, "alpha_pattern")
        said = check_count(find(ranks, module, config.get("r")), "r")
        if rank not in (None, said) or not said:
            raise ValueError(f"the header says rank {said} for {module}, and its tensors have {rank}")
        # The latter of a LoKr.
        alpha = check_alpha(find(alphas, module, config.get("lora_alpha", config.get("alpha"))), "lora_alpha")
        return said, alpha / math.sqrt(said) if config.get("use_rslora") else alpha / said

    return strength_of


class _PatternFinder:
    """Finds the value of a module by a header's patterns, as peft's get_pattern_key: of the first that matches the
    path's end. ValueError for what is no regular expression, and after PATTERNS_S in all."""

    def __init__(self) -> None:
        self.left = PATTERNS_S

    def __call__(self, patterns: Mapping[str, Any], module: str, default: Any) -> Any:
        import regex  # which has a time limit, as `re` has not

        began = time.monotonic()
        for key, value in patterns.items():
            try:
                if regex.match(rf"(.*\.)?({key})$", module, timeout=max(self.left - time.monotonic() + began, 1e-3)):
                    return value
            except (regex.error, TimeoutError) as error:
                reason = "takes too long to compare" if isinstance(error, TimeoutError) else "is no regular expression"
                raise ValueError(f"the pattern {printable(key)} {reason}") from error
        self.left -= time.monotonic() - began
        return default


def check_alpha(value: Any, what: str) -> float:
    if type(value) not in (int, float) or not abs(value) <= MAX_ALPHA:  # neither is NaN
        raise ValueError(f"{what} is no number from -{MAX_ALPHA:g} to {MAX_ALPHA:g}: {printable(repr(value)[:40])}")
    return float(value)
