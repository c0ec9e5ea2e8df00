"""The files of every format: how each is made, and what the programs make of it."""

import os
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.stages import media_files

COLORS, WHITE = media_files.COLORS, media_files.WHITE
RED, GREEN, BLUE, YELLOW = COLORS
LANDSCAPE, PORTRAIT = "80x48@1", "48x80@1"
CLIP, TALL = "80x48@9", "48x80@9"


@dataclass(frozen=True)
class Sample:
    """What a person sees: the corners' colors, the levels of the frames' patches; exact: the very same latents."""

    bucket: str = LANDSCAPE
    colors: tuple | None = COLORS
    levels: tuple[float, ...] = (0,)
    exact: bool = False
    shown: bool = True  # the page shows one of two files of the same bytes


@dataclass(frozen=True)
class Reject:
    stage: str
    reason: str


Case = tuple[Callable[[Path], Any], Sample | Reject]


def saved(picture: Image.Image, form: str = "PNG", **options: Any) -> Callable[[Path], None]:
    """Written under any name, whatever its ending."""

    def make(path: Path) -> None:
        with path.open("wb") as file:
            picture.save(file, form, **options)

    return make


def content(data: bytes) -> Callable[[Path], None]:
    return lambda path: (path.write_bytes(data), None)[1]


def then(make: Callable[[Path], Any], change: Callable[[Path], Any]) -> Callable[[Path], None]:
    def both(path: Path) -> None:
        make(path)
        change(path)

    return both


def greys(colors: tuple) -> tuple:
    return tuple((round(0.299 * r + 0.587 * g + 0.114 * b),) * 3 for r, g, b in colors)


def folder_with_a_picture(path: Path) -> None:
    path.mkdir()
    media_files.picture(90).save(path / "inside.png")
    (path / "inside.txt").write_text("a scene")


GREY = greys(COLORS)
EXACT = Sample(exact=True)
SCENE = media_files.picture()

IMAGES: dict[str, Case] = {
    "plain.png": (saved(SCENE), EXACT),
    **{f"exif-{n}.png": (partial(media_files.oriented, orientation=n), EXACT) for n in range(1, 9)},
    **{f"exif-{n}.jpg": (partial(media_files.oriented, orientation=n), Sample()) for n in range(1, 9)},
    "cmyk.jpg": (saved(SCENE.convert("CMYK"), "JPEG", quality=95), Sample()),
    "cmyk.tif": (saved(SCENE.convert("CMYK"), "TIFF"), EXACT),
    "deep.png": (content(media_files.deep_png(media_files.scene())), EXACT),
    "deep-grey.png": (content(media_files.deep_png(np.asarray(SCENE.convert("L"))[..., None])), Sample(colors=GREY)),
    "palette.png": (media_files.see_through, Sample(colors=(RED, GREEN, BLUE, WHITE))),
    "grey.png": (saved(SCENE.convert("L")), Sample(colors=GREY)),
    "grey-alpha.png": (media_files.half_grey, Sample(colors=(*GREY[:2], WHITE, WHITE), levels=())),
    "profile.png": (media_files.with_profile, Sample()),
    "moving.gif": (media_files.animation, Sample()),
    "moving.webp": (media_files.animation, EXACT),
    "moving.png": (media_files.animation, EXACT),
    "still.webp": (saved(SCENE, "WEBP", lossless=True), EXACT),
    "bitmap.bmp": (saved(SCENE, "BMP"), EXACT),
    "photo.avif": (saved(SCENE, "AVIF", quality=95), Sample()),
    "photo.heic": (media_files.heic, Sample()),
    "progressive.jpg": (saved(SCENE, "JPEG", progressive=True, quality=95), Sample()),
    "says-jpg.jpg": (saved(media_files.picture(7)), Sample(levels=(7,))),
    "UPPER.PNG": (saved(media_files.picture(8)), Sample(levels=(8,))),
    "cut.jpg": (
        then(saved(SCENE.resize((480, 320)), "JPEG", quality=95), media_files.cut),
        Reject("latents", "truncated"),
    ),
    "cut.png": (
        then(saved(SCENE.resize((480, 320))), partial(media_files.cut, share=0.7)),
        Reject("latents", "truncated"),
    ),
    "bomb.png": (content(media_files.png(20_000, 20_000, 8, 0, b"\0" * 999)), Reject("discover", "too-large")),
    "line.png": (saved(SCENE.resize((1, 64))), Reject("bucket", "needs-upscale")),
    "hair.png": (saved(SCENE.resize((20_000, 3))), Reject("bucket", "needs-upscale")),
    "wide.png": (saved(SCENE.resize((20_000, 64))), Sample(colors=None, levels=())),
    "text.png": (content(b"no picture, whatever its name says" * 9), Reject("discover", "not-an-image")),
    "empty.png": (content(b""), Reject("discover", "empty-file")),
    "hdr.png": (
        content(media_files.deep_png(media_files.scene(), media_files.chunk(b"cICP", bytes([9, 16, 0, 1])))),
        Reject("discover", "hdr"),
    ),
    "float.tif": (saved(SCENE.convert("F"), "TIFF"), Reject("latents", "unsupported-samples")),
    "y.png": (os.mkfifo, Reject("discover", "unreadable")),
    "dangling.png": (lambda path: path.symlink_to("nowhere.png"), Reject("discover", "missing")),
    "uncaptioned.png": (saved(media_files.picture(9)), Reject("discover", "no-caption")),
    "empty\nname.png": (content(b""), Reject("discover", "empty-file")),
    "\x1b[31mempty.png": (content(b""), Reject("discover", "empty-file")),
    "left \u202e right.png": (content(b"no picture" * 99), Reject("discover", "not-an-image")),
    "cut\n\x1b]0;title\x07.jpg": (
        then(saved(SCENE.resize((480, 320)), "JPEG", quality=94), media_files.cut),
        Reject("latents", "truncated"),
    ),
    "pair.png": (saved(media_files.picture(10)), Sample(levels=(10,))),
    "pair.jpg": (saved(media_files.picture(11), "JPEG", quality=95), Sample(levels=(11,))),
    "twice-1.png": (saved(media_files.picture(12)), Sample(levels=(12,))),
    "twice-2.png": (saved(media_files.picture(12)), Sample(shown=False)),
}
NAMES = [
    "two words.png",
    "new\nline.png",
    "quote'\"`.png",
    "tab\tand\rreturn.png",
    "\x1b[31mcolour.png",
    "-rf.png",
    "--help.png",
    "100%d {0} $HOME.png",
    "[bold]markup :smile:.png",
    "back\\slash.png",
    "dots.in.it.png",
    "right\u202eto left.png",
    "x" * 251 + ".png",
    *(unicodedata.normalize(form, "Éclair ü.png") for form in ("NFC", "NFD")),
]
IMAGES |= {name: (saved(media_files.picture(20 + i)), Sample(levels=(20 + i,))) for i, name in enumerate(NAMES)}
NO_UTF8 = os.fsdecode(b"caf\xe9.png")
NO_UTF8_SHOWN = "caf\\udce9.png"
IN_FOLDER = "x.png/inside.png"


def levels(*frames: int) -> tuple[float, ...]:
    return tuple(media_files.STEP * frame for frame in frames)


def live(path: Path) -> None:
    with media_files.Pipe(path) as pipe:
        media_files.video(pipe, form="matroska", live="1")


def turned(matrix: tuple[int, int, int, int], stored: Callable) -> Callable[[Path], None]:
    return lambda path: media_files.video(path, media_files.clip(turn=stored), prepare=media_files.matrix(*matrix))


def plain(**options: Any) -> Callable[[Path], None]:
    return lambda path: media_files.video(path, **options)


USUAL = Sample(CLIP, levels=levels(*range(9)))
#: Of the last eight frames of fourteen, which last eight and a half.
TRIMMED = Sample("80x48@5", levels=levels(*range(6, 11)))
#: Of 12 frames a second, the ninth of which lasts longer: shown frames by the times of the clip.
UNEVEN = [0, 40, 90, 170, 260, 300, 430, 600, 610, 700, 1000, 1100, 1200, 1300]
BY_TIME = [max(i for i, stamp in enumerate(UNEVEN) if stamp <= 1000 * n / 12 + 1) for n in range(9)]

VIDEOS: dict[str, Case] = {
    "h264.mp4": (plain(), USUAL),
    "h264.mov": (plain(), USUAL),
    "h264.mkv": (plain(), USUAL),
    "h264.avi": (plain(), USUAL),
    "hevc.mp4": (plain(codec=media_files.HEVC), USUAL),
    "vp9.webm": (plain(codec=media_files.VP9), USUAL),
    "av1.mp4": (plain(codec=media_files.AV1), USUAL),
    "av1.webm": (plain(codec=media_files.AV1), USUAL),
    "mpeg4.avi": (plain(codec=media_files.MPEG4), USUAL),
    "prores.mov": (plain(codec=media_files.PRORES), USUAL),
    "b-frames.mp4": (plain(codec=media_files.SLOW), USUAL),
    "edited.mp4": (partial(media_files.edited, skip=3), Sample(CLIP, levels=levels(*range(3, 12)))),
    **{f"trimmed.{ending}": (partial(media_files.trimmed, skip=5.5), TRIMMED) for ending in ("mp4", "mov")},
    "trimmed.mkv": (partial(media_files.trimmed, skip=5.5), USUAL),
    "cut-trimmed.mkv": (then(partial(media_files.trimmed, skip=5.5), media_files.cut), Reject("discover", "truncated")),
    "late.mkv": (plain(codec=media_files.SLOW, stamps=[3000 + round(1000 * n / 12) for n in range(14)]), USUAL),
    "turned-90.mp4": (turned((0, 1, -1, 0), np.rot90), USUAL),
    "turned-180.mov": (turned((-1, 0, 0, -1), lambda p: p[::-1, ::-1]), USUAL),
    "turned-270.mp4": (turned((0, -1, 1, 0), lambda p: np.rot90(p, -1)), USUAL),
    "turned-portrait.mp4": (
        turned((0, 1, -1, 0), lambda p: p),
        Sample(TALL, (BLUE, RED, YELLOW, GREEN), levels(*range(9))),
    ),
    "mirrored.mp4": (turned((-1, 0, 0, 1), lambda p: p[:, ::-1]), USUAL),
    "uneven.mkv": (plain(stamps=UNEVEN), Sample(CLIP, levels=levels(*BY_TIME))),
    "uneven.mp4": (plain(stamps=UNEVEN), Sample(CLIP, levels=levels(*BY_TIME))),
    "live.mkv": (live, USUAL),
    "fragments.mp4": (plain(movflags="frag_keyframe+empty_moov"), USUAL),
    "media_files.webm": (plain(frames=media_files.clip(size=(97, 65)), codec=media_files.VP9), USUAL),
    "ten-bits.mp4": (plain(codec=media_files.DEEP), USUAL),
    "anamorphic.mp4": (plain(frames=media_files.clip(size=(48, 64)), prepare=media_files.anamorphic), USUAL),
    "hdr.mp4": (plain(codec=media_files.DEEP, prepare=media_files.colors(16, 9, 9)), Reject("discover", "hdr")),
    "clear.mov": (
        lambda path: media_files.video(path, media_files.clear_clip(), ("qtrle", "argb", {})),
        Sample(CLIP, (*COLORS[:3], WHITE), levels(*range(9))),
    ),
    "interlaced.mp4": (
        plain(codec=("libx264", "yuv420p", {"x264-params": "tff=1"})),
        Reject("discover", "interlaced"),
    ),
    "no-moov.mp4": (then(plain(), partial(media_files.cut, share=0.6)), Reject("discover", "not-a-video")),
    "cut.mp4": (
        then(plain(movflags="faststart"), partial(media_files.cut, share=0.7)),
        Reject("discover", "truncated"),
    ),
    "cut.mkv": (then(plain(), partial(media_files.cut, share=0.5)), Reject("discover", "truncated")),
    "cut.avi": (
        then(plain(codec=media_files.MPEG4), partial(media_files.cut, share=0.8)),
        Reject("discover", "truncated"),
    ),
    "damaged.mp4": (media_files.damaged, Reject("latents", "unreadable")),
    "sound.mp4": (media_files.sound, Reject("discover", "no-video-stream")),
    "nothing.mp4": (media_files.without_frames, Reject("discover", "zero-frames")),
    "nothing.mkv": (media_files.without_frames, Reject("discover", "not-a-video")),
    "empty.mp4": (content(b""), Reject("discover", "empty-file")),
    "text.mp4": (content(b"no video, whatever its name says" * 99), Reject("discover", "not-a-video")),
    "short.mp4": (plain(frames=media_files.clip(3)), Reject("bucket", "too-short")),
    "pipe.mp4": (os.mkfifo, Reject("discover", "unreadable")),
    "moving.gif": (media_files.animation, USUAL),
    "moving.webp": (media_files.animation, USUAL),
    "moving.png": (media_files.animation, USUAL),
    "still.png": (saved(SCENE), Sample()),
    "turned.jpg": (partial(media_files.oriented, orientation=6), Sample()),
    "cut.jpg": (
        then(saved(SCENE.resize((480, 320)), "JPEG", quality=95), media_files.cut),
        Reject("latents", "truncated"),
    ),
    "new\nline.mp4": (plain(frames=media_files.clip(13)), USUAL),
    "-dash.mp4": (plain(frames=media_files.clip(12)), USUAL),
    "pipe:1.mp4": (plain(frames=media_files.clip(11)), USUAL),
    "pair.mp4": (plain(codec=media_files.SLOW, frames=media_files.clip(13)), USUAL),
    "pair.mkv": (plain(codec=media_files.SLOW, frames=media_files.clip(12)), USUAL),
    "twice-1.mp4": (plain(codec=media_files.SLOW, frames=media_files.clip(11)), USUAL),
    "twice-2.mp4": (plain(codec=media_files.SLOW, frames=media_files.clip(11)), Sample(CLIP, shown=False)),
}
