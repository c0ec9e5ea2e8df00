"""The two forms of the tests: what proves every change, and the long form, marked `long`, which takes turns."""

from typing import Any

import pytest


def long(*values: Any) -> Any:
    """Values of a parameter that are of the long form."""
    return pytest.param(*values, marks=pytest.mark.long)
