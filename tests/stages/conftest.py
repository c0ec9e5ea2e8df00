"""Projects that several tests of programs begin with, and the page of `latentpress ui`."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from stages import bucket, discover, encode_latents, encode_text
from tests.project import Project
from tests.stages.encoded_photos import IMAGE, plan_four

if TYPE_CHECKING:
    from tests.stages.ui_server import UiServer


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


@pytest.fixture
def photos(project: Callable[..., Project], built: Callable[..., Project]) -> Project:
    """Four images of two shapes with a caption each, discovered and bucketed."""
    return built(project(IMAGE), plan_four)


@pytest.fixture
def server(home: Project) -> "Iterator[UiServer]":
    """The page of the project `home` of a test's module."""
    from tests.stages.ui_server import ui_server

    with ui_server(home) as started:
        yield started
