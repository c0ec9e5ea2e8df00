"""What can be asked for and is prepared, and what training does not use yet: said whenever it is asked for."""

from collections.abc import Iterator
from typing import Literal

from schemas.config.pipeline import Config

Topic = Literal["masks", "regularisation", "vision"]


def find_unused_features(config: Config, *topics: Topic) -> Iterator[str]:
    """A sentence for each of `topics` that the configuration asks for."""
    used = [dataset for dataset in config.datasets if not dataset.disabled]
    masked = [dataset.id for dataset in used if dataset.mask_data or dataset.mask_column]
    kept = [dataset.id for dataset in used if dataset.is_regularisation_data]
    if "masks" in topics and masked:
        yield f"{', '.join(masked)}: masks are encoded, but training does not use them yet"
    if "regularisation" in topics and kept:
        yield (
            f"{', '.join(kept)}: is_regularisation_data is kept with the samples, but training does not use it yet: it "
            "trains on them as on any other"
        )
    if "vision" in topics and config.vision.model:
        yield f"vision.model {config.vision.model}: features are encoded, but training does not use them yet (no CREPA)"
