"""Reads members for the encoding stages: each in a decoding process, ahead of the batch that is encoded.

A decoding process (stages/engines/sandbox.py) checks a member's files, chooses and crops its frames. It needs no torch,
and its results are small: 8-bit pixels. One thread prepares each member for the encoder. Members are read in the units'
order; the number in progress is bounded, and so is memory. Successive members with the same request (texts with one
image) share its result.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from cache.sets.plans import Unit
from schemas.clips import clip_times
from schemas.family import ReferenceSize
from schemas.geometry import Bucket, Crop
from schemas.interruption import wait_for
from schemas.tables import MADE
from stages.engines.sandbox import SandboxPool, WorkerFailure
from stages.media.files import MediaError, MediaPath, require_unchanged, unreadable_error
from stages.media.image import load_image
from stages.media.sample_reader import read_cropped_image, read_sample_frames, read_sample_mask, resize_and_crop


@dataclass(frozen=True)
class ReadRequest:
    """files: paths, each with its media id as planned; a mask is the last. sample: its row, None for an image alone.
    image_geometry: the crop of an image that is read in addition to the sample or alone. image_size: all files are
    reference images, each to be resized to what this makes of its size."""

    files: tuple[tuple[MediaPath, str], ...]
    sample: dict[str, Any] | None
    image_geometry: dict[str, Any] | None
    decoder: str = "pyav"
    has_mask: bool = False
    image_size: ReferenceSize | None = None


class MemberPixels(NamedTuple):
    """uint8 (T, H, W, 3) frames, (H, W, 3) image and each of references, (T, H, W) mask (T = 1 for a mask of all
    frames); None, or no references, for what was not requested."""

    frames: np.ndarray | None
    image: np.ndarray | None
    mask: np.ndarray | None
    references: tuple[np.ndarray, ...] = ()


def read_member(request: ReadRequest) -> MemberPixels:
    """Raises MediaError."""
    first_path, sample = request.files[0][0], request.sample
    try:
        for path, media_id in request.files:
            require_unchanged(path, media_id)
        if request.image_size is not None:
            return MemberPixels(None, None, None, tuple(_read_references(request.files, request.image_size)))
        frames = image = mask = None
        if sample is not None:
            frames = read_sample_frames(first_path, sample, request.decoder)
        if request.image_geometry is not None:
            image = read_cropped_image(request.files[0 if sample is None else 1][0], request.image_geometry)
        if request.has_mask:
            assert sample is not None
            times: Sequence[float] = ()
            frame_count = Bucket.parse(sample["geometry"]["bucket"]).frames
            if sample["mask_kind"] == "video":
                times = clip_times(sample["start"], sample["rate"], frame_count)
            elif sample["mask_kind"] == MADE:
                times = range(frame_count)
            mask = read_sample_mask(request.files[-1][0], sample["mask_kind"], sample["mask_geometry"], times)
        return MemberPixels(frames, image, mask)
    except OSError as error:
        raise unreadable_error(first_path, error) from error


def _read_references(files: Sequence[tuple[MediaPath, str]], size: ReferenceSize) -> Iterator[np.ndarray]:
    for path, _ in files:
        image = load_image(path)
        width, height, crop = size.fit(*(np.array([side]) for side in image.size))
        placed = Crop(*(int(numbers[0]) for numbers in vars(crop).values()))
        yield resize_and_crop(image, placed, Bucket(int(width[0]), int(height[0])), path=path)


def make_member_reader() -> Callable[[ReadRequest], MemberPixels]:
    return read_member


#: The next unit of this process. None: there is none yet or, for an argument of True, which waits, no more.
NextUnit = Callable[[bool], Unit | None]


class Prefetcher:
    """Members of the units that `take` gives.

    read_request: the files to read for a member, None for none. prepare: prepares it for the encoder, or raises
    MediaError. depth: how many members of a unit may be in progress. processes: the readers; made when first needed.
    """

    def __init__(
        self,
        take: NextUnit,
        *,
        read_request: Callable[[str], ReadRequest | None],
        prepare: Callable[[str, MemberPixels | None], Any],
        depth: Callable[[Unit], int],
        processes: Callable[[], SandboxPool[ReadRequest, MemberPixels]],
    ) -> None:
        self._take, self._read_request, self._prepare = take, read_request, prepare
        self._depth, self._processes = depth, processes
        self._thread = ThreadPoolExecutor(1, "prepare")
        self._units: deque[Unit] = deque()  # begun; the first is being encoded
        self._begun: deque[tuple[Unit, str, Future]] = deque()
        self._remaining_members: Iterator[str] | None = None  # of the last unit, not begun
        self._current_depth = 0  # of the last unit
        self._last_read: tuple[ReadRequest, Future[MemberPixels]] | None = None

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def next_unit(self, wait: bool) -> Unit | None:
        """The unit to encode now, once the last one's members have been taken; None as from `take`."""
        self._fill(wait)
        return self._units[0] if self._units else None

    def members(self, unit: Unit) -> Iterator[tuple[str, Any | MediaError]]:
        """Each member of the unit that `next_unit` gave, in order: prepared, or its MediaError."""
        assert self._units and self._units[0] is unit
        for _ in unit.members:
            self._fill(False)
            owner, name, item = self._begun.popleft()
            assert owner is unit
            yield name, _result_or_error(item)
        self._units.popleft()

    def reread(self, unit: Unit) -> Iterator[tuple[str, Any | MediaError]]:
        """The same members again, with nothing read ahead."""
        for name in unit.members:
            yield name, _result_or_error(self._begin(name))

    def skip(self, unit: Unit) -> None:
        """Drop the rest of the unit that `next_unit` gave."""
        while self._begun and self._begun[0][0] is unit:
            self._begun.popleft()
        if self._units and self._units[0] is unit:
            self._remaining_members = self._remaining_members if len(self._units) > 1 else None
            self._units.popleft()

    def _fill(self, wait: bool) -> None:
        while not self._units or len(self._begun) < self._current_depth:
            name = next(self._remaining_members, None) if self._remaining_members is not None else None
            if name is not None:
                self._begun.append((self._units[-1], name, self._begin(name)))
                continue
            unit = self._take(wait and not self._units)
            if unit is None:
                return
            self._units.append(unit)
            self._remaining_members, self._current_depth = iter(unit.members), self._depth(unit)

    def _begin(self, name: str) -> Future:
        try:
            request = self._read_request(name)
        except MediaError as error:
            failed: Future = Future()
            failed.set_exception(error)
            return failed
        if request is None:
            return self._thread.submit(self._prepare, name, None)
        # Compared with names for files: one member of an archive may be requested by two objects.
        named = replace(request, files=tuple((os.fspath(path), media_id) for path, media_id in request.files))
        if self._last_read is None or self._last_read[0] != named:
            processes = self._processes()
            self._last_read = named, self._thread.submit(_wait_for, processes, request, processes.begin(request))
        read = self._last_read[1]  # done when its members' turn comes, as the thread takes one after another
        return self._thread.submit(lambda: self._prepare(name, read.result()))


def _wait_for(processes: SandboxPool[ReadRequest, MemberPixels], request: ReadRequest, task: Future) -> MemberPixels:
    """Raises MediaError."""
    result = processes.result(request, task)
    if isinstance(result, WorkerFailure):
        raise result.error(request.files[0][0])
    if isinstance(result, MediaError):
        raise result
    return result


def _result_or_error(item: Future) -> Any | MediaError:
    try:
        return wait_for(item)
    except MediaError as error:
        return error
