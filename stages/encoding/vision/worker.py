"""The worker of encode-vision: samples -> features of their frames."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from cache.sets.plans import Unit
from cache.shards.shard import ShardRow
from schemas.geometry import Bucket
from stages.encoding import model_loading
from stages.encoding.member_reader import MemberPixels, ReadRequest
from stages.encoding.vision.dinov2 import Encoder, resize_frames
from stages.encoding.vision.features import patch_grid, resolve_checkpoint, stored_grid
from stages.encoding.worker import UnitWorker
from stages.engines.jobs import Job


class VisionWorker(UnitWorker):
    """Members are uint8 frames_FHWC at DINOv2's input size, F = 1 for an image."""

    stage, kind, section, tensors = "encode-vision", "vision", "vision", ("vision",)
    batch_limit_option = "batch_size"
    advice = "lower vision.batch_size (frames of one pass) or vision.size, or use --device cpu"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.precision = "bfloat16"  # as stored
        self._family, self._size = self.config.model.family_spec, self.config.vision.pixels
        # Resizing a clip takes longer than DINOv2 on a GPU: 0.3 s of one core for 61 frames of 768x512.
        self._threads = ThreadPoolExecutor(job.resources.readers_per_worker, "resize")
        vision = self.config.vision
        assert vision.source is not None
        # The fingerprint is of the weights at this commit: the repository's branch may have moved since.
        record = self.store.read_json(f"{self.kind}/{job.fingerprint}/provenance.json")
        weights = resolve_checkpoint(vision.source, record["weights"].get("commit", vision.revision))
        model_loading.disable_progress_bars()
        dtype = getattr(torch, vision.precision or self.config.model.precision)
        self._encoder = Encoder(weights, dtype, self.device)

    def member_bytes(self, unit: Unit) -> int:
        """Return the bytes of the frames as they are read, before they are resized."""
        bucket = Bucket.parse(unit.bucket)
        return 3 * bucket.width * bucket.height * bucket.frames

    def read_request(self, name: str) -> ReadRequest:
        """The sample's own frames alone, not the source image that its latents are conditioned on."""
        files = tuple(self.locations.planned_files("vision", name))
        return ReadRequest(files, self.plan.samples[name], None, self.config.latents.decoder)

    def prepare(self, name: str, read: MemberPixels | None) -> np.ndarray:
        assert read is not None and read.frames is not None
        return resize_frames(read.frames, patch_grid(self._bucket(name), self._size), self._threads.map)

    def cost(self, batch: list[np.ndarray]) -> int:
        """Frames."""
        return sum(len(frames_FHWC) for frames_FHWC in batch)

    def indivisible(self, batch: list[np.ndarray], limit: int) -> bool:
        """At one frame a pass: a clip may take several passes of at most `limit` frames."""
        return min(self.cost(batch), limit) <= 1

    def encode(self, names: list[str], batch: list[np.ndarray], limit: int) -> Iterator[ShardRow]:
        grid = stored_grid(self._bucket(names[0]), self._size, self._family.side_multiple)
        clips = self._encoder.clips(batch, grid, self._family.temporal_stride, limit)
        for name, features_THWC in zip(names, clips, strict=True):
            yield ShardRow(name, {"vision": model_loading.to_array(features_THWC)})

    def _bucket(self, name: str) -> Bucket:
        return Bucket.parse(self.plan.samples[name]["geometry"]["bucket"])
