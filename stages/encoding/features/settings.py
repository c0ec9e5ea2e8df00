"""The stage `features` without torch: which model it has, what identifies its shards, and what it reads."""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.sets.plans import Unit
from cache.store.store import Store
from schemas.config.datasets import Dataset
from schemas.config.encoding import Features
from schemas.config.pipeline import Config
from schemas.recipe import features_settings
from stages.encoding.stage_options import UsageError
from stages.encoding.vision.features import PATCH_SIZE, fingerprint_weights
from stages.planning.items import ItemRequest

OPTION = "features.model"
EDGE = 448  # pixels: pictures are measured in about the area of a square of that edge
ROW_BYTES = 8192  # of one item in a shard, about


def require_features(config: Config) -> Features:
    if config.features is None:
        raise UsageError(
            "features has nothing to do: the section `features` is not in the configuration",
            "add `features: {}`, which looks for near-duplicates, or more of docs/captions-and-cleaning.md",
        )
    return config.features


def features_fingerprint_inputs(config: Config) -> dict[str, Any]:
    features, weights = require_features(config), None
    if features.source is not None:
        weights = fingerprint_weights(features.source, features.revision, Store(config.root), OPTION)
    return features_settings(config) | {"weights": weights}


def features_request(config: Config) -> ItemRequest:
    """What the stage reads of the media: every item, whole."""
    return ItemRequest(
        stage="features",
        pixels=EDGE**2,
        multiple=PATCH_SIZE,
        frames=require_features(config).frames,
        sources=False,
        options=(),
        choose=_choose_all,
        whole=True,
    )


def estimate_features_bytes(config: Config, unit: Unit) -> int:
    return ROW_BYTES * len(unit.members)


def _choose_all(dataset: Dataset, table: pa.Table) -> NDArray[np.bool_]:
    return np.ones(len(table), bool)
