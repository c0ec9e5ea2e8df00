"""Which files of a checkpoint are read: weights as safetensors, and never pickled, since a pickle runs what it says."""

import json
from pathlib import Path

SUFFIX = ".safetensors"
#: Of a part of a checkpoint: its weights, configurations, and what a tokenizer has. A pickle is not even fetched.
PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def problem_of(folder: Path) -> tuple[str, str] | None:
    """Of a folder with a model's weights: why they are not read, and what to do; None where they are safetensors."""
    files = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    for name in files:
        if name.endswith(f"{SUFFIX}.index.json") and not _is_index(folder / name):
            problem = f"{folder / name} does not name files {SUFFIX} beside it"
            return problem, "replace the checkpoint with a whole copy from a source that you trust"
    if any(name.endswith(SUFFIX) for name in files):
        return None
    pickled = [name for name in files if name.endswith(PICKLED)]
    if not pickled:
        return f"{folder} holds no *{SUFFIX}", "replace the checkpoint with a whole copy in diffusers layout"
    return (
        f"{folder / pickled[0]} is pickled, and a pickle runs what it says: weights are read as *{SUFFIX} alone, and "
        "there are none",
        "take a checkpoint that has them; or, if you trust this one, load the folder with its class in diffusers or "
        "transformers, call save_pretrained(folder, safe_serialization=True) on it, and remove the pickled files",
    )


def _is_index(path: Path) -> bool:
    """Whether it shares the weights out among safetensors files of its own folder."""
    try:
        shares = json.loads(path.read_bytes())["weight_map"].values()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    return all(isinstance(name, str) and name.endswith(SUFFIX) and Path(name).name == name for name in shares)
