"""The stage `masks` without torch: its model, the fingerprint of its masks, and the media that it reads."""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.models.weights import MODEL_FILES, SingleModel
from cache.sets.plans import Unit
from cache.store.store import Store
from schemas.config.datasets import MAX_CLIP_FRAMES, Dataset
from schemas.config.encoding import Masks
from schemas.config.pipeline import Config
from schemas.errors import UsageError
from schemas.geometry import Bucket
from schemas.recipe import masks_settings
from stages.planning.items import ItemRequest

ADVICE = (
    "set masks.model to the folder or repository of a model that transformers loads for semantic segmentation, such as "
    "nvidia/segformer-b5-finetuned-ade-640-640, of a Mask2Former, a MaskFormer, a CLIPSeg or a SAM"
)
SIDE_MULTIPLE = 16  # pixels: a multiple, so that pictures have few shapes and fill batches
PIXELS_PER_BYTE = 16  # approximate pixels per byte in a mask's PNG


def require_masks(config: Config) -> Masks:
    if config.masks is None:
        raise UsageError(
            "masks has nothing to do: the configuration has no section `masks`",
            "add `masks: {model: ..., classes: [...]}`; see docs/guides/captions-and-cleaning.md",
        )
    return config.masks


def single_model(masks: Masks) -> SingleModel:
    return SingleModel(masks.model, masks.revision, "masks.model", ADVICE, MODEL_FILES)


def masks_fingerprint_inputs(config: Config) -> dict[str, Any]:
    masks = require_masks(config)
    weights = single_model(masks).fingerprint(Store(config.root))
    return masks_settings(config.model, masks, config.latents) | {"weights": weights}


def masks_request(config: Config) -> ItemRequest:
    """Media that the stage reads: pictures, and all frames of each clip."""
    masks = require_masks(config)
    return ItemRequest(
        stage="masks",
        pixels=masks.resolution**2,
        multiple=SIDE_MULTIPLE,
        frames=MAX_CLIP_FRAMES,
        sources=False,
        options=("make_masks", "mask_data", "mask_column"),
        choose=_choose_items,
        box_column=masks.box_column,
    )


def estimate_masks_bytes(config: Config, unit: Unit) -> int:
    bucket = Bucket.parse(unit.bucket)
    return bucket.width * bucket.height * bucket.frames // PIXELS_PER_BYTE * len(unit.members)


def _choose_items(dataset: Dataset, table: pa.Table) -> NDArray[np.bool_]:
    """bool (n,): which rows of a media table get a mask, namely rows without a mask by the user."""
    if not dataset.makes_masks:
        return np.zeros(len(table), bool)
    return np.asarray(table.column("mask_id").is_null())
