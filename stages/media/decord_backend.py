"""The same `read_frames` through decord, for clips of constant frame rate on x86-64.

decord is unmaintained since 2022 and picks wrong frames where the rate varies, so such files are refused
here. It turns rotated videos itself. Its colours differ from PyAV's by a few levels: it takes swscale's fast
path and BT.601 wherever the stream doesn't say, so that the decoder is part of a cache's fingerprint.
"""

import os
from collections.abc import Iterator, Sequence
from types import ModuleType

import numpy as np

from stages.media.container import open_stream, require_within, time_tolerance
from stages.media.errors import MediaError
from stages.media.video import check_ascending, probe_video

# FFmpeg's names. In MPEG-TS decord replaces frames that it can't find by others, with no more than a warning.
_CONTAINERS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "avi")


def read_frames(path: str | os.PathLike[str], times: Sequence[float], *, threads: int = 1) -> Iterator[np.ndarray]:
    """For each time, ascending, the last frame at or before it: uint8 (height, width, 3), RGB, upright.

    As `stages.media.video.read_frames`, and the same frames. Raises MediaError also for a variable frame
    rate, and ValueError where decord is not installed.
    """
    check_ascending(times)
    if not times:
        return
    decord = _import_decord()
    # decord can hang on a file that is cut; PyAV's look at the header finds those.
    info = probe_video(path)
    with open_stream(path) as (container, stream):
        if container.format.name not in _CONTAINERS:
            problem = f"is in a container that decord reads wrongly ({container.format.name})"
            raise MediaError("unreadable", path, problem, "use the decoder pyav, or write the file anew")
        tolerance = time_tolerance(stream)
    try:
        reader = decord.VideoReader(os.fspath(path), ctx=decord.cpu(0), num_threads=threads)
        stamps = np.asarray(reader.get_frame_timestamp(range(len(reader))), dtype=np.float64)
        starts = stamps[:, 0] - stamps[0, 0]
        _require_constant_rate(path, starts, info.rate, tolerance)
        end = float(starts[-1]) + 1 / info.rate
        for time in times:
            require_within(path, time, end, tolerance)
            index = max(0, int(np.searchsorted(starts, time + tolerance, side="right")) - 1)
            yield reader[index].asnumpy()
    except (decord.DECORDError, RuntimeError) as error:
        first_line = str(error).strip().splitlines()[0][:200]
        advice = "use the decoder pyav, or write the file anew"
        raise MediaError("unreadable", path, f"can't be decoded by decord ({first_line})", advice) from error


def _import_decord() -> ModuleType:
    try:
        import decord
    except ImportError as error:
        raise ValueError(
            f"decoder 'decord' can't be used here ({error}); choose 'pyav', or install it where "
            "there is a wheel (x86-64): pip install decord"
        ) from error
    decord.logging.set_level(decord.logging.QUIET)
    return decord


def _require_constant_rate(path: str | os.PathLike[str], starts: np.ndarray, rate: float, tolerance: float) -> None:
    even = np.linspace(0.0, starts[-1], len(starts))
    wrong_length = abs(starts[-1] - (len(starts) - 1) / rate) > 0.5 / rate
    if wrong_length or np.abs(starts - even).max() > tolerance:
        raise MediaError("variable-rate", path, "has no constant frame rate", "use the decoder pyav, which is exact")
