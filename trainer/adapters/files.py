"""Tensors of adapter files: reading, writing in each format (equal tensors give equal bytes), and merging them into the
weights of a checkpoint in diffusers' layout.

`trainer/adapters/header.py` describes the formats. Merging does not build a model: the tensors of one file of the
checkpoint are in memory at a time, and the names, order and dtypes of all tensors do not change.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cache.models.weights import PICKLE_SUFFIXES, WEIGHTS_SUFFIX, list_parts, read_object
from cache.store.files import replacing
from schemas.config.training import FILE_NAMES, FileFormat
from schemas.family import ComfyUINames
from trainer.adapters.header import (
    ALPHA,
    DIFFUSERS_NAMES,
    FLOAT_DTYPES,
    LYCORIS_PREFIX,
    OUR_PREFIX,
    WHOLE_COPY,
    AdapterError,
    AdapterFile,
    flat_name,
    pair_layers,
    rename,
)
from trainer.adapters.layers import METADATA_KEY, SIDES, Layer, Lokr, Tensors


def load_layers(adapter: AdapterFile, scale: float = 1.0) -> dict[str, Layer]:
    """ "<component>.<module path>" -> layer with its tensors. AdapterError if a tensor has numbers that are not finite
    in float32, the dtype in which adapters are computed. scale: factor of the strength."""
    try:
        with safe_open(adapter.path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{adapter.path} can't be read: {error}", WHOLE_COPY) from error
    layers = with_tensors(adapter.layers, tensors, scale)
    for layer in layers.values():
        for name, tensor in layer.tensors.items():
            check_finite(tensor, torch.float32, f"{adapter.path}: {layer.keys[name]}")
    return layers


def check_finite(tensor: torch.Tensor, dtype: torch.dtype, key: str) -> None:
    """AdapterError if a tensor has numbers that are NaN, infinite, or too large for `dtype`. key: the tensor's file and
    key, for the message."""
    invalid = tensor[~tensor.to(dtype).isfinite()]
    if not len(invalid):
        return
    if not invalid.isfinite().all():
        raise AdapterError(f"{key} is damaged: it has numbers that are not finite", WHOLE_COPY)
    raise AdapterError(
        f"{key} has {invalid[0].item():g}, which {str(dtype)[6:]} can't hold: its largest number is "
        f"{torch.finfo(dtype).max:.3g}",
        "Name the adapter of a run that did not diverge, or choose a lower --scale.",
    )


def with_tensors(layers: Mapping[str, Layer], tensors: Tensors, scale: float = 1.0) -> dict[str, Layer]:
    """The layers with their tensors. tensors: key in the file -> tensor. scale: factor of the strength."""
    return {
        name: replace(layer, tensors=layer.take(tensors), scale=layer.scale * scale) for name, layer in layers.items()
    }


def write_adapter(
    tensors: Tensors,
    settings: Mapping[str, Any],
    folder: Path,
    notes: Mapping[str, str],
    names: ComfyUINames = DIFFUSERS_NAMES,
    comfyui_file: Path | None = None,
) -> Path:
    """Write a trained adapter to `folder` in diffusers' format, and a LoKr in LyCORIS' format, too. Returns the path of
    diffusers' file.

    tensors: diffusers' key -> tensor. settings: peft's configuration for the header of diffusers' file. notes, names:
    see `adapter_contents`. comfyui_file: file for ComfyUI, or None.
    """
    path, header = folder / FILE_NAMES["diffusers"], make_header(notes, settings)
    write_file(tensors, header, path)
    files = dict[FileFormat, Path]()
    if any(".lokr_" in key for key in tensors):
        files["lycoris"] = folder / FILE_NAMES["lycoris"]
    if comfyui_file is not None:
        files["comfyui"] = comfyui_file
    if files:
        shapes = {key: tuple(value.shape) for key, value in tensors.items()}
        layers = with_tensors(pair_layers(path, shapes, header, {}), tensors)
    for form, file in files.items():
        write_file(*adapter_contents(layers, form, notes, names), file)
    return path


def adapter_contents(
    layers: Mapping[str, Layer], form: FileFormat, notes: Mapping[str, str], names: ComfyUINames = DIFFUSERS_NAMES
) -> tuple[Tensors, dict[str, str]]:
    """Tensors and header of a file with a transformer's adapter. AdapterError if diffusers' format can't represent a
    LoKr of another program, or numbers are too large for their dtype.

    layers: "transformer.<module path>" -> layer. form: format of the file. notes: text for the header
    (`latentpress.<key>`). names: the family's `comfyui_names`.
    """
    if form == "diffusers":
        named = {f"{name}.{end}": tensor for name, layer in layers.items() for end, tensor in layer.tensors.items()}
        header = make_header(notes, describe_for_peft(layers))
    else:
        named, header = {}, make_header(notes)
        for name, layer in layers.items():
            path = rename(name.removeprefix("transformer."), names.paths)
            start = f"{LYCORIS_PREFIX}{flat_name(name)}" if form == "lycoris" else f"{names.prefix}{path}"
            has_alpha = form == "lycoris" or names.has_alpha
            tensors, alpha = (layer if has_alpha else layer.with_strength()).tensors_and_alpha()
            named |= {f"{start}.{end}": tensor for end, tensor in tensors.items()}
            if has_alpha:
                named[f"{start}.{ALPHA}"] = torch.tensor(alpha)
        for key, tensor in named.items():
            if not tensor.isfinite().all():
                problem = f"{key}: times the adapter's strength, its values are too large for {str(tensor.dtype)[6:]}"
                raise AdapterError(problem, "Choose a lower --scale.")
    return {key: tensor.detach().cpu().contiguous() for key, tensor in named.items()}, header


def make_header(notes: Mapping[str, str], settings: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The header of a file. notes: text, stored as `latentpress.<key>`. settings: peft's configuration; None: not
    diffusers' format."""
    header = {"format": "pt"} | {OUR_PREFIX + key: value for key, value in notes.items()}
    return header if settings is None else header | {METADATA_KEY: json.dumps(settings, sort_keys=True)}


def write_file(tensors: Tensors, header: Mapping[str, str], final: Path) -> Path:
    """Write a file atomically: it appears under its name only when complete. Returns its path."""
    with replacing(final) as temporary:
        write_tensors(tensors, temporary, header)
    return final


def describe_for_peft(layers: Mapping[str, Layer]) -> dict[str, Any]:
    """peft's configuration with the rank and alpha of each module, in the form that diffusers writes."""
    from peft import LoKrConfig, LoraConfig

    modules = {name.removeprefix("transformer."): layers[name] for name in sorted(layers)}
    ranks = {f"^{re.escape(name)}": layer.rank for name, layer in modules.items()}
    alphas = {f"^{re.escape(name)}": layer.alpha for name, layer in modules.items()}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    settings: dict[str, Any] = {
        "r": int(rank),
        "target_modules": sorted(modules),
        "rank_pattern": {key: value for key, value in ranks.items() if value != rank},
        "alpha_pattern": {key: value for key, value in alphas.items() if value != alpha},
    }
    lokrs = {name: layer for name, layer in modules.items() if isinstance(layer, Lokr)}
    if lokrs:
        config = LoKrConfig(alpha=alpha, **settings, **find_decomposition(lokrs)).to_dict()  # type: ignore[arg-type]
    else:
        dora = any(layer.kind == "DoRA" for layer in modules.values())
        config = LoraConfig(lora_alpha=alpha, use_dora=dora, **settings).to_dict()  # type: ignore[arg-type]
    return {f"transformer.{key}": sorted(value) if isinstance(value, set) else value for key, value in config.items()}


def find_decomposition(layers: Mapping[str, Lokr]) -> dict[str, Any]:
    """The values of decompose_factor and decompose_both with which peft makes matrices of these sizes. AdapterError if
    no values do, since other programs may divide sides differently."""
    from peft.tuners.lokr.layer import factorization

    decompose_both = any(SIDES[0] not in layer.keys for layer in layers.values())
    sides = dict[int, tuple[int, str]]()  # side -> its first factor, and a module with this side
    for name, layer in layers.items():
        w1, w2 = layer.matrix_shape(SIDES[0]), layer.matrix_shape(SIDES[1])
        is_whole = not (decompose_both and layer.rank < max(w1) / 2), layer.rank >= max(w2[:2]) / 2
        is_consistent = all(sides.setdefault(a * b, (a, name))[0] == a for a, b in zip(w1, w2[:2], strict=True))
        if is_whole != tuple(side in layer.keys for side in SIDES) or not is_consistent:
            raise _unlike_peft(name, layer)
    max_factor = max(first for first, _ in sides.values())
    for factor in (-1, *range(1, max_factor + 1)):
        if all(factorization(product, factor)[0] == first for product, (first, _) in sides.items()):
            return {"decompose_factor": factor, "decompose_both": decompose_both}
    name = next(name for product, (first, name) in sides.items() if factorization(product)[0] != first)
    raise _unlike_peft(name, layers[name])


def _unlike_peft(name: str, layer: Lokr) -> AdapterError:
    matrices = ", ".join(f"{key} {list(shape)}" for key, shape in layer.shapes.items())
    return AdapterError(
        f"the LoKr of {name} can't be written in diffusers' format: peft does not divide a weight into {matrices}",
        "Merge it into the model: latentpress export-adapter --merge --to FOLDER",
    )


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions of the umask; the library would write a file that only its owner
    can read. Equal tensors and metadata give equal bytes, because metadata is sorted; the library's order is random."""
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
            if len(sorted_header) == size:  # if library and json escape differently, the order is not changed
                file.seek(8)
                file.write(sorted_header)


def read_weight_shapes(checkpoint: Path, part: str) -> dict[str, tuple[int, ...]]:
    """ "<component>.<module path>" -> shape of the weight, from the headers of a component's files. AdapterError if the
    files are damaged or quantized."""
    shapes = dict[str, tuple[int, ...]]()
    for path in weight_files(checkpoint / part):
        with _explained(path), safe_open(path, "np") as file:
            for key in file.keys():  # noqa: SIM118
                tensor = file.get_slice(key)
                if tensor.get_dtype() not in FLOAT_DTYPES:
                    raise AdapterError(
                        f"{path}: {key} is of type {tensor.get_dtype()}, and an adapter can't be merged into it",
                        "Set model.path to the checkpoint before it was quantized.",
                    )
                if key.endswith(".weight"):
                    shapes[f"{part}.{key.removesuffix('.weight')}"] = tuple(tensor.get_shape())
    return shapes


def weight_files(component: Path) -> list[Path]:
    return sorted(component.glob(f"*{WEIGHTS_SUFFIX}"))


def merge_component(source: Path, target: Path, layers: Mapping[str, Layer], advance: Callable[[], None]) -> int:
    """Write the component `source` to the empty folder `target`, with `layers` applied to their weights in float32.
    Returns the number of changed weights. AdapterError if the result is too large for the weight's dtype.

    layers: module path -> layer. advance: function called after each weights file.
    """
    target.mkdir(parents=True, exist_ok=True)
    merged = set[str]()
    for path in weight_files(source):
        with _explained(path), safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            header = file.metadata()
        for key in [key for key in tensors if key.removesuffix(".weight") in layers]:
            weight, module = tensors[key], key.removesuffix(".weight")
            tensors[key] = layers[module].apply(weight.float()).to(weight.dtype)
            if not tensors[key].isfinite().all():
                raise AdapterError(
                    f"{path}: with the adapter, {key} has numbers that are not finite in {str(weight.dtype)[6:]}",
                    "Choose a lower --scale, or set model.path to a checkpoint of another dtype.",
                )
            merged.add(module)
        write_tensors(tensors, target / path.name, header)
        advance()
    for path in other_files(source):
        shutil.copyfile(path, target / path.name)  # without its mode: new files have the mode of the umask
    assert merged == layers.keys(), "checked before by check_fits"
    return len(merged)


def other_files(folder: Path) -> list[Path]:
    """A folder's files, without weights and hidden files."""
    unread = (WEIGHTS_SUFFIX, *PICKLE_SUFFIXES)
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith("."))
    return [path for path in files if not path.name.endswith(unread)]


def copy_rest(index: Path, checkpoint: Path, target: Path, merged: list[str]) -> None:
    """Copy a pipeline's index, and the components that it names except `merged`, as its `from_pretrained` reads them.
    The copies have the modes of new files."""
    shutil.copyfile(index, target / index.name)
    for part in list_parts(read_object(index)):
        if part not in merged and (checkpoint / part).is_dir():
            ignored = shutil.ignore_patterns(".*", *(f"*{suffix}" for suffix in PICKLE_SUFFIXES))
            shutil.copytree(checkpoint / part, target / part, ignore=ignored, copy_function=shutil.copyfile)
            for folder in (target / part, *(path for path in (target / part).rglob("*") if path.is_dir())):
                folder.chmod(target.stat().st_mode & 0o777)  # copytree copies the modes of folders


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise AdapterError(f"{path} is damaged: {error}", "Replace the checkpoint with a whole copy.") from error
