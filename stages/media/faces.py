"""The largest face of a picture or clip, for `crop_style: face`. OpenCV detects faces: with YuNet if its file is
configured (https://github.com/opencv/opencv_zoo, face_detection_yunet), else with the Haar cascade that OpenCV
includes.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from schemas.cli.starting import install_command
from schemas.errors import LatentpressError
from stages.media import animation, video
from stages.media.files import MediaPath
from stages.media.image import load_image

Box = tuple[float, float, float, float]  # x, y, width, height
#: Function from uint8 RGB pixels_HWC to the boxes of all faces.
Detector = Callable[[np.ndarray], list[Box]]
CASCADE = "haarcascade_frontalface_alt2.xml"
_EDGE = 480  # longer side, in pixels, of the searched picture
_MIN_SHARE = 0.1  # smallest share of the shorter side; a smaller face is not the subject, or not a face
_NEIGHBORS, _SCALE = 4, 1.1  # for the cascade, chosen with benchmarks/faces.py
_SCORE = 0.7  # threshold for YuNet
_FRAMES = 5  # evenly spaced frames of a clip that are searched


def find_face(path: MediaPath, media: dict[str, Any], detector: str | None) -> list[int]:
    """x, y, width and height of the largest face, in pixels of the displayed picture; [] if no face is found.

    For a clip, the box encloses the largest face of each of five frames. media: columns of schemas.tables.MEDIA_SCHEMA.
    detector: a YuNet file, or None for the cascade. Raises MediaError, and LatentpressError if OpenCV can't be used.
    """
    faces = []
    for picture in _pictures(path, media):
        size = media["width"], media["height"]  # display size; differs from `picture.size` if pixels are not square
        faces += [face] if (face := largest_face(picture, open_detector(detector), size)) else []
    if not faces:
        return []
    boxes = np.array(faces)
    low, high = boxes[:, :2].min(0), (boxes[:, :2] + boxes[:, 2:]).max(0)
    return [*low.tolist(), *(high - low).tolist()]


def largest_face(picture: Image.Image, detect: Detector, size: tuple[int, int] | None = None) -> list[int]:
    """x, y, width and height of the largest face, in pixels of the picture scaled to `size`; [] if no face is found.

    picture: in mode RGB. size: (width, height), by default the picture's own size."""
    size = size or picture.size
    small = picture.copy()
    small.thumbnail((_EDGE, _EDGE), Image.Resampling.BILINEAR)
    smallest = _MIN_SHARE * min(small.size)
    faces = [face for face in detect(np.asarray(small)) if min(face[2:]) >= smallest]
    if not faces:
        return []
    x, y, width, height = max(faces, key=lambda face: (face[2] * face[3], face))
    scale = np.array(size) / small.size
    low = np.floor(np.array([x, y]) * scale).clip(0, np.array(size) - 1).astype(int)
    high = np.ceil(np.array([x + width, y + height]) * scale).clip(1, size).astype(int)
    return [*low.tolist(), *(high - low).tolist()]


def _pictures(path: MediaPath, media: dict[str, Any]) -> Iterator[Image.Image]:
    if media["kind"] == "image":
        yield load_image(path).convert("RGB")
        return
    times = [media["duration"] * (number + 0.5) / _FRAMES for number in range(_FRAMES)]
    read = animation.read_frames if animation.is_animation(path) else video.read_frames
    yield from map(Image.fromarray, read(path, times))


@lru_cache(maxsize=1)
def open_detector(detector: str | None) -> Detector:
    """A detector with a YuNet file, or with the cascade (None). Raises LatentpressError if OpenCV is not installed, has
    no cascades or can't read the file."""
    try:
        import cv2

        cv2.setNumThreads(1)
        if detector is None:
            cascade = cv2.CascadeClassifier(f"{Path(cv2.__file__).parent}/data/{CASCADE}")
    except (ImportError, AttributeError) as error:  # OpenCV 5 has no cascades
        raise LatentpressError(f"crop_style: face is not available ({error})", install_command("faces")) from error
    if detector is None:

        def by_cascade(pixels_HWC: np.ndarray) -> list[Box]:
            gray = cv2.cvtColor(pixels_HWC, cv2.COLOR_RGB2GRAY)
            side = int(_MIN_SHARE * min(gray.shape))
            faces = cascade.detectMultiScale(gray, _SCALE, _NEIGHBORS, minSize=(side, side))
            return [(float(x), float(y), float(width), float(height)) for x, y, width, height in faces]

        return by_cascade
    try:
        yunet = cv2.FaceDetectorYN.create(detector, "", (_EDGE, _EDGE), _SCORE)
    except cv2.error as error:
        problem = " ".join(error.err.split()).strip("> ")
        raise LatentpressError(
            f"face_detector: {detector} can't be read as a YuNet model: {problem}",
            "set it to a file of opencv_zoo's face_detection_yunet, or remove it to use the cascade",
        ) from error

    def by_yunet(pixels_HWC: np.ndarray) -> list[Box]:
        yunet.setInputSize((pixels_HWC.shape[1], pixels_HWC.shape[0]))
        _, faces = yunet.detect(np.ascontiguousarray(pixels_HWC[..., ::-1]))
        return [tuple(face[:4]) for face in (faces if faces is not None else ())]

    return by_yunet
