"""Comparison of two clips of the same shape: PSNR, and small pictures of some frames and their difference. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stages.pages.pictures import FRAME_BOX, IMAGE_BOX, Picture, encode_picture

MAX_COMPARED_FRAMES = 8  # shown of a clip
DIFFERENCE_GAIN = 4  # factor that makes differences visible
MAX_PAGE_BYTES = 3 << 20  # all pictures of a page


@dataclass(frozen=True)
class ComparedFrame:
    """An image (time: None), or one frame of a clip. original, difference, mse: None if the original can't be read."""

    reconstruction: Picture
    original: Picture | None
    difference: Picture | None
    mse: float | None
    time: float | None  # seconds

    @property
    def psnr(self) -> float | None:
        return None if self.mse is None else psnr(self.mse)


@dataclass(frozen=True)
class Comparison:
    """A sample's original and reconstruction. mse: over all frames. condition: the i2i source or the i2v first frame,
    which have latents of their own."""

    frames: tuple[ComparedFrame, ...]
    mse: float | None
    condition: ComparedFrame | None = None

    @property
    def psnr(self) -> float | None:
        return None if self.mse is None else psnr(self.mse)


def psnr(mse: float) -> float:
    """Peak signal-to-noise ratio in dB of 8-bit pixels; infinite for identical ones."""
    return 10 * math.log10(255**2 / mse) if mse else math.inf


def format_decibels(value: float) -> str:
    return "identical" if math.isinf(value) else f"{value:.2f} dB"


def frame_errors(original_THWC: np.ndarray, reconstruction_THWC: np.ndarray) -> np.ndarray:
    """(T,) the mean squared error of each frame of two uint8 clips, exact; a frame at a time, which bounds memory."""
    assert original_THWC.shape == reconstruction_THWC.shape, (original_THWC.shape, reconstruction_THWC.shape)
    assert original_THWC.dtype == reconstruction_THWC.dtype == np.uint8
    pairs = zip(original_THWC, reconstruction_THWC, strict=True)
    return np.array([np.square(first.astype(np.int32) - second).mean(dtype=np.float64) for first, second in pairs])


def frame_indices(count: int) -> list[int]:
    """Choose at most MAX_COMPARED_FRAMES of `count` frames, evenly spaced, with the first and the last."""
    return np.unique(np.rint(np.linspace(0, count - 1, min(MAX_COMPARED_FRAMES, count)))).astype(int).tolist()


def compare_clips(
    original_THWC: np.ndarray | None, reconstruction_THWC: np.ndarray, times: Sequence[float], max_bytes: int
) -> Comparison:
    """Compare a sample with its reconstruction, both uint8.

    times: seconds of the frames, none for an image. max_bytes: size limit of each picture.
    """
    errors = None if original_THWC is None else frame_errors(original_THWC, reconstruction_THWC)
    frames = []
    for i in frame_indices(len(reconstruction_THWC)):
        time = times[i] if times else None
        box = IMAGE_BOX if time is None else FRAME_BOX
        reconstruction = encode_picture(reconstruction_THWC[i], box, max_bytes)
        original = difference = mse = None
        if original_THWC is not None and errors is not None:
            original, mse = encode_picture(original_THWC[i], box, max_bytes), float(errors[i])
            absolute = np.abs(original_THWC[i].astype(np.int16) - reconstruction_THWC[i])
            amplified = np.minimum(absolute * DIFFERENCE_GAIN, 255).astype(np.uint8)
            difference = encode_picture(amplified, box, max_bytes)
        frames.append(ComparedFrame(reconstruction, original, difference, mse, time))
    # All frames have the same number of pixels, so this is the mean over all pixels.
    return Comparison(tuple(frames), None if errors is None else float(errors.mean()))
