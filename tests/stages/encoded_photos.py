"""Photographs that the encoding stages encode."""

from stages import bucket, discover, encode_latents, encode_text

IMAGE = "kandinsky5-image-t2i"


def prepare(home, *overrides: str) -> None:
    home.run(discover.run, *overrides)
    home.run(bucket.run, *overrides)


def encode(home, *overrides: str, **options):
    return (
        home.run(encode_text.run, *overrides, **options),
        home.run(encode_latents.run, *overrides, **options),
    )


def plan_four(home) -> None:
    for number in range(4):
        home.image(f"{number}.png", (64, 64) if number % 2 else (96, 64), f"picture number {number}", number)
    prepare(home)
