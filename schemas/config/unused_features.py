"""Features that can be configured and are prepared, but that training does not use yet."""

from collections.abc import Iterator
from typing import Literal

from schemas.config.pipeline import Config

Topic = Literal["masks", "regularisation", "vision"]


def find_unused_features(config: Config, *topics: Topic) -> Iterator[str]:
    """A sentence for each of `topics` that the configuration uses."""
    used = [dataset for dataset in config.datasets if not dataset.disabled]
    masked = [dataset.id for dataset in used if dataset.mask_data or dataset.mask_column]
    regularisation = [dataset.id for dataset in used if dataset.is_regularisation_data]
    if "masks" in topics and masked:
        yield f"{', '.join(masked)}: masks are encoded, but training does not use them yet"
    if "regularisation" in topics and regularisation:
        named = ", ".join(regularisation)
        yield f"{named}: training does not use is_regularisation_data yet and treats these samples like any others"
    if "vision" in topics and config.vision.model:
        yield f"vision.model {config.vision.model}: features are encoded, but training does not use them yet (no CREPA)"
