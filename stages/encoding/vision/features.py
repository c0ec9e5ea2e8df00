"""DINOv2 features without the model itself: the weights' location and fingerprint, and the grids of the features. Does
not import torch.

The three grids are DINOv2's patches, the transformer's tokens, and the stored grid. Each divides the frame evenly,
so features and tokens are aligned by position, with no offset and no crop.
"""

import math
from pathlib import Path
from typing import Any

from cache.models.weights import CONFIG_FILE, SingleModel, WeightsError, read_object
from cache.store.store import Store
from schemas.errors import USAGE
from schemas.geometry import Bucket

PATCH_SIZE = 14  # pixels: side of a patch, in every published DINOv2

#: Rows and columns.
GridSize = tuple[int, int]


def patch_grid(bucket: Bucket, size: int) -> GridSize:
    """DINOv2's patch grid for a frame: about as many patches as in a square of `size` pixels, in the frame's aspect
    ratio.

    Not a square: 16:9 stretched to 1:1 has shapes that the model never saw, at no gain. Not DINOv2's usual center
    crop: the rest would have no features. Its position encodings are interpolated to any grid.
    """
    per_side = size // PATCH_SIZE
    aspect = bucket.width / bucket.height
    return max(1, round(per_side / math.sqrt(aspect))), max(1, round(per_side * math.sqrt(aspect)))


def token_grid(bucket: Bucket, side: int) -> GridSize:
    """The grid of the diffusion transformer's tokens in one latent frame.

    side: pixels that one token covers, stride times patch; a bucket's sides are multiples of it.
    """
    return bucket.height // side, bucket.width // side


def stored_grid(bucket: Bucket, size: int, side: int) -> GridSize:
    """The grid of the stored features of one latent frame: along each axis, the coarser of patches and tokens.

    If DINOv2's grid is coarser, the trainer enlarges the features to its tokens: enlarging them here would take several
    times the bytes without adding information.
    """
    patches, tokens = patch_grid(bucket, size), token_grid(bucket, side)
    return min(patches[0], tokens[0]), min(patches[1], tokens[1])


#: model_type in config.json -> class in transformers.
MODEL_CLASSES = {"dinov2": "Dinov2Model", "dinov2_with_registers": "Dinov2WithRegistersModel"}
OPTION = "vision.model"
ADVICE = f"set {OPTION} to dinov2_vits14, dinov2_vitg14, or another DINOv2 in transformers' layout"


class UnsupportedModelError(WeightsError):
    """Weights of a model that is not a DINOv2 with patches of 14 pixels."""

    exit_code = USAGE


def fingerprint_weights(source: str, revision: str | None, memo: Store | None = None) -> dict[str, Any]:
    """`SingleModel.fingerprint` of a DINOv2."""
    model = _dinov2_model(source, revision)
    require_dinov2_class(source, model.config_file())
    return model.fingerprint(memo)


def feature_width(source: str, revision: str | None) -> int:
    """Number of channels of a patch token."""
    return read_object(_dinov2_model(source, revision).config_file())["hidden_size"]


def resolve_checkpoint(source: str, revision: str | None) -> Path:
    """The directory of the config and weights; fetches them if `source` is a repository. Raises WeightsError."""
    folder = _dinov2_model(source, revision).fetch()
    require_dinov2_class(source, folder / CONFIG_FILE)
    return folder


def _dinov2_model(source: str, revision: str | None) -> SingleModel:
    return SingleModel(source, revision, OPTION, ADVICE)


def is_dinov2(config: Path) -> bool:
    """Whether the config describes a DINOv2 with patches of PATCH_SIZE."""
    values = read_object(config)
    return str(values.get("model_type")) in MODEL_CLASSES and values.get("patch_size") == PATCH_SIZE


def require_dinov2_class(source: str, config: Path) -> str:
    """The transformers class of the model that the config describes. Raises UnsupportedModelError if the model is not a
    DINOv2."""
    values = read_object(config)
    if not is_dinov2(config):
        raise UnsupportedModelError(
            f"{source} is a {values.get('model_type')} with patches of {values.get('patch_size')}; vision features are "
            f"of {' or '.join(MODEL_CLASSES)}, of {PATCH_SIZE}",
            ADVICE,
        )
    return MODEL_CLASSES[values["model_type"]]
