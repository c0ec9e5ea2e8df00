"""The two forms of the tests: what proves every change, and the long form, marked `long`, which takes turns."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def long(*values: Any) -> Any:
    """Values of a parameter that are of the long form."""
    return pytest.param(*values, marks=pytest.mark.long)


def first(number: int, cases: list[Any]) -> list[Any]:
    """Leave this many of the short form; the others become long ones."""
    short = [case for case in cases if not hasattr(case, "marks")][:number]
    return [case if case in short or hasattr(case, "marks") else long(*case) for case in cases]


def in_turn(*options: Iterable[Any]) -> list[Any]:
    """Make cases of all products of options. Those of the short form have each value once, with the others' in turn."""
    values = [[*each] for each in options]
    short = {tuple(n % len(each) for each in values) for n in range(max(map(len, values)))}
    numbers = product(*(range(len(each)) for each in values))
    cases = {places: [each[place] for each, place in zip(values, places, strict=True)] for places in numbers}
    return [tuple(case) if places in short else long(*case) for places, case in cases.items()]
