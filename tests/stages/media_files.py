"""Media of every format made on the spot: one scene, and what a person sees of it.

The scene is 96 x 64 pixels of four quarters in four colors, so that no turn or mirroring looks like another, with a
grey patch in the middle whose level distinguishes pictures and the frames of a clip.
"""

import io
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from itertools import chain, count
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image, ImageCms

from stages.media.files import MediaError
from tests.processes import same_scheduling

SIZE = WIDTH, HEIGHT = 96, 64
COLORS = RED, GREEN, BLUE, YELLOW = (200, 40, 40), (40, 180, 60), (50, 60, 200), (220, 210, 60)
WHITE = (255, 255, 255)
STEP = 12  # between the levels of a clip's frames
FRAMES, RATE = 14, 12

Pixels = np.ndarray


def scene(level: int = 0, size: tuple[int, int] = SIZE, colors: Iterable[tuple[int, int, int]] = COLORS) -> Pixels:
    """uint8 (H, W, 3). colors: upper left, upper right, lower left, lower right."""
    width, height = size
    one, two, three, four = colors
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2], pixels[: height // 2, width // 2 :] = one, two
    pixels[height // 2 :, : width // 2], pixels[height // 2 :, width // 2 :] = three, four
    pixels[height // 3 : -(height // 3), width // 3 : -(width // 3)] = level
    return pixels


def corners(picture: Pixels) -> Pixels:
    """(4, 3): the mean colour well inside of each quarter, in the order of `scene`."""
    height, width = picture.shape[:2]
    down, across = max(1, height // 5), max(1, width // 5)
    parts = [
        picture[y][:, x] for y in (slice(2, down), slice(-down, -2)) for x in (slice(2, across), slice(-across, -2))
    ]
    return np.array([part.reshape(-1, 3).mean(0) for part in parts])


def level(picture: Pixels) -> float:
    """The level of the patch in the middle."""
    height, width = picture.shape[:2]
    return float(picture[height // 2 - 2 : height // 2 + 2, width // 2 - 3 : width // 2 + 3].mean())


# -- images ----------------------------------------------------------------------------------------------------------

STORED = {  # what was done to the upright picture before it was stored, by EXIF orientation
    1: lambda p: p,
    2: lambda p: p[:, ::-1],
    3: lambda p: p[::-1, ::-1],
    4: lambda p: p[::-1],
    5: lambda p: p.swapaxes(0, 1),
    6: lambda p: np.rot90(p),
    7: lambda p: p[::-1, ::-1].swapaxes(0, 1),
    8: lambda p: np.rot90(p, -1),
}


def picture(level: int = 0, colors: Iterable[tuple[int, int, int]] = COLORS) -> Image.Image:
    return Image.fromarray(scene(level, colors=colors))


def oriented(path: Path, orientation: int, level: int = 0) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](scene(level))))
    stored.save(path, exif=exif, **({"quality": 98, "subsampling": 0} if path.suffix == ".jpg" else {}))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, bits: int, kind: int, rows: bytes, extra: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + header + extra + body + chunk(b"IEND", b"")


def deep_png(samples_HWC: Pixels, extra: bytes = b"") -> bytes:
    """16 bits a sample from 8, as grey or RGB by the number of bands."""
    height, width, bands = samples_HWC.shape
    rows = b"".join(b"\0" + row.tobytes() for row in (samples_HWC.astype(np.uint16) * 257).astype(">u2"))
    return png(width, height, 16, {1: 0, 3: 2}[bands], rows, extra)


def swapped_profile() -> bytes:
    """sRGB's profile with red and blue exchanged, under a name of its own."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    (count,) = struct.unpack(">I", profile[128:132])
    names = {b"rXYZ": b"bXYZ", b"bXYZ": b"rXYZ"}
    for entry in (132 + 12 * index for index in range(count)):
        tag = bytes(profile[entry : entry + 4])
        profile[entry : entry + 4] = names.get(tag, tag)
        if tag == b"desc":
            start, size = struct.unpack(">II", profile[entry + 4 : entry + 12])
            text = profile[start : start + size].replace(b"s\0R\0G\0B", b"s\0B\0G\0R")
            profile[start : start + size] = text
    return bytes(profile)


def with_profile(path: Path) -> None:
    Image.fromarray(scene()[..., ::-1].copy()).save(path, icc_profile=swapped_profile())


def see_through(path: Path) -> None:
    """A palette whose yellow is transparent."""
    palette = picture().convert("P", palette=Image.Palette.ADAPTIVE, colors=8)
    palette.save(path, transparency=palette.getpixel((WIDTH - 2, HEIGHT - 2)))


def half_grey(path: Path) -> None:
    """Grey with alpha: the lower half is transparent, whatever is under it."""
    grey = Image.fromarray(scene()).convert("LA")
    alpha = np.full((HEIGHT, WIDTH), 255, np.uint8)
    alpha[HEIGHT // 2 :] = 0
    grey.putalpha(Image.fromarray(alpha))
    grey.save(path)


def animation(path: Path, frames: int = FRAMES) -> None:
    """Twelve frames a second, nearly: GIF counts in hundredths."""
    first, *others = [picture(STEP * index) for index in range(frames)]
    options: dict[str, Any] = {".webp": {"lossless": True}}.get(path.suffix, {})
    first.save(path, save_all=True, append_images=others, duration=80, **options)


def heic(path: Path) -> None:
    import pillow_heif

    pillow_heif.from_pillow(picture()).save(path, quality=95)


def cut(path: Path, share: float = 0.5) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


# -- videos ----------------------------------------------------------------------------------------------------------

H264 = ("libx264", "yuv420p", {"preset": "ultrafast", "qp": "8", "g": "5"})
SLOW = ("libx264", "yuv420p", {"preset": "medium", "qp": "8", "g": "12", "bf": "3"})
DEEP = ("libx264", "yuv420p10le", {"preset": "ultrafast", "qp": "8"})
HEVC = ("libx265", "yuv420p", {"preset": "ultrafast", "x265-params": "log-level=none:keyint=10:qp=8"})
VP9 = ("libvpx-vp9", "yuv420p", {"cpu-used": "8", "deadline": "realtime", "crf": "8", "b": "0"})
AV1 = ("libsvtav1", "yuv420p", {"preset": "12", "crf": "20", "g": "10"})
MPEG4 = ("mpeg4", "yuv420p", {"g": "5", "qmin": "1", "qmax": "2"})
PRORES = ("prores_ks", "yuv422p10le", {})

Codec = tuple[str, str, dict[str, str]]  # name, layout of pixels, options
Frames = Iterable[Pixels | av.VideoFrame]
BITS, BLOCK = 16, 16  # of a frame's number


def clip(frames: int = FRAMES, turn: Callable[[Pixels], Pixels] = lambda p: p, size: tuple[int, int] = SIZE) -> Frames:
    return (np.ascontiguousarray(turn(scene(STEP * index, size))) for index in range(frames))


def clear_clip(frames: int = FRAMES) -> Iterator[av.VideoFrame]:
    """The yellow quarter is transparent, and black under it."""
    for pixels in clip(frames):
        alpha = np.where((pixels == YELLOW).all(-1), 0, 255).astype(np.uint8)
        yield av.VideoFrame.from_ndarray(np.dstack([pixels * (alpha[..., None] > 0), alpha]), format="rgba")


def numbered(numbers: Iterable[int], height: int = 64) -> Iterator[Pixels]:
    """Frames of 256 pixels width that carry their numbers in binary as sixteen black or white blocks."""
    for number in numbers:
        row = np.array([255 * (number >> bit & 1) for bit in range(BITS)], np.uint8).repeat(BLOCK)
        yield np.ascontiguousarray(np.broadcast_to(row[None, :, None], (height, len(row), 3)))


def number_of(frame: Pixels) -> int:
    return sum(int(frame[4:28, bit * BLOCK + 5 : bit * BLOCK + 11].mean() > 128) << bit for bit in range(BITS))


def video(
    path: Path | io.IOBase,
    frames: Frames | None = None,
    codec: Codec = H264,
    *,
    rate: Fraction | int = RATE,
    stamps: Iterable[int] | None = None,
    base: Fraction | None = None,
    prepare: Callable[[Any], None] | None = None,
    form: str | None = None,
    **container: str,
) -> Any:
    """Returns the path. frames: arrays, or frames in the codec's layout. stamps: of each frame, in ticks of `base`, by
    default milliseconds; without stamps `rate` frames a second."""
    name, layout, options = codec
    pictures = iter(clip() if frames is None else frames)
    first = next(pictures)
    base = base or (1 / Fraction(rate) if stamps is None else Fraction(1, 1000))
    target = path if isinstance(path, io.IOBase) else str(path)
    with same_scheduling(), av.open(target, "w", format=form, options=container) as output:
        stream: Any = output.add_stream(name, rate=rate, options=options)
        width, height = first.shape[1::-1] if isinstance(first, np.ndarray) else (first.width, first.height)
        stream.width, stream.height, stream.pix_fmt = width, height, layout
        stream.codec_context.time_base = base
        if prepare:
            prepare(stream)
        for stamp, picture in zip(count() if stamps is None else stamps, chain([first], pictures), strict=False):
            frame = av.VideoFrame.from_ndarray(picture) if isinstance(picture, np.ndarray) else picture
            frame.pts, frame.time_base = stamp, base
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return path


def matrix(a: int, b: int, c: int, d: int) -> Callable[[Any], None]:
    """A stored pixel (p, q) is shown at (a p + c q, b p + d q)."""
    values = [a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30]
    return lambda stream: stream.set_display_matrix(values)


def colors(transfer: int, primaries: int, space: int, whole: int | None = None) -> Callable[[Any], None]:
    def prepare(stream: Any) -> None:
        context = stream.codec_context
        context.color_trc, context.color_primaries, context.colorspace = transfer, primaries, space
        if whole is not None:
            context.color_range = whole

    return prepare


def anamorphic(stream: Any) -> None:
    stream.codec_context.sample_aspect_ratio = Fraction(2, 1)


class Pipe(io.RawIOBase):
    """A writer that can't be searched: what is muxed into it has no duration and no frame count."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("wb")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def edited(path: Path, skip: int) -> None:
    """B-frames, and an edit list that begins `skip` frames into them."""
    video(path, codec=SLOW)
    content = bytearray(path.read_bytes())
    place = content.index(b"elst") + 12
    duration, start = struct.unpack_from(">Ii", content, place)
    with av.open(str(path)) as opened:
        base = opened.streams.video[0].time_base
        assert base is not None
        ticks = base.denominator // RATE
    content[place : place + 8] = struct.pack(">Ii", duration * (FRAMES - skip) // FRAMES, start + skip * ticks)
    path.write_bytes(content)


def trimmed(path: Path, skip: float) -> None:
    """Cut `skip` frames after the beginning without encoding it again, as `ffmpeg -ss ... -i ... -c copy` does: what
    is before that moment is in the file and is not shown."""
    whole = path.with_name(f".{path.name}")
    video(whole, codec=SLOW, form="mp4")
    with av.open(str(whole)) as source, av.open(str(path), "w") as output:
        stream = source.streams.video[0]
        copy = output.add_stream_from_template(stream)
        for packet in source.demux(stream):
            if packet.dts is not None and packet.pts is not None:
                offset = round(skip / RATE / packet.time_base)
                packet.pts, packet.dts, packet.stream = packet.pts - offset, packet.dts - offset, copy
                output.mux(packet)
    whole.unlink()


def damaged(path: Path) -> None:
    """Its header is whole, and the middle of its pictures is not."""
    video(path, movflags="faststart")
    content = bytearray(path.read_bytes())
    start = content.index(b"mdat") + 4
    middle = start + (len(content) - start) // 4
    content[middle : middle + 300] = b"\xff" * 300
    path.write_bytes(content)


def sound(path: Path) -> None:
    with av.open(str(path), "w") as output:
        stream = output.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))


def without_frames(path: Path) -> None:
    with av.open(str(path), "w", options={"movflags": "empty_moov"} if path.suffix == ".mp4" else {}) as output:
        stream = output.add_stream("libx264", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        output.start_encoding()


def refusal(action: Callable[[Path], object], path: Path) -> MediaError:
    """The error with which `action` refuses a file; it names it."""
    with pytest.raises(MediaError) as caught:
        action(path)
    assert os.fspath(path) in str(caught.value)
    return caught.value


def reason(action: Callable[[Path], object], path: Path) -> str:
    return refusal(action, path).reason
