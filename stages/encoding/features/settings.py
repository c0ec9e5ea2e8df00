"""The stage `features` without torch: its model, the fingerprint of its shards, and the media that it reads."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.models.weights import WEIGHT_FILES, SingleModel
from cache.sets.plans import Unit
from cache.store.store import Store
from schemas.config.datasets import Dataset
from schemas.config.encoding import Features
from schemas.config.pipeline import Config
from schemas.errors import UsageError
from schemas.recipe import features_settings
from stages.encoding.vision.features import PATCH_SIZE, is_dinov2
from stages.planning.items import ItemRequest

OPTION = "features.model"
ADVICE = f"set {OPTION} to dinov2_vits14, or to the folder or repository of a vision model that transformers loads"
PROCESSOR_FILE = "preprocessor_config.json"
#: Settings of vision models other than DINOv2; they replace the same keys of `schemas.recipe.features_settings`.
OTHER_MODEL = {
    "size": None,
    "pixels": "its-own-processor-by-pillow",
    "pooling": "pooler-else-class-else-mean;length-one",
}
EDGE = 448  # pixels: pictures are measured at about the area of a square with this edge
ROW_BYTES = 8192  # approximate bytes of one item in a shard


def require_features(config: Config) -> Features:
    if config.features is None:
        raise UsageError(
            "features has nothing to do: the configuration has no section `features`",
            "add `features: {}` to find near-duplicates; see docs/guides/captions-and-cleaning.md",
        )
    return config.features


def features_model(features: Features, revision: str | None) -> SingleModel:
    """The model's config and weights, and for models other than DINOv2 its processor's settings. Raises
    WeightsError."""
    assert features.source is not None
    model = SingleModel(features.source, revision, OPTION, ADVICE)
    return model if is_dinov2(model.config_file()) else replace(model, files=(*WEIGHT_FILES, PROCESSOR_FILE))


def features_fingerprint_inputs(config: Config) -> dict[str, Any]:
    features = require_features(config)
    settings: dict[str, Any] = features_settings(config.model, features, config.latents) | {"weights": None}
    if features.source is not None:
        model = features_model(features, features.revision)
        settings["weights"] = model.fingerprint(Store(config.root))
        if PROCESSOR_FILE in model.files:
            if features.size is not None:
                raise UsageError(
                    f"features.size is {features.size}, but {features.source} is not a DINOv2 and has a fixed size",
                    "remove features.size",
                )
            settings["shown"] |= OTHER_MODEL
    return settings


def features_request(config: Config) -> ItemRequest:
    """Media that the stage reads: every item, videos from beginning to end."""
    return ItemRequest(
        stage="features",
        pixels=EDGE**2,
        multiple=PATCH_SIZE,
        frames=require_features(config).frames,
        sources=False,
        options=(),
        choose=_choose_all,
        has_whole_items=True,
    )


def estimate_features_bytes(config: Config, unit: Unit) -> int:
    return ROW_BYTES * len(unit.members)


def _choose_all(dataset: Dataset, table: pa.Table) -> NDArray[np.bool_]:
    return np.ones(len(table), bool)
