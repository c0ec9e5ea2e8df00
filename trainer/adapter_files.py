"""LoRA tensors in files: reading them, and writing them in each format.

`trainer/adapter_header.py` describes the formats.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cache.files import replacing
from schemas.config.training import AdapterFormat
from trainer.adapter_header import (
    COMFYUI_PREFIX,
    FILE_NAMES,
    METADATA_KEY,
    OUR_PREFIX,
    WHOLE_COPY,
    AdapterError,
    AdapterFile,
    pair_layers,
)
from trainer.checkpoint import write_tensors

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Lora:
    """W + scale B A of one module. down: A (rank, inputs, ...), up: B (outputs, rank, ...)."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    def delta(self, shape: Sequence[int]) -> torch.Tensor:
        """scale B A in float32, of a weight's shape (outputs, inputs, ...)."""
        return self.scale * (self.up.float().flatten(1) @ self.down.float().flatten(1)).reshape(shape)


def load_layers(adapter: AdapterFile, scale: float = 1.0) -> dict[str, Lora]:
    """By "<component>.<module path>", the strength multiplied by `scale`. AdapterError for numbers that are not
    finite."""
    layers = {}
    try:
        with safe_open(adapter.path, "pt") as file:
            for name, layer in adapter.layers.items():
                found = Lora(file.get_tensor(layer.down), file.get_tensor(layer.up), layer.scale * scale)
                if not (found.down.isfinite().all() and found.up.isfinite().all()):
                    raise AdapterError(f"{adapter.path} is damaged: {name} has numbers that are not finite", WHOLE_COPY)
                layers[name] = found
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{adapter.path} can't be read: {error}", WHOLE_COPY) from error
    return layers


def write_formats(
    tensors: Tensors,
    settings: Mapping[str, Any],
    folder: Path,
    notes: Mapping[str, str],
    formats: Sequence[AdapterFormat],
) -> Path:
    """Write what training saves in each format; returns the first file. tensors: by diffusers' keys. settings: peft's
    configurations for diffusers' header."""
    header = make_header(notes, settings)
    for form in formats:
        path = folder / FILE_NAMES[form]
        if form == "diffusers":
            _write(tensors, path, header)
        else:
            shapes = {key: tuple(value.shape) for key, value in tensors.items()}
            found = pair_layers(path, shapes, header, {})
            layers = {name: Lora(tensors[own.down], tensors[own.up], own.scale) for name, own in found.items()}
            write_adapter(layers, form, path, notes)
    return folder / FILE_NAMES[formats[0]]


def write_adapter(layers: Mapping[str, Lora], form: AdapterFormat, path: Path, notes: Mapping[str, str]) -> list[Path]:
    """Write the adapter, in ComfyUI's format a file for each component, as ComfyUI has a model for each; returns the
    paths. Files appear whole. notes: text for the header (`latentpress.<key>`)."""
    if form == "diffusers":
        return [_write(_name_pairs(layers, ""), path, make_header(notes, describe_for_peft(layers)))]
    written = []
    for part in sorted({name.partition(".")[0] for name in layers}):
        own = {name.partition(".")[2]: lora for name, lora in layers.items() if name.startswith(f"{part}.")}
        tensors = _name_pairs(own, COMFYUI_PREFIX)
        tensors |= {f"{COMFYUI_PREFIX}{name}.alpha": torch.tensor(lora.scale * lora.rank) for name, lora in own.items()}
        written.append(_write(tensors, path_of_component(path, part), make_header(notes)))
    return written


def path_of_component(path: Path, part: str) -> Path:
    """Where ComfyUI's adapter of a further transformer is, beside that of the first."""
    return path if part == "transformer" else path.with_name(f"{path.stem}.{part}{path.suffix}")


def make_header(notes: Mapping[str, str], settings: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The header of a file. notes: text, as `latentpress.<key>`. settings: peft's configurations, for diffusers."""
    header = {"format": "pt"} | {OUR_PREFIX + key: value for key, value in notes.items()}
    return header if settings is None else header | {METADATA_KEY: json.dumps(settings, sort_keys=True)}


def _name_pairs(layers: Mapping[str, Lora], prefix: str) -> Tensors:
    return {
        f"{prefix}{name}.{key}.weight": tensor.detach().cpu().contiguous()
        for name, lora in layers.items()
        for key, tensor in (("lora_A", lora.down), ("lora_B", lora.up))
    }


def _write(tensors: Tensors, final: Path, header: Mapping[str, str]) -> Path:
    with replacing(final) as temporary:
        write_tensors(tensors, temporary, header)
    return final


def describe_for_peft(layers: Mapping[str, Lora]) -> dict[str, Any]:
    """peft's configuration of each component, with the rank and alpha of each module, as diffusers writes them."""
    from peft import LoraConfig

    found = dict[str, Any]()
    for part in sorted({name.partition(".")[0] for name in layers}):
        own = {name.partition(".")[2]: lora for name, lora in layers.items() if name.startswith(f"{part}.")}
        ranks = {f"^{re.escape(name)}": lora.rank for name, lora in own.items()}
        alphas = {f"^{re.escape(name)}": lora.scale * lora.rank for name, lora in own.items()}
        rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
        config = LoraConfig(
            r=int(rank),
            lora_alpha=alpha,  # type: ignore[arg-type]  # peft takes fractions
            target_modules=sorted(own),
            rank_pattern={key: value for key, value in ranks.items() if value != rank},
            alpha_pattern={key: value for key, value in alphas.items() if value != alpha},
        ).to_dict()
        found |= {f"{part}.{key}": sorted(it) if isinstance(it, set) else it for key, it in config.items()}
    return found
