"""The worker of encode-latents: samples -> latents."""

from collections.abc import Iterator

import numpy as np
import torch

from cache.shard import Row
from schemas.identity import seed_of
from stages import loading
from stages.media import pixels
from stages.media.members import Wanted
from stages.media.places import Places
from stages.stage import Job
from stages.worker import UnitWorker

Pixels = tuple[np.ndarray, np.ndarray | None]


class LatentsWorker(UnitWorker):
    """Members are (pixels_CTHW, condition pixels_CTHW or None), float32 in [-1, 1]; T = 1 for an image."""

    stage, kind, tensors = "encode-latents", "latents", ("latent", "condition")

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.precision = self.config.latents.precision or self.config.model.precision
        self.batch_limit = self.config.latents.batch_size
        self._autoencoder = loading.autoencoder(self.config, self.device)
        self._places = Places(self.config, self.plan)

    def cost(self, batch: list[Pixels]) -> int:
        return len(batch)

    def read(self, name: str) -> Pixels:
        sample = self.plan.samples[name]
        beside = sample["source_geometry"] if sample["condition"] == "source" else None
        files = tuple(self._places.of_sample(name))
        uint8_THWC, image_HWC = self.fetch(Wanted(files, sample, beside, self.config.latents.decoder))
        assert uint8_THWC is not None
        frames = pixels.normalise(uint8_THWC)
        if sample["condition"] == "first-frame":
            return frames, frames[:, :1]
        if image_HWC is not None:
            return frames, pixels.normalise(image_HWC[None])
        return frames, None

    def encode(self, names: list[str], batch: list[Pixels]) -> Iterator[Row]:
        columns = {"latent": self._latents(names, "latent", [item for item, _ in batch])}
        conditions = [item for _, item in batch if item is not None]
        if conditions:
            columns["condition"] = self._latents(names, "condition", conditions)
        for index, name in enumerate(names):
            yield Row(name, {key: loading.array(values[index]) for key, values in columns.items()})

    def _latents(self, names: list[str], purpose: str, items: list[np.ndarray]) -> torch.Tensor:
        """latents_BCTHW; the posterior's seed depends on the sample and on what is encoded of it."""
        seeds = [seed_of(name, purpose) for name in names]
        return self._autoencoder.encode(torch.from_numpy(np.stack(items)), seeds, self.config.latents.posterior)
