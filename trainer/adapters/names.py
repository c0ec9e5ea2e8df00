"""Names of modules in adapter files: diffusers' paths, ComfyUI's own ones, and LyCORIS' with underscores."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace

from schemas.catalog import FAMILIES
from schemas.family import ComfyUINames
from trainer.adapters.header import LYCORIS_PREFIX, AdapterError, AdapterFile, is_twice
from trainer.adapters.layers import Layer

DIFFUSERS_NAMES = ComfyUINames()


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
    """The adapter with the model's module paths in place of LyCORIS' and ComfyUI's names, or itself where it has paths.
    AdapterError where a name means several modules. weights: the model's "<component>.<module path>"."""
    if adapter.format != "lycoris":
        return _resolve_comfyui(adapter, frozenset(weights))
    paths = defaultdict[str, list[str]](list)
    for name in weights:
        paths[flat_name(name)].append(name)
    layers = {}
    for name, layer in adapter.layers.items():
        candidates = paths.get(flat_name(name), [name])
        if len(candidates) > 1:
            raise AdapterError(
                f"{adapter.path}: {LYCORIS_PREFIX}{flat_name(name)} may be any of {', '.join(candidates)} in {model}",
                "Name diffusers' or ComfyUI's file of the same adapter, whose keys are module paths.",
            )
        if candidates[0] in layers:
            raise is_twice(adapter.path, candidates[0], LYCORIS_PREFIX + flat_name(name), candidates[0])
        layers[candidates[0]] = layer
    return replace(adapter, layers=layers)


def _resolve_comfyui(adapter: AdapterFile, weights: Collection[str]) -> AdapterFile:
    """With the paths that the names of some family's models in ComfyUI mean, where these are paths of the model."""
    tables = [family.comfyui_names for family in FAMILIES.values()]
    layers = dict[str, Layer]()
    for name, layer in adapter.layers.items():
        meanings = (from_comfyui(name, names) for names in tables if name not in weights)
        path = next((path for path in meanings if path in weights), name)
        if path in layers:
            raise is_twice(adapter.path, path, *(next(iter(each.keys.values())) for each in (layers[path], layer)))
        layers[path] = layer
    return replace(adapter, layers=layers)
