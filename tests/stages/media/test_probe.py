import pytest
from PIL import Image

from schemas.tables import MEDIA_SCHEMA
from stages.media.files import Blob, MediaError, hash_file
from stages.media.probe import probe_companion, probe_media
from tests.stages.media_files import clip, video


def write_video(path):
    return video(path, clip(20, size=(64, 32)), rate=25)


class Stored(Blob):
    """A file in a store that vouches for an id."""

    def __init__(self, path, given):
        self.name, self.path, self.given = f"s3://bucket/{path.name}", path, given

    def open(self):
        return self.path.open("rb")

    def size(self):
        return self.path.stat().st_size

    def media_id(self):
        return self.given


def test_an_image_has_no_time(tmp_path):
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    found = probe_media(tmp_path / "a.png", "image", scenes=True)
    known = {"media_id": hash_file(tmp_path / "a.png"), "kind": "image", "width": 30, "height": 20}
    assert found == known | dict.fromkeys(("frames", "rate", "duration", "constant_rate", "scenes"))
    assert set(found) <= set(MEDIA_SCHEMA.names)


def test_a_video_has(tmp_path):
    path = write_video(tmp_path / "a.mp4")
    found = probe_media(path, "video")
    assert (found["kind"], found["width"], found["height"], found["frames"]) == ("video", 64, 32, 20)
    assert (found["rate"], found["duration"]) == (pytest.approx(25), pytest.approx(0.8))
    assert found["constant_rate"] is True
    assert found["media_id"] == hash_file(path) and found["scenes"] is None
    assert probe_media(path, "video", scenes=True)["scenes"] == []


def test_companions(tmp_path):
    Image.new("L", (30, 20)).save(tmp_path / "mask.png")
    found = probe_companion(tmp_path / "mask.png", "image")
    assert (found["id"], found["kind"], found["width"]) == (hash_file(tmp_path / "mask.png"), "image", 30)
    moving = probe_companion(write_video(tmp_path / "mask.mp4"), "video")
    assert (moving["kind"], moving["duration"]) == ("video", pytest.approx(0.8))


def test_the_store_may_vouch_for_the_id(tmp_path):
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    path = write_video(tmp_path / "a.mp4")
    assert probe_media(Stored(path, "f" * 32), "video")["media_id"] == "f" * 32
    assert probe_media(Stored(path, None), "video") == probe_media(path, "video")
    assert probe_companion(Stored(tmp_path / "a.png", "f" * 32), "image")["id"] == "f" * 32


def test_the_same_bytes_are_the_same_media_and_extensions_do_not_tell(tmp_path):
    Image.new("RGB", (30, 20)).save(tmp_path / "one.png")
    (tmp_path / "two.png").write_bytes((tmp_path / "one.png").read_bytes())
    Image.new("RGB", (30, 20)).save(tmp_path / "one.jpg")
    ids = [probe_media(tmp_path / name, "image")["media_id"] for name in ("one.png", "two.png", "one.jpg")]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize("kind", ["image", "video"])
def test_what_can_not_be_used_is_a_media_error(tmp_path, kind):
    (tmp_path / "text").write_text("neither")
    with pytest.raises(MediaError) as caught:
        probe_media(tmp_path / "text", kind)
    assert caught.value.reason in ("not-an-image", "not-a-video")
    with pytest.raises(MediaError):
        probe_media(tmp_path / "none", kind)
