"""Read the headers of adapter files: layers, rank, strength. Needs torch only if a file has alpha tensors.

diffusers  transformer.<module>.lora_A.weight (rank, inputs, ...) and .lora_B.weight (outputs, rank, ...). Rank and
           alpha are in the header, as `lora_adapter_metadata`; without it, alpha is the rank
           (diffusers/loaders/peft.py)
comfyui    diffusion_model.<module>.lora_A.weight, .lora_B.weight and .alpha, a number; without it, the strength is 1.
           ComfyUI maps this prefix for every model whose modules have these names, and "transformer." only for some
           models (comfy/lora.py, comfy/weight_adapter/lora.py). If ComfyUI has other names for the modules, or maps
           their names only with the other prefix, the file uses ComfyUI's names (Family.comfyui_names). With the
           prefix "transformer.", B is multiplied by the strength, and the file has no alpha
lycoris    lycoris_<module path with underscores>.<tensor>, for a LoKr: the names of the LyCORIS library. ComfyUI maps
           them only for some models. LoRAs of kohya (musubi-tuner) are read in the same way:
           lora_unet_<module path with underscores>.lora_down.weight

`resolve_names` finds the modules for the names of ComfyUI, LyCORIS and the original releases in the model.

A DoRA also has transformer.<module>.lora_magnitude_vector. `trainer/adapters/layers.py` lists the tensors of a LoKr.
Files of other programs are read, too: keys without a prefix, and lora_down and lora_up instead of lora_A and lora_B.
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from cache.models.weights import PICKLE_SUFFIXES, call_hub
from cache.store.json_checks import printable
from schemas.activities import activity
from schemas.catalog import FAMILIES
from schemas.config.encoding import PUBLISHED, Model
from schemas.config.pipeline import Config
from schemas.config.training import FILE_NAMES, Adapter, FileFormat
from schemas.errors import USAGE, LatentpressError
from schemas.family import ComfyUINames, OriginalNames
from schemas.regular_files import NOT_REGULAR
from trainer.adapters.layers import (
    DOWN,
    LOKR_TENSORS,
    MAGNITUDE,
    UP,
    Kind,
    Layer,
    Lokr,
    Shapes,
    check_alpha,
    pair_lokr,
    pair_lora,
    read_configs,
)

OUR_PREFIX = "latentpress."
DIFFUSERS_NAMES = ComfyUINames()
#: Modules that `fuse_qkv_projections` makes in diffusers' models; SimpleTuner trains them (see OriginalNames.joined).
FUSED = OriginalNames(joined=(("to_qkv", ("to_q", "to_k", "to_v")),))
FLOAT_DTYPES, INTEGER_DTYPES = ("F64", "F32", "F16", "BF16"), ("I64", "I32", "I16", "I8", "U8")
COMFYUI_PREFIX, LYCORIS_PREFIX = "diffusion_model.", "lycoris_"
FLAT_PREFIXES = (LYCORIS_PREFIX, "lora_unet_")  # prefixes of module paths with underscores
ALPHA = "alpha"
#: End of a key -> name of the layer's tensor, for peft, diffusers before peft, and kohya.
_TENSORS = {
    "lora_A.default.weight": DOWN,
    "lora_B.default.weight": UP,
    "lora.down.weight": DOWN,
    "lora.up.weight": UP,
    "lora_down.weight": DOWN,
    "lora_up.weight": UP,
    "lora_magnitude_vector.default.weight": MAGNITUDE,
    **{tensor: tensor for tensor in (DOWN, UP, MAGNITUDE, ALPHA, *LOKR_TENSORS)},
}
_KEY = re.compile(
    r"(?:(?P<part>transformer(?:_\d+)?)\.|diffusion_model\.|base_model\.model\.|lycoris_|lora_unet_)?"
    rf"(?P<module>.+)\.(?P<tensor>{'|'.join(map(re.escape, _TENSORS))})"
)
#: Part of a key -> description of a file with such keys.
_OTHER_KINDS = {
    "dora_scale": "a DoRA with LyCORIS' magnitudes",
    "lokr_t2": "a LoKr with a middle tensor",
    "hada_": "a LoHa",
    "lora_mid": "a LoCon with a middle layer",
    "lora_B.bias": "a LoRA with biases",
    "lora_te": "an adapter of a text encoder",
    "text_encoder": "an adapter of a text encoder",
}
WHOLE_COPY = "Copy the file again from its source, or name another file."
#: Kind of a file -> next step: the configuration that fits the file.
_SETTINGS = {
    "LoRA": "Set train.adapter.type to lora and train.adapter.dora to false.",
    "DoRA": "Set train.adapter.type to lora and train.adapter.dora to true.",
    "LoKr": "Set train.adapter.type to lokr.",
}


class AdapterError(LatentpressError, ValueError):
    """Raised if an adapter file is damaged, of another kind, or made for another model or configuration."""

    exit_code: ClassVar[int] = USAGE


@dataclass(frozen=True)
class AdapterFile:
    """The header of an adapter file. layers: "<component>.<module path>" -> layer, all of one kind. notes: notes in a
    file of latentpress, such as family and steps."""

    path: Path
    format: FileFormat
    layers: dict[str, Layer]
    notes: dict[str, str]

    @property
    def kind(self) -> Kind:
        return next(iter(self.layers.values())).kind

    @property
    def components(self) -> list[str]:
        return sorted({name.partition(".")[0] for name in self.layers})

    @property
    def ranks(self) -> list[int]:
        """The different ranks, without LoKr layers of whole matrices for which the header has no rank."""
        return sorted({layer.file_rank for layer in self.layers.values() if layer.file_rank is not None})

    @property
    def alphas(self) -> list[float]:
        return sorted({round(layer.alpha, 6) for layer in self.layers.values() if layer.file_rank is not None})


def find_adapter(path: Path) -> Path:
    """The adapter file at `path`, which is the file itself, or the folder of an adapter, a checkpoint or a run."""
    if path.is_file():
        return path
    if not path.is_dir():
        problem = NOT_REGULAR if path.exists() else "does not exist"
        raise AdapterError(f"{path} {problem}", "Name an adapter file, or the folder of an adapter or a run.")
    for folder in (path, path / "adapter"):
        for name in FILE_NAMES.values():
            if (folder / name).is_file():
                return folder / name
    if any(path.glob("model/transformer*/")) or (path / "config.json").is_file():
        step = "Nothing needs to be converted: `from_pretrained` loads it. Name the run of a LoRA."
        raise AdapterError(f"{path} contains a whole model, not an adapter", step)
    names = sorted(file.name for file in path.glob("*.safetensors"))
    raise AdapterError(
        f"{path} contains no {' or '.join(FILE_NAMES.values())}{'; it has ' if names else ''}{', '.join(names[:5])}",
        "Name the adapter's file itself, or train until a result is saved.",
    )


def read_adapter(source: Path) -> AdapterFile:
    """The adapter that `find_adapter(source)` finds. AdapterError if it is damaged or of an unsupported kind."""
    path = find_adapter(source)
    if path.name.endswith(PICKLE_SUFFIXES):
        step = "Convert it on a machine that you can lose: safetensors.torch.save_file(torch.load(...), ...)."
        raise AdapterError(f"{path} is pickled, and a pickle can run code: only *.safetensors is read", step)
    from safetensors import SafetensorError, safe_open  # in the extra `train`, which --help does not need

    try:
        with safe_open(path, "np") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            header = file.metadata() or {}
            shapes = {key: tuple(tensor.get_shape()) for key, tensor in slices.items()}
            dtypes = {key: tensor.get_dtype() for key, tensor in slices.items()}
        for key, dtype in dtypes.items():
            if dtype not in FLOAT_DTYPES and (not key.endswith(".alpha") or dtype not in INTEGER_DTYPES):
                raise AdapterError(
                    f"{path}: {printable(key)} is of type {dtype}, and not one of {', '.join(FLOAT_DTYPES)}",
                    "Name the adapter's file before it was quantized or converted, or convert it to bfloat16.",
                )
        alphas = dict[str, float]()
        if alpha_keys := [key for key in shapes if key.endswith(".alpha")]:
            with safe_open(path, "pt") as file:  # numpy has no bfloat16
                for key in alpha_keys:
                    tensor = file.get_tensor(key)
                    if tensor.numel() != 1:
                        raise ValueError(f"{key} is not a number")
                    alphas[key] = check_alpha(float(tensor), key)
        layers = pair_layers(path, shapes, header, alphas)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{path} is damaged or not a safetensors file: {printable(error)}", WHOLE_COPY) from error
    except AdapterError:
        raise
    except ValueError as error:
        raise AdapterError(f"{path} is damaged: {printable(error)}", WHOLE_COPY) from error
    notes = {key.removeprefix(OUR_PREFIX): text for key, text in header.items() if key.startswith(OUR_PREFIX)}
    form: FileFormat = "comfyui" if alphas or any(key.startswith(COMFYUI_PREFIX) for key in shapes) else "diffusers"
    form = "lycoris" if any(key.startswith(FLAT_PREFIXES) for key in shapes) else form
    return AdapterFile(path, form, layers, notes)


def pair_layers(path: Path, shapes: Shapes, header: Mapping[str, str], alphas: Mapping[str, float]) -> dict[str, Layer]:
    """The layers of a file. AdapterError if the file is of an unsupported kind, ValueError if it is damaged.

    shapes: key -> shape. alphas: key that ends with ".alpha" -> value of the tensor.
    """
    groups = defaultdict[str, dict[str, str]](dict)
    spellings = dict[str, str]()  # name -> prefix of its keys
    for key in shapes:
        match = _KEY.fullmatch(key)
        if match is None or any(part in key for part in _OTHER_KINDS):
            raise _other_kind(path, shapes)
        name, tensor = f"{match['part'] or 'transformer'}.{match['module']}", _TENSORS[match["tensor"]]
        start = spellings.setdefault(name, key[: match.start("tensor")])
        if tensor in groups[name] or not key.startswith(start):
            raise duplicate_error(path, name, groups[name].get(tensor, start), key)
        groups[name][tensor] = key
    if not groups:
        raise _other_kind(path, shapes)
    layers: dict[str, Layer] = {}
    strength_of = read_configs(header, groups)
    for name, keys in sorted(groups.items()):
        alpha = alphas[keys.pop(ALPHA)] if ALPHA in keys else None
        make = pair_lora if keys.keys() & {DOWN, UP, MAGNITUDE} else pair_lokr
        layers[name] = make(name, keys, shapes, alpha, partial(strength_of, name))
    if len(kinds := sorted({layer.kind for layer in layers.values()})) > 1:
        raise AdapterError(
            f"{path} contains layers of several kinds: {', '.join(kinds)}",
            "Only files of one kind are read: train or convert each kind into a file of its own.",
        )
    return layers


def duplicate_error(path: Path, name: str, *keys: str) -> AdapterError:
    return AdapterError(
        f"{path}: {printable(name)} occurs twice, as {printable(' and '.join(keys))}",
        "Remove one of the two from the file.",
    )


def _other_kind(path: Path, keys: Iterable[str]) -> AdapterError:
    match = next(((kind, key) for key in keys for part, kind in _OTHER_KINDS.items() if part in key), None)
    foreign = [key for key in keys if not _KEY.fullmatch(key)]
    kind, keys_text = match or ("not a LoRA of a transformer", ", ".join(foreign[:3]))
    return AdapterError(
        f"{path} is {kind}: it contains {printable(keys_text) or 'no tensors'}",
        "LoRA files with diffusers', ComfyUI's or kohya's keys are read (<module path>.lora_A.weight and "
        ".lora_B.weight), diffusers' DoRA (.lora_magnitude_vector, too) and LoKr (.lokr_w1 and .lokr_w2).",
    )


def check_family(adapter: AdapterFile, family: str) -> None:
    """AdapterError if the note "family" of a latentpress file names another family."""
    if (trained_for := adapter.notes.get("family", family)) != family:
        raise AdapterError(
            f"{adapter.path} was trained for {printable(trained_for)}, and model.family is {family}",
            f"Name an adapter of {family}, or the configuration with which this one was trained.",
        )


def check_fits(adapter: AdapterFile, weights: Mapping[str, tuple[int, ...]], model: str) -> None:
    """AdapterError if the model has no weight for a layer, or a weight of another size. weights: "<component>.<module
    path>" -> shape. model: name of the model in the message."""
    if missing_modules := [name for name in adapter.layers if name not in weights]:
        raise AdapterError(
            f"{model} lacks {len(missing_modules)} of the {len(adapter.layers)} modules that {adapter.path} adapts: "
            f"{printable(', '.join(missing_modules[:3]))}",
            "It was made for another model: set model.family, model.flavour or model.path, or name another file.",
        )
    for name, layer in adapter.layers.items():
        size = weights[name][0], math.prod(weights[name][1:])
        if layer.size != size:
            raise AdapterError(
                f"{adapter.path}: {name} is {layer.size[0]} x {layer.size[1]}, but {size[0]} x {size[1]} in {model}",
                "It was made for a model of another size: set model.flavour or model.path to that model.",
            )


def find_assistant(model: Model) -> Path | None:
    """The adapter file of `model.assistant`; None without one. A published adapter is fetched from the hub, unless it
    is in the hub's cache. HubError if the hub can't be reached."""
    if model.assistant != PUBLISHED:
        return None if model.assistant is None else find_adapter(Path(model.assistant))
    from huggingface_hub import hf_hub_download

    published = model.flavour_spec.assistant
    assert published is not None, "the configuration is checked"
    with activity(f"fetching the assistant {published}"):
        options = {"key": "model.assistant", "filename": published.file}
        return Path(call_hub(hf_hub_download, published.repo, published.revision, **options))


def read_frozen(config: Config) -> dict[str, AdapterFile]:
    """Option -> adapter of `model.assistant` and `validation.adapter`, without options that are not set. AdapterError
    if an adapter is not a LoRA, or was trained for another family."""
    few, files = config.validation.adapter, dict[str, AdapterFile]()
    for option, find in (
        ("model.assistant", partial(find_assistant, config.model)),
        ("validation.adapter", lambda: None if few is None else find_adapter(Path(few.path))),
    ):
        try:
            if (path := find()) is None:
                continue
            adapter = read_adapter(path)
            check_family(adapter, config.model.family)
        except AdapterError as error:
            raise AdapterError(f"{option}: {error.message}", error.next_step) from error
        if adapter.kind != "LoRA":
            step = f"Name a LoRA, or remove {option}."
            raise AdapterError(f"{option}: {adapter.path} is a {adapter.kind}, and only a LoRA is valid", step)
        files[option] = adapter
    return files


def read_initial(settings: Adapter) -> AdapterFile | None:
    """The adapter of `train.adapter.init_from`; None without one. AdapterError if the configuration has another kind of
    adapter, or if no module of the file has the rank or alpha that the configuration sets."""
    if settings.init_from is None:
        return None
    try:
        adapter = read_adapter(Path(settings.init_from))
    except AdapterError as error:
        raise AdapterError(f"train.adapter.init_from: {error.message}", error.next_step) from error
    expected_kind = "LoKr" if settings.type == "lokr" else "DoRA" if settings.dora else "LoRA"
    if adapter.kind != expected_kind:
        raise AdapterError(
            f"train.adapter.init_from: {adapter.path} is a {adapter.kind}, but the configuration trains a "
            f"{expected_kind}",
            f"{_SETTINGS[adapter.kind]} Or name a {expected_kind}.",
        )
    ranks, alphas = zip(*(initial_scale(layer, settings.rslora) for layer in adapter.layers.values()), strict=True)
    rank = settings.rank if "rank" in settings.model_fields_set else None
    for name, value, file_values in (("rank", rank, ranks), ("alpha", settings.alpha, alphas)):
        if value is not None and not any(math.isclose(value, file_value, rel_tol=1e-5) for file_value in file_values):
            with_rslora = " (with rslora: true)" if name == "alpha" and settings.rslora else ""
            raise AdapterError(
                f"train.adapter.init_from: {adapter.path} has {name} {_join(file_values)}{with_rslora}; the "
                f"configuration has {name} {value:g}",
                f"Remove train.adapter.{name} to use the value of the file.",
            )
    return adapter


def initial_scale(layer: Layer, rslora: bool) -> tuple[int, float]:
    """The layer's rank, and the alpha for which alpha / rank, or with rslora alpha / sqrt(rank), is its strength."""
    return layer.rank, layer.scale * (math.sqrt(layer.rank) if rslora else layer.rank)


def _join(numbers: Any) -> str:
    values = sorted(set(numbers))
    return ", ".join(f"{number:g}" for number in values[:5]) + (", ..." if len(values) > 5 else "")


def rename(path: str, names: Iterable[tuple[str, str]]) -> str:
    """A module path with whole segments replaced. names: (segments, replacement) pairs, applied in order."""
    path = f".{path}."
    for name, replacement in names:
        path = path.replace(f".{name}.", f".{replacement}.")
    return path[1:-1]


def from_comfyui(name: str, names: ComfyUINames) -> str:
    """A module path with diffusers' names, from a path with ComfyUI's names. A path that already has diffusers' names
    does not change."""
    return rename(name, [(theirs, ours) for ours, theirs in names.paths])


def flat_name(name: str) -> str:
    """ "<component>.<module path>" in the form of LyCORIS' files, without their prefix."""
    return name.removeprefix("transformer.").replace(".", "_")


def resolve_names(adapter: AdapterFile, weights: Mapping[str, tuple[int, ...]], model: str) -> AdapterFile:
    """The adapter with the model's module paths instead of other programs' names; unchanged if it already has module
    paths. A layer for several modules becomes one layer per module. AdapterError if a name is ambiguous, or if the
    modules of a layer have another number of outputs.

    weights: "<component>.<module path>" -> shape of the model's weight. model: name of the model in messages.
    """
    is_flat = adapter.format == "lycoris"
    if not is_flat and weights.keys() >= adapter.layers.keys():
        return adapter
    meanings = [*_meanings(weights, is_flat)]
    layers = dict[str, Layer]()
    for name, layer in adapter.layers.items():
        key = flat_name(name) if is_flat else name
        table, swapped = next(((table, swapped) for table, swapped in meanings if key in table), ({}, ()))
        candidates = table.get(key, [(name,)])
        if len(candidates) > 1:
            paths = ", ".join(path for path, *_ in candidates)
            raise AdapterError(
                f"{adapter.path}: {_start(layer)} is ambiguous: in {model}, it may be {paths}",
                "Name diffusers' or ComfyUI's file of the same adapter, whose keys are module paths.",
            )
        for path, part in _split(adapter, layer, {path: weights.get(path, ()) for path in candidates[0]}, model):
            if path in swapped:
                part = _swap(adapter, part)
            if path in layers:
                raise duplicate_error(adapter.path, path, _first_key(layers[path]), _first_key(layer))
            layers[path] = part
    return replace(adapter, layers=layers)


def _meanings(
    weights: Collection[str], is_flat: bool
) -> Iterator[tuple[dict[str, list[tuple[str, ...]]], Collection[str]]]:
    """Tables of names: one for diffusers' names, and one for each set of names that other programs use for a family.

    Each table maps a name -> its possible meanings. A meaning is the path of one module, or the paths of the modules
    whose outputs the named layer concatenates. With each table are the paths of the modules that are swapped
    (`OriginalNames.swapped`).
    """
    others = [(OriginalNames(family.comfyui_names.paths), family.original_names) for family in FAMILIES.values()]
    for names in dict.fromkeys([FUSED, *chain(*others)]):
        table = defaultdict[str, list[tuple[str, ...]]](list)
        for name in weights:
            foreign_name = rename(name, names.paths)
            table[flat_name(foreign_name) if is_flat else foreign_name].append((name,))
            for joint, (first, *next_ends) in names.joined:
                if name.endswith(f".{first}"):
                    start = name.removesuffix(first)
                    modules = (name, *(start + end for end in next_ends))
                    if all(module in weights for module in modules):
                        foreign_name = rename(start + joint, names.paths)
                        table[flat_name(foreign_name) if is_flat else foreign_name].append(modules)
        yield table, [name for name in weights if name.partition(".")[2] in names.swapped]


def _split(
    adapter: AdapterFile, layer: Layer, modules: Mapping[str, tuple[int, ...]], model: str
) -> list[tuple[str, Layer]]:
    """The layer of each module. modules: path of a module -> shape of its weight, in the order of their outputs."""
    if len(modules) == 1:
        return [(path, layer) for path in modules]
    if isinstance(layer, Lokr):
        raise AdapterError(
            f"{adapter.path}: {_start(layer)} is for {len(modules)} modules of this model, and a LoKr can't be divided",
            "Train or convert it for the separate modules, or name a LoRA.",
        )
    sizes = [shape[0] for shape in modules.values()]
    if sum(sizes) != layer.size[0]:
        raise AdapterError(
            f"{adapter.path}: {_start(layer)} has {layer.size[0]} outputs, but {', '.join(modules)} have {sum(sizes)} "
            f"in {model}",
            "It was made for a model of another size: set model.flavour or model.path to that model.",
        )
    return [*zip(modules, layer.split(sizes), strict=True)]


def _swap(adapter: AdapterFile, layer: Layer) -> Layer:
    if isinstance(layer, Lokr):
        raise AdapterError(
            f"{adapter.path}: {_start(layer)} has its outputs in another order in this model, and a LoKr can't be "
            "reordered",
            "Remove this module from the file, or name a LoRA.",
        )
    return layer.swap()


def _first_key(layer: Layer) -> str:
    return next(iter(layer.keys.values()))


def _start(layer: Layer) -> str:
    """The name of the layer's module in the file."""
    return re.split(r"\.(?:lora_|lokr_|lora\.)", _first_key(layer))[0]
