"""The worker of encode-vision: samples -> features of their frames. The features are DINOv2's patch tokens, computed by
`transformers` and pooled to a clip's latent frames."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from cache.models.weights import CONFIG_FILE, load_pretrained
from cache.shards.shard import ShardRow
from schemas.devices import HostCopy, to_device
from schemas.geometry import Bucket
from stages.encoding import model_loading
from stages.encoding.member_reader import MemberPixels
from stages.encoding.pooling import pool_space, pool_time
from stages.encoding.vision.features import (
    PATCH_SIZE,
    GridSize,
    patch_grid,
    require_dinov2_class,
    resolve_checkpoint,
    stored_grid,
)
from stages.encoding.worker import FrameWorker
from stages.engines.jobs import Job

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def resize_frames(
    frames_FHWC: np.ndarray, grid: GridSize, mapped: Callable[..., Iterable[np.ndarray]] = map
) -> np.ndarray:
    """uint8 frames resized to the pixels of this patch grid, by Pillow's bicubic filter as in DINOv2's image processor.

    mapped: `map`, or a thread pool's `map`, since Pillow releases the GIL.
    """
    assert frames_FHWC.dtype == np.uint8 and frames_FHWC.shape[-1] == 3, frames_FHWC.shape
    size = (grid[1] * PATCH_SIZE, grid[0] * PATCH_SIZE)

    def resized(frame_HWC: np.ndarray) -> np.ndarray:
        return np.asarray(Image.fromarray(frame_HWC).resize(size, Image.Resampling.BICUBIC))

    return np.stack(list(mapped(resized, frames_FHWC)))


class Encoder:
    """One DINOv2, with or without register tokens, for inference."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises WeightsError if weights are damaged or missing."""
        import transformers

        model_class = getattr(transformers, require_dinov2_class(str(folder), folder / CONFIG_FILE))
        with model_loading.reading_errors(str(folder), "the DINOv2"):
            mask = "embeddings.mask_token"  # for training only
            model = load_pretrained(model_class, folder, unneeded=[mask], dtype=dtype)
        self._model: Any = model.eval().to(device)
        #: Number of tokens before the patches: class token and registers.
        self._leading_tokens = 1 + getattr(model.config, "num_register_tokens", 0)
        self._mean = torch.tensor(IMAGENET_MEAN, device=device).view(1, 3, 1, 1)
        self._deviation = torch.tensor(IMAGENET_STD, device=device).view(1, 3, 1, 1)

    @torch.no_grad()
    def patches(self, frames_BHWC: np.ndarray) -> torch.Tensor:
        """features_BHWC of the patches, after the last norm, on the model's device in its dtype.

        frames_BHWC: uint8 frames whose sides are multiples of 14.
        """
        height, width = frames_BHWC.shape[1:3]
        tokens_BLC = self._tokens(frames_BHWC)[:, self._leading_tokens :]
        return tokens_BLC.unflatten(1, (height // PATCH_SIZE, width // PATCH_SIZE))

    @torch.no_grad()
    def class_tokens(self, frames_BHWC: np.ndarray) -> torch.Tensor:
        """float32 vectors_BC after the last norm, on the model's device. frames_BHWC: as in `patches`."""
        return self._tokens(frames_BHWC)[:, 0].float()

    def _tokens(self, frames_BHWC: np.ndarray) -> torch.Tensor:
        height, width = frames_BHWC.shape[1:3]
        assert height % PATCH_SIZE == width % PATCH_SIZE == 0, f"{width}x{height} has no whole patches"
        bytes_BHWC = to_device(torch.from_numpy(np.ascontiguousarray(frames_BHWC)), self._mean.device)
        unit_BCHW = bytes_BHWC.permute(0, 3, 1, 2).float() * (1 / 255)
        pixels_BCHW = (unit_BCHW - self._mean) / self._deviation
        return self._model(pixels_BCHW.to(self._model.dtype)).last_hidden_state

    def clips(self, clips: list[np.ndarray], grid: GridSize, stride: int, limit: int) -> list[torch.Tensor]:
        """bfloat16 features_THWC of each clip on the device, pooled to `grid` and to latent frames. clips: uint8
        clips_FHWC of one size.

        limit: frames per forward pass; a longer clip takes several passes. Pooling is in float32.
        """
        frames_BHWC = clips[0] if len(clips) == 1 else np.concatenate(clips)
        starts = range(0, len(frames_BHWC), limit)
        pooled = [pool_space(self.patches(frames_BHWC[start : start + limit]), grid) for start in starts]
        pooled_clips = torch.cat(pooled).split([len(clip) for clip in clips])
        return [pool_time(features_FHWC, stride).to(torch.bfloat16) for features_FHWC in pooled_clips]


class VisionWorker(FrameWorker):
    """Members are uint8 frames_FHWC at DINOv2's input size, F = 1 for an image."""

    stage, kind, section, tensors = "encode-vision", "vision", "vision", ("vision",)
    listed_as = "vision"
    batch_limit_option = "batch_size"
    advice = "lower vision.batch_size (frames of one pass) or vision.size, or use --device cpu"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.precision = "bfloat16"  # dtype of the stored features
        self._family, self._size = self.config.model.family_spec, self.config.vision.pixels
        # Resizing a clip takes longer than DINOv2 on a GPU: 0.3 s of one core for 61 frames of 768x512.
        self._threads = ThreadPoolExecutor(job.resources.readers_per_worker, "resize")
        vision = self.config.vision
        assert vision.source is not None
        weights = resolve_checkpoint(vision.source, self.pinned_revision(vision.revision))
        model_loading.disable_progress_bars()
        dtype = getattr(torch, vision.precision or self.config.model.precision)
        self._encoder = Encoder(weights, dtype, self.device)

    def prepare(self, name: str, read: MemberPixels | None) -> np.ndarray:
        assert read is not None and read.frames is not None
        return resize_frames(read.frames, patch_grid(self._bucket(name), self._size), self._threads.map)

    def encode(self, names: list[str], batch: list[np.ndarray], limit: int) -> Iterator[ShardRow]:
        grid = stored_grid(self._bucket(names[0]), self._size, self._family.side_multiple)
        clips = self._encoder.clips(batch, grid, self._family.temporal_stride, limit)
        return self._rows(names, [len(features_THWC) for features_THWC in clips], HostCopy(torch.cat(clips)))

    def _rows(self, names: list[str], lengths: list[int], features: HostCopy) -> Iterator[ShardRow]:
        for name, features_THWC in zip(names, features.wait().split(lengths), strict=True):
            yield ShardRow(name, {"vision": model_loading.to_array(features_THWC)})

    def _bucket(self, name: str) -> Bucket:
        return Bucket.parse(self.plan.samples[name]["geometry"]["bucket"])
