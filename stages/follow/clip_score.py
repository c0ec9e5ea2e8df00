"""The CLIP score of validation samples, computed with `transformers`. torch is imported when the model is loaded.

The CLIP score of a picture (Hessel et al. 2021, https://arxiv.org/abs/2104.08718, scaled like in torchmetrics) is
max(100 * cos(picture, prompt), 0). The score of a clip is the mean over its frames. Pictures are prepared by the
settings in the checkpoint's preprocessor_config.json, with Pillow, so that a score does not depend on whether
torchvision is installed.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache.models.weights import WEIGHT_FILES, SingleModel, WeightsError, config_errors, load_pretrained, read_object
from cache.runs.scores import Measured
from cache.store.store import Store
from schemas.config.validation import Scores
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
VERSION = 1  # version of the computation: increase it if a change gives the same file another score


class NotAClip(WeightsError):
    """Raised if the model has another architecture than CLIP."""

    exit_code = USAGE


class ClipScore:
    """The CLIP score as a measure. Call `load` before `score`. name: name of the measure on curves. measured: identity
    of the measure."""

    name = "clip_score"

    def __init__(self, scores: Scores, memo: Store) -> None:
        """Find the model. Raises WeightsError if it is missing. memo: store for the hashes of large files."""
        model = find_clip(scores)
        weights = model.fingerprint(memo)
        settings = {"version": VERSION, "weights": weights, "frames": scores.frames}
        self.measured = Measured(hash_json(settings), model.source)
        # Use the commit that was fingerprinted, because a repository's branch may have moved since then.
        self._source = replace(model, revision=weights.get("commit", model.revision))

    def load(self, device: "torch.device") -> None:
        """Load the model in float32. Raises WeightsError if files are damaged or weights are missing."""
        import torch
        from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

        from stages.encoding.model_loading import check_picture_sizes, reading_errors

        folder = self._source.fetch()
        with reading_errors(str(folder), "the CLIP"), config_errors(f"{folder}/{PREPROCESSOR}"):
            check_picture_sizes(folder)
            model = load_pretrained(CLIPModel, folder, dtype=torch.float32)
            self._processor: Any = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False, backend="pil")
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = model.eval().to(device)
        self._max_tokens: int = model.config.text_config.max_position_embeddings

    def score(self, frames_FHWC: "np.ndarray", prompt: str) -> float:
        """Compute the score of uint8 frames, 0 to 100. A prompt that is too long is truncated to its first tokens and
        the end token, as in CLIP."""
        import torch

        pictures = self._processor(images=list(frames_FHWC), return_tensors="pt")
        text = self._tokenizer(prompt, truncation=True, max_length=self._max_tokens, return_tensors="pt")
        with torch.no_grad():
            output = self._model(**pictures.to(self._model.device), **text.to(self._model.device))
        cosine_F = output.image_embeds @ output.text_embeds[0]
        return (100 * cosine_F).clamp(min=0).mean().item()

    def find_cut(self, prompt: str) -> tuple[int, int] | None:
        """For a prompt that is too long, returns (number of tokens, number of tokens used), including the begin and the
        end token; otherwise None."""
        tokens = len(self._tokenizer(prompt, verbose=False)["input_ids"])
        return (tokens, self._max_tokens) if tokens > self._max_tokens else None


def find_clip(scores: Scores) -> SingleModel:
    """Find the model of `validation.scores.clip`. Raises WeightsError if it is missing or is not a CLIP. For a
    repository, only config.json is checked."""
    assert scores.clip is not None
    model = SingleModel(scores.clip, scores.clip_revision, "validation.scores.clip", CLIP_ADVICE, CLIP_FILES)
    if (kind := read_object(model.config_file()).get("model_type")) != "clip":
        raise NotAClip(f"{model.source} is a model of type {kind}, not clip", CLIP_ADVICE)
    return model


def check_clip(scores: Scores) -> None:
    """Check the model before hours of training. Raises WeightsError if it is missing or can't compute scores. For a
    folder, the files are checked; for a repository, its config.json, from the Hub or the local cache."""
    model = find_clip(scores)
    if Path(model.source).is_dir() and not (model.fetch() / PREPROCESSOR).exists():
        raise WeightsError(f"{model.source} has no {PREPROCESSOR}", "replace the folder with a complete copy")
