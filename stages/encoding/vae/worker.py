"""The worker of encode-latents: samples -> latents."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from cache.sets.plans import Unit
from cache.shards.shard import ShardRow
from schemas.devices import HostCopy, to_device_together
from schemas.geometry import Bucket
from schemas.identity import derive_seed
from schemas.tables import TRAINED_ROLES
from stages.encoding import model_loading
from stages.encoding.member_reader import MemberPixels, ReadRequest
from stages.encoding.pooling import pool_space, pool_time
from stages.encoding.vae import base
from stages.encoding.worker import UnitWorker
from stages.engines.jobs import Job


@dataclass(frozen=True)
class SamplePixels:
    """uint8 pixels; T = 1 for an image. condition_THWC: pixels encoded in addition to the media, without padding.
    mask_THW: T = 1 if all frames share the mask."""

    media_THWC: np.ndarray
    condition_THWC: np.ndarray | None
    mask_THW: np.ndarray | None


class LatentsWorker(UnitWorker):
    """Encodes latents of media and conditions, and masks on the grid of latents: 1 is trained, 0 is not."""

    stage, kind, section, tensors = "encode-latents", "latents", "latents", ("latent", "condition", "mask")
    batch_limit_option = "batch_pixels"
    advice = "set latents.chunk_frames or latents.tiling, lower the resolution or frames, or use --device cpu"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.precision = self.config.latents.precision or self.config.model.precision
        self._autoencoder = base.load_autoencoder(self.config.model, self.config.latents, self.device)
        self.provenance["slicing"] = self.config.latents.slicing
        self._dtype = getattr(torch, self.precision)
        self._stride = self.config.model.family_spec.temporal_stride

    def member_bytes(self, unit: Unit) -> int:
        bucket = Bucket.parse(unit.bucket)
        return 3 * bucket.width * bucket.height * (bucket.frames + 1)

    def read_request(self, name: str) -> ReadRequest:
        sample = self.plan.samples[name]
        source = sample["source_geometry"] if sample["condition"] == "source" else None
        files = tuple(self.locations.planned_files("latents", name))
        return ReadRequest(files, sample, source, self.config.latents.decoder, has_mask=bool(sample["mask_id"]))

    def prepare(self, name: str, read: MemberPixels | None) -> SamplePixels:
        assert read is not None and read.frames is not None
        condition_THWC = None if read.image is None else read.image[None]
        condition, sample, media_THWC = self.config.model.condition, self.plan.samples[name], read.frames
        if sample["condition"] == "first-frame" and condition is not None:
            condition_THWC = media_THWC[: condition.frames]
        if sample["role"] not in TRAINED_ROLES and condition is not None and condition.padded:
            media_THWC = media_THWC[: condition.frames]
        return SamplePixels(media_THWC, condition_THWC, read.mask)

    def cost(self, batch: list[SamplePixels]) -> int:
        """Pixels of one pass of the autoencoder: the pixels of the media or of the conditions, whichever are more."""
        media = sum(item.media_THWC.size for item in batch)
        return max(media, sum(item.condition_THWC.size for item in batch if item.condition_THWC is not None)) // 3

    def encode(self, names: list[str], batch: list[SamplePixels], limit: int) -> Iterator[ShardRow]:
        pixels = {"latent": np.stack([item.media_THWC for item in batch])}
        conditions = [item.condition_THWC for item in batch if item.condition_THWC is not None]
        if conditions:
            pixels["condition"] = np.stack(conditions)
        arrays = to_device_together([*map(torch.from_numpy, pixels.values())], self.device)
        latents = [self._latents(names, part, bytes_BTHWC) for part, bytes_BTHWC in zip(pixels, arrays, strict=True)]
        return self._rows(names, batch, [*pixels], HostCopy(*latents))

    def _latents(self, names: list[str], purpose: str, bytes_BTHWC: torch.Tensor) -> torch.Tensor:
        """latents_BCTHW; the posterior's seed depends on the sample and on the purpose, "latent" or "condition"."""
        seeds = [derive_seed(name, purpose) for name in names]
        posterior, condition = self.config.latents.posterior, self.config.model.condition
        # A reference, or the start of a validation prompt, is a row by itself; its unit holds only such rows.
        sample, pixels_BCTHW = self.plan.samples[names[0]], normalize_pixels(bytes_BTHWC)
        is_condition = purpose == "condition" or sample["role"] not in TRAINED_ROLES
        if is_condition and condition is not None and condition.posterior is not None:
            posterior = condition.posterior
        if is_condition and condition is not None and condition.padded:
            padding = Bucket.parse(sample["geometry"]["bucket"]).frames - pixels_BCTHW.shape[2]
            pixels_BCTHW = F.pad(pixels_BCTHW, (0, 0, 0, 0, 0, padding))
        return self._autoencoder.encode(pixels_BCTHW, seeds, posterior)

    def _rows(
        self, names: list[str], batch: list[SamplePixels], purposes: list[str], latents: HostCopy
    ) -> Iterator[ShardRow]:
        columns = dict(zip(purposes, latents.wait_all(), strict=True))
        for index, (name, item) in enumerate(zip(names, batch, strict=True)):
            tensors = {key: values[index] for key, values in columns.items()}
            if item.mask_THW is not None:
                tensors["mask"] = mask_to_latent_grid(item.mask_THW, columns["latent"][index].shape[1:], self._stride)
            yield ShardRow(name, {key: model_loading.to_array(value.to(self._dtype)) for key, value in tensors.items()})


def normalize_pixels(bytes_BTHWC: torch.Tensor) -> torch.Tensor:
    """uint8 pixels as float32 pixels_BCTHW in [-1, 1] on the same device, equal to the last bit to
    stages.media.sample_reader.normalize_pixels. On CUDA, dividing by a Python number multiplies by its rounded inverse;
    by a tensor of the device, it divides."""
    pixels_BCTHW = bytes_BTHWC.movedim(-1, 1).to(torch.float32, memory_format=torch.contiguous_format)
    return pixels_BCTHW.div_(torch.full((), 255.0, device=pixels_BCTHW.device)).mul_(2.0).sub_(1.0)


def mask_to_latent_grid(mask_THW: np.ndarray, grid_THW: Sequence[int], stride: int) -> torch.Tensor:
    """Convert a mask from 0 to 255 to a mask from 0 to 1 on a grid of latents: the mean over the area and the frames
    (frame 0, then `stride` frames at a time) that each latent covers. A mask of one frame applies to all frames."""
    cells_THWC = pool_space(torch.from_numpy(mask_THW).unsqueeze(-1), (grid_THW[1], grid_THW[2])) / 255
    cells_THWC = pool_time(cells_THWC, stride) if len(mask_THW) > 1 else cells_THWC.expand(grid_THW[0], -1, -1, -1)
    assert tuple(cells_THWC.shape[:3]) == tuple(grid_THW), f"{cells_THWC.shape[:3]} is not {grid_THW}"
    return cells_THWC.squeeze(-1)
