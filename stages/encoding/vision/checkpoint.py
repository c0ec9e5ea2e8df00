"""Where a DINOv2's weights are, and what identifies them in a cache's fingerprint. Imports no torch."""

from pathlib import Path
from typing import Any

from cache.models.single_model import CONFIG_FILE, SingleModel
from cache.models.weights import WeightsError, read_object
from cache.store.store import Store
from schemas.errors import USAGE
from stages.encoding.vision.grids import PATCH_SIZE

#: model_type in config.json -> class in transformers.
MODEL_CLASSES = {"dinov2": "Dinov2Model", "dinov2_with_registers": "Dinov2WithRegistersModel"}
ADVICE = "set vision.model to dinov2_vits14, dinov2_vitg14, or another DINOv2 in transformers' layout"


class UnsupportedModelError(WeightsError):
    """Weights of a model that is no DINOv2 with patches of 14 pixels."""

    exit_code = USAGE


def fingerprint_weights(source: str, revision: str | None, memo: Store | None = None) -> dict[str, Any]:
    """`SingleModel.fingerprint` of a DINOv2."""
    model = _dinov2_model(source, revision)
    require_dinov2_class(source, model.config_file())
    return model.fingerprint(memo)


def feature_width(source: str, revision: str | None) -> int:
    """Numbers of one patch's token."""
    return read_object(_dinov2_model(source, revision).config_file())["hidden_size"]


def resolve_checkpoint(source: str, revision: str | None) -> Path:
    """The directory of the config and weights, a repository's after fetching it. Raises WeightsError."""
    folder = _dinov2_model(source, revision).fetch()
    require_dinov2_class(source, folder / CONFIG_FILE)
    return folder


def _dinov2_model(source: str, revision: str | None) -> SingleModel:
    return SingleModel(source, revision, "vision.model", ADVICE)


def require_dinov2_class(source: str, config: Path) -> str:
    """The transformers class of the model that the config describes. UnsupportedModelError where it is no DINOv2."""
    values = read_object(config)
    kind, patch = values.get("model_type"), values.get("patch_size")
    if kind not in MODEL_CLASSES or patch != PATCH_SIZE:
        raise UnsupportedModelError(
            f"{source} is a {kind} with patches of {patch}; vision features are of "
            f"{' or '.join(MODEL_CLASSES)}, of {PATCH_SIZE}",
            ADVICE,
        )
    return MODEL_CLASSES[kind]
