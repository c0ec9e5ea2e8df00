"""Where a vision model's weights lie, and what names them in a cache's fingerprint. Imports no torch.

A source is a local directory with config.json and *.safetensors, as transformers saves a model, or the id of a
Hugging Face repository. Pickled weights are not read.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from cache.store import Store
from cache.weights import COMMIT, WeightsError, calling, hash_file, local
from schemas.errors import USAGE
from schemas.identity import hash_json
from stages.vision.grids import PATCH

CONFIG = "config.json"
FILES = (CONFIG, "*.safetensors", "*.safetensors.index.json")
#: model_type in config.json -> class in transformers.
MODELS = {"dinov2": "Dinov2Model", "dinov2_with_registers": "Dinov2WithRegistersModel"}
MODEL = "set vision.model to dinov2_vits14, dinov2_vitg14, or to a DINOv2 in transformers' layout"


class OtherModel(WeightsError):
    """Weights of a model that is no DINOv2 with patches of 14 pixels."""

    exit_code = USAGE


def fingerprint_of(source: str, revision: str | None, memo: Store | None = None) -> dict[str, Any]:
    """What determines the weights, for a cache's fingerprint; small JSON. Raises WeightsError.

    A local directory: {"content"}, the xxh3 of its config and weights. A repository: {"repo", "commit"}; only its
    config is fetched. memo: where the hashes of large files are remembered, so that each is read once.
    """
    folder, config = local(source, MODEL), _config(source, revision)
    require_dinov2(source, config)
    if folder is None:
        return {"repo": source, "commit": config.parent.name}
    return {"content": hash_json([[path.name, hash_file(path, memo)] for path in _files(folder)])}


def width(source: str, revision: str | None) -> int:
    """Numbers of one patch's token."""
    return _values(source, _config(source, revision))["hidden_size"]


def resolve(source: str, revision: str | None) -> Path:
    """The directory of the config and weights, fetched where it is a repository's. Raises WeightsError."""
    folder = local(source, MODEL)
    if folder is None:
        from huggingface_hub import snapshot_download

        folder = Path(calling(snapshot_download, source, revision, key="vision.model", allow_patterns=list(FILES)))
    if not any(path.suffix == ".safetensors" for path in _files(folder)):
        raise WeightsError(
            f"{source} has no *.safetensors",
            "save the model with transformers' save_pretrained, which writes them; pickled weights are not read",
        )
    require_dinov2(source, folder / CONFIG)
    return folder


def require_dinov2(source: str, config: Path) -> str:
    """The class in transformers of the model that the config describes; OtherModel where it can't be used."""
    values = _values(source, config)
    kind, patch = values.get("model_type"), values.get("patch_size")
    if kind not in MODELS or patch != PATCH:
        raise OtherModel(
            f"{source} is a {kind} with patches of {patch}; vision features are of {' or '.join(MODELS)}, of {PATCH}",
            "set vision.model to dinov2_vits14, dinov2_vitg14, or another DINOv2 in transformers' layout",
        )
    return MODELS[kind]


def _values(source: str, config: Path) -> dict[str, Any]:
    try:
        values = json.loads(config.read_bytes())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{source}: {CONFIG} can't be read: {error}", "replace it with a whole copy") from error
    return values if isinstance(values, dict) else {}


def _config(source: str, revision: str | None) -> Path:
    folder = local(source, MODEL)
    return folder / CONFIG if folder else _config_in_repo(source, revision)


def _files(folder: Path) -> list[Path]:
    return sorted({path for pattern in FILES for path in folder.glob(pattern) if not path.name.startswith(".")})


@cache
def _config_in_repo(repo: str, revision: str | None) -> Path:
    """config.json of the commit that the revision stands for now, or, offline, as of the local cache; the commit
    is the name of its folder. Once in a process, so that a branch which moves meanwhile does not rename the cache."""
    from huggingface_hub import hf_hub_download

    config = Path(calling(hf_hub_download, repo, revision, key="vision.model", filename=CONFIG))
    assert COMMIT.fullmatch(config.parent.name), f"{config}: no commit"
    return config
