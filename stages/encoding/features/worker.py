"""The worker of `features`: whole pictures and videos -> a vector by a model, layouts, and measures.

The model is any vision model in transformers, such as a ViT, the image half of a CLIP or SigLIP, DINOv3 or ConvNeXt.
transformers' image processor on Pillow resizes, crops and normalizes a picture by the checkpoint's
preprocessor_config.json, so a vector does not depend on whether torchvision is installed. A DINOv2 with patches of 14
pixels receives pictures with their own aspect ratio (`DinoModel`).
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open

from cache.models.weights import CONFIG_FILE, WeightsError, config_errors, load_pretrained
from cache.sets.item_rows import item_info
from cache.shards.shard import ShardRow
from cache.shards.tensors import Array
from schemas.devices import HostCopy, to_device
from schemas.geometry import Bucket
from stages.encoding import model_loading
from stages.encoding.features.measures import layouts, measure
from stages.encoding.features.settings import ADVICE, PROCESSOR_FILE, features_model, require_features
from stages.encoding.member_reader import MemberPixels
from stages.encoding.vision.features import patch_grid
from stages.encoding.vision.worker import Encoder, resize_frames
from stages.encoding.worker import FrameWorker
from stages.engines.jobs import Job

UNNEEDED = ("embeddings.mask_token", "mask_token")  # only for training


class VisionModel(Protocol):
    def prepare(self, frames_FHWC: np.ndarray, bucket: Bucket) -> np.ndarray:
        """The model's input, with F as its first axis. frames_FHWC: uint8 frames of a picture or clip of this
        bucket."""

    def vectors(self, inputs: np.ndarray) -> torch.Tensor:
        """float32 vectors (F, C) on the device. inputs: output of `prepare`."""


class DinoModel:
    """A DINOv2 with patches of 14 pixels. The vector is the class token after the last norm."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, size: int) -> None:
        self._encoder, self._size = Encoder(folder, dtype, device), size

    def prepare(self, frames_FHWC: np.ndarray, bucket: Bucket) -> np.ndarray:
        return resize_frames(frames_FHWC, patch_grid(bucket, self._size))

    def vectors(self, inputs: np.ndarray) -> torch.Tensor:
        return self._encoder.class_tokens(inputs)


class AutoModel:
    """Any other vision model. The vector is `pooler_output`, else the class token, else the mean of all tokens."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises WeightsError for damaged or missing weights, and for a model that is not a vision model."""
        with model_loading.reading_errors(str(folder), "the vision model"):
            model_loading.check_picture_sizes(folder)
            with config_errors(f"{folder}/{PROCESSOR_FILE}"):
                self._processor: Any = _load_processor(folder)
            with config_errors(f"{folder}/{CONFIG_FILE}"):
                self._model: Any = _load_model(folder, dtype).eval().to(device)
        self._has_class_token = any(name.endswith("cls_token") for name, _ in self._model.named_parameters())
        with model_loading.reading_errors(str(folder), "the vision model"):
            self._try_out(folder)

    def prepare(self, frames_FHWC: np.ndarray, bucket: Bucket) -> np.ndarray:
        return self._processor(images=list(frames_FHWC), return_tensors="np")["pixel_values"]

    @torch.no_grad()
    def vectors(self, inputs: np.ndarray) -> torch.Tensor:
        pixels = to_device(torch.from_numpy(np.ascontiguousarray(inputs)), self._model.device)
        output = self._model(pixel_values=pixels.to(self._model.dtype))
        pooled = getattr(output, "pooler_output", None)
        if pooled is None:
            hidden = output.last_hidden_state
            tokens_BLC = hidden if hidden.ndim == 3 else hidden.flatten(2).transpose(1, 2)  # (B, C, H, W)
            pooled = tokens_BLC[:, 0] if self._has_class_token else tokens_BLC.mean(1)
        return pooled.flatten(1).float()

    def _try_out(self, folder: Path) -> None:
        """Raises WeightsError if the model fails on a test picture, or if two runs on it differ or are not finite."""
        picture = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3), np.uint8)
        try:
            first, second = (self.vectors(self.prepare(picture, Bucket(64, 64, 1))) for _ in range(2))
        except (TypeError, AttributeError, LookupError, ValueError, ArithmeticError, AssertionError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise WeightsError(
                f"{folder}: this model can't compute a vector of a picture ({reason})", ADVICE
            ) from error
        if not torch.isfinite(first).all():
            advice = "replace it with a whole copy, or set features.precision: float32"
            raise WeightsError(f"{folder}: this model returns NaN or infinite numbers for a picture", advice)
        if not torch.equal(first, second):
            raise WeightsError(f"{folder}: this model returns different vectors for the same picture", ADVICE)


def pool_clips(model: VisionModel, clips: list[np.ndarray], limit: int) -> torch.Tensor:
    """float16 vectors_NC of length one on the device: for each clip, the mean of its frames' vectors. clips: outputs of
    `prepare`, all of one size. limit: frames per forward pass; a longer clip takes several passes."""
    frames = clips[0] if len(clips) == 1 else np.concatenate(clips)
    starts = range(0, len(frames), limit)
    vectors_BC = torch.cat([model.vectors(frames[start : start + limit]) for start in starts])
    means = [vectors_FC.mean(0) for vectors_FC in vectors_BC.split([len(clip) for clip in clips])]
    return torch.nn.functional.normalize(torch.stack(means), dim=-1).to(torch.float16)


def _load_processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor, ViTImageProcessorPil
    from transformers.image_processing_base import ImageProcessingMixin

    values, _ = ImageProcessingMixin.get_image_processor_dict(folder)
    if str(values.get("image_processor_type")).startswith("DINOv3"):
        # DINOv3's own processor needs torchvision; it resizes and normalizes by the same keys, and pixels differ by at
        # most one level of 255.
        return ViTImageProcessorPil.from_pretrained(folder)
    try:
        return AutoImageProcessor.from_pretrained(folder, trust_remote_code=False, backend="pil")
    except ImportError as error:
        reason = str(error).strip().partition("\n")[0]
        raise WeightsError(f"{folder}: its image processor can't be loaded: {reason}", ADVICE) from error


def _load_model(folder: Path, dtype: torch.dtype) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config = getattr(config, "vision_config", None) or config  # the image half of a CLIP or SigLIP
    try:
        model_class: Any = transformers.MODEL_MAPPING[type(config)]
    except KeyError:
        raise WeightsError(f"{folder} is a {config.model_type}, which is not a vision model", ADVICE) from None
    settings: dict[str, Any] = {}
    if "add_pooling_layer" in inspect.signature(model_class).parameters:
        # A ViT that was trained as a classifier has no weights of a pooling layer; they would be initialized at random.
        settings["add_pooling_layer"] = False
        for file in folder.glob("*.safetensors"):
            with safe_open(file, framework="pt") as content:
                names = content.keys()
            settings["add_pooling_layer"] |= any("pooler." in name for name in names)
    return load_pretrained(model_class, folder, unneeded=UNNEEDED, config=config, dtype=dtype, **settings)


@dataclass(frozen=True)
class PreparedItem:
    """frames: the model's input, with F as its first axis; None without a model."""

    frames: np.ndarray | None
    layouts: np.ndarray
    measures: dict[str, Any]

    def __len__(self) -> int:
        return 1 if self.frames is None else len(self.frames)


class FeaturesWorker(FrameWorker):
    """Members are whole items: their measures and layouts, and their frames for the model."""

    stage, kind, section = "features", "features", "features"
    batch_limit_option = "batch_size"
    advice = "lower features.batch_size (frames of one pass) or features.size, or use --device cpu"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        features = require_features(self.config)
        self.precision = "float16"  # dtype of the stored vectors
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
        inputs = None
        if self._model is not None:
            inputs = self._model.prepare(frames, Bucket.parse(sample["geometry"]["bucket"]))
        return PreparedItem(inputs, layouts(frames[len(frames) // 2]).astype(np.float16), measures)

    def encode(self, names: list[str], batch: list[PreparedItem], limit: int) -> Iterator[ShardRow]:
        frames = [item.frames for item in batch if item.frames is not None]
        pooled = HostCopy(pool_clips(self._model, frames, limit)) if self._model is not None else None

        def rows() -> Iterator[ShardRow]:
            vectors = None if pooled is None else pooled.wait()
            for number, (name, item) in enumerate(zip(names, batch, strict=True)):
                tensors = {"layouts": Array.from_numpy(item.layouts)}
                if vectors is not None:
                    tensors["features"] = model_loading.to_array(vectors[number])
                yield ShardRow(name, tensors, {"measures": item.measures, **item_info(self.plan.samples[name])})

        return rows()
