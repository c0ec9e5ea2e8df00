"""Which frames of each item: one for an image, one clip or several for a video or each of its scenes."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.clips import Clips, frames_available, match_frame_rates, select_clips, takes_every_kth_frame
from schemas.config.datasets import Dataset, Video
from schemas.family import Family, Task
from schemas.identity import derive_seeds
from schemas.randomness import mix_bits
from stages.planning.candidates import CandidateItems, message_column


@dataclass(frozen=True)
class SelectedClips:
    """(m,) clips and images, in the items' order. item: row of the media. start: seconds, and rate: frames per second,
    NaN for an image."""

    item: np.ndarray
    start: np.ndarray
    rate: np.ndarray
    frames: np.ndarray
    rounded: int  # clips that lost frames to (frames - 1) % stride == 0
    repeating: int  # clips that show a frame twice, their source being slower than the target rate


def frame_strides(family: Family, video: Video) -> tuple[int, ...]:
    """What frames - 1 must be multiples of."""
    interval = video.frame_interval if video.bucket_strategy == "resolution_frames" else None
    return (family.temporal_stride, interval or 1)


def drop_unusable_videos(family: Family, dataset: Dataset, task: Task, items: CandidateItems) -> None:
    """Put out the videos that yield no clip, or too long or slow ones, and what can't be a clip at all."""
    video, rate = dataset.video, dataset.video.frame_rate
    condition = family.conditions.get(task)
    if condition is not None and condition.kind == "first-frame":
        items.drop(~items.videos, "no-motion", lambda gone: f"is a still image; {task} learns from videos only")
    if not items.videos.any():
        return
    if not family.video:
        items.drop(
            items.videos,
            "in-motion",
            lambda gone: "is a video, and this model is of images; set animations: first-frame, or remove it",
        )
        return
    given = frames_available(items.numbers("duration"), rate)
    if video.max_frames is not None:
        stay = items.drop(
            items.videos & (given > video.max_frames),
            "too-long",
            lambda gone: message_column(
                "lasts ",
                gone.column("duration"),
                f" s, at {rate:g} per second more than max_frames = {video.max_frames}",
            ),
        )
        given = given[stay]
    if video.max_repeated_frames is not None:
        most = video.max_repeated_frames
        items.drop(
            items.videos & (_repeated_share(items, rate) > most),
            "repeats-frames",
            lambda gone: message_column(
                "has ",
                gone.column("rate"),
                f" frames per second, and at {rate:g} more than {most:.0%} of them repeat; "
                "lower frame_rate, raise max_repeated_frames, or remove it",
            ),
        )
    yields = np.zeros(len(items), bool)
    yields[_select_video_clips(family, dataset, items).item] = True
    least = video.num_frames if video.bucket_strategy == "aspect_ratio" else video.min_frames
    items.drop(
        items.videos & ~yields,
        "too-short",
        lambda gone: message_column(
            "lasts ",
            gone.column("duration"),
            " s, which is ",
            frames_available(gone.numbers("duration"), _native_rates(gone, rate)),
            f" frames at {rate:g} per second{' and less in a scene' if video.scenes else ''}; a clip needs {least}",
        ),
    )


def select_clips_and_images(family: Family, dataset: Dataset, items: CandidateItems) -> SelectedClips:
    """The images and clips of items of which each yields at least one."""
    found = _select_video_clips(family, dataset, items)
    stills = np.flatnonzero(~items.videos)
    every = np.concatenate([found.item, stills])
    order = np.argsort(every, kind="stable")
    wanted = np.minimum(frames_available(found.segment, found.rate), dataset.video.num_frames)
    nothing = np.full(len(stills), np.nan)
    return SelectedClips(
        every[order],
        np.concatenate([found.start, nothing])[order],
        np.concatenate([found.rate, nothing])[order],
        np.concatenate([found.frames, np.ones(len(stills), np.int64)])[order],
        rounded=int((found.frames < wanted).sum()),
        repeating=int((_repeated_share(items, dataset.video.frame_rate)[found.item] > 0).sum()),
    )


def _source_rates(items: CandidateItems) -> np.ndarray:
    """Frames per second of videos of constant rate, NaN for others."""
    constant = pc.fill_null(items.column("constant_rate"), False).to_numpy(zero_copy_only=False)
    return np.where(constant, items.numbers("rate"), np.nan)


def _native_rates(items: CandidateItems, rate: float) -> np.ndarray:
    return match_frame_rates(_source_rates(items), rate)


def _repeated_share(items: CandidateItems, rate: float) -> np.ndarray:
    """Share of a clip's frames that repeat the one before; 0 for an image."""
    share = 1 - items.numbers("rate") / _native_rates(items, rate)
    return np.where(items.videos, np.maximum(0.0, share), 0.0)


@dataclass(frozen=True)
class _VideoClips:
    """(m,) clips of videos, in order. segment: seconds of the stretch that each lies in."""

    item: np.ndarray
    start: np.ndarray
    rate: np.ndarray
    frames: np.ndarray
    segment: np.ndarray


def _select_video_clips(family: Family, dataset: Dataset, items: CandidateItems) -> _VideoClips:
    """All at the rate asked for, where that takes frames evenly; a video of nearly that rate in which a clip would show
    a frame twice or leave one out has all its clips at its own, so that an even one stays what it is.
    """
    video = dataset.video
    owner, begin, end = _segments(items, video.scenes)
    seeds = derive_seeds(items.column("media_id"), "clips")[owner] if len(owner) else np.zeros(0, np.uint64)
    # Each scene of a video draws for itself; a video of one scene draws as one without.
    seeds = np.where(begin > 0, mix_bits(seeds ^ begin.view(np.uint64)), seeds)
    rate = np.full(len(owner), video.frame_rate)
    clips = _select_in_segments(family, video, end - begin, seeds, rate)
    own = _native_rates(items, video.frame_rate)[owner]
    near = own[clips.segment] != video.frame_rate
    if near.any():
        of = clips.segment[near]
        source, start = _source_rates(items)[owner[of]], begin[of] + clips.start[near]
        uneven = owner[of[~takes_every_kth_frame(start, clips.frames[near], source, video.frame_rate)]]
        rate = np.where(np.isin(owner, uneven), own, rate)
        clips = _select_in_segments(family, video, end - begin, seeds, rate)
    of = clips.segment
    return _VideoClips(owner[of], begin[of] + clips.start, rate[of], clips.frames, (end - begin)[of])


def _select_in_segments(
    family: Family, video: Video, seconds: np.ndarray, seeds: np.ndarray, rate: np.ndarray
) -> Clips:
    return select_clips(
        seconds,
        seeds,
        rate=rate,
        num_frames=video.num_frames,
        min_frames=video.min_frames,
        strides=frame_strides(family, video),
        fixed=video.bucket_strategy == "aspect_ratio",
        clip=video.clip,
        clips=video.clips,
        clip_stride=video.clip_stride,
    )


def _segments(items: CandidateItems, scenes: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(item, begin, end) in seconds of each stretch that no clip may leave: a video, or each of its scenes."""
    rows = np.flatnonzero(items.videos)
    duration = items.numbers("duration")
    if not scenes:
        return rows, np.zeros(len(rows)), duration[rows]
    cuts = items.column("scenes").take(pa.array(rows))
    owner = np.concatenate([np.arange(len(rows)), np.asarray(pc.list_parent_indices(cuts)).astype(np.int64)])
    begin = np.concatenate([np.zeros(len(rows)), np.asarray(cuts.flatten())])
    order = np.lexsort((begin, owner))
    owner, begin = owner[order], begin[order]
    last = np.append(owner[1:] != owner[:-1], True)[: len(owner)]
    end = np.where(last, duration[rows][owner], np.append(begin[1:], 0.0)[: len(owner)])
    return rows[owner], begin, end
