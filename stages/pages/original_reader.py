"""The originals of encoded samples, read as for encoding; runs in a process of its own."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stages.media.errors import unreadable_error
from stages.media.files import require_unchanged
from stages.pages.sample_preview import PreviewTask


@dataclass(frozen=True)
class OriginalPixels:
    """The pixels that were encoded, uint8: frames (T, H, W, 3); condition (F, H, W, 3), the source image or the first
    frames, where one was encoded beside them."""

    frames: np.ndarray
    condition: np.ndarray | None


def read_original(task: PreviewTask) -> OriginalPixels:
    """Raises MediaError, also where a file is not the one that was planned."""
    from stages.media.sample_reader import read_cropped_image, read_sample_frames

    path, sample = task.media[0], task.sample
    try:
        for file, content in filter(None, (task.media, task.source)):
            require_unchanged(file, content)
        frames = read_sample_frames(path, sample, task.decoder)
        condition = frames[: task.given] if sample["condition"] == "first-frame" else None
        if task.source:
            condition = read_cropped_image(task.source[0], sample["source_geometry"])[None]
    except OSError as error:
        raise unreadable_error(path, error) from error
    return OriginalPixels(frames, condition)


def make_original_reader() -> Callable[[PreviewTask], OriginalPixels]:
    return read_original
