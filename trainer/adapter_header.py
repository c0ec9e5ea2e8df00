"""What LoRA files hold, from their headers: layers, rank, strength. Without torch, unless there are alpha tensors.

diffusers  transformer.<module>.lora_A.weight (rank, inputs, ...) and .lora_B.weight (outputs, rank, ...); rank and
           alpha in the header, as `lora_adapter_metadata`; without that alpha is the rank (diffusers/loaders/peft.py)
comfyui    diffusion_model.<module>.lora_A.weight, .lora_B.weight and .alpha, a number; without that the strength is 1.
           ComfyUI maps this prefix for every model whose modules have these names, and "transformer." only for some
           (comfy/lora.py, comfy/weight_adapter/lora.py)

Files of other programs are read, too: keys without a prefix, and lora_down and lora_up in place of lora_A and lora_B.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from safetensors import SafetensorError, safe_open

from cache.json_checks import check_count, check_object, parse_json, printable
from schemas.config.training import Adapter, AdapterFormat
from schemas.errors import USAGE, LatentpressError
from schemas.weight_files import PICKLE_SUFFIXES

METADATA_KEY, OUR_PREFIX = "lora_adapter_metadata", "latentpress."
#: Format -> name of the file. A pipeline given a folder prefers the first name to all others.
FILE_NAMES: dict[AdapterFormat, str] = {
    "diffusers": "pytorch_lora_weights.safetensors",
    "comfyui": "comfyui_lora.safetensors",
}
COMFYUI_PREFIX = "diffusion_model."
#: End of a key -> which tensor of a layer it is; peft, diffusers before peft, kohya.
_TENSORS = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_A.default.weight": "down",
    "lora_B.default.weight": "up",
    "lora.down.weight": "down",
    "lora.up.weight": "up",
    "lora_down.weight": "down",
    "lora_up.weight": "up",
    "alpha": "alpha",
}
_KEY = re.compile(
    r"(?:(?P<part>transformer(?:_\d+)?)\.|diffusion_model\.|base_model\.model\.)?"
    rf"(?P<module>.+)\.(?P<tensor>{'|'.join(map(re.escape, _TENSORS))})"
)
#: Part of a key -> what such a file is.
_OTHER_KINDS = {
    "lora_magnitude_vector": "a DoRA",
    "dora_scale": "a DoRA",
    "lokr_": "a LoKr",
    "hada_": "a LoHa",
    "lora_mid": "a LoCon with a middle layer",
    "lora_B.bias": "a LoRA with biases",
    "lora_unet_": "a LoRA with kohya's keys (lora_unet_...)",
    "text_encoder": "an adapter of a text encoder",
}
_ADVICE = {
    "a LoKr": " For ComfyUI, add comfyui to train.adapter.formats and start train again; docs/training.md says how to "
    "merge a LoKr."
}
WHOLE_COPY = "Copy it again from where it was made, or name another file."


class AdapterError(LatentpressError, ValueError):
    """An adapter file that can't be used: damaged, of another kind, or for another model or configuration."""

    exit_code: ClassVar[int] = USAGE


@dataclass(frozen=True)
class Layer:
    """One module's LoRA, W + scale B A. down, up: the keys of A (rank, inputs, ...) and B (outputs, rank, ...)."""

    down: str
    up: str
    down_shape: tuple[int, ...]
    up_shape: tuple[int, ...]
    scale: float

    @property
    def rank(self) -> int:
        return self.down_shape[0]

    @property
    def alpha(self) -> float:
        """With which the scale is alpha / rank."""
        return self.scale * self.rank

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether B A can be added to a weight of this shape (outputs, inputs, ...)."""
        return shape[0] == self.up_shape[0] and math.prod(shape[1:]) == math.prod(self.down_shape[1:])


@dataclass(frozen=True)
class AdapterFile:
    """layers: by "<component>.<module path>". notes: of our own files, such as family and steps."""

    path: Path
    format: AdapterFormat
    layers: dict[str, Layer]
    notes: dict[str, str]

    @property
    def ranks(self) -> list[int]:
        return sorted({layer.rank for layer in self.layers.values()})

    @property
    def alphas(self) -> list[float]:
        return sorted({round(layer.alpha, 6) for layer in self.layers.values()})


def find_adapter(place: Path) -> Path:
    """The adapter file that `place` names: a file, or the folder of an adapter, a checkpoint or a run."""
    if place.is_file():
        return place
    if not place.exists():
        raise AdapterError(f"{place} is not there", "Name an adapter file, or the folder of an adapter or a run.")
    for folder in (place, place / "adapter"):
        for name in FILE_NAMES.values():
            if (folder / name).is_file():
                return folder / name
    if (place / "model" / "transformer").is_dir() or (place / "config.json").is_file():
        step = "Nothing needs to be converted: `from_pretrained` loads it. Name the run of a LoRA."
        raise AdapterError(f"{place} holds a whole model and no adapter", step)
    found = sorted(path.name for path in place.glob("*.safetensors"))
    raise AdapterError(
        f"{place} holds no {' or '.join(FILE_NAMES.values())}{'; it has ' if found else ''}{', '.join(found[:5])}",
        "Name the adapter's file itself, or train until a result is saved.",
    )


def read_adapter(place: Path) -> AdapterFile:
    """What `find_adapter(place)` holds. AdapterError where it is damaged or no LoRA of a transformer."""
    path = find_adapter(place)
    if path.name.endswith(PICKLE_SUFFIXES):
        step = "Convert it on a machine that you can lose: safetensors.torch.save_file(torch.load(...), ...)."
        raise AdapterError(f"{path} is pickled, and a pickle can run code: only *.safetensors is read", step)
    try:
        with safe_open(path, "np") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            header = file.metadata() or {}
        alphas = _read_alphas(path, [key for key in shapes if key.endswith(".alpha")])
        layers = pair_layers(path, shapes, header, alphas)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{path} is damaged or no safetensors file: {printable(error)}", WHOLE_COPY) from error
    except AdapterError:
        raise
    except ValueError as error:
        raise AdapterError(f"{path} is damaged: {printable(error)}", WHOLE_COPY) from error
    notes = {key.removeprefix(OUR_PREFIX): text for key, text in header.items() if key.startswith(OUR_PREFIX)}
    comfyui = bool(alphas) or any(key.startswith(COMFYUI_PREFIX) for key in shapes)
    return AdapterFile(path, "comfyui" if comfyui else "diffusers", layers, notes)


def _read_alphas(path: Path, keys: list[str]) -> dict[str, float]:
    if not keys:
        return {}
    found = {}
    with safe_open(path, "pt") as file:  # numpy has no bfloat16
        for key in keys:
            tensor = file.get_tensor(key)
            if tensor.numel() != 1 or not tensor.isfinite().all():
                raise ValueError(f"{key} is no number")
            found[key] = float(tensor)
    return found


def pair_layers(
    path: Path, shapes: Mapping[str, tuple[int, ...]], header: Mapping[str, str], alphas: Mapping[str, float]
) -> dict[str, Layer]:
    """The layers of a file with these tensors and this header. AdapterError where they are no LoRA, ValueError where
    they are damaged. alphas: the values of the tensors ".alpha"."""
    scale_of, pairs = _read_configs(header), dict[str, dict[str, str]]()
    for key in shapes:
        match = _KEY.fullmatch(key)
        if match is None or any(part in key for part in _OTHER_KINDS):
            raise _other_kind(path, shapes)
        pairs.setdefault(f"{match['part'] or 'transformer'}.{match['module']}", {})[_TENSORS[match["tensor"]]] = key
    if not pairs:
        raise _other_kind(path, shapes)
    layers = {}
    for name, keys in sorted(pairs.items()):
        if not {"down", "up"} <= keys.keys():
            raise ValueError(f"of {name} it has only {', '.join(keys.values())}")
        down, up = shapes[keys["down"]], shapes[keys["up"]]
        if len(down) < 2 or len(down) != len(up) or 0 in (*down, *up) or down[0] != math.prod(up[1:]):
            raise ValueError(f"the tensors of {name} don't belong together: A {list(down)}, B {list(up)}")
        part, _, module = name.partition(".")
        scale = alphas[keys["alpha"]] / down[0] if "alpha" in keys else scale_of(part, module, down[0])
        layers[name] = Layer(keys["down"], keys["up"], down, up, scale)
    return layers


def _other_kind(path: Path, keys: Iterable[str]) -> AdapterError:
    said = next(((kind, key) for key in keys for part, kind in _OTHER_KINDS.items() if part in key), None)
    foreign = [key for key in keys if not _KEY.fullmatch(key)]
    kind, shown = said or ("no LoRA of a transformer", ", ".join(foreign[:3]))
    more = _ADVICE.get(kind, "")
    return AdapterError(
        f"{path} is {kind}: it holds {printable(shown) or 'no tensors'}",
        "Only LoRA files with diffusers' or ComfyUI's keys are read: <module path>.lora_A.weight and .lora_B.weight."
        + more,
    )


def _read_configs(header: Mapping[str, str]) -> Callable[[str, str, int], float]:
    """scale_of(component, module, rank) by the header's peft configurations. ValueError where they are malformed."""
    text = header.get(METADATA_KEY)
    whole = {} if text is None else check_object(parse_json(text.encode()), METADATA_KEY)

    def scale_of(part: str, module: str, rank: int) -> float:
        # The keys have no component where the transformer's own save_lora_adapter wrote them.
        config = {key.removeprefix(f"{part}."): value for key, value in whole.items() if key.startswith(f"{part}.")}
        config = config or whole
        if not config:
            return 1.0
        ranks = check_object(config.get("rank_pattern") or {}, "rank_pattern")
        alphas = check_object(config.get("alpha_pattern") or {}, "alpha_pattern")
        said = check_count(_by_pattern(ranks, module, config.get("r")), "r")
        if said != rank:
            raise ValueError(f"the header says rank {said} for {module}, and its tensors have {rank}")
        alpha = _by_pattern(alphas, module, config.get("lora_alpha"))
        if type(alpha) not in (int, float):
            raise ValueError(f"lora_alpha is no number: {printable(repr(alpha))}")
        return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank

    return scale_of


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """As peft's get_pattern_key: the first that matches the path's end."""
    try:
        found = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
        return next(found, default)
    except re.error as error:
        raise ValueError(f"a pattern is no regular expression: {error}") from error


def check_family(adapter: AdapterFile, family: str) -> None:
    """AdapterError where our own note names another family."""
    if (own := adapter.notes.get("family", family)) != family:
        raise AdapterError(
            f"{adapter.path} was trained for {printable(own)}, and model.family is {family}",
            f"Name an adapter of {family}, or the configuration with which this one was trained.",
        )


def check_fits(adapter: AdapterFile, weights: Mapping[str, tuple[int, ...]], model: str) -> None:
    """AdapterError where a layer has no weight in the model, or one of another shape. weights: shapes by "<component>.
    <module path>"."""
    if missing := [name for name in adapter.layers if name not in weights]:
        raise AdapterError(
            f"{adapter.path} adapts {len(missing)} of its {len(adapter.layers)} modules where {model} has none: "
            f"{printable(', '.join(missing[:3]))}",
            "It was made for another model: set model.family, model.flavour or model.path, or name another file.",
        )
    for name, layer in adapter.layers.items():
        if not layer.fits(weights[name]):
            raise AdapterError(
                f"{adapter.path}: {name} is {layer.up_shape[0]} x {math.prod(layer.down_shape[1:])}, and in {model} "
                f"{weights[name][0]} x {math.prod(weights[name][1:])}",
                "It was made for a model of another size: set model.flavour or model.path to that.",
            )


def read_initial(settings: Adapter) -> AdapterFile | None:
    """The adapter of `train.adapter.init`. AdapterError where its rank or alpha are not those of the configuration."""
    if settings.init is None:
        return None
    try:
        adapter = read_adapter(Path(settings.init))
    except AdapterError as error:
        raise AdapterError(f"train.adapter.init: {error.message}", error.next_step) from error
    wanted = settings.rank, float(settings.rank if settings.alpha is None else settings.alpha)
    if len(adapter.ranks) > 1 or len(adapter.alphas) > 1:
        raise AdapterError(
            f"train.adapter.init: the modules of {adapter.path} have several ranks ({_join(adapter.ranks)}) or alphas "
            f"({_join(adapter.alphas)}), and training has one of each",
            "Merge it into the model (latentpress export-adapter --merge --to FOLDER), and train a new one on that.",
        )
    found = adapter.ranks[0], adapter.alphas[0]
    if found[0] != wanted[0] or not math.isclose(found[1], wanted[1], rel_tol=1e-5):
        raise AdapterError(
            f"train.adapter.init: {adapter.path} has rank {found[0]} and alpha {found[1]:g}; the configuration has "
            f"rank {wanted[0]} and alpha {wanted[1]:g}{' (the rank)' if settings.alpha is None else ''}",
            f"Set train.adapter.rank to {found[0]} and train.adapter.alpha to {found[1]:g}.",
        )
    return adapter


def _join(numbers: list[Any]) -> str:
    return ", ".join(f"{number:g}" for number in numbers[:5]) + (", ..." if len(numbers) > 5 else "")
