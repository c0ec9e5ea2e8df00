"""Stages of which media are missing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from schemas.cli.console import INCOMPLETE
from schemas.errors import LatentpressError
from stages import bucket, discover

Program = Callable[..., Any]


def prepared(home, count: int = 4):
    for number in range(count):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    return again(home)


def again(home):
    home.run(discover.run)
    home.run(bucket.run)
    return home


def unloaded(stage) -> Program:
    """The stage's `run`, which must not come to loading a model."""
    return replace(stage.STAGE, load_worker=lambda job: pytest.fail("loaded a model")).run


def files(home) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in home.root.rglob("*") if path.is_file()}


def stops(home, program: Program, *words: str, **options: Any) -> str:
    """The program stops with exit code 3 and an error that holds these words, and leaves every file as it was."""
    before = files(home)
    with pytest.raises(LatentpressError) as caught:
        home.run(program, **options)
    message = str(caught.value)
    assert caught.value.exit_code == INCOMPLETE
    assert all(word in message for word in words), message
    assert files(home) == before
    return message
