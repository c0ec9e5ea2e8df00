"""Where a vision model's weights are, and what identifies them in a cache's fingerprint. Imports no torch.

A source is a local directory with config.json and *.safetensors, as transformers saves a model, or the id of a
Hugging Face repository. Pickled weights are not read.
"""

from functools import cache
from pathlib import Path
from typing import Any

from cache.store import Store
from cache.weights import COMMIT_PATTERN, WeightsError, call_hub, hash_file, local_folder, read_object
from schemas.errors import USAGE
from schemas.identity import hash_json
from stages.encoding.vision.grids import PATCH_SIZE

CONFIG_FILE = "config.json"
CHECKPOINT_FILES = (CONFIG_FILE, "*.safetensors", "*.safetensors.index.json")
#: model_type in config.json -> class in transformers.
MODEL_CLASSES = {"dinov2": "Dinov2Model", "dinov2_with_registers": "Dinov2WithRegistersModel"}
MODEL_ADVICE = "set vision.model to dinov2_vits14, dinov2_vitg14, or another DINOv2 in transformers' layout"


class UnsupportedModelError(WeightsError):
    """Weights of a model that is no DINOv2 with patches of 14 pixels."""

    exit_code = USAGE


def fingerprint_weights(source: str, revision: str | None, memo: Store | None = None) -> dict[str, Any]:
    """What determines the weights, for a cache's fingerprint; small JSON. Raises WeightsError.

    For a local directory {"content"}, the xxh3 of its config and weights; for a repository {"repo", "commit"}, for
    which only its config is fetched. memo: remembers the hashes of large files, so that each is read once.
    """
    folder, config = local_folder(source, MODEL_ADVICE), _find_config(source, revision)
    require_dinov2_class(source, config)
    if folder is None:
        return {"repo": source, "commit": config.parent.name}
    return {"content": hash_json([[path.name, hash_file(path, memo)] for path in _checkpoint_files(folder)])}


def feature_width(source: str, revision: str | None) -> int:
    """Numbers of one patch's token."""
    return read_object(_find_config(source, revision))["hidden_size"]


def resolve_checkpoint(source: str, revision: str | None) -> Path:
    """The directory of the config and weights, a repository's after fetching it. Raises WeightsError."""
    folder = local_folder(source, MODEL_ADVICE)
    if folder is None:
        from huggingface_hub import snapshot_download

        folder = Path(
            call_hub(snapshot_download, source, revision, key="vision.model", allow_patterns=list(CHECKPOINT_FILES))
        )
    if not any(path.suffix == ".safetensors" for path in _checkpoint_files(folder)):
        raise WeightsError(
            f"{source} has no *.safetensors",
            "save the model with transformers' save_pretrained, which writes them; pickled weights are not read",
        )
    require_dinov2_class(source, folder / CONFIG_FILE)
    return folder


def require_dinov2_class(source: str, config: Path) -> str:
    """The transformers class of the model that the config describes. UnsupportedModelError where it is no DINOv2."""
    values = read_object(config)
    kind, patch = values.get("model_type"), values.get("patch_size")
    if kind not in MODEL_CLASSES or patch != PATCH_SIZE:
        raise UnsupportedModelError(
            f"{source} is a {kind} with patches of {patch}; vision features are of "
            f"{' or '.join(MODEL_CLASSES)}, of {PATCH_SIZE}",
            MODEL_ADVICE,
        )
    return MODEL_CLASSES[kind]


def _checkpoint_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if any(map(path.match, CHECKPOINT_FILES)) and path.name[0] != ".")


@cache
def _find_config(source: str, revision: str | None) -> Path:
    """config.json. Of a repository that at the revision's present commit or, offline, at the commit in the local cache;
    its folder is named by the commit. Looked up once in a process, so that a branch that moves meanwhile does not
    change the fingerprint."""
    if folder := local_folder(source, MODEL_ADVICE):
        return folder / CONFIG_FILE
    from huggingface_hub import hf_hub_download

    config = Path(call_hub(hf_hub_download, source, revision, key="vision.model", filename=CONFIG_FILE))
    assert COMMIT_PATTERN.fullmatch(config.parent.name), f"{config}: no commit"
    return config
