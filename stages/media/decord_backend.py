"""`read_frames` with decord, for clips of constant frame rate on x86-64.

decord is unmaintained since 2022. Files that it does not decode correctly are refused: variable frame rate (it returns
wrong frames), mirrored videos, wide primaries, ICC profiles and transparency (it ignores them), frames that change
their size (it stretches them), several video tracks (it chooses a different track), and high definition without a
declared matrix (it assumes BT.601). After a seek, it returns wrong frames if a keyframe depends on earlier frames (open
groups of pictures, x265's default; gradual refresh; MPEG-4 with B-frames): such files are decoded from their beginning.
It applies rotations itself, and reads a Blob into memory completely. Its colors differ from PyAV's by a few levels,
because it uses swscale's fast path; the decoder is therefore part of a cache's fingerprint.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from stages.media import color
from stages.media.container import (
    OpenVideo,
    TimedFrame,
    decode_packets,
    open_video,
    packets_from_keyframe,
    require_ascending,
    require_size,
    require_time_within,
    time_tolerance,
)
from stages.media.files import Blob, MediaError, MediaPath, open_media, out_of_memory_error, unreadable_error
from stages.media.video import VideoInfo, probe_video

# FFmpeg's names. In MPEG-TS, decord only warns if it can't find a frame, and returns a different frame.
_CONTAINERS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "avi")
_NAL_IDR = 5
_ADVICE = "use the decoder pyav, or convert the file"


def read_frames(path: MediaPath, times: Sequence[float], *, threads: int = 1) -> Iterator[np.ndarray]:
    """Yield, for each of the ascending times, the last frame at or before it: uint8 (height, width, 3), RGB, upright.

    The same frames as `stages.media.video.read_frames`. Raises MediaError also for a variable frame rate, and
    ValueError if decord is not installed.
    """
    require_ascending(times)
    if not times:
        return
    try:
        import decord
    except ImportError as error:
        raise ValueError(
            f"decoder 'decord' is not available ({error}); choose 'pyav', or on x86-64: pip install decord"
        ) from error
    decord.logging.set_level(decord.logging.QUIET)
    # decord can hang on a truncated file; probing the header with PyAV raises for such files.
    info = probe_video(path)
    with open_video(path) as reader:
        container = reader.container.format.name
        if container not in _CONTAINERS:
            problem = f"is in a container that decord does not read correctly ({container})"
            raise MediaError("unreadable", path, problem, _ADVICE)
        if info.mirrored or info.wide:
            raise _ignored_error(path, "is shown mirrored" if info.mirrored else "has colors beyond sRGB")
        if info.track is not None:
            raise _ignored_error(path, f"has several video tracks; the main track has number {info.track}")
        if color.is_assumed_bt709(reader.stream.codec_context):
            problem = "has high definition without a color matrix; decord assumes BT.601, players assume BT.709"
            raise MediaError("unsupported-color", path, problem, _ADVICE)
        tolerance, can_seek = time_tolerance(reader.stream), _can_seek(reader)
    _check_frames(path, times[-1], info.rate)
    try:
        with ExitStack() as stack:
            # An absolute path can't be mistaken for the name of a protocol.
            source = stack.enter_context(open_media(path)) if isinstance(path, Blob) else os.path.abspath(path)
            decoder = decord.VideoReader(source, ctx=decord.cpu(0), num_threads=threads)
        yield from _read_selected(decoder, path, times, info, tolerance, can_seek)
    except MemoryError as error:
        raise out_of_memory_error(path, error) from error
    except OSError as error:
        raise unreadable_error(path, error) from error
    except (decord.DECORDError, RuntimeError) as error:
        first_line = str(error).strip().splitlines()[0][:200]
        raise MediaError("unreadable", path, f"can't be decoded by decord ({first_line})", _ADVICE) from error


def _ignored_error(path: MediaPath, problem: str) -> MediaError:
    return MediaError("unreadable", path, f"{problem}, which decord ignores", _ADVICE)


def _check_frames(path: MediaPath, end: float, rate: float) -> None:
    """Raise MediaError if a frame until `end` seconds has transparency, an ICC profile or a different size, which
    decord ignores. With most codecs only keyframes can change them, so only keyframes are decoded."""
    with open_video(path) as reader:
        stream, decoder = reader.stream, reader.decoder
        if decoder.format and color.has_alpha(decoder.format):
            raise _ignored_error(path, "has transparency")
        every = decoder.name == "vp9" or reader.container.format.name == "avi"
        if not every:
            decoder.skip_frame = "NONKEY"
        for number, frame in enumerate(decode_packets(packets_from_keyframe(reader), reader)):
            if color.has_alpha(frame.format):
                raise _ignored_error(path, "has transparency")
            if color.profile_of(frame):
                raise _ignored_error(path, "has an ICC profile")
            if not every and frame.pts is not None and stream.time_base:
                number = round((frame.pts - (stream.start_time or 0)) * stream.time_base * rate)
            timed_frame = TimedFrame(number / rate, 1 / rate, number, frame)
            require_size(path, timed_frame, (frame.width, frame.height), reader.size)
            if timed_frame.time > end:
                return


def _can_seek(reader: OpenVideo) -> bool:
    """Whether decoding can start at every keyframe: no packet is shown before its keyframe, and H.264 keyframes are IDR
    frames, not mere recovery points. Reads all packets without decoding, which decord does, too."""
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
    """Types of the NAL units in a packet. The units have lengths if `header` is an avcC record (ISO/IEC 14496-15), else
    start codes."""
    if not header or header[0] != 1:
        return {unit[0] & 31 for unit in packet.split(b"\0\0\1")[1:] if unit}
    width, at, types = (header[4] & 3) + 1, 0, set()
    while at + width < len(packet):
        types.add(packet[at + width] & 31)
        at += width + int.from_bytes(packet[at : at + width], "big")
    return types


def _read_selected(
    decoder: Any, path: MediaPath, times: Sequence[float], info: VideoInfo, tolerance: float, can_seek: bool
) -> Iterator[np.ndarray]:
    stamps = np.asarray(decoder.get_frame_timestamp(range(len(decoder))), dtype=np.float64)
    # decord also counts the frames that an edit list hides, but does not return them.
    starts = (stamps[:, 0] - stamps[0, 0])[: info.frames]
    wrong_length = abs(starts[-1] - (len(starts) - 1) / info.rate) > 0.5 / info.rate
    if wrong_length or np.abs(starts - np.linspace(0.0, starts[-1], len(starts))).max() > tolerance:
        raise MediaError("variable-rate", path, "has a variable frame rate", "use the decoder pyav, which supports it")
    end, at = float(starts[-1]) + 1 / info.rate, -1
    picture = np.empty(0, np.uint8)
    for time in times:
        require_time_within(path, time, end, tolerance)
        index = max(0, int(np.searchsorted(starts, time + tolerance, side="right")) - 1)
        if index > at:
            if can_seek:
                picture = decoder[index].asnumpy()
            else:
                for _ in range(index - at - 1):
                    decoder.next()
                picture = decoder.next().asnumpy()
            if picture.shape[-1] != 3:  # in some narrow frames decord treats the padding of lines as channels
                problem = f"has frames that decord decodes incorrectly ({picture.shape})"
                raise MediaError("unreadable", path, problem, _ADVICE)
            at = index
        yield picture
