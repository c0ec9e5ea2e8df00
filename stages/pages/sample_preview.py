"""The pixels of samples as the encoder gets them, for previews; read in sandboxed processes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas.clips import clip_times
from schemas.errors import LatentpressError
from schemas.geometry import Bucket
from stages.discovery.media_locations import MediaLocations
from stages.media.errors import MediaError, unreadable_error
from stages.media.files import MediaPath, require_unchanged
from stages.pages.clip_comparison import FRAME_BOX, encode_picture
from stages.pages.html import PageItem, Picture, PreviewPictures
from stages.pages.plan_table import PlanTable

TableRow = dict[str, Any]
MAX_PREVIEW_FRAMES = 9  # shown of a clip; 1 + 8, because the frames of most clips divide evenly by that
CROP_BOX, FULL_BOX = (384, 256), (240, 160)  # pixels
WEBP_QUALITY = 75
MASK_TINT = (214, 40, 40)  # colour of what is not trained on


@dataclass(frozen=True)
class PreviewTask:
    """A sample to read.

    sample: its row of SAMPLES_SCHEMA. full_size: (width, height) of the picture of the whole item. media, source, mask:
    files with the media ids they were planned with. given: how many frames of a clip the task starts from.
    """

    sample: TableRow
    full_size: tuple[int, int]
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


@dataclass(frozen=True)
class OriginalPixels:
    """The pixels that were encoded, uint8: frames (T, H, W, 3); condition (F, H, W, 3), the source image or the first
    frames, if there is a condition."""

    frames: np.ndarray
    condition: np.ndarray | None


def reduce_frames(sample: TableRow) -> TableRow:
    """The sample with at most MAX_PREVIEW_FRAMES of its frames, evenly spaced, with the first and the last."""
    bucket = Bucket.parse(sample["geometry"]["bucket"])
    gaps = next((n for n in range(min(MAX_PREVIEW_FRAMES, bucket.frames) - 1, 0, -1) if not (bucket.frames - 1) % n), 0)
    if not gaps:
        return sample
    geometry = sample["geometry"] | {"bucket": str(Bucket(bucket.width, bucket.height, gaps + 1))}
    return sample | {"geometry": geometry, "rate": sample["rate"] * gaps / (bucket.frames - 1)}


def read_preview(task: PreviewTask) -> PreviewPixels:
    """Some frames of a sample as the encoder gets them, and the whole item. Raises MediaError."""
    from stages.media.sample_reader import read_cropped_image, read_sample_frames, read_sample_mask

    for path, media_id in filter(None, (task.media, task.source, task.mask)):
        require_unchanged(path, media_id)
    sample, path = reduce_frames(task.sample), task.media[0]
    frames = read_sample_frames(path, sample, task.decoder)
    times = clip_times(sample["start"], sample["rate"], len(frames)) if sample["kind"] == "video" else []
    width, height = task.full_size
    uncropped = {"bucket": f"{width}x{height}@1", "resize_w": width, "resize_h": height, "x": 0, "y": 0}
    whole = read_sample_frames(path, sample | {"geometry": uncropped}, task.decoder)[0]
    source = read_cropped_image(task.source[0], task.sample["source_geometry"]) if task.source else None
    mask = None
    if task.mask:
        mask = read_sample_mask(task.mask[0], task.sample["mask_kind"], task.sample["mask_geometry"], times)
    return PreviewPixels(frames, tuple(times), whole, source, mask)


def render_preview(task: PreviewTask) -> PreviewPictures:
    """`read_preview` as small pictures. Raises MediaError."""
    try:
        pixels = read_preview(task)
    except OSError as error:
        raise unreadable_error(task.media[0], error) from error
    box, masked = FRAME_BOX if pixels.times else CROP_BOX, []
    if pixels.mask is not None:
        for frame, mask in zip(pixels.frames, pixels.mask, strict=True):
            trained = mask[..., None] / np.float32(255)
            tinted = frame * np.float32(0.35) + np.array(MASK_TINT, np.float32) * np.float32(0.65)
            masked.append((frame * trained + tinted * (1 - trained)).astype(np.uint8))

    def encode(pixels_HWC: np.ndarray, box: tuple[int, int] = box) -> Picture:
        return encode_picture(pixels_HWC, box, steps=((WEBP_QUALITY, 1.0),))

    return PreviewPictures(
        crops=tuple(map(encode, pixels.frames)),
        times=pixels.times,
        whole=encode(pixels.whole, FULL_BOX),
        source=None if pixels.source is None else encode(pixels.source),
        masked=tuple(map(encode, masked)),
    )


def make_previewer() -> Callable[[PreviewTask], PreviewPictures]:
    return render_preview


def read_original(task: PreviewTask) -> OriginalPixels:
    """All pixels that were encoded of a sample. Raises MediaError, also if a file changed since it was planned."""
    from stages.media.sample_reader import read_cropped_image, read_sample_frames

    path, sample = task.media[0], task.sample
    try:
        for file, media_id in filter(None, (task.media, task.source)):
            require_unchanged(file, media_id)
        frames = read_sample_frames(path, sample, task.decoder)
        condition = frames[: task.given] if sample["condition"] == "first-frame" else None
        if task.source:
            condition = read_cropped_image(task.source[0], sample["source_geometry"])[None]
    except OSError as error:
        raise unreadable_error(path, error) from error
    return OriginalPixels(frames, condition)


def make_original_reader() -> Callable[[PreviewTask], OriginalPixels]:
    return read_original


@dataclass(frozen=True)
class OpenedSample:
    """A row of a PlanTable as a card without pictures, and what to read for it, or why that is impossible."""

    item: PageItem
    task: PreviewTask | MediaError


class SampleOpener:
    """Opens the rows of a PlanTable."""

    def __init__(self, table: PlanTable) -> None:
        self._table, self._locations = table, MediaLocations(table.config, table.plan)

    def open(self, row: int) -> OpenedSample:
        table = self._table
        active_row = table.active.slice(row, 1).to_pylist()[0]
        item = PageItem(
            active_row=active_row,
            sample=table.plan.samples[active_row["sample_id"]],
            size=(int(table.width[row]), int(table.height[row])) if table.width[row] else None,
            cropped_share=float(table.cropped_share[row]),
            stretched=float(table.stretched[row]),
        )
        try:
            return OpenedSample(item, self._make_task(item))
        except MediaError as error:
            return OpenedSample(item, error)
        except OSError as error:
            return OpenedSample(item, unreadable_error(item.path, error))
        except LatentpressError as error:
            return OpenedSample(item, MediaError("unreadable", item.path, error.message, error.next_step))

    def _make_task(self, item: PageItem) -> PreviewTask:
        row, sample, config = item.active_row, item.sample, self._table.config
        dataset, source, mask = row["dataset"], None, None
        media = self._locations.open_media(dataset, row["path"]), sample["media_id"]
        if sample["condition"] == "source":
            source = self._locations.open_companion(dataset, "source", row["source_path"]), sample["source_id"]
        if sample["mask_id"]:
            mask = self._locations.open_companion(dataset, "mask", row["mask_path"]), sample["mask_id"]
        width, height = item.size or (sample["geometry"]["resize_w"], sample["geometry"]["resize_h"])
        scale = min(1.0, FULL_BOX[0] / width, FULL_BOX[1] / height)
        full_size = max(1, round(width * scale)), max(1, round(height * scale))
        given = 1 if config.model.condition is None else config.model.condition.frames
        return PreviewTask(sample, full_size, media, source, mask, config.latents.decoder, given)
