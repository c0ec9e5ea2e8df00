"""The same `read_sample_frames` through decord, for clips of constant frame rate on x86-64.

decord is unmaintained since 2022 and picks wrong frames where the rate varies, so such files are refused
here. It also gives wrong frames behind a seek wherever a keyframe isn't a fresh start (open groups of pictures, as
x265 makes them by default, gradual refresh, MPEG-4 with B-frames): such files are decoded from their beginning. Refused
are mirrored videos and wide primaries, too, which it leaves as they are, and high definition whose stream names no
matrix, which it takes for BT.601. It turns rotated videos itself. A Blob it reads whole, into memory. Its colours
differ from PyAV's by a few levels, as it takes swscale's fast path, so that the decoder is part of a cache's
fingerprint.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from stages.media.colour import is_assumed_bt709
from stages.media.container import OpenVideo, open_video
from stages.media.errors import MediaError, out_of_memory_error, unreadable_error
from stages.media.files import Blob, MediaPath, open_media
from stages.media.frame_selection import require_ascending, require_time_within, time_tolerance
from stages.media.video import VideoInfo, probe_video

# FFmpeg's names. In MPEG-TS decord replaces frames that it can't find by others, with no more than a warning.
_CONTAINERS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "avi")
_NAL_IDR = 5
_ADVICE = "use the decoder pyav, or write the file anew"


class _SeekTiming(NamedTuple):
    """Frames that are shown, how many a second, seconds by which a timestamp may be off, and whether decord finds its
    way back to them.
    """

    frames: int
    rate: float
    tolerance: float
    can_seek: bool


def read_frames(path: MediaPath, times: Sequence[float], *, threads: int = 1) -> Iterator[np.ndarray]:
    """For each time, ascending, the last frame at or before it: uint8 (height, width, 3), RGB, upright.

    As `stages.media.video.read_frames`, and the same frames. Raises MediaError also for a variable frame
    rate, and ValueError where decord is not installed.
    """
    require_ascending(times)
    if not times:
        return
    decord = _import_decord()
    # decord can hang on a file that is cut; PyAV's look at the header finds those.
    info = probe_video(path)
    with open_video(path) as reader:
        _require_readable(path, info, reader)
        timing = _SeekTiming(info.frames, info.rate, time_tolerance(reader.stream), _can_seek(reader))
    try:
        yield from _read_selected(decord, path, times, threads, timing)
    except MemoryError as error:
        raise out_of_memory_error(path, error) from error
    except OSError as error:
        raise unreadable_error(path, error) from error
    except (decord.DECORDError, RuntimeError) as error:
        first_line = str(error).strip().splitlines()[0][:200]
        raise MediaError("unreadable", path, f"can't be decoded by decord ({first_line})", _ADVICE) from error


def _require_readable(path: MediaPath, info: VideoInfo, reader: OpenVideo) -> None:
    container = reader.container.format.name
    if container not in _CONTAINERS:
        raise MediaError("unreadable", path, f"is in a container that decord reads wrongly ({container})", _ADVICE)
    if info.mirrored or info.wide:
        what = "is shown mirrored" if info.mirrored else "has colours beyond sRGB"
        raise MediaError("unreadable", path, f"{what}, which decord leaves as it is", _ADVICE)
    if is_assumed_bt709(reader.stream.codec_context):
        what = "is of high definition and names no colour matrix; decord takes BT.601, and players take BT.709"
        raise MediaError("unsupported-colour", path, what, _ADVICE)


def _can_seek(reader: OpenVideo) -> bool:
    """Whether every keyframe is a fresh start, by the packets, undecoded: none is shown before its keyframe, and
    H.264's are not mere points of recovery. decord reads all packets as well.
    """
    start = None
    h264 = reader.stream.codec_context.name == "h264"
    for packet in reader.container.demux(reader.stream):
        if not packet.size:
            continue
        if packet.pts is None or packet.is_discard:
            return False
        if packet.is_keyframe:
            start = packet.pts
            if h264 and _NAL_IDR not in _nal_types(bytes(packet), reader.stream.codec_context.extradata):
                return False
        elif start is None or packet.pts < start:
            return False
    return True


def _nal_types(packet: bytes, header: bytes | None) -> set[int]:
    """Types of the NAL units in a packet (ISO/IEC 14496-15 lengths, or start codes where there is no such header)."""
    if not header or header[0] != 1:
        return {unit[0] & 31 for unit in packet.split(b"\0\0\1")[1:] if unit}
    width, place, found = (header[4] & 3) + 1, 0, set()
    while place + width < len(packet):
        found.add(packet[place + width] & 31)
        place += width + int.from_bytes(packet[place : place + width], "big")
    return found


def _read_selected(
    decord: ModuleType, path: MediaPath, times: Sequence[float], threads: int, timing: _SeekTiming
) -> Iterator[np.ndarray]:
    with ExitStack() as stack:
        # An absolute path is never taken for the name of a protocol.
        source = stack.enter_context(open_media(path)) if isinstance(path, Blob) else os.path.abspath(path)
        reader = decord.VideoReader(source, ctx=decord.cpu(0), num_threads=threads)
    stamps = np.asarray(reader.get_frame_timestamp(range(len(reader))), dtype=np.float64)
    # It counts frames that an edit list leaves out, too, and does not give them.
    starts = (stamps[:, 0] - stamps[0, 0])[: timing.frames]
    _require_constant_rate(path, starts, timing.rate, timing.tolerance)
    end, at = float(starts[-1]) + 1 / timing.rate, -1
    picture = np.empty(0, np.uint8)
    for time in times:
        require_time_within(path, time, end, timing.tolerance)
        index = max(0, int(np.searchsorted(starts, time + timing.tolerance, side="right")) - 1)
        if index > at:
            picture = (reader[index] if timing.can_seek else _step_forward(reader, index - at)).asnumpy()
            if picture.shape[-1] != 3:  # of some narrow frames it takes the padding of lines for further colours
                raise MediaError("unreadable", path, f"has frames that decord garbles ({picture.shape})", _ADVICE)
            at = index
        yield picture


def _step_forward(reader: Any, steps: int) -> Any:
    """The frame `steps` (1 or more) further on, without decord's seek."""
    for _ in range(steps - 1):
        reader.next()
    return reader.next()


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


def _require_constant_rate(path: MediaPath, starts: np.ndarray, rate: float, tolerance: float) -> None:
    even = np.linspace(0.0, starts[-1], len(starts))
    wrong_length = abs(starts[-1] - (len(starts) - 1) / rate) > 0.5 / rate
    if wrong_length or np.abs(starts - even).max() > tolerance:
        raise MediaError("variable-rate", path, "has no constant frame rate", "use the decoder pyav, which is exact")
