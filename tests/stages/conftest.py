"""Projects that several tests of programs begin with."""

from collections.abc import Callable
from typing import Any

import pytest

from stages import bucket, discover, encode_latents, encode_text
from tests.project import Project


@pytest.fixture
def encoded(project: Callable[..., Project], built: Callable[..., Project]) -> Project:
    """Three pictures in two units of latents, and their captions."""
    return built(project("kandinsky5-image-t2i", cache={"unit_mib": 0.008}), _encode_three)


def _encode_three(home: Project) -> None:
    programs: tuple[Any, ...] = (discover, bucket, encode_text, encode_latents)
    for number in range(3):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    for program in programs:
        home.run(program.run)
