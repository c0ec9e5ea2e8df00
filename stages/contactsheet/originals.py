"""The originals of encoded samples, read as for encoding; runs in a process of its own."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stages.contactsheet.looking import Task
from stages.media.errors import unreadable
from stages.media.files import check


@dataclass(frozen=True)
class Original:
    """The pixels that were encoded, uint8: frames (T, H, W, 3); condition (F, H, W, 3), the source image or the first
    frames, where one was encoded beside them."""

    frames: np.ndarray
    condition: np.ndarray | None


def original(task: Task) -> Original:
    """Raises MediaError, also where a file is not the one that was planned."""
    from stages.media.samples import fit_image, read_frames

    path, sample = task.media[0], task.sample
    try:
        for file, content in filter(None, (task.media, task.source)):
            check(file, content)
        frames = read_frames(path, sample, task.decoder)
        condition = frames[: task.given] if sample["condition"] == "first-frame" else None
        if task.source:
            condition = fit_image(task.source[0], sample["source_geometry"])[None]
    except OSError as error:
        raise unreadable(path, error) from error
    return Original(frames, condition)


def reader() -> Callable[[Task], Original]:
    return original
