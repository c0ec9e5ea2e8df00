"""Selecting the frames of each item: one frame for an image; for a video, one or several clips of the video or of each
of its scenes."""

from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.clips import frames_available, match_frame_rates, select_clips, takes_every_kth_frame
from schemas.config.datasets import Dataset, Video
from schemas.family import Family, Task
from schemas.identity import derive_seeds, mix_bits
from stages.planning.candidates import CandidateItems, message_column

SHORTEST_S = 1e-3  # least duration of a video; a video with a stated duration of 0 has at least one frame


class VideoClips(NamedTuple):
    """(m,) clips. item: index of the clip's item. start: in seconds. rate: in frames per second. frames: number of
    frames. rounded: whether the clip lost frames because of (frames - 1) % stride == 0. repeating: whether the clip
    shows a frame twice, because its source is slower than the target rate."""

    item: np.ndarray
    start: np.ndarray
    rate: np.ndarray
    frames: np.ndarray
    rounded: np.ndarray
    repeating: np.ndarray


def frame_strides(family: Family, video: Video) -> tuple[int, ...]:
    """The strides by which `frames - 1` must be divisible."""
    interval = video.frame_interval if video.bucket_strategy == "resolution_frames" else None
    return (family.temporal_stride, interval or 1)


def drop_unusable_videos(family: Family, dataset: Dataset, task: Task, items: CandidateItems) -> None:
    """Drop videos that yield no clip, are too long or too slow, and items that can't be used at all (still images for a
    task on videos, videos for an image model)."""
    video, rates = dataset.video, partial(_target_rates, family, dataset)
    rate = "its own rate" if video.frame_rate == "source" else f"{video.frame_rate:g} per second"
    condition = family.conditions.get(task)
    if condition is not None and condition.kind == "first-frame":
        items.drop(~items.videos, "no-motion", f"is a still image; {task} learns from videos only")
    if not items.videos.any():
        return
    if not family.video:
        advice = "is a video, but the model is for images; set animations: first-frame, or remove it"
        items.drop(items.videos, "in-motion", advice)
        return
    if video.max_frames is not None:
        limit = f" s, which at {rate} is more than max_frames = {video.max_frames}"
        items.drop(
            items.videos & (frames_available(items.numbers("duration"), rates(items)) > video.max_frames),
            "too-long",
            lambda rejected: message_column("lasts ", rejected.column("duration"), limit),
        )
    if video.max_repeated_frames is not None:
        repeats = (
            f" frames per second; at {rate}, more than {video.max_repeated_frames:.0%} of the frames repeat; "
            "lower frame_rate, raise max_repeated_frames, or remove it"
        )
        items.drop(
            items.videos & (_repeated_share(items, rates(items)) > video.max_repeated_frames),
            "repeats-frames",
            lambda rejected: message_column("has ", rejected.column("rate"), repeats),
        )
    too_short = items.videos.copy()
    too_short[_select_video_clips(family, dataset, items).item] = False
    min_frames = video.num_frames if video.bucket_strategy == "aspect_ratio" else video.min_frames
    in_scene = " and less in a scene" if video.scenes else ""

    def message(rejected: CandidateItems) -> pa.Array:
        matched_rates = match_frame_rates(_source_rates(rejected), rates(rejected))
        frames = frames_available(rejected.numbers("duration"), matched_rates)
        needs = f" frames at {rate}{in_scene}; a clip needs {min_frames}"
        return message_column("lasts ", rejected.column("duration"), " s, which is ", frames, needs)

    items.drop(too_short, "too-short", message)


def select_members(family: Family, dataset: Dataset, items: CandidateItems) -> CandidateItems:
    """The pictures and clips of items, in the items' order. Their values are the fields of VideoClips; a picture is one
    frame without start and rate."""
    clips = _select_video_clips(family, dataset, items)
    images = np.flatnonzero(~items.videos)
    no_time, is_false = np.full(len(images), np.nan), np.zeros(len(images), bool)
    pictures = VideoClips(images, no_time, no_time, np.ones(len(images), np.int64), is_false, is_false)
    order = np.argsort(np.concatenate([clips.item, images]), kind="stable")
    values = {name: np.concatenate([getattr(clips, name), getattr(pictures, name)])[order] for name in clips._fields}
    members = items.take(values["item"])
    members.values = members.values | values
    return members


def select_whole_items(items: CandidateItems, frames: int) -> CandidateItems:
    """Every item as one member. For a video, it has `frames` frames, or all frames if the video has fewer, each in the
    middle of one of as many equal parts of the video."""
    count = np.where(items.videos, np.clip(items.numbers("frames"), 1, frames), 1).astype(np.int64)
    duration = np.maximum(items.numbers("duration"), SHORTEST_S)
    start, rate = (np.where(items.videos, of, np.nan) for of in (duration / (2 * count), count / duration))
    items.values = {"start": start, "rate": rate, "frames": count}
    return items


def _source_rates(items: CandidateItems) -> np.ndarray:
    """(n,) frames per second of videos with a constant rate; NaN for all other items."""
    constant = pc.fill_null(items.column("constant_rate"), False).to_numpy(zero_copy_only=False)
    return np.where(constant, items.numbers("rate"), np.nan)


def _target_rates(family: Family, dataset: Dataset, items: CandidateItems) -> np.ndarray:
    """(n,) the configured frame_rate; if it is "source", the video's own rate, or the family's rate if the video's
    rate is unknown."""
    if dataset.video.frame_rate != "source":
        return np.full(len(items), dataset.video.frame_rate)
    video_rates = items.numbers("rate")
    return np.where(np.isfinite(video_rates) & (video_rates > 0), video_rates, family.frame_rate)


def _repeated_share(items: CandidateItems, rates: np.ndarray) -> np.ndarray:
    """(n,) share of a clip's frames that repeat the previous frame; 0 for an image."""
    share = 1 - items.numbers("rate") / match_frame_rates(_source_rates(items), rates)
    return np.where(items.videos, np.maximum(0.0, share), 0.0)


def _select_video_clips(family: Family, dataset: Dataset, items: CandidateItems) -> VideoClips:
    """Clips of videos at the configured rate. If a video's own rate is close to the configured rate, but a clip would
    repeat or skip a frame, all clips of the video are at its own rate."""
    video = dataset.video
    owner, begin, end = _segments(items, video.scenes)
    seeds = derive_seeds(items.column("media_id"), "clips")[owner] if len(owner) else np.zeros(0, np.uint64)
    # Each scene of a video has its own seed. The first scene has the seed that a video without scenes has.
    seeds = np.where(begin > 0, mix_bits(seeds ^ begin.view(np.uint64)), seeds)
    target = _target_rates(family, dataset, items)
    rate = target[owner]

    select = partial(
        select_clips,
        end - begin,
        seeds,
        num_frames=video.num_frames,
        min_frames=video.min_frames,
        strides=frame_strides(family, video),
        fixed=video.bucket_strategy == "aspect_ratio",
        clip=video.clip_selection,
        clips=video.clips_per_video,
        clip_stride=video.clip_stride,
    )
    clips = select(rate=rate)
    native = match_frame_rates(_source_rates(items), target)[owner]
    near = native[clips.segment] != target[owner[clips.segment]]
    if near.any():
        segment = clips.segment[near]
        source, start = _source_rates(items)[owner[segment]], begin[segment] + clips.start[near]
        even = takes_every_kth_frame(start, clips.frames[near], source, target[owner[segment]])
        uneven = owner[segment[~even]]
        rate = np.where(np.isin(owner, uneven), native, rate)
        clips = select(rate=rate)
    item, rate, segment = owner[clips.segment], rate[clips.segment], clips.segment
    unrounded = np.minimum(frames_available((end - begin)[segment], rate), video.num_frames)
    repeating = _repeated_share(items, target)[item] > 0
    return VideoClips(item, begin[segment] + clips.start, rate, clips.frames, clips.frames < unrounded, repeating)


def _segments(items: CandidateItems, scenes: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(item, begin, end), each (m,), of the segments from which clips are cut: whole videos, or each of their scenes.
    item: index of the item. begin, end: in seconds."""
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
