"""Conversions of single values, used by the tables of all trainers."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from schemas.catalog import FAMILIES
from schemas.config.encoding import UNREADABLE, is_weight_file
from schemas.config.section import MOST_STEPS
from schemas.config.yaml_reader import KeyPath, parse_yaml
from stages.importing.draft import NOTHING, Convert, Draft, Nearest, Several, is_off, section_options

WHOLE_MATRICES = 65_536  # a rank larger than every side of a matrix: a LoKr then has full matrices, like in peft
NO_LIMIT = 1e9  # a norm larger than that of any gradient
DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16"), "float16"),
    **dict.fromkeys(("no", "fp32", "float32", "float", "none"), "float32"),
}
ATTENTION = {
    **dict.fromkeys(("diffusers", "native", "sdpa"), "sdpa"),
    **dict.fromkeys(("flash", "flash-attn", "flash-attn-2"), "flash"),
    **dict.fromkeys(("cudnn", "native-cudnn", "_native_cudnn"), "cudnn"),
    **dict.fromkeys(("flash-attn-3", "flash3", "_flash_3", "_flash_3_hub"), Nearest("flash")),
    **dict.fromkeys(("flash-attn-varlen", "flash_varlen"), "flash-varlen"),
}
QUANTIZED = {
    **dict.fromkeys(("no_change", "none"), "no_change"),
    **{name: name for name in ("int8-quanto", "int8-torchao", "fp8-torchao", "nf4-bnb")},
    **dict.fromkeys(("fp8-quanto", "fp8uz-quanto", "qfloat8", "float8"), "fp8-torchao"),
    "qint8": "int8-quanto", "int8": "int8-torchao",
}  # fmt: skip
#: FLAVOURS: flavour -> family. REPOS: repository of a published checkpoint, in lower case -> flavour.
FLAVOURS = {flavour: name for name, family in FAMILIES.items() for flavour in family.flavours}
REPOS = {
    flavour.repo.lower(): name
    for family in reversed(FAMILIES.values())
    for name, flavour in reversed(family.flavours.items())
}


def boolean(value: Any, draft: Draft | None = None) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word not in ("true", "1", "yes", "on", "false", "0", "no", "off", "none", ""):
        raise ValueError(value)
    return word in ("true", "1", "yes", "on")


def number(value: Any, draft: Draft | None = None) -> float:
    if isinstance(value, bool) or not math.isfinite(result := float(value)):
        raise ValueError(value)
    return result


def integer(value: Any, draft: Draft | None = None) -> int:
    if number(value) != int(number(value)):
        raise ValueError(value)
    return int(number(value))


def positive_integer(value: Any, draft: Draft | None = None) -> Any:
    """An integer; NOTHING for 0, which means "never" or "no limit"."""
    return integer(value) if number(value) > 0 else NOTHING


def interval(value: Any, draft: Draft | None = None) -> int:
    """A number of steps between validations; 0 or less means "never", here too."""
    return max(0, integer(value))


def kept(value: Any, draft: Draft | None = None) -> int:
    """A number of checkpoints to keep; 0 or less means "all"."""
    return integer(value) if number(value) > 0 else MOST_STEPS


def text(value: Any, draft: Draft | None = None) -> str:
    if isinstance(value, dict | list | bool):
        raise ValueError(value)
    return str(value)


def texts(value: Any, draft: Draft | None = None) -> list[str]:
    return [text(item) for item in (value if isinstance(value, list) else [value])]


def run_name(value: Any, draft: Draft | None = None) -> str:
    """The name of a run or dataset, with "-" in place of invalid characters."""
    if not (name := re.sub(r"[^A-Za-z0-9._-]+", "-", text(value)).strip("-._")[:80]):
        raise ValueError(value)
    return name


def one_of(choices: Mapping[str, Any], nearest: Any = None) -> Convert:
    """Make a conversion by a table of values in lower case. nearest: value for a value that is not in the table."""

    def convert(value: Any, draft: Draft) -> Any:
        name = ("true" if value else "false") if isinstance(value, bool) else text(value).strip().lower()
        if name not in choices and nearest is None:
            raise ValueError(value)
        return choices[name] if name in choices else Nearest(nearest)

    return convert


def flag(on: Any = True, off: Any = NOTHING) -> Convert:
    """Make a conversion of a flag. on, off: values of the option."""
    return lambda value, draft: on if boolean(value) else off


def if_positive(value: Any, draft: Draft) -> Any:
    """True if a number is positive, else NOTHING."""
    return True if number(value) > 0 else NOTHING


def only_if(test: Callable[[Draft], Any], convert: Convert) -> Convert:
    """Make a conversion that returns NOTHING unless `test` is true."""
    return lambda value, draft: convert(value, draft) if test(draft) else NOTHING


def only_with(key: str, convert: Convert) -> Convert:
    return only_if(lambda draft: not is_off(draft.entries.get(key)), convert)


def unless(key: str, convert: Convert) -> Convert:
    return only_if(lambda draft: is_off(draft.entries.get(key)), convert)


def with_schedule(convert: Convert, *names: str) -> Convert:
    return only_if(lambda draft: draft.entries.get("lr_scheduler") in names, convert)


def norm_limit(value: Any, draft: Draft) -> float:
    """A limit of the gradient norm; 0 means "no limit"."""
    return number(value) or NO_LIMIT


def file_path(value: Any, draft: Draft) -> str:
    """The path of an existing file or folder, for the new configuration."""
    return draft.files.convert_path(text(value))


def output_path(value: Any, draft: Draft) -> str:
    """The path of an output folder, which does not have to exist."""
    return draft.files.convert_path(text(value), is_input=False)


def dtype(value: Any, draft: Draft) -> str:
    return DTYPES[text(value).lower()]


def precision(value: Any, draft: Draft) -> Several:
    """The dtype of training and of the encoders."""
    name = DTYPES[text(value).lower()]
    return Several({"model.precision": name, **({"train.precision": "float32"} if name == "float16" else {})})


def quantized(value: Any, draft: Draft) -> Any:
    """The precision of the base weights, or a precision with the same number of bits."""
    name = text(value).lower()
    if name in QUANTIZED:
        return QUANTIZED[name]
    return Nearest("fp8-torchao" if "fp8" in name else "int8-torchao" if "8" in name else "nf4-bnb")


def size(width: Any, height: Any, frames: Any = None) -> str:
    """WxH, or WxH@F for more than one frame; F is rounded down to 1 more than a multiple of 4."""
    count = integer(frames or 1) - (integer(frames or 1) - 1) % 4
    return f"{integer(width)}x{integer(height)}" + (f"@{count}" if count > 1 else "")


def repeats(value: Any, draft: Draft) -> int:
    """The number of additional repetitions for num_repeats, in which 1 means once."""
    return max(integer(value), 1) - 1


def resolutions(value: Any, draft: Draft) -> Several:
    """Edges of squares of the same area. value: an edge, or a list of edges or of [width, height]."""
    edges = [area_edge(item) for item in (value if isinstance(value, list) else [value])]
    return Several({"resolution": edges[0] if len(edges) == 1 else edges, "resolution_type": "pixel_area"})


def area_edge(size: Any) -> float:
    width, height = size if isinstance(size, list | tuple) else (size, size)
    return compact(round(math.sqrt(number(width) * number(height)), 3))


def compact(value: float) -> float:
    return int(value) if value == int(value) else value


def text_files(value: Any, draft: Draft) -> str:
    """The suffix of caption files; only .txt is valid."""
    if text(value).lstrip(".").lower() != "txt":
        raise ValueError(value)
    return "textfile"


def epochs(value: Any, draft: Draft) -> Any:
    """Number of optimizer steps of a number of epochs, if the files could be counted."""
    if number(value) <= 0:
        return NOTHING
    if draft.samples is None:
        raise ValueError("files x (repeats + 1) / (batch x accumulation) are not known")
    batch = draft.get("train.batch_size", 1) * draft.get("train.accumulate", 1)
    return max(1, math.ceil(number(value) * draft.samples / batch))


def steps(convert: Convert) -> Convert:
    """Make a conversion of a number of steps, of which several may be one step of latentpress."""

    def wrapped(value: Any, draft: Draft) -> Any:
        count = convert(value, draft)
        if count is NOTHING or count == 0 or draft.step_ratio == 1:
            return count
        return Nearest(max(1, math.ceil(count / draft.step_ratio)))

    return wrapped


def largest(values: Any, draft: Draft) -> Any:
    """The largest of the datasets' values, because latentpress has one value for all datasets."""
    rates = [number(value) for value in values]
    return compact(max(rates)) if len({*rates}) == 1 else Nearest(compact(max(rates)))


def parse_pairs(value: Any) -> dict[str, Any]:
    """Parse arguments: texts "name=value" in a list or separated by commas outside of brackets, or a mapping."""
    if isinstance(value, Mapping):
        return dict(value)
    words = value if isinstance(value, list) else re.split(r",(?=\s*[A-Za-z_]\w*=)", text(value))
    sides = [text(word).partition("=") for word in words]
    if not all(equals for _, equals, _ in sides):
        raise ValueError(value)
    return {name.strip(): parse_literal(item.strip()) for name, _, item in sides}


def parse_literal(word: str) -> Any:
    """Parse a value in the notation of a shell or Python: number, boolean, list in any brackets, or text."""
    content = word.strip("()[]")
    items = parse_yaml(f"[{content}]").value
    return items[0] if content == word and len(items) == 1 else items


def compiled(value: Any, draft: Draft) -> Any:
    """The options for a backend of torch.compile."""
    name = text(value).lower()
    backend = {} if name == "inductor" else {"train.compile_backend": name}
    return NOTHING if name == "no" else Several({"train.compile": "blocks", **backend})


# -- models


def flavour_of_repo(name: str) -> str | None:
    """The flavour of a repository. Repositories with the original checkpoint in another layout are found, too."""
    word = name.lower().rstrip("/").removeprefix("hf://")
    for candidate in (word, f"{word}-diffusers", f"{word}_diffusers"):
        if candidate in REPOS:
            return REPOS[candidate]
    last = word.rpartition("/")[2].removesuffix("-bf16").removesuffix("-diffusers")
    matches = (flavour for repo, flavour in REPOS.items() if repo.rpartition("/")[2].removesuffix("-diffusers") == last)
    return next(matches, None)


def select_flavour(flavour: str, expert: str | None = None) -> Several:
    more = {"train.experts": expert} if expert else {}
    return Several({"model.family": FLAVOURS[flavour], "model.flavour": flavour, **more})


def checkpoint(value: Any, draft: Draft) -> Several:
    """The flavour of a published checkpoint, or model.path for another folder or repository."""
    published = flavour_of_repo(text(value))
    if published is not None and draft.get("model.family", FLAVOURS[published]) == FLAVOURS[published]:
        return select_flavour(published)
    path = text(value)
    if path.endswith((*UNREADABLE, ".sft")):
        raise ValueError("a checkpoint must be a folder or repository in diffusers' layout, or a .safetensors file")
    family = FAMILIES.get(draft.get("model.family", ""))
    if is_weight_file(path) and not draft.get("model.flavour") and (family is None or len(family.flavours) > 1):
        raise ValueError("a file does not state its flavour; set model.flavour and model.path")
    is_local = path.startswith((".", "/", "~")) or draft.files.find(path)
    return Several({"model.path": draft.files.convert_path(path) if is_local else path})


def assistant(value: Any, draft: Draft) -> Any:
    """The path of an assistant's file; for a file in a repository only its name, because the user has to download
    it."""
    if not (path := text(value)):
        return NOTHING
    is_in_repo = path.count("/") == 2 and not path.startswith((".", "/", "~"))
    return Nearest(draft.files.convert_path(path.rpartition("/")[2])) if is_in_repo else draft.files.convert_path(path)


# -- optimizers and schedules

_ADAM, _OPTIMI = {"betas": [0.9, 0.999]}, {"betas": [0.9, 0.99]}  # the libraries' defaults that differ from ours
#: Name in the other trainer, in lower case -> (name in latentpress, the other trainer's default settings).
OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **dict.fromkeys(("adamw", "torch.optim.adamw", "adamw_optimi_torch"), ("adamw", _ADAM)),
    "adamw_bf16": ("adamw", {**_ADAM, "eps": 1e-6}),
    **dict.fromkeys(("adam", "torch.optim.adam"), ("adamw", {**_ADAM, "weight_decay": 0.0})),
    **dict.fromkeys(("adamw8bit", "adamw8", "bnb-adamw8bit"), ("bnb-adamw8bit", _ADAM)),
    **dict.fromkeys(("adam8bit", "adam8"), ("bnb-adamw8bit", {**_ADAM, "weight_decay": 0.0})),
    **dict.fromkeys(("pagedadamw8bit", "bnb-adamw8bit-paged", "bitsandbytes.optim.pagedadamw8bit"),
                    ("bnb-adamw8bit-paged", _ADAM)),
    **dict.fromkeys(("lion8bit", "bnb-lion8bit"), ("bnb-lion8bit", {})),
    **dict.fromkeys(("pagedlion8bit", "bnb-lion8bit-paged"), ("bnb-lion8bit-paged", {})),
    **dict.fromkeys(("optimi-adamw", "adamw_optimi"), ("optimi-adamw", _OPTIMI)),
    **dict.fromkeys(("optimi-lion", "lion"), ("optimi-lion", {})),
    **dict.fromkeys(("optimi-stableadamw", "stableadamw"), ("optimi.StableAdamW", {})),
    **{f"optimi-{name.lower()}": (f"optimi.{name}", {}) for name in ("RAdam", "Ranger", "Adan", "Adam", "SGD")},
    **dict.fromkeys(("prodigy", "prodigyopt.prodigy"), ("prodigy", {})),
    **dict.fromkeys(("adamw_schedulefree", "adamwschedulefree", "schedulefree.adamwschedulefree"),
                    ("adamw-schedulefree", {})),
}  # fmt: skip


def optimizer(value: Any, draft: Draft) -> Any:
    name = text(value).strip()
    if name.lower() in OPTIMIZERS:
        ours, settings = OPTIMIZERS[name.lower()]
        return section_options("train.optimizer", name=ours, **settings)
    return name if "." in name else Nearest(section_options("train.optimizer", name="adamw", lr=1e-4))


def with_optimizer(convert: Convert) -> Convert:
    """Make a conversion of a rate or arguments. They are not usable if the optimizer is replaced by the nearest one."""

    def wrapped(value: Any, draft: Draft) -> Any:
        name = str(draft.entries.get("optimizer", draft.entries.get("optimizer_type", "adamw"))).strip()
        if "." not in name and name.lower() not in OPTIMIZERS:
            raise ValueError(value)
        return convert(value, draft)

    return wrapped


def arguments(value: Any, draft: Draft) -> Several:
    """Further arguments of the optimizer. Arguments with an option of their own become this option."""
    values = {}
    for name, item in parse_pairs(value).items():
        has_option = name in ("weight_decay", "betas", "eps")
        values[f"train.optimizer.{'' if has_option else 'arguments.'}{name}"] = item
    return Several(values)


def beta(index: int) -> Convert:
    def convert(value: Any, draft: Draft) -> list[float]:
        betas = list(draft.get("train.optimizer.betas") or (0.9, 0.999))
        betas[index] = number(value)
        return betas

    return convert


def schedule(value: Any, draft: Draft) -> Any:
    """A schedule of diffusers. Its `constant` does not have a warm-up."""
    name = text(value).strip()
    ours = next((one for one in ("constant", "linear", "cosine", "polynomial") if name.startswith(one)), None)
    more: dict[str, float] = {"warmup": 0} if name == "constant" else {"lr_end": 1e-7} if name == "polynomial" else {}
    return section_options("train.optimizer", schedule=ours, **more) if ours else Nearest("cosine")


def warmup(value: Any, draft: Draft) -> Any:
    """Number of warm-up steps. A value below 1 is a fraction of all steps."""
    if draft.entries.get("lr_scheduler") == "constant":
        return NOTHING
    steps = number(value)
    return round(steps * draft.get("train.steps", 1000)) if 0 < steps < 1 else integer(value)


# -- datasets


def new_dataset(draft: Draft, source: Any, ending: str = "") -> tuple[KeyPath, str]:
    """Add a dataset. Returns (path, unique id). source: folder or file, from which the id is derived. ending: suffix of
    the id."""
    folder = re.split(r"[\\/]", str(source or "").rstrip("\\/"))[-1]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder).strip("-._")[:80] or "dataset"
    ids = [dataset.get("id") for dataset in draft.datasets()]
    dataset_id, count = f"{name}{ending}", 2
    while dataset_id in ids:
        dataset_id, count = f"{name}{ending}-{count}", count + 1
    path: KeyPath = ("datasets", len(ids))
    draft.set((*path, "id"), dataset_id)
    return path, dataset_id


def use_masks(draft: Draft) -> None:
    draft.values.setdefault(("train", "methods", "masked_loss"), {})


def has_regularization(draft: Draft) -> bool:
    return any(dataset.get("is_regularization_data") for dataset in draft.datasets())


def keep_data_as_target(draft: Draft, key: str) -> None:
    """Train on regularization data itself instead of the base model's predictions."""
    if has_regularization(draft):
        path = ("train", "methods", "regularization", "target")
        draft.set(path, "data")
        draft.add_line(key, "carried over", "", path)
