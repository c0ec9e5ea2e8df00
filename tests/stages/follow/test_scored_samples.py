"""Which files are the samples of a step, and which of a clip's frames are scored."""

import os
from pathlib import Path

import numpy as np
import pytest

from stages.decode import write_output
from stages.follow.scored_samples import find_samples, frame_numbers, read_sample
from stages.media.errors import MediaError
from tests.stages.report_run import FakeRun


@pytest.mark.parametrize(
    ("count", "most", "numbers"),
    [(1, 8, [0]), (5, 8, [0, 1, 2, 3, 4]), (9, 1, [4]), (10, 2, [2, 7]), (61, 3, [10, 30, 50])],
)
def test_frames_are_spread_evenly(count: int, most: int, numbers: list[int]) -> None:
    assert frame_numbers(count, most) == numbers


def test_the_frames_of_a_clip_are_those(project) -> None:
    """Each of its 12 frames is brighter than the one before."""
    clip = FakeRun(project()).clip(0, "one")
    shades = read_sample(clip, 4).mean((1, 2, 3))
    assert np.abs(shades - [number * 255 // 12 for number in (1, 4, 7, 10)]).max() < 3
    assert read_sample(clip, 100).shape == (12, 48, 64, 3)


def test_samples_say_what_they_are_and_wait_for_their_pictures(project) -> None:
    made = FakeRun(project())
    for seed in (1, 2):
        made.latent(500, f"cat_seed{seed}", prompt="a cat", group="cat", seed=seed)
        made.picture(500, f"cat_seed{seed}", (seed, 0, 0))
    made.latent(500, "late")
    made.latent(500, "small")
    write_output(made.picture(500, "small", (0, 0, 0)), np.zeros((1, 8, 8, 3), np.uint8), 1, preview=True)
    made.latent(0, "old")
    made.picture(0, "old", (9, 9, 9))
    latent = made.folder / "validation/step-000000/old.safetensors"
    os.utime(latent, ns=(0, (made.folder / "samples/step-000000/old.png").stat().st_mtime_ns + 1))
    first, second = find_samples(made.folder)
    assert (first.step, first.samples, first.waiting) == (0, (), ("old",)), "its latent is newer"
    assert (second.step, second.waiting) == (500, ("late", "small")), "a preview is not scored"
    assert [(each.group, each.seed, each.prompt) for each in second.samples] == [
        ("cat", 1, "a cat"),
        ("cat", 2, "a cat"),
    ]
    contents = {each.content() for each in second.samples}
    assert len(contents) == 2 and "" not in contents


def test_a_damaged_picture_is_named(tmp_path: Path) -> None:
    for name in ("one.png", "two.mp4"):
        (tmp_path / name).write_bytes(b"cut off")
        with pytest.raises(MediaError, match=name):
            read_sample(tmp_path / name, 8)
