"""Photographs of scikit-image."""

from PIL import Image

from tests.golden import packaged

NAMES = ("astronaut.png", "camera.png", "chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png")


def photograph(name: str) -> Image.Image:
    return Image.open(packaged("skimage", "data") / name).convert("RGB")
