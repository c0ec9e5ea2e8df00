"""What every program's report has to be, as a document of JSON."""

import re
from collections.abc import Iterator
from typing import Any


def odd_keys(value: Any) -> Iterator[str]:
    """Keys, at any depth of a document, that are not snake_case: no key is a name out of the data, nor a heading."""
    if isinstance(value, dict):
        yield from (key for key in value if not re.fullmatch("[a-z][a-z0-9]*(_[a-z0-9]+)*", key))
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from odd_keys(part)
