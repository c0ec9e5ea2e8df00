"""Tensors of adapters in files: reading them, and writing them in each format.

`trainer/adapters/header.py` describes the formats.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cache.store.files import replacing
from schemas.config.adapter import FILE_NAMES, FileFormat
from trainer.adapters.header import (
    COMFYUI_PREFIX,
    LYCORIS_PREFIX,
    OUR_PREFIX,
    WHOLE_COPY,
    AdapterError,
    AdapterFile,
    Layer,
    flat_name,
    pair_layers,
)
from trainer.adapters.lokr_files import Lokr, Tensors, find_decomposition
from trainer.adapters.lokr_header import LokrLayer
from trainer.adapters.strength import METADATA_KEY
from trainer.tensor_files import write_tensors


@dataclass(frozen=True)
class Lora:
    """W + scale B A of one module. down: A (rank, inputs, ...), up: B (outputs, rank, ...). magnitude: of a DoRA, one
    number for each output: the norm of the output's weights."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float
    magnitude: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def alpha(self) -> float:
        return self.scale * self.rank

    @property
    def tensors(self) -> Tensors:
        """By the ends of diffusers' keys."""
        found = {"lora_A.weight": self.down, "lora_B.weight": self.up}
        return found if self.magnitude is None else {**found, "lora_magnitude_vector": self.magnitude}

    def apply(self, weight: torch.Tensor) -> torch.Tensor:
        """The float32 weight (outputs, inputs, ...) with the update. Of a DoRA each output's weights then get its
        magnitude as their norm, whatever the scale is, as in peft (peft/tuners/lora/variants.py, after `set_scale`)."""
        product = self.up.float().flatten(1) @ self.down.float().flatten(1)
        weight = weight + self.scale * product.reshape(weight.shape)
        if self.magnitude is None:
            return weight
        factor = self.magnitude.float().flatten() / weight.flatten(1).norm(dim=1)
        return factor.reshape(-1, *[1] * (weight.ndim - 1)) * weight

    def with_alpha(self) -> Tensors:
        """The tensors of a LoRA and alpha, as ComfyUI reads them."""
        return {**self.tensors, "alpha": torch.tensor(self.alpha)}


def load_layers(adapter: AdapterFile, scale: float = 1.0) -> dict[str, Lora | Lokr]:
    """By "<component>.<module path>", the strength multiplied by `scale`. AdapterError for numbers that are not
    finite."""
    layers = {}
    try:
        with safe_open(adapter.path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{adapter.path} can't be read: {error}", WHOLE_COPY) from error
    for name, layer in adapter.layers.items():
        found = make_layer(layer, tensors, scale)
        if not all(tensor.isfinite().all() for tensor in found.tensors.values()):
            raise AdapterError(f"{adapter.path} is damaged: {name} has numbers that are not finite", WHOLE_COPY)
        layers[name] = found
    return layers


def make_layer(layer: Layer | LokrLayer, tensors: Tensors, scale: float = 1.0) -> Lora | Lokr:
    """The layer with its tensors, which `tensors` has by their keys; the strength multiplied by `scale`."""
    if isinstance(layer, LokrLayer):
        return Lokr({name: tensors[key] for name, key in layer.keys.items()}, layer.rank, layer.scale * scale)
    magnitude = None if layer.magnitude is None else tensors[layer.magnitude]
    return Lora(tensors[layer.down], tensors[layer.up], layer.scale * scale, magnitude)


def write_formats(
    tensors: Tensors,
    settings: Mapping[str, Any],
    folder: Path,
    notes: Mapping[str, str],
    formats: Sequence[FileFormat],
) -> Path:
    """Write what training saves in each format, a LoKr in LyCORIS', too; returns the first file. tensors: by diffusers'
    keys. settings: peft's configurations for diffusers' header."""
    header = make_header(notes, settings)
    lokr: list[FileFormat] = ["lycoris"] if any(".lokr_" in key for key in tensors) else []
    for form in (*formats, *lokr):
        path = folder / FILE_NAMES[form]
        if form == "diffusers":
            _write(tensors, path, header)
        else:
            shapes = {key: tuple(value.shape) for key, value in tensors.items()}
            found = pair_layers(path, shapes, header, {})
            write_adapter({name: make_layer(own, tensors) for name, own in found.items()}, form, path, notes)
    return folder / FILE_NAMES[formats[0]]


def write_adapter(
    layers: Mapping[str, Lora | Lokr], form: FileFormat, path: Path, notes: Mapping[str, str]
) -> list[Path]:
    """Write the files of `adapter_contents`; returns their paths. Files appear whole."""
    return [_write(tensors, final, header) for final, tensors, header in adapter_contents(layers, form, path, notes)]


def adapter_contents(
    layers: Mapping[str, Lora | Lokr], form: FileFormat, path: Path, notes: Mapping[str, str]
) -> Iterator[tuple[Path, Tensors, dict[str, str]]]:
    """Path, tensors and header of each file that the adapter is in a format: one, in ComfyUI's format one for each
    component, as ComfyUI has a model for each. notes: text for the header (`latentpress.<key>`). AdapterError where
    diffusers' format has no place for a LoKr of another program."""
    if form == "diffusers":
        header = make_header(notes, describe_for_peft(layers))
        yield path, _name_tensors({f"{name}.": layer.tensors for name, layer in layers.items()}), header
    elif form == "lycoris":
        named = {f"{LYCORIS_PREFIX}{flat_name(name)}.": layer.with_alpha() for name, layer in layers.items()}
        yield path, _name_tensors(named), make_header(notes)
    else:
        for part, own in _by_component(layers).items():
            named = {f"{COMFYUI_PREFIX}{name}.": layer.with_alpha() for name, layer in own.items()}
            yield path_of_component(path, part), _name_tensors(named), make_header(notes)


def path_of_component(path: Path, part: str) -> Path:
    """Where ComfyUI's adapter of a further transformer is, beside that of the first."""
    return path if part == "transformer" else path.with_name(f"{path.stem}.{part}{path.suffix}")


def make_header(notes: Mapping[str, str], settings: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The header of a file. notes: text, as `latentpress.<key>`. settings: peft's configurations, for diffusers."""
    header = {"format": "pt"} | {OUR_PREFIX + key: value for key, value in notes.items()}
    return header if settings is None else header | {METADATA_KEY: json.dumps(settings, sort_keys=True)}


def _name_tensors(layers: Mapping[str, Tensors]) -> Tensors:
    """layers: by the beginning of their keys."""
    found = {f"{start}{end}": tensor for start, own in layers.items() for end, tensor in own.items()}
    return {key: tensor.detach().cpu().contiguous() for key, tensor in found.items()}


def _by_component(layers: Mapping[str, Lora | Lokr]) -> dict[str, dict[str, Lora | Lokr]]:
    """Component -> module path -> layer."""
    found = defaultdict[str, dict[str, Lora | Lokr]](dict)
    for name in sorted(layers):
        part, _, module = name.partition(".")
        found[part][module] = layers[name]
    return dict(found)


def _write(tensors: Tensors, final: Path, header: Mapping[str, str]) -> Path:
    with replacing(final) as temporary:
        write_tensors(tensors, temporary, header)
    return final


def describe_for_peft(layers: Mapping[str, Lora | Lokr]) -> dict[str, Any]:
    """peft's configuration of each component, with the rank and alpha of each module, as diffusers writes them."""
    from peft import LoKrConfig, LoraConfig

    found = dict[str, Any]()
    for part, own in _by_component(layers).items():
        ranks = {f"^{re.escape(name)}": layer.rank for name, layer in own.items()}
        alphas = {f"^{re.escape(name)}": layer.alpha for name, layer in own.items()}
        rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
        settings: dict[str, Any] = {
            "r": int(rank),
            "target_modules": sorted(own),
            "rank_pattern": {key: value for key, value in ranks.items() if value != rank},
            "alpha_pattern": {key: value for key, value in alphas.items() if value != alpha},
        }
        lokrs = {name: layer for name, layer in own.items() if isinstance(layer, Lokr)}
        if lokrs:
            config = LoKrConfig(alpha=alpha, **settings, **find_decomposition(lokrs)).to_dict()  # type: ignore[arg-type]
        else:
            dora = any("lora_magnitude_vector" in layer.tensors for layer in own.values())
            config = LoraConfig(lora_alpha=alpha, use_dora=dora, **settings).to_dict()  # type: ignore[arg-type]
        found |= {f"{part}.{key}": sorted(it) if isinstance(it, set) else it for key, it in config.items()}
    return found
