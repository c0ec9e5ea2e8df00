"""Faults of captions that a model wrote."""

import pytest

from stages.encoding.captions.worker import find_fault

GOOD = "A lighthouse on a cliff; high waves break below it, and a gull, a big one, flies over the lighthouse."


@pytest.mark.parametrize(
    ("text", "ended", "forbidden", "reason"),
    [
        (GOOD, True, (), None),
        ("cat, cat ears, black cat, sitting, cat tail", True, (), None),
        ("", True, (), "empty-caption"),
        (" ... !", False, (), "empty-caption"),
        ("a cat", False, (), "cut-caption"),
        ("the sea the sea the sea the sea", False, (), "repeating-caption"),
        ("the sea the sea the sea", True, (), None),
        ("no no no no", True, (), "repeating-caption"),
        ("tree, sky, tree, sea, tree, rock, tree", True, (), "repeating-caption"),
        (f"{GOOD} " * 4, True, (), "repeating-caption"),
        ("A stunning view.", True, ("Stunning",), "forbidden-word"),
        ("A stunningly bad view.", True, ("stunning",), None),
        ("A view (c++).", True, ("c++",), "forbidden-word"),
    ],
)
def test_faults(text: str, ended: bool, forbidden: tuple[str, ...], reason: str | None) -> None:
    fault = find_fault(text, ended, 50, forbidden)
    assert (fault and fault.reason) == reason


def test_a_fault_has_the_text_and_what_to_do() -> None:
    fault = find_fault("A cat; it sits\non", False, 50, ())
    assert fault is not None and '"A cat, it sits on"' in fault.problem and "50 tokens" in fault.problem
    assert "caption.max_tokens" in fault.advice and "; " not in fault.problem
