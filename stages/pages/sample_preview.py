"""The pixels of samples as the encoder gets them, for previews; read in sandboxed processes."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from schemas.clips import clip_times
from schemas.errors import LatentpressError
from schemas.family import SOURCE_ROLES
from schemas.geometry import Bucket
from schemas.tables import MADE
from stages.engines.sandbox import SandboxPool, WorkerFailure
from stages.media.files import MediaError, MediaPath, require_unchanged, unreadable_error
from stages.pages.pictures import FRAME_BOX, Picture, encode_picture
from stages.pages.plan_table import PlanTable

R = TypeVar("R")

TableRow = dict[str, Any]
MAX_SHOWN_FRAMES = 9  # of a clip; 1 + 8, because the frames of most clips divide evenly by that
CROP_BOX, FULL_BOX = (384, 256), (240, 160)  # pixels
WEBP_QUALITY = 75
MASK_TINT = (214, 40, 40)  # color of what is not trained on


@dataclass(frozen=True)
class PreviewPictures:
    """Small pictures of an item.

    crops: frames as the encoder gets them. times: their seconds, none for an image. whole: the whole image or first
    frame. sources: the cropped i2i source, or the references. masked: `crops` under the mask.
    """

    crops: tuple[Picture, ...]
    times: tuple[float, ...]
    whole: Picture
    sources: tuple[Picture, ...] = ()
    masked: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class PageItem:
    """One sample on a page.

    active_row, sample: its rows of ACTIVE_SCHEMA and SAMPLES_SCHEMA. size: of the item as displayed, in pixels; None if
    not known. cropped_share, stretched: shares. references: rows of SAMPLES_SCHEMA of its references.
    """

    active_row: TableRow
    sample: TableRow
    size: tuple[int, int] | None
    cropped_share: float
    stretched: float
    references: tuple[TableRow, ...] = ()

    @property
    def path(self) -> str:
        return self.active_row["path"]

    @property
    def name(self) -> str:
        return f"{self.active_row['dataset']}/{self.path}"

    @property
    def times(self) -> list[float]:
        """Seconds of a clip's frames; none of an image."""
        if self.sample["kind"] != "video":
            return []
        return clip_times(self.sample["start"], self.sample["rate"], self.bucket.frames)

    @property
    def bucket(self) -> Bucket:
        return Bucket.parse(self.sample["geometry"]["bucket"])

    @property
    def facts(self) -> tuple[str, ...]:
        """Geometry, times and companions, a line each."""
        geometry, row, times = self.sample["geometry"], self.active_row, self.times
        size = "{}x{}".format(*self.size) if self.size else "size no longer known"
        resized = "resized to {resize_w}x{resize_h}, cropped at ({x}, {y})".format(**geometry)
        facts = [f"{size} → {self.bucket}: {resized}"]
        if self.size:
            facts.append(f"{self.cropped_share:.1%} cut off, stretched by {self.stretched:.1%}")
        if times:
            span = f"from {times[0]:.2f} to {times[-1]:.2f} s"
            facts.append(f"{self.bucket.frames} frames at {self.sample['rate']:g} per second, {span}")
        if self.sample["condition"] == "source":
            facts.append(f"source: {row['source_path']}")
        for number, reference in enumerate(self.references, 1):
            facts.append(f"reference {number}: {reference['path']} → {reference['geometry']['bucket']}")
        if self.sample["mask_id"]:
            facts.append(f"mask: {'made by a model' if self.sample.get('mask_kind') == MADE else row['mask_path']}")
        return tuple(facts)

    @property
    def marks(self) -> tuple[str, ...]:
        """Labels for what is particular about it."""
        row, geometry = self.active_row, self.sample["geometry"]
        marks = {
            "held out": row["role"] == "eval",
            "regularization": row["regularization"],
            f"repeats {row['repeats']}": row["repeats"],
            f"weight {row['weight']:g}": row["weight"] != 1,
            "starts from its first frame": self.sample["condition"] == "first-frame",
            "enlarged": self.size and (geometry["resize_w"] > self.size[0] or geometry["resize_h"] > self.size[1]),
        }
        return tuple(mark for mark, applies in marks.items() if applies)


@dataclass(frozen=True)
class PreviewTask:
    """A sample to read.

    sample: its row of SAMPLES_SCHEMA. full_size: (width, height) of the picture of the whole item. files: by role
    ("media", "source", "mask"; of references the source roles in their order), each with the media id it was planned
    with. given: how many frames of a clip the task starts from. crops: geometries of the source image or references.
    """

    sample: TableRow
    full_size: tuple[int, int]
    files: dict[str, tuple[MediaPath, str]]
    decoder: str
    given: int = 1
    crops: tuple[TableRow, ...] = ()

    @property
    def path(self) -> MediaPath:
        return self.files["media"][0]


@dataclass(frozen=True)
class SamplePixels:
    """Pixels as the encoder gets them, uint8: frames (T, H, W, 3); conditions (F, H, W, 3) each, the source image, the
    references or the first frames, if there are any."""

    frames: np.ndarray
    conditions: tuple[np.ndarray, ...]


def frame_indices(count: int) -> list[int]:
    """Choose at most MAX_SHOWN_FRAMES of `count` frames, evenly spaced, with the first and the last."""
    return np.unique(np.rint(np.linspace(0, count - 1, min(MAX_SHOWN_FRAMES, count)))).astype(int).tolist()


@contextmanager
def _reading(task: PreviewTask) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unreadable_error(task.path, error) from error


def read_original(task: PreviewTask, roles: Iterable[str] = ("media", *SOURCE_ROLES)) -> SamplePixels:
    """All pixels that were encoded of a sample. roles: of the files that may not have changed since they were planned.
    Raises MediaError."""
    from stages.media.sample_reader import read_cropped_image, read_sample_frames

    sample = task.sample
    with _reading(task):
        for path, media_id in (task.files[role] for role in roles if role in task.files):
            require_unchanged(path, media_id)
        frames = read_sample_frames(task.path, sample, task.decoder)
        if sample["condition"] == "first-frame":
            return SamplePixels(frames, (frames[: task.given],))
        crops = zip(SOURCE_ROLES, task.crops, strict=False)
        return SamplePixels(frames, tuple(read_cropped_image(task.files[role][0], crop)[None] for role, crop in crops))


def render_preview(task: PreviewTask) -> PreviewPictures:
    """Some frames of a sample and the whole item as small pictures. Raises MediaError."""
    from stages.media.sample_reader import read_sample_frames, read_sample_mask

    pixels, sample = read_original(task, task.files), task.sample
    indices, is_clip = frame_indices(len(pixels.frames)), sample["kind"] == "video"
    frames = pixels.frames[indices]
    all_times = clip_times(sample["start"], sample["rate"], len(pixels.frames)) if is_clip else []
    times = [all_times[index] for index in indices] if is_clip else []
    width, height = task.full_size
    uncropped = {"bucket": f"{width}x{height}@1", "resize_w": width, "resize_h": height, "x": 0, "y": 0}
    masked = list[np.ndarray]()
    with _reading(task):
        whole = read_sample_frames(task.path, sample | {"geometry": uncropped}, task.decoder)[0]
        if "mask" in task.files:
            kind = sample["mask_kind"]
            at = indices if kind == MADE else times
            masks = read_sample_mask(task.files["mask"][0], kind, sample["mask_geometry"], at)
            masked = [_tint(frame, mask) for frame, mask in zip(frames, masks, strict=True)]

    def encode(pixels_HWC: np.ndarray, box: tuple[int, int] = FRAME_BOX if is_clip else CROP_BOX) -> Picture:
        return encode_picture(pixels_HWC, box, steps=((WEBP_QUALITY, 1.0),))

    return PreviewPictures(
        crops=tuple(map(encode, frames)),
        times=tuple(times),
        whole=encode(whole, FULL_BOX),
        sources=tuple(encode(condition[0]) for condition in pixels.conditions) if task.crops else (),
        masked=tuple(map(encode, masked)),
    )


def _tint(frame_HWC: np.ndarray, mask_HW: np.ndarray) -> np.ndarray:
    """The frame with MASK_TINT over what is not trained on."""
    trained = mask_HW[..., None] / np.float32(255)
    tinted = frame_HWC * np.float32(0.35) + np.array(MASK_TINT, np.float32) * np.float32(0.65)
    return (frame_HWC * trained + tinted * (1 - trained)).astype(np.uint8)


def make_previewer() -> Callable[[PreviewTask], PreviewPictures]:
    return render_preview


def make_original_reader() -> Callable[[PreviewTask], SamplePixels]:
    return read_original


def read_samples(
    table: PlanTable, rows: Iterable[int], make_reader: Callable[[], Callable[[PreviewTask], R]], workers: int
) -> Generator[tuple[PageItem, R | MediaError]]:
    """Yield an item for each of these rows of `table`, and what a reader returns for it, or why there is nothing.
    Readers work ahead, in sandboxed processes."""
    opened = [_open_sample(table, row) for row in rows]
    with SandboxPool.configured(make_reader, workers, table.config.stages) as pool:
        results = pool.map(task for _, task in opened if isinstance(task, PreviewTask))
        for item, task in opened:
            result = next(results)[1] if isinstance(task, PreviewTask) else task
            yield item, result.error(item.path) if isinstance(result, WorkerFailure) else result


def _open_sample(table: PlanTable, row: int) -> tuple[PageItem, PreviewTask | MediaError]:
    active_row = table.active.slice(row, 1).to_pylist()[0]
    sample, config = table.plan.samples[active_row["sample_id"]], table.config
    item = PageItem(
        active_row=active_row,
        sample=sample,
        size=(int(table.width[row]), int(table.height[row])) if table.width[row] else None,
        cropped_share=float(table.cropped_share[row]),
        stretched=float(table.stretched[row]),
        references=tuple(table.plan.samples[id] for id in active_row.get("references") or ()),
    )
    try:
        required = table.locations.required_files("latents", active_row["sample_id"])
        files = {file.role: (table.locations.open(file), file.content) for file in required}
        for role, reference in zip(SOURCE_ROLES, item.references, strict=False):
            (file,) = table.locations.required_files("latents", reference["sample_id"])
            files[role] = table.locations.open(file), file.content
    except MediaError as error:
        return item, error
    except OSError as error:
        return item, unreadable_error(item.path, error)
    except LatentpressError as error:
        return item, MediaError("unreadable", item.path, error.message, error.next_step)
    width, height = item.size or (sample["geometry"]["resize_w"], sample["geometry"]["resize_h"])
    scale = min(1.0, FULL_BOX[0] / width, FULL_BOX[1] / height)
    full_size = max(1, round(width * scale)), max(1, round(height * scale))
    given = 1 if config.model.condition is None else config.model.condition.frames
    crops = tuple(reference["geometry"] for reference in item.references)
    crops = (sample["source_geometry"],) if sample["condition"] == "source" else crops
    return item, PreviewTask(sample, full_size, files, config.latents.decoder, given, crops)
