"""The worker of `features`: whole pictures and videos -> one vector by a model, their layout, and measures."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cache.sets.item_rows import item_info
from cache.shards.shard import ShardRow
from cache.shards.tensors import Array
from schemas.devices import HostCopy
from schemas.geometry import Bucket
from stages.encoding import model_loading
from stages.encoding.features.measures import layouts, measure
from stages.encoding.features.settings import PROCESSOR_FILE, features_model, require_features
from stages.encoding.features.vision_model import AutoModel, DinoModel, VisionModel, pool_clips
from stages.encoding.member_reader import MemberPixels
from stages.encoding.worker import FrameWorker
from stages.engines.jobs import Job


@dataclass(frozen=True)
class PreparedItem:
    """frames: the model's input, the first axis F; None without a model."""

    frames: np.ndarray | None
    layouts: np.ndarray
    measures: dict[str, Any]

    @property
    def frame_count(self) -> int:
        return 1 if self.frames is None else len(self.frames)


class FeaturesWorker(FrameWorker):
    """Members are whole items: what was measured of them, and their frames for the model."""

    stage, kind, section = "features", "features", "features"
    batch_limit_option = "batch_size"
    advice = "lower features.batch_size (frames of one pass) or features.size, or use --device cpu"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        features = require_features(self.config)
        self.precision = "float16"  # as stored
        self.tensors = ("layouts", "features") if features.source else ("layouts",)
        self._model: VisionModel | None = None
        if features.source is None:
            return
        model = features_model(features, self.pinned_revision(features.revision))
        folder = model.fetch()
        model_loading.disable_progress_bars()
        dtype = getattr(torch, features.precision or self.config.model.precision)
        if PROCESSOR_FILE in model.files:
            self._model = AutoModel(folder, dtype, self.device)
        else:
            self._model = DinoModel(folder, dtype, self.device, features.pixels)

    def prepare(self, name: str, read: MemberPixels | None) -> PreparedItem:
        assert read is not None and read.frames is not None
        frames, sample = read.frames, self.plan.samples[name]
        measures = measure(frames, sample["kind"] == "video")
        shown = None
        if self._model is not None:
            shown = self._model.show(frames, Bucket.parse(sample["geometry"]["bucket"]))
        return PreparedItem(shown, layouts(frames[len(frames) // 2]).astype(np.float16), measures)

    def cost(self, batch: list[PreparedItem]) -> int:
        """Frames."""
        return sum(item.frame_count for item in batch)

    def indivisible(self, batch: list[PreparedItem], limit: int) -> bool:
        """At one frame a pass: a clip may take several passes of at most `limit` frames."""
        return min(self.cost(batch), limit) <= 1

    def encode(self, names: list[str], batch: list[PreparedItem], limit: int) -> Iterator[ShardRow]:
        frames = [item.frames for item in batch if item.frames is not None]
        pooled = HostCopy(pool_clips(self._model, frames, limit)) if self._model is not None else None
        return self._rows(names, batch, pooled)

    def _rows(self, names: list[str], batch: list[PreparedItem], pooled: HostCopy | None) -> Iterator[ShardRow]:
        vectors = None if pooled is None else pooled.wait()
        for number, (name, item) in enumerate(zip(names, batch, strict=True)):
            tensors = {"layouts": Array.from_numpy(item.layouts)}
            if vectors is not None:
                tensors["features"] = model_loading.to_array(vectors[number])
            yield ShardRow(name, tensors, {"measures": item.measures, **item_info(self.plan.samples[name])})
