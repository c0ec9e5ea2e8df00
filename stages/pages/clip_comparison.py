"""Two clips of the same shape compared: PSNR, chosen frames, the difference, and small pictures of all that. Pure."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stages.pages.html import Picture

MAX_COMPARED_FRAMES = 8  # of a clip that are shown
IMAGE_BOX, FRAME_BOX = (384, 320), (208, 160)  # pixels
DIFFERENCE_GAIN = 4  # by which differences are multiplied, so that they can be seen
MAX_PAGE_BYTES = 3 << 20  # that the pictures of a page may take together
QUALITY_STEPS = ((82, 1.0), (70, 1.0), (55, 1.0), (45, 0.75), (40, 0.5), (35, 0.35))  # quality, scale


@dataclass(frozen=True)
class ComparedFrame:
    """An image, or one frame of a clip. The original and what needs it are None where it can't be read."""

    reconstruction: Picture
    original: Picture | None
    difference: Picture | None
    mse: float | None  # of its pixels alone
    time: float | None  # seconds

    @property
    def psnr(self) -> float | None:
        return None if self.mse is None else psnr(self.mse)


@dataclass(frozen=True)
class Comparison:
    """What was decoded of a sample. mse: over all frames. condition: the i2i source, or the i2v first frame, which is
    encoded alone."""

    frames: tuple[ComparedFrame, ...]
    mse: float | None
    condition: ComparedFrame | None = None

    @property
    def psnr(self) -> float | None:
        return None if self.mse is None else psnr(self.mse)


def psnr(mse: float) -> float:
    """Peak signal-to-noise ratio in dB of 8-bit pixels, whose peak is 255; infinite where nothing differs."""
    return 10 * math.log10(255**2 / mse) if mse else math.inf


def frame_errors(original_THWC: np.ndarray, reconstruction_THWC: np.ndarray) -> np.ndarray:
    """(T,) the mean squared error of each frame of two uint8 clips, exact; a frame at a time, which bounds memory."""
    assert original_THWC.shape == reconstruction_THWC.shape, (original_THWC.shape, reconstruction_THWC.shape)
    assert original_THWC.dtype == reconstruction_THWC.dtype == np.uint8
    return np.array([_mse(*frames) for frames in zip(original_THWC, reconstruction_THWC, strict=True)])


def _mse(original_HWC: np.ndarray, reconstruction_HWC: np.ndarray) -> float:
    difference = original_HWC.astype(np.int32) - reconstruction_HWC
    return float(np.square(difference).mean(dtype=np.float64))


def frame_indices(count: int) -> list[int]:
    """At most FRAMES of `count` frames, evenly spread, the first and the last among them."""
    return np.unique(np.rint(np.linspace(0, count - 1, min(MAX_COMPARED_FRAMES, count)))).astype(int).tolist()


def count_pictures(frames: int, condition: bool) -> int:
    """How many pictures `compare` makes of a sample."""
    return 3 * (len(frame_indices(frames)) + condition)


def compare_clips(
    original_THWC: np.ndarray | None,
    reconstruction_THWC: np.ndarray,
    times: Sequence[float],
    size: int,
) -> Comparison:
    """Compare a sample with what was decoded of it, uint8. times: seconds of the frames, none for an image. size:
    bytes that a picture may take."""
    mses = None if original_THWC is None else frame_errors(original_THWC, reconstruction_THWC)
    frames = []
    for i in frame_indices(len(reconstruction_THWC)):
        original = None if original_THWC is None else original_THWC[i]
        mse = None if mses is None else float(mses[i])
        frames.append(_compare_frame(original, reconstruction_THWC[i], mse, times[i] if times else None, size))
    # Frames have equally many pixels, so the mean of their errors is that of all pixels.
    return Comparison(tuple(frames), None if mses is None else float(mses.mean()))


def _compare_frame(
    original_HWC: np.ndarray | None, reconstruction_HWC: np.ndarray, mse: float | None, time: float | None, size: int
) -> ComparedFrame:
    box = IMAGE_BOX if time is None else FRAME_BOX
    shown = encode_picture(reconstruction_HWC, box, size)
    if original_HWC is None:
        return ComparedFrame(shown, None, None, None, time)
    difference = np.abs(original_HWC.astype(np.int16) - reconstruction_HWC)
    amplified = np.minimum(difference * DIFFERENCE_GAIN, 255).astype(np.uint8)
    return ComparedFrame(
        shown, encode_picture(original_HWC, box, size), encode_picture(amplified, box, size), mse, time
    )


def encode_picture(pixels_HWC: np.ndarray, box: tuple[int, int], size: int) -> Picture:
    """uint8 pixels scaled down to fit into the box, never up, as the best WebP of at most `size` bytes; where none is
    as small, the smallest."""
    from PIL import Image

    whole: Image.Image = Image.fromarray(pixels_HWC)
    for quality, scale in QUALITY_STEPS:
        image = whole.copy()
        image.thumbnail((round(box[0] * scale), round(box[1] * scale)), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        image.save(buffer, "WEBP", quality=quality)
        if buffer.tell() <= size:
            break
    return Picture(buffer.getvalue(), image.width, image.height)
