"""Names of modules in adapter files: diffusers' paths, ComfyUI's and the original release's, and paths with underscores
(LyCORIS, kohya)."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from schemas.catalog import FAMILIES
from schemas.family import ComfyUINames
from trainer.adapters.header import AdapterError, AdapterFile, is_twice
from trainer.adapters.layers import Layer, Lokr

DIFFUSERS_NAMES = ComfyUINames()
Joined = tuple[tuple[str, tuple[str, ...]], ...]


def rename(path: str, names: Iterable[tuple[str, str]]) -> str:
    """A module path with whole segments replaced, one pair of `names` after the other."""
    path = f".{path}."
    for name, other in names:
        path = path.replace(f".{name}.", f".{other}.")
    return path[1:-1]


def from_comfyui(name: str, names: ComfyUINames) -> str:
    """A module path by diffusers' names, of one by ComfyUI's; a path by diffusers' names is left."""
    return rename(name, [(other, ours) for ours, other in names.paths])


def flat_name(name: str) -> str:
    """ "<component>.<module path>" as LyCORIS' files have it, without their prefix."""
    return name.removeprefix("transformer.").replace(".", "_")


def resolve_names(adapter: AdapterFile, weights: Iterable[str], model: str) -> AdapterFile:
    """The adapter with the model's module paths in place of other programs' names, or itself where it has paths. A
    layer of several modules becomes one of each. AdapterError where a name may mean several. weights: the model's
    "<component>.<module path>"."""
    names, flat = list(weights), adapter.format == "lycoris"
    known = set(names)
    if not flat and known.issuperset(adapter.layers):
        return adapter
    meanings = [*_meanings(names, flat)]
    layers = dict[str, Layer]()
    for name, layer in adapter.layers.items():
        key = flat_name(name) if flat else name
        candidates = next((table[key] for table in meanings if key in table), [(name,)])
        if not flat and name in known:
            candidates = [(name,)]
        if len(candidates) > 1:
            paths = ", ".join(path for path, *_ in candidates)
            raise AdapterError(
                f"{adapter.path}: {_start(layer)} may be any of {paths} in {model}",
                "Name diffusers' or ComfyUI's file of the same adapter, whose keys are module paths.",
            )
        for path, part in zip(candidates[0], _split(adapter, name, layer, len(candidates[0])), strict=True):
            if path in layers:
                raise is_twice(adapter.path, path, _first_key(layers[path]), _first_key(layer))
            layers[path] = part
    return replace(adapter, layers=layers)


def _meanings(weights: Sequence[str], flat: bool) -> Iterator[dict[str, list[tuple[str, ...]]]]:
    """For diffusers' own names, and for those of each family's models elsewhere: name there -> the modules of which it
    may be, each as one path, or the paths of several whose outputs it has."""
    known = set(weights)
    tables: dict[tuple[tuple[str, str], ...], Joined] = {DIFFUSERS_NAMES.paths: ()} if flat else {}
    for family in FAMILIES.values():
        tables |= {family.comfyui_names.paths: (), family.original_names.paths: family.original_names.joined}
    for paths, joined in tables.items():
        table = defaultdict[str, list[tuple[str, ...]]](list)
        for name in weights:
            there = rename(name, paths)
            table[flat_name(there) if flat else there].append((name,))
            for joint, (first, *others) in joined:
                if name.endswith(f".{first}"):
                    start = name.removesuffix(first)
                    modules = (name, *(start + other for other in others))
                    if known.issuperset(modules):
                        there = rename(start + joint, paths)
                        table[flat_name(there) if flat else there].append(modules)
        yield table


def _split(adapter: AdapterFile, name: str, layer: Layer, count: int) -> list[Layer]:
    if count == 1:
        return [layer]
    if isinstance(layer, Lokr):
        raise AdapterError(
            f"{adapter.path}: {_start(layer)} is of {count} modules here, and a LoKr of them can't be divided",
            "Train or convert it for the separate modules, or name a LoRA.",
        )
    return [*layer.split(count)]


def _first_key(layer: Layer) -> str:
    return next(iter(layer.keys.values()))


def _start(layer: Layer) -> str:
    """The name of its module in the file."""
    return re.split(r"\.(?:lora_|lokr_|lora\.)", _first_key(layer))[0]
