"""Safetensors files that equal tensors make byte for byte."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions of the umask; the library's own are for the owner only. Equal
    tensors and metadata give equal bytes: the library writes metadata in an order that is drawn anew each time."""
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    path.chmod(mode & 0o777)
    if metadata:
        with path.open("r+b") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
            header["__metadata__"] = dict(sorted(metadata.items()))
            sorted_header = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
            assert len(sorted_header) == size, "the library escapes other characters than json"
            file.seek(8)
            file.write(sorted_header)
