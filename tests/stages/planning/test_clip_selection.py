"""Videos of nearly the rate asked for, through discover and bucket: the frames that a sample's readers take."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from cache.sets.set_lookup import current_plan
from cache.store.store import Store
from stages import bucket, discover
from stages.media.sample_reader import read_sample_frames
from tests.stages.media_files import video

BITS = 8


def film(path: Path, rate: Fraction, frames: int) -> None:
    """Frames that carry their numbers as eight black or white bars."""

    def barred(number: int) -> np.ndarray:
        bars = np.array([255 * (number >> bit & 1) for bit in range(BITS)], np.uint8).repeat(16)
        return np.ascontiguousarray(np.broadcast_to(bars[None, :, None], (64, 128, 3)))

    codec = "libx264", "yuv420p", {"preset": "ultrafast", "g": "24"}
    video(path, map(barred, range(frames)), codec, rate=rate)
    path.with_suffix(".txt").write_text("film")


def number_of(frame: np.ndarray) -> int:
    side = frame.shape[1] // BITS
    return sum(int(frame[:, bit * side + 2 : (bit + 1) * side - 2].mean() > 128) << bit for bit in range(BITS))


def taken(home, decoder: str) -> dict[str, list[list[int]]]:
    """path -> the frames of each of its clips."""
    plan, numbers_by_path = current_plan(Store(home.config().root), home.config()), dict[str, list[list[int]]]()
    for sample in plan.sample_table.sort_by([("path", "ascending"), ("start", "ascending")]).to_pylist():
        frames = read_sample_frames(home.media / sample["path"], sample, decoder)
        numbers_by_path.setdefault(sample["path"], []).append([number_of(frame) for frame in frames])
    return numbers_by_path


@pytest.mark.long
def test_frames_neither_repeat_nor_are_left_out(project) -> None:
    home = project("kandinsky5-video-t2v")
    home.settings["datasets"][0] |= {
        "video": {"num_frames": 61, "frame_rate": 24.0, "clip_selection": "chunks"},
        "resolution": 96,
    }
    slow = Fraction(24000, 1001)
    for suffix in ("mp4", "mkv"):
        film(home.media / f"film.{suffix}", slow, 127)
        film(home.media / f"twice.{suffix}", 2 * slow, 254)
        film(home.media / f"exact.{suffix}", Fraction(24), 127)
        film(home.media / f"faster.{suffix}", Fraction(241, 10), 250)
    home.run(discover.run)
    report = home.run(bucket.run)
    assert "repeat" not in home.said and report.rejects == []
    check_clips(taken(home, "pyav"))
    pytest.importorskip("decord")
    check_clips(taken(home, "decord"))


def check_clips(found: dict[str, list[list[int]]]) -> None:
    assert len(found) == 8
    for path, clips in found.items():
        step = 2 if path.startswith("twice") else 1
        assert len(clips[0]) == 61 and len(clips) == (5 if path.startswith("faster") else 3), path
        first = [clip[0] for clip in clips]
        assert first == [61 * step * number for number in range(len(clips))], path
        for clip in clips:
            assert clip == list(range(clip[0], clip[0] + step * len(clip), step)), path
