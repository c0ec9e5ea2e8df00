"""Segmentation models of transformers: the inputs of each kind of model, and how its output becomes a mask. The model's
image processor prepares pictures with Pillow, so masks do not depend on whether torchvision is installed."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
from transformers.image_processing_backends import PilBackend

from cache.models.weights import CONFIG_FILE, WeightsError, config_errors, load_pretrained, read_object
from schemas.config.encoding import Masks
from schemas.devices import to_device
from stages.encoding import model_loading
from stages.encoding.masks.settings import ADVICE, single_model

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels
LOGITS = ("logits", "class_queries_logits", "masks_queries_logits", "pred_masks")  # names of the models' outputs
PROBABILITY = 0.5  # if masks.threshold is not set
#: Model types that a user may try, and the reasons why they are not supported.
UNSUPPORTED = {
    "vitmatte": "takes a trimap, a rough mask of each picture",
    "oneformer": "needs a table of classes that is not a part of its checkpoint",
    **dict.fromkeys(
        ("sam2", "sam2_video", "sam3", "sam3_video", "sam3_tracker", "edgetam"), "has no Pillow image processor"
    ),
}


class Segmenter(ABC):
    """Base of all kinds of models. folder: the model's checkpoint. masks: the settings."""

    def __init__(self, model: Any, folder: Path, masks: Masks) -> None:
        self.model, self.masks = model, masks
        self.probability = PROBABILITY if masks.threshold is None else masks.threshold
        self.processor = _load_processor(folder, masks.model)

    @abstractmethod
    def find(self, frames: Sequence[np.ndarray], boxes: Sequence[Box]) -> torch.Tensor:
        """Pixels to be masked: bool (B, H, W) on the model's device. frames: uint8 (H, W, 3) frames of one size. boxes:
        one per frame."""

    @torch.no_grad()
    def try_out(self) -> None:
        """Raises WeightsError if the model fails on a test picture, or if its outputs are not finite."""
        picture, outputs = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8), list[Any]()
        hook = self.model.register_forward_hook(lambda model, arguments, output: outputs.append(output))
        try:
            self.find([picture], [(0, 0, 64, 64)])
        except (TypeError, AttributeError, LookupError, ValueError, ArithmeticError, AssertionError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise WeightsError(f"{self.masks.model} can't compute a mask of a picture ({reason})", ADVICE) from error
        finally:
            hook.remove()
        answers = (output[name] for output in outputs for name in LOGITS if name in output)
        if not all(bool(torch.isfinite(answer).all()) for answer in answers):
            raise WeightsError(
                f"{self.masks.model} returns NaN or infinite numbers for a picture",
                "replace it with a whole copy, or set masks.precision: float32",
            )

    def _inputs(self, frames: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """The model's inputs for these frames, made by the image processor, on the device."""
        processed = self.processor(list(frames), return_tensors="pt", input_data_format="channels_last")
        names = (name for name in ("pixel_values", "pixel_mask") if name in processed)
        inputs = {name: to_device(processed[name], self.model.device) for name in names}
        inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        return inputs


class LabeledSegmenter(Segmenter):
    """A model with a fixed list of classes, identified by numbers."""

    def __init__(self, model: Any, folder: Path, masks: Masks) -> None:
        super().__init__(model, folder, masks)
        self.labels = find_labels(model.config.id2label, masks)
        self.ids = torch.tensor(self.labels, device=model.device)


class SemanticSegmenter(LabeledSegmenter):
    """Models that classify each pixel, such as SegFormer. A pixel is masked if its most probable class is one of
    masks.classes or, with masks.threshold, if these classes' probabilities add up to at least the threshold."""

    def find(self, frames: Sequence[np.ndarray], boxes: Sequence[Box]) -> torch.Tensor:
        logits_BCHW = self.model(**self._inputs(frames)).logits
        return torch.cat([self._find(logits_CHW, frames[0].shape[:2]) for logits_CHW in logits_BCHW])

    def _find(self, logits_CHW: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        """The mask (1, H, W) of one frame. Frames are processed one by one, because full-size logits of all classes
        take memory."""
        logits_BCHW = F.interpolate(logits_CHW[None].float(), size, mode="bilinear", align_corners=False)
        if self.masks.threshold is None:
            return torch.isin(logits_BCHW.argmax(1), self.ids)
        return logits_BCHW.softmax(1)[:, self.ids].sum(1) >= self.masks.threshold


class UniversalSegmenter(LabeledSegmenter):
    """MaskFormer and Mask2Former, which find segments with one class each. Uses the processor's panoptic
    post-processing."""

    def find(self, frames: Sequence[np.ndarray], boxes: Sequence[Box]) -> torch.Tensor:
        outputs, size = self.model(**self._inputs(frames)), tuple(frames[0].shape[:2])
        for name in ("class_queries_logits", "masks_queries_logits"):
            outputs[name] = outputs[name].float()
        mask_BHW = torch.zeros((len(frames), *size), dtype=torch.bool, device=self.model.device)
        results = self.processor.post_process_panoptic_segmentation(
            outputs, threshold=self.probability, label_ids_to_fuse=set(), target_sizes=[size] * len(frames)
        )
        for number, result in enumerate(results):
            for segment in result["segments_info"]:
                if segment["label_id"] in self.labels:
                    mask_BHW[number] |= (result["segmentation"] == segment["id"]).to(mask_BHW.device)
        return mask_BHW


class WordSegmenter(Segmenter):
    """CLIPSeg, which segments by texts. A pixel is masked if any text of masks.classes matches it."""

    def __init__(self, model: Any, folder: Path, masks: Masks) -> None:
        super().__init__(model, folder, masks)
        if not masks.classes:
            raise WeightsError(
                f"{masks.model} segments by texts, and masks.classes is empty", "set it, such as [a person]"
            )
        tokens = AutoTokenizer.from_pretrained(folder)(list(masks.classes), padding=True, return_tensors="pt")
        length, max_tokens = tokens["input_ids"].shape[1], model.config.text_config.max_position_embeddings
        if length > max_tokens:
            problem = f"masks.classes: the longest has {length} tokens, and {masks.model} reads at most {max_tokens}"
            raise WeightsError(problem, "shorten it")
        words = {name: tokens[name].to(model.device) for name in ("input_ids", "attention_mask")}
        self._words = model.get_conditional_embeddings(len(masks.classes), **words)

    def find(self, frames: Sequence[np.ndarray], boxes: Sequence[Box]) -> torch.Tensor:
        pixels, size = self._inputs(frames)["pixel_values"], frames[0].shape[:2]
        mask_BHW = torch.zeros((len(frames), *size), dtype=torch.bool, device=pixels.device)
        for word in self._words:
            answer = self.model(pixel_values=pixels, conditional_embeddings=word.expand(len(frames), -1))
            logits_BHW = answer.logits.view(len(frames), *pixels.shape[-2:])
            sized_B1HW = F.interpolate(logits_BHW[:, None].float(), size, mode="bilinear", align_corners=False)
            mask_BHW |= sized_B1HW[:, 0].sigmoid() >= self.probability
        return mask_BHW


class BoxSegmenter(Segmenter):
    """SAM, which segments the object in a box."""

    def __init__(self, model: Any, folder: Path, masks: Masks) -> None:
        super().__init__(model, folder, masks)
        if masks.classes:
            problem = f"{masks.model} segments by boxes, not by classes ({', '.join(masks.classes)})"
            raise WeightsError(problem, "remove masks.classes and set masks.box_column, or choose another model")

    def find(self, frames: Sequence[np.ndarray], boxes: Sequence[Box]) -> torch.Tensor:
        processed = self.processor(list(frames), return_tensors="pt", input_data_format="channels_last")
        sizes, original = processed["reshaped_input_sizes"], processed["original_sizes"]
        scale = (sizes / original)[:, [1, 0, 1, 0]]  # (B, 4): x, y, x, y
        boxes_B14 = (torch.tensor(boxes, dtype=scale.dtype) * scale)[:, None]
        device, dtype = self.model.device, self.model.dtype
        outputs = self.model(
            pixel_values=to_device(processed["pixel_values"], device).to(dtype),
            input_boxes=to_device(boxes_B14, device).to(dtype),
            multimask_output=False,
        )
        threshold = torch.tensor(self.probability, dtype=torch.float64).logit().item()
        masks = self.processor.post_process_masks(
            outputs.pred_masks.float(), original.tolist(), sizes.tolist(), mask_threshold=threshold
        )
        return torch.stack([mask_11HW[0, 0] for mask_11HW in masks])


#: Model type -> the kind and the class in transformers. transformers has its own mapping for semantic segmentation.
KINDS: dict[str, tuple[type[Segmenter], str]] = {
    "mask2former": (UniversalSegmenter, "Mask2FormerForUniversalSegmentation"),
    "maskformer": (UniversalSegmenter, "MaskFormerForInstanceSegmentation"),
    "clipseg": (WordSegmenter, "CLIPSegForImageSegmentation"),
    "sam": (BoxSegmenter, "SamModel"),
}


def find_labels(id2label: dict[int, str], masks: Masks) -> list[int]:
    """The numbers of the labels in masks.classes; several labels may have the same name. Raises WeightsError, which
    lists the valid labels, for an unknown class or for an empty list."""
    numbers_by_label: dict[str, list[int]] = {}
    for number, label in sorted(id2label.items()):
        numbers_by_label.setdefault(label.strip().lower(), []).append(number)
    labels = ", ".join(dict.fromkeys(id2label[number] for number in sorted(id2label)))
    if not masks.classes:
        raise WeightsError(f"masks.classes is empty, and {masks.model} segments by labels", f"choose from: {labels}")
    if unknown := [name for name in masks.classes if name.strip().lower() not in numbers_by_label]:
        raise WeightsError(f"masks.classes: {masks.model} has no label {', '.join(unknown)}", f"valid labels: {labels}")
    return [number for name in masks.classes for number in numbers_by_label[name.strip().lower()]]


def load_segmenter(masks: Masks, dtype: torch.dtype, device: torch.device) -> Segmenter:
    """Raises WeightsError for weights that are damaged or missing, and for a model that does not make masks."""
    model_loading.disable_progress_bars()
    folder = single_model(masks).fetch()
    with model_loading.reading_errors(masks.model, "the model"):
        kind, model_class = _find_kind(folder, masks.model)
        model_loading.check_picture_sizes(folder)
        model = load_pretrained(model_class, folder, dtype=dtype).eval().to(device)
        with config_errors(f"{folder}/{CONFIG_FILE}"):
            segmenter = kind(model, folder, masks)
        segmenter.try_out()
        return segmenter


def _load_processor(folder: Path, source: str) -> Any:
    """The checkpoint's image processor on Pillow. If a model has none, transformers returns its torchvision processor,
    which is not supported."""
    reason = ""
    try:
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
        if isinstance(processor, PilBackend):
            return processor
    except (ImportError, ValueError) as error:
        reason = f" ({str(error).strip().partition(chr(10))[0]})"
    raise WeightsError(f"transformers has no Pillow image processor for {source}{reason}", ADVICE)


def _find_kind(folder: Path, source: str) -> tuple[type[Segmenter], Any]:
    """The kind of the checkpoint's model, and its class in transformers."""
    model_type = str(read_object(folder / CONFIG_FILE).get("model_type", "model without a type"))
    if model_type in KINDS:
        kind, name = KINDS[model_type]
        return kind, getattr(transformers, name)
    if model_type not in UNSUPPORTED:
        with config_errors(str(folder / CONFIG_FILE)):
            config = type(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        if config in (mapping := transformers.AutoModelForSemanticSegmentation._model_mapping):
            return SemanticSegmenter, mapping[config]
    reason = UNSUPPORTED.get(model_type, "is not a supported segmentation model")
    raise WeightsError(f"{source} is a {model_type}, which {reason}", ADVICE)
