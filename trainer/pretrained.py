"""A checkpoint's transformer, of safetensors alone."""

from pathlib import Path
from typing import Any

import torch

from schemas.errors import USAGE, LatentpressError
from schemas.safeweights import problem_of

PART = "transformer"


class WeightsError(LatentpressError):
    """A checkpoint whose weights are not read."""

    exit_code = USAGE


def transformer(model_class: Any, source: str, revision: str | None, dtype: torch.dtype, part: str = PART) -> Any:
    """The model in the sub-folder `part` of `source`, a local folder or a repo id, and nothing else of it.

    WeightsError where its weights are pickled; of a repo no pickle is fetched, and OSError says that it has none of the
    files that are.
    """
    folder = Path(source).expanduser() / part
    if folder.is_dir() and (problem := problem_of(folder)):
        raise WeightsError(*problem)
    return model_class.from_pretrained(
        source, subfolder=part, revision=revision, torch_dtype=dtype, use_safetensors=True
    )
