"""The worker of encode-latents: samples -> latents."""

from collections.abc import Iterator

import numpy as np
import torch

from cache.shard import Row
from schemas.identity import seed_of
from stages import loading
from stages.media import pixels
from stages.media.files import check
from stages.media.places import Places
from stages.media.samples import fit_image, read_frames
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
        files = self._places.of_sample(name)
        for path, content in files:
            check(path, content)
        frames = pixels.normalise(read_frames(files[0][0], sample, self.config.latents.decoder))
        if sample["condition"] == "first-frame":
            return frames, frames[:, :1]
        if sample["condition"] == "source":
            return frames, pixels.normalise(fit_image(files[1][0], sample["source_geometry"])[None])
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
