"""The measures of validation samples, by name, and what identifies it. Imports no torch until a model is loaded."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cache.models.single_model import CONFIG_FILE, WEIGHT_FILES, SingleModel
from cache.models.weights import WeightsError, read_object
from cache.runs.scores import Measured
from cache.store.store import Store
from schemas.config.pipeline import Config
from schemas.errors import USAGE
from schemas.identity import hash_json

if TYPE_CHECKING:
    import numpy as np
    import torch

PREPROCESSOR = "preprocessor_config.json"
CLIP_FILES = (*WEIGHT_FILES, PREPROCESSOR, "tokenizer*.json", "vocab.json", "merges.txt",
              "special_tokens_map.json")  # fmt: skip
CLIP_ADVICE = (
    "set validation.scores.clip to a CLIP in transformers' layout: a folder, or a repository such as "
    "openai/clip-vit-large-patch14"
)
VERSION = 1  # of how scores are computed: raise it where the same file would get another score


class NoClip(WeightsError):
    """A model that is no CLIP."""

    exit_code = USAGE


class LoadedMeasure(Protocol):
    """A measure with its model. score: of the uint8 frames of a sample and its prompt. find_cut: of a prompt that is
    too long its tokens, and how many of them count."""

    def score(self, frames_FHWC: "np.ndarray", prompt: str) -> float: ...
    def find_cut(self, prompt: str) -> tuple[int, int] | None: ...


@dataclass(frozen=True)
class Measure:
    """name: as on the curves. measured: its model and the hash of model and settings."""

    name: str
    measured: Measured
    load: "Callable[[torch.device], LoadedMeasure]"


def check_measures(config: Config) -> None:
    """WeightsError where a model is not there or can't score, before hours of training: of a folder the files, of a
    repository its config.json, from the hub or the local cache."""
    if config.validation.scores.clip is None:
        return
    model = _clip_model(config)
    _require_clip(model, model.config_file())
    if Path(model.source).is_dir() and not (model.fetch() / PREPROCESSOR).exists():
        raise WeightsError(f"{model.source} has no {PREPROCESSOR}", "replace it with a whole copy")


def _clip_model(config: Config) -> SingleModel:
    scores = config.validation.scores
    assert scores.clip is not None
    return SingleModel(scores.clip, scores.clip_revision, "validation.scores.clip", CLIP_ADVICE, CLIP_FILES)


def plan_measures(config: Config) -> Iterator[Measure]:
    """The measures of a configuration. Raises WeightsError where a model is not there."""
    scores = config.validation.scores
    if scores.clip:
        model = _clip_model(config)
        _require_clip(model, model.config_file())
        weights = model.fingerprint(Store(config.root))
        settings = {"version": VERSION, "weights": weights, "frames": scores.frames}
        # The one that was fingerprinted: a repository's branch may have moved since.
        pinned = replace(model, revision=weights.get("commit", model.revision))
        measured = Measured(hash_json(settings), scores.clip)
        yield Measure("clip_score", measured, lambda device: _load_clip(pinned, device))


def _require_clip(model: SingleModel, config: Path) -> None:
    if (kind := read_object(config).get("model_type")) != "clip":
        raise NoClip(f"{model.source} is a {kind}; a CLIP score is of a clip", CLIP_ADVICE)


def _load_clip(model: SingleModel, device: "torch.device") -> LoadedMeasure:
    from stages.follow.clip_score import Clip

    folder = model.fetch()
    _require_clip(model, folder / CONFIG_FILE)
    return Clip(folder, device)
