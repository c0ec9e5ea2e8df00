"""Every program that writes, killed at a random step or with a full disk: the same files, byte for byte, afterwards."""

from collections.abc import Callable
from random import Random

import pytest

from tests.forms import long
from tests.torture.programs import PROGRAMS, AtWork

pytestmark = pytest.mark.slow
SHORT = ("index", "encode-text of edits", "encode-latents of clips")


@pytest.mark.parametrize("name", [name if name in SHORT else long(name) for name in PROGRAMS])
def test_killed_once(at_work: Callable[[str], AtWork], draw: Random, name: str) -> None:
    work = at_work(name)
    work.kill(draw.randrange(len(work.log)))
    work.check_left()
    work.finish()


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_killed_in_steps_of_each_kind_and_with_a_full_disk(
    at_work: Callable[[str], AtWork], draw: Random, name: str
) -> None:
    work = at_work(name)
    for at in work.moments(draw):
        work.reset()
        work.kill(at)
        work.check_left()
        work.finish()
    work.reset()
    work.fill_disk(draw.choice([at for at, (step, _) in enumerate(work.log) if step != "unlink"]))
    work.check_left()
    work.finish()
