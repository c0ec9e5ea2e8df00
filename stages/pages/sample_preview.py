"""Items of a plan as the encoder will see them, as small pictures; runs in a process of its own."""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas.clips import clip_times
from schemas.errors import LatentpressError
from schemas.geometry import Bucket
from stages.discovery.media_locations import MediaLocations
from stages.media.errors import MediaError, unreadable_error
from stages.media.files import MediaPath, require_unchanged
from stages.pages.html import PageItem, Picture, PreviewPictures
from stages.pages.plan_table import PlanTable

TableRow = dict[str, Any]
MAX_PREVIEW_FRAMES = 9  # of a clip that are shown; 1 + 8, so that most clips' frames divide evenly
CROP_BOX, FULL_BOX, FRAME_BOX = (384, 256), (240, 160), (208, 160)  # pixels
WEBP_QUALITY = 75
MASK_TINT = (214, 40, 40)  # what is not trained on is tinted with


@dataclass(frozen=True)
class PreviewTask:
    """An item to look at: its row of SAMPLES_SCHEMA, the size of the whole picture, and its files with their content.

    given: how many frames of a clip the task starts from.
    """

    sample: TableRow
    whole: tuple[int, int]
    media: tuple[MediaPath, str]
    source: tuple[MediaPath, str] | None
    mask: tuple[MediaPath, str] | None
    decoder: str
    given: int = 1


@dataclass(frozen=True)
class PreviewPixels:
    """Pixels, uint8: frames (T, H, W, 3), whole (H, W, 3), source (H, W, 3), mask (T, H, W)."""

    frames: np.ndarray
    times: tuple[float, ...]
    whole: np.ndarray
    source: np.ndarray | None
    mask: np.ndarray | None


def reduce_frames(sample: TableRow) -> TableRow:
    """The sample with at most FRAMES of its frames, evenly chosen, the first and the last among them."""
    bucket = Bucket.parse(sample["geometry"]["bucket"])
    gaps = next((n for n in range(min(MAX_PREVIEW_FRAMES, bucket.frames) - 1, 0, -1) if not (bucket.frames - 1) % n), 0)
    if not gaps:
        return sample
    geometry = sample["geometry"] | {"bucket": str(Bucket(bucket.width, bucket.height, gaps + 1))}
    return sample | {"geometry": geometry, "rate": sample["rate"] * gaps / (bucket.frames - 1)}


def read_preview(task: PreviewTask) -> PreviewPixels:
    """An item's pixels as the encoder gets them. Raises MediaError."""
    from stages.media.sample_reader import read_cropped_image, read_sample_frames, read_sample_mask

    for path, content in filter(None, (task.media, task.source, task.mask)):
        require_unchanged(path, content)
    few, path = reduce_frames(task.sample), task.media[0]
    frames = read_sample_frames(path, few, task.decoder)
    times: list[float] = []
    if few["kind"] == "video":
        times = clip_times(few["start"], few["rate"], len(frames))
    uncut = {"bucket": "{}x{}@1".format(*task.whole), "resize_w": task.whole[0], "resize_h": task.whole[1]}
    whole = read_sample_frames(path, few | {"geometry": uncut | {"x": 0, "y": 0}}, task.decoder)[0]
    source = read_cropped_image(task.source[0], task.sample["source_geometry"]) if task.source else None
    mask = None
    if task.mask:
        mask = read_sample_mask(task.mask[0], task.sample["mask_kind"], task.sample["mask_geometry"], times)
    return PreviewPixels(frames, tuple(times), whole, source, mask)


def render_preview(task: PreviewTask) -> PreviewPictures:
    """The same as small pictures. Raises MediaError."""
    try:
        seen = read_preview(task)
    except OSError as error:
        raise unreadable_error(task.media[0], error) from error
    box = FRAME_BOX if seen.times else CROP_BOX
    masked: Iterable[np.ndarray] = ()
    if seen.mask is not None:
        masked = (_tint_masked(frame, mask) for frame, mask in zip(seen.frames, seen.mask, strict=True))
    return PreviewPictures(
        crops=tuple(_encode_thumbnail(frame, box) for frame in seen.frames),
        times=seen.times,
        whole=_encode_thumbnail(seen.whole, FULL_BOX),
        source=None if seen.source is None else _encode_thumbnail(seen.source, box),
        masked=tuple(_encode_thumbnail(frame, box) for frame in masked),
    )


def make_previewer() -> Callable[[PreviewTask], PreviewPictures]:
    return render_preview


def _tint_masked(frame: np.ndarray, mask: np.ndarray) -> np.ndarray:
    kept = mask[..., None] / np.float32(255)
    tinted = frame * np.float32(0.35) + np.array(MASK_TINT, np.float32) * np.float32(0.65)
    return (frame * kept + tinted * (1 - kept)).astype(np.uint8)


def _encode_thumbnail(pixels_HWC: np.ndarray, box: tuple[int, int]) -> Picture:
    """Scaled down to fit into the box, never up."""
    from PIL import Image

    image: Image.Image = Image.fromarray(pixels_HWC)
    image.thumbnail(box, Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=WEBP_QUALITY)
    return Picture(buffer.getvalue(), image.width, image.height)


@dataclass(frozen=True)
class OpenedSample:
    """A row of a sheet with its rows of ACTIVE_SCHEMA and SAMPLES_SCHEMA, and what to read, or why that can't be."""

    row: int
    active_row: TableRow
    sample: TableRow
    task: PreviewTask | MediaError


def make_page_item(sheet: PlanTable, one: OpenedSample) -> PageItem:
    """What the plan says of it, for its card."""
    known = sheet.width[one.row] > 0
    return PageItem(
        active_row=one.active_row,
        sample=one.sample,
        size=(int(sheet.width[one.row]), int(sheet.height[one.row])) if known else None,
        cropped_share=float(sheet.cropped_share[one.row]),
        stretched=float(sheet.stretched[one.row]),
    )


class SampleOpener:
    """From rows of a sheet to tasks."""

    def __init__(self, sheet: PlanTable) -> None:
        self._sheet, self._places = sheet, MediaLocations(sheet.config, sheet.plan)

    def open(self, row: int) -> OpenedSample:
        place = self._sheet.active.slice(row, 1).to_pylist()[0]
        sample = self._sheet.plan.samples[place["sample_id"]]
        try:
            return OpenedSample(row, place, sample, self._task(row, place, sample))
        except MediaError as error:
            return OpenedSample(row, place, sample, error)
        except OSError as error:
            return OpenedSample(row, place, sample, unreadable_error(place["path"], error))
        except LatentpressError as error:
            problem = MediaError("unreadable", place["path"], error.message, error.next_step)
            return OpenedSample(row, place, sample, problem)

    def _task(self, row: int, place: TableRow, sample: TableRow) -> PreviewTask:
        dataset, source, mask = place["dataset"], None, None
        media = self._places.open_media(dataset, place["path"]), sample["media_id"]
        if sample["condition"] == "source":
            source = self._places.open_companion(dataset, "source", place["source_path"]), sample["source_id"]
        if sample["mask_id"]:
            mask = self._places.open_companion(dataset, "mask", place["mask_path"]), sample["mask_id"]
        whole = _full_size(int(self._sheet.width[row]), int(self._sheet.height[row]), sample["geometry"])
        config = self._sheet.config
        given = 1 if config.model.condition is None else config.model.condition.frames
        return PreviewTask(sample, whole, media, source, mask, config.latents.decoder, given)


def _full_size(width: int, height: int, geometry: TableRow) -> tuple[int, int]:
    """The item's shape, or where that is not known the one it is resized to, as small as it is drawn."""
    if not width:
        width, height = geometry["resize_w"], geometry["resize_h"]
    scale = min(1.0, FULL_BOX[0] / width, FULL_BOX[1] / height)
    return max(1, round(width * scale)), max(1, round(height * scale))
