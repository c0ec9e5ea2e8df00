"""Safetensors files with ordinary permissions."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions of the umask; the library's own are for the owner only."""
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    path.chmod(mode & 0o777)
