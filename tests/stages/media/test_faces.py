"""The largest face of a picture or clip."""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cache.sets.set_lookup import current_plan
from cache.store.store import Store
from schemas.errors import LatentpressError
from stages import bucket, discover
from stages.discovery.item_reader import probe_media
from stages.discovery.media_table import read_media_table
from stages.media import faces
from tests.project import Project
from tests.stages.media_files import video

skimage_data = Path(pytest.importorskip("skimage").__file__).parent / "data"
ASTRONAUT = skimage_data / "astronaut.png"
FACE = (165, 55, 275, 185)  # as a person sees it: left, upper, right, lower


def found(path: Path, kind: str = "image") -> list[int]:
    return faces.find_face(path, probe_media(path, kind), None)


def overlap(box: list[int], seen: tuple[int, ...]) -> float:
    """Intersection over union."""
    x_start, upper, x_end, lower = box[0], box[1], box[0] + box[2], box[1] + box[3]
    sides = [max(0, min(x_end, seen[2]) - max(x_start, seen[0])), max(0, min(lower, seen[3]) - max(upper, seen[1]))]
    common_area = sides[0] * sides[1]
    return common_area / (box[2] * box[3] + (seen[2] - seen[0]) * (seen[3] - seen[1]) - common_area)


def test_a_face_is_found_where_a_person_sees_it(tmp_path: Path) -> None:
    assert overlap(found(ASTRONAUT), FACE) > 0.5
    assert found(skimage_data / "brick.png") == []
    picture = Image.open(ASTRONAUT)
    turned = picture.transpose(Image.Transpose.ROTATE_90)
    exif = turned.getexif()
    exif[0x0112] = 6  # shown turned back
    turned.save(tmp_path / "turned.jpg", exif=exif, quality=95)
    assert overlap(found(tmp_path / "turned.jpg"), FACE) > 0.5


def test_of_a_clip_all_places_of_the_face_are_in_the_box(tmp_path: Path) -> None:
    picture = Image.open(ASTRONAUT).crop((100, 0, 356, 256))
    frames = []
    for shift in range(0, 100, 10):
        frame = Image.new("RGB", (360, 256), (90, 90, 90))
        frame.paste(picture, (shift, 0))
        frames.append(np.asarray(frame))
    path = video(tmp_path / "moving.mp4", frames, ("libx264", "yuv420p", {"crf": "12"}), rate=10)
    alone = faces.largest_face(Image.fromarray(frames[0]), faces.open_detector(None))
    box = found(path, "video")
    assert box[0] < alone[0] + 25 and box[2] > alone[2] + 60


@pytest.mark.long
def test_the_crop_is_around_the_face_and_without_one_in_the_middle(project: Any) -> None:
    home: Project = project(datasets=[{"id": "people", "instance_data_dir": "media", "resolution": 256,
                                       "crop_aspect": "square", "crop_style": "face"}])  # fmt: skip
    home.media.mkdir(parents=True, exist_ok=True)
    wide = Image.new("RGB", (1024, 512), (120, 120, 120))
    wide.paste(Image.open(ASTRONAUT), (512, 0))
    wide.save(home.media / "wide.png")
    Image.open(skimage_data / "brick.png").convert("RGB").resize((1024, 512)).save(home.media / "wall.png")
    for name in ("wide", "wall"):
        (home.media / f"{name}.txt").write_text("a picture")
    home.run(discover.run)
    rows = {row["path"]: row for row in read_media_table(Store(str(home.root)), "people").to_pylist()}
    assert rows["wall.png"]["face"] == [] and overlap(rows["wide.png"]["face"], (677, 55, 787, 185)) > 0.5
    home.run(bucket.run)
    crops = {
        row["path"]: row["geometry"]
        for row in current_plan(Store(str(home.root)), home.config()).sample_table.to_pylist()
        if row["role"] == "train"
    }
    x, _, width, _ = rows["wide.png"]["face"]
    crop = crops["wide.png"]
    assert crop["resize_w"] == 512 and crop["x"] <= x / 2 and (x + width) / 2 <= crop["x"] + 256
    assert abs(crop["x"] + 128 - (x + width / 2) / 2) <= 1, "it is in the middle where the picture reaches so far"
    assert (crops["wall.png"]["x"], crops["wall.png"]["y"]) == (128, 0)
    assert home.run(discover.run).details["datasets"][0]["files_read"] == 0

    with pytest.raises(LatentpressError, match="discovered with different settings"):
        home.run(bucket.run, "datasets.people.crop_style=center")
    report = home.run(discover.run, "datasets.people.crop_style=center")
    assert report.details["datasets"][0]["files_read"] == 0
    assert "face" not in read_media_table(Store(str(home.root)), "people").column_names
    assert home.run(discover.run, dry_run=True).details["datasets"][0]["files_to_read"] == 2


def test_what_can_not_find_faces_is_named(project: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "yunet.onnx").write_bytes(b"no model")
    with pytest.raises(LatentpressError, match=r"yunet\.onnx can't be read as a YuNet model") as caught:
        faces.open_detector(str(tmp_path / "yunet.onnx"))
    assert "face_detection_yunet" in caught.value.next_step
    home: Project = project(datasets=[{"id": "people", "instance_data_dir": "media", "crop_style": "face"}])
    home.media.mkdir(parents=True, exist_ok=True)
    shutil.copy(ASTRONAUT, home.media)
    (home.media / "astronaut.txt").write_text("an astronaut")
    with pytest.raises(LatentpressError, match="YuNet model"):
        home.run(discover.run, f"datasets.people.face_detector={tmp_path / 'yunet.onnx'}")
    faces.open_detector.cache_clear()
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(LatentpressError, match="crop_style: face is not available") as caught:
        faces.open_detector(None)
    assert "faces" in caught.value.next_step
