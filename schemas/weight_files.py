"""The files of a checkpoint that are read: safetensors only, as reading a pickle runs code from it."""

import json
from pathlib import Path

from schemas.regular_files import open_regular

WEIGHTS_SUFFIX = ".safetensors"
#: Files of a component that are downloaded: weights, configurations, a tokenizer's files; never a pickle.
ALLOW_PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def find_weights_problem(folder: Path) -> tuple[str, str] | None:
    """The reason why a folder's weights can't be read, and what to do; None where they are safetensors."""
    files = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    for name in files:
        if name.endswith(f"{WEIGHTS_SUFFIX}.index.json") and not _is_valid_index(folder / name):
            problem = f"{folder / name} does not name files {WEIGHTS_SUFFIX} in its folder"
            return problem, "replace the checkpoint with a whole copy from a source that you trust"
    if any(name.endswith(WEIGHTS_SUFFIX) for name in files):
        return None
    pickled = [name for name in files if name.endswith(PICKLE_SUFFIXES)]
    if not pickled:
        return f"{folder} holds no *{WEIGHTS_SUFFIX}", "replace the checkpoint with a whole copy in diffusers layout"
    return (
        f"{folder / pickled[0]} is pickled, and a pickle can run code: only *{WEIGHTS_SUFFIX} is read; it has none",
        "take a checkpoint that has them; or, if you trust this one, load the folder with its class in diffusers or "
        "transformers, call save_pretrained(folder, safe_serialization=True) on it, and remove the pickled files",
    )


def _is_valid_index(path: Path) -> bool:
    """Tell whether it maps every weight to a safetensors file of its own folder."""
    try:
        with open_regular(path) as file:
            files = json.loads(file.read())["weight_map"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    return all(isinstance(name, str) and name.endswith(WEIGHTS_SUFFIX) and Path(name).name == name for name in files)
