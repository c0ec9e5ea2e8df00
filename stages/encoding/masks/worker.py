"""The worker of `masks`: pictures and clips -> a PNG with a mask for each frame (`MadeMask`)."""

import io
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageFilter

from cache.sets.item_rows import PNG, item_info
from cache.shards.shard import ShardRow
from cache.shards.tensors import Array
from schemas.devices import HostCopy
from schemas.geometry import Bucket
from stages.encoding.masks.segmenters import Box, load_segmenter
from stages.encoding.masks.settings import require_masks
from stages.encoding.member_reader import MemberPixels
from stages.encoding.worker import FrameWorker, RejectedResult
from stages.engines.jobs import Job
from stages.media.files import MediaError
from stages.media.sample_reader import FRAME_S


@dataclass(frozen=True)
class PreparedItem:
    """frames: uint8 (F, H, W, 3). box: the item's box in pixels of the frames; the whole picture if masks.box_column is
    not set."""

    frames: np.ndarray
    box: Box

    def __len__(self) -> int:
        return len(self.frames)


class MasksWorker(FrameWorker):
    """Members are items whose frames are masked one by one."""

    stage, kind, section, tensors = "masks", "masks", "masks", (PNG,)
    batch_limit_option, precision = "batch_size", "uint8"  # as stored
    advice = "lower masks.batch_size (frames of one pass) or masks.resolution, or use --device cpu"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._masks = require_masks(self.config)
        dtype = getattr(torch, self._masks.precision or self.config.model.precision)
        pinned = self._masks.changed(revision=self.pinned_revision(self._masks.revision))
        self._segmenter = load_segmenter(pinned, dtype, self.device)

    def prepare(self, name: str, read: MemberPixels | None) -> PreparedItem:
        assert read is not None and read.frames is not None
        crop, (height, width) = self.plan.samples[name]["mask_geometry"], read.frames.shape[1:3]
        if self._masks.box_column is None:
            return PreparedItem(read.frames, (0, 0, width, height))
        if crop is None:
            problem = f"has no valid box (x, y, width, height) in column {self._masks.box_column!r}"
            step = "correct the box and run `latentpress discover`"
            raise MediaError("no-box", self.path(name), problem, step)
        box, across, down = Bucket.parse(crop["bucket"]), width / crop["resize_w"], height / crop["resize_h"]
        left, top = crop["x"] * across, crop["y"] * down
        return PreparedItem(read.frames, (left, top, left + box.width * across, top + box.height * down))

    @torch.no_grad()
    def encode(self, names: list[str], batch: list[PreparedItem], limit: int) -> Iterator[ShardRow | RejectedResult]:
        frames = [frame for item in batch for frame in item.frames]
        boxes = [item.box for item in batch for _ in item.frames]
        masks = [
            self._segmenter.find(frames[start : start + limit], boxes[start : start + limit])
            for start in range(0, len(frames), limit)
        ]
        return self._rows(names, batch, HostCopy(torch.cat(masks)))

    def _rows(
        self, names: list[str], batch: list[PreparedItem], masks: HostCopy
    ) -> Iterator[ShardRow | RejectedResult]:
        parts = masks.wait().split([len(item.frames) for item in batch])
        for name, area_THW in zip(names, parts, strict=True):
            mask_THW = self._finish(area_THW)
            white, min_area = float(mask_THW.mean()) / 255, self._masks.min_area
            if white <= 1 - min_area and white >= min_area and 0 < white < 1:
                png = Array.from_numpy(np.frombuffer(write_png(mask_THW), np.uint8))
                yield ShardRow(name, {PNG: png}, item_info(self.plan.samples[name]))
                continue
            reason, color = ("empty-mask", "white") if white < 0.5 else ("full-mask", "black")
            targets = ", ".join(self._masks.classes) or "the box"
            problem = f"has a mask whose share of {color} pixels is only {min(white, 1 - white):.2g} ({targets})"
            step = "change masks.threshold or masks.classes, or draw a mask (mask_data)"
            yield RejectedResult(name, MediaError(reason, self.path(name), problem, step))

    def _finish(self, area_THW: torch.Tensor) -> np.ndarray:
        """The stored mask, uint8 (T, H, W): 255 is trained, 0 is not. area_THW: bool, the segmented pixels."""
        grow, masks = self._masks.grow, area_THW.float()[:, None]
        if grow:
            side = 2 * grow + 1  # a square, applied as a column and a row
            masks = F.max_pool2d(F.max_pool2d(masks, (side, 1), 1, (grow, 0)), (1, side), 1, (0, grow))
        mask_THW = (masks[:, 0] * 255).to(torch.uint8).numpy()
        if self._masks.blur:
            blur = ImageFilter.GaussianBlur(self._masks.blur)
            mask_THW = np.stack([np.asarray(Image.fromarray(mask).filter(blur)) for mask in mask_THW])
        return 255 - mask_THW if self._masks.invert else mask_THW


def write_png(mask_THW: np.ndarray) -> bytes:
    """A PNG file of a mask in 8-bit gray, with one PNG frame for each frame of the sample."""
    (first, *tail), file = map(Image.fromarray, mask_THW), io.BytesIO()
    animated = {"save_all": True, "append_images": tail, "duration": round(1000 * FRAME_S)} if tail else {}
    first.save(file, "PNG", **animated)
    return file.getvalue()
