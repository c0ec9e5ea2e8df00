"""Items of a plan as the encoder will see them, as small pictures; runs in a process of its own."""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas.clips import clip_times
from schemas.errors import LatentpressError
from schemas.geometry import Bucket
from stages.contactsheet.page import Item, Look, Picture
from stages.contactsheet.sheet import Sheet
from stages.discovery.places import Places
from stages.media.errors import MediaError, unreadable
from stages.media.files import Media, check

Row = dict[str, Any]
FRAMES = 9  # of a clip that are shown; 1 + 8, so that most clips' frames divide evenly
CROP_BOX, WHOLE_BOX, FRAME_BOX = (384, 256), (240, 160), (208, 160)  # pixels
QUALITY = 75
MASKED = (214, 40, 40)  # what is not trained on is tinted with


@dataclass(frozen=True)
class Task:
    """An item to look at: its row of SAMPLES, the size of the whole picture, and its files with their content. given:
    how many frames of a clip the task starts from."""

    sample: Row
    whole: tuple[int, int]
    media: tuple[Media, str]
    source: tuple[Media, str] | None
    mask: tuple[Media, str] | None
    decoder: str
    given: int = 1


@dataclass(frozen=True)
class Seen:
    """Pixels, uint8: frames (T, H, W, 3), whole (H, W, 3), source (H, W, 3), mask (T, H, W)."""

    frames: np.ndarray
    times: tuple[float, ...]
    whole: np.ndarray
    source: np.ndarray | None
    mask: np.ndarray | None


def thinned(sample: Row) -> Row:
    """The sample with at most FRAMES of its frames, evenly chosen, the first and the last among them."""
    bucket = Bucket.parse(sample["geometry"]["bucket"])
    gaps = next((n for n in range(min(FRAMES, bucket.frames) - 1, 0, -1) if not (bucket.frames - 1) % n), 0)
    if not gaps:
        return sample
    geometry = sample["geometry"] | {"bucket": str(Bucket(bucket.width, bucket.height, gaps + 1))}
    return sample | {"geometry": geometry, "rate": sample["rate"] * gaps / (bucket.frames - 1)}


def see(task: Task) -> Seen:
    """An item's pixels as the encoder gets them. Raises MediaError."""
    from stages.media.samples import fit_image, read_frames, read_mask

    for path, content in filter(None, (task.media, task.source, task.mask)):
        check(path, content)
    few, path = thinned(task.sample), task.media[0]
    frames = read_frames(path, few, task.decoder)
    times: list[float] = []
    if few["kind"] == "video":
        times = clip_times(few["start"], few["rate"], len(frames))
    uncut = {"bucket": "{}x{}@1".format(*task.whole), "resize_w": task.whole[0], "resize_h": task.whole[1]}
    whole = read_frames(path, few | {"geometry": uncut | {"x": 0, "y": 0}}, task.decoder)[0]
    source = fit_image(task.source[0], task.sample["source_geometry"]) if task.source else None
    mask = None
    if task.mask:
        mask = read_mask(task.mask[0], task.sample["mask_kind"], task.sample["mask_geometry"], times)
    return Seen(frames, tuple(times), whole, source, mask)


def look(task: Task) -> Look:
    """The same as small pictures. Raises MediaError."""
    try:
        seen = see(task)
    except OSError as error:
        raise unreadable(task.media[0], error) from error
    box = FRAME_BOX if seen.times else CROP_BOX
    masked: Iterable[np.ndarray] = ()
    if seen.mask is not None:
        masked = (_masked(frame, mask) for frame, mask in zip(seen.frames, seen.mask, strict=True))
    return Look(
        crops=tuple(_picture(frame, box) for frame in seen.frames),
        times=seen.times,
        whole=_picture(seen.whole, WHOLE_BOX),
        source=None if seen.source is None else _picture(seen.source, box),
        masked=tuple(_picture(frame, box) for frame in masked),
    )


def looker() -> Callable[[Task], Look]:
    return look


def _masked(frame: np.ndarray, mask: np.ndarray) -> np.ndarray:
    kept = mask[..., None] / np.float32(255)
    tinted = frame * np.float32(0.35) + np.array(MASKED, np.float32) * np.float32(0.65)
    return (frame * kept + tinted * (1 - kept)).astype(np.uint8)


def _picture(pixels_HWC: np.ndarray, box: tuple[int, int]) -> Picture:
    """Scaled down to fit into the box, never up."""
    from PIL import Image

    image: Image.Image = Image.fromarray(pixels_HWC)
    image.thumbnail(box, Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=QUALITY)
    return Picture(buffer.getvalue(), image.width, image.height)


@dataclass(frozen=True)
class Opened:
    """A row of a sheet with its rows of ACTIVE and SAMPLES, and what to read, or why that can't be."""

    row: int
    place: Row
    sample: Row
    task: Task | MediaError


def item_of(sheet: Sheet, one: Opened) -> Item:
    """What the plan says of it, for its card."""
    known = sheet.width[one.row] > 0
    return Item(
        place=one.place,
        sample=one.sample,
        size=(int(sheet.width[one.row]), int(sheet.height[one.row])) if known else None,
        lost=float(sheet.lost[one.row]),
        stretched=float(sheet.stretched[one.row]),
    )


class Opener:
    """From rows of a sheet to tasks."""

    def __init__(self, sheet: Sheet) -> None:
        self._sheet, self._places = sheet, Places(sheet.config, sheet.plan)

    def open(self, row: int) -> Opened:
        place = self._sheet.active.slice(row, 1).to_pylist()[0]
        sample = self._sheet.plan.samples[place["sample_id"]]
        try:
            return Opened(row, place, sample, self._task(row, place, sample))
        except MediaError as error:
            return Opened(row, place, sample, error)
        except OSError as error:
            return Opened(row, place, sample, unreadable(place["path"], error))
        except LatentpressError as error:
            problem = MediaError("unreadable", place["path"], error.message, error.next_step)
            return Opened(row, place, sample, problem)

    def _task(self, row: int, place: Row, sample: Row) -> Task:
        dataset, source, mask = place["dataset"], None, None
        media = self._places.media(dataset, place["path"]), sample["media_id"]
        if sample["condition"] == "source":
            source = self._places.companion(dataset, "source", place["source_path"]), sample["source_id"]
        if sample["mask_id"]:
            mask = self._places.companion(dataset, "mask", place["mask_path"]), sample["mask_id"]
        whole = _whole_size(int(self._sheet.width[row]), int(self._sheet.height[row]), sample["geometry"])
        config = self._sheet.config
        given = 1 if config.model.condition is None else config.model.condition.frames
        return Task(sample, whole, media, source, mask, config.latents.decoder, given)


def _whole_size(width: int, height: int, geometry: Row) -> tuple[int, int]:
    """The item's shape, or where that is not known the one it is resized to, as small as it is drawn."""
    if not width:
        width, height = geometry["resize_w"], geometry["resize_h"]
    scale = min(1.0, WHOLE_BOX[0] / width, WHOLE_BOX[1] / height)
    return max(1, round(width * scale)), max(1, round(height * scale))
