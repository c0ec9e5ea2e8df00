"""Conversions of single values, for the tables of all trainers' keys."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from schemas.catalog import FAMILIES
from schemas.config.yaml_reader import KeyPath, parse_yaml
from stages.importing.draft import NOTHING, Convert, Draft, Nearest, Several, below, is_off

WHOLE_MATRICES = 65_536  # a rank above every side of a matrix: a LoKr then has whole matrices, as in peft
NO_LIMIT = 1e9  # a norm that no gradient has
DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16"), "float16"),
    **dict.fromkeys(("no", "fp32", "float32", "float", "none"), "float32"),
}
ATTENTION = {
    **dict.fromkeys(("diffusers", "native", "sdpa"), "native"),
    **dict.fromkeys(("flash", "flash-attn", "flash-attn-2"), "flash"),
    **dict.fromkeys(("flash-attn-3", "flash3", "_flash_3", "_flash_3_hub"), "_flash_3_hub"),
    "xformers": "xformers", "cudnn": "_native_cudnn", "native-flash": "_native_flash",
    "native-efficient": "_native_efficient", "native-math": "_native_math",
}  # fmt: skip
QUANTIZED = {
    **dict.fromkeys(("no_change", "none"), "no_change"),
    **{name: name for name in ("int8-quanto", "int8-torchao", "fp8-torchao", "nf4-bnb")},
    **dict.fromkeys(("fp8-quanto", "fp8uz-quanto", "qfloat8", "float8"), "fp8-torchao"),
    "qint8": "int8-quanto", "int8": "int8-torchao",
}  # fmt: skip
#: Flavour -> family. Repository of a published checkpoint, in lower case -> flavour.
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


def whole(value: Any, draft: Draft | None = None) -> int:
    if number(value) != int(number(value)):
        raise ValueError(value)
    return int(number(value))


def above_zero(value: Any, draft: Draft | None = None) -> Any:
    """0 is "never", or "no limit"."""
    return whole(value) if number(value) > 0 else NOTHING


def text(value: Any, draft: Draft | None = None) -> str:
    if isinstance(value, dict | list | bool):
        raise ValueError(value)
    return str(value)


def texts(value: Any, draft: Draft | None = None) -> list[str]:
    return [text(item) for item in (value if isinstance(value, list) else [value])]


def run_name(value: Any, draft: Draft | None = None) -> str:
    """The name of a run or dataset, with "-" for characters that it can't have here."""
    if not (name := re.sub(r"[^A-Za-z0-9._-]+", "-", text(value)).strip("-._")[:80]):
        raise ValueError(value)
    return name


def one_of(choices: Mapping[str, Any], nearest: Any = None) -> Convert:
    """By a table of values in lower case; `nearest` for a value that is not in it."""

    def convert(value: Any, draft: Draft) -> Any:
        name = ("true" if value else "false") if isinstance(value, bool) else text(value).strip().lower()
        if name not in choices and nearest is None:
            raise ValueError(value)
        return choices[name] if name in choices else Nearest(nearest)

    return convert


def flag(on: Any = True, off: Any = NOTHING) -> Convert:
    """A value of ours while a key is on, and another while it is off."""
    return lambda value, draft: on if boolean(value) else off


def some(value: Any, draft: Draft) -> Any:
    """Whether a number is above 0, if it is."""
    return True if number(value) > 0 else NOTHING


def when(test: Callable[[Draft], Any], convert: Convert) -> Convert:
    """A value that counts only under a condition."""
    return lambda value, draft: convert(value, draft) if test(draft) else NOTHING


def only_with(key: str, convert: Convert) -> Convert:
    return when(lambda draft: not is_off(draft.given.get(key)), convert)


def unless(key: str, convert: Convert) -> Convert:
    return when(lambda draft: is_off(draft.given.get(key)), convert)


def with_schedule(convert: Convert, *names: str) -> Convert:
    return when(lambda draft: draft.given.get("lr_scheduler") in names, convert)


def norm_limit(value: Any, draft: Draft) -> float:
    """0 is "no limit"."""
    return number(value) or NO_LIMIT


def place(value: Any, draft: Draft) -> str:
    """A path, as the written file has it."""
    return draft.files.place(text(value))


def output_place(value: Any, draft: Draft) -> str:
    """A folder that is written to, which is not looked for."""
    return draft.files.place(text(value), look=False)


def dtype(value: Any, draft: Draft) -> str:
    return DTYPES[text(value).lower()]


def precision(value: Any, draft: Draft) -> Several:
    """The dtype of the whole model: of training and of the encoders."""
    name = DTYPES[text(value).lower()]
    return Several({"model.precision": name, **({"train.precision": "float32"} if name == "float16" else {})})


def quantized(value: Any, draft: Draft) -> Any:
    """A precision of the base weights, or one of as many bits."""
    name = text(value).lower()
    if name in QUANTIZED:
        return QUANTIZED[name]
    return Nearest("fp8-torchao" if "fp8" in name else "int8-torchao" if "8" in name else "nf4-bnb")


def size(width: Any, height: Any, frames: Any = None) -> str:
    """WxH, for more than one frame WxH@F: the next below that is 1 more than a multiple of 4."""
    count = whole(frames or 1) - (whole(frames or 1) - 1) % 4
    return f"{whole(width)}x{whole(height)}" + (f"@{count}" if count > 1 else "")


def repeats(value: Any, draft: Draft) -> int:
    """num_repeats, with 1 for once."""
    return max(whole(value), 1) - 1


def resolutions(value: Any, draft: Draft) -> Several:
    """Edges of squares, or a list of them or of widths with heights: edges of the squares of the same area."""
    edges = [area_edge(item) for item in (value if isinstance(value, list) else [value])]
    return Several({"resolution": edges[0] if len(edges) == 1 else edges, "resolution_type": "pixel_area"})


def area_edge(size: Any) -> float:
    width, height = size if isinstance(size, list | tuple) else (size, size)
    return compact(round(math.sqrt(number(width) * number(height)), 3))


def compact(value: float) -> float:
    return int(value) if value == int(value) else value


def text_files(value: Any, draft: Draft) -> str:
    """The ending of caption files: here .txt alone."""
    if text(value).lstrip(".").lower() != "txt":
        raise ValueError(value)
    return "textfile"


def epochs(value: Any, draft: Draft) -> Any:
    """Optimizer steps of so many epochs, if the files could be counted."""
    if number(value) <= 0:
        return NOTHING
    if draft.samples is None:
        raise ValueError("files x (repeats + 1) / (batch x accumulation) are not known")
    batch = draft.get("train.batch_size", 1) * draft.get("train.accumulate", 1)
    return max(1, math.ceil(number(value) * draft.samples / batch))


def steps(convert: Convert) -> Convert:
    """A number of steps there, of which several may be one here."""

    def wrapped(value: Any, draft: Draft) -> Any:
        count = convert(value, draft)
        return count if count is NOTHING or draft.parts == 1 else Nearest(max(1, math.ceil(count / draft.parts)))

    return wrapped


def largest(values: Any, draft: Draft) -> Any:
    """The largest of values that each dataset has there, and all have together here."""
    rates = [number(value) for value in values]
    return compact(max(rates)) if len({*rates}) == 1 else Nearest(compact(max(rates)))


def pairs(value: Any) -> dict[str, Any]:
    """Arguments as "name=value" texts, in a list or divided by commas outside of brackets, or a mapping."""
    if isinstance(value, Mapping):
        return dict(value)
    words = value if isinstance(value, list) else re.split(r",(?=\s*[A-Za-z_]\w*=)", text(value))
    sides = [text(word).partition("=") for word in words]
    if not all(equals for _, equals, _ in sides):
        raise ValueError(value)
    return {name.strip(): literal(right.strip()) for name, _, right in sides}


def literal(word: str) -> Any:
    """A value as a shell or Python writes it: numbers, truth values, lists in any brackets, else text."""
    inside = word.strip("()[]")
    items = parse_yaml(f"[{inside}]").value
    return items[0] if inside == word and len(items) == 1 else items


def compiled(value: Any, draft: Draft) -> Any:
    """A backend of torch.compile."""
    name = text(value).lower()
    backend = {} if name == "inductor" else {"train.compile_backend": name}
    return NOTHING if name == "no" else Several({"train.compile": "blocks", **backend})


# -- models


def flavour_of_repo(name: str) -> str | None:
    """The flavour of a repository, also of one with the original checkpoint, in another layout."""
    word = name.lower().rstrip("/").removeprefix("hf://")
    for candidate in (word, f"{word}-diffusers", f"{word}_diffusers"):
        if candidate in REPOS:
            return REPOS[candidate]
    last = word.rpartition("/")[2].removesuffix("-bf16").removesuffix("-diffusers")
    same = (own for repo, own in REPOS.items() if repo.rpartition("/")[2].removesuffix("-diffusers") == last)
    return next(same, None)


def chosen(flavour: str, expert: str | None = None) -> Several:
    more = {"train.experts": expert} if expert else {}
    return Several({"model.family": FLAVOURS[flavour], "model.flavour": flavour, **more})


def checkpoint(value: Any, draft: Draft) -> Several:
    """The flavour of a published checkpoint, else a folder or repository as model.path."""
    published = flavour_of_repo(text(value))
    if published is not None and draft.get("model.family", FLAVOURS[published]) == FLAVOURS[published]:
        return chosen(published)
    if text(value).endswith((".safetensors", ".pt", ".pth", ".ckpt", ".gguf", ".sft")):
        raise ValueError("a checkpoint is a folder or repository in diffusers' layout")
    path = text(value)
    is_here = path.startswith((".", "/", "~")) or draft.files.find(path)
    return Several({"model.path": draft.files.place(path) if is_here else path})


def assistant(value: Any, draft: Draft) -> Any:
    """An assistant's file; of a file in a repository its name, as it has to be downloaded."""
    if not (path := text(value)):
        return NOTHING
    is_in_repo = path.count("/") == 2 and not path.startswith((".", "/", "~"))
    return Nearest(draft.files.place(path.rpartition("/")[2])) if is_in_repo else draft.files.place(path)


# -- optimizers and schedules

_ADAM, _OPTIMI = {"betas": [0.9, 0.999]}, {"betas": [0.9, 0.99]}  # the libraries' defaults that differ from ours
#: Name there, in lower case -> name here, and settings that it has without any.
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
        return below("train.optimizer", name=ours, **settings)
    return name if "." in name else Nearest(below("train.optimizer", name="adamw", lr=1e-4))


def with_optimizer(convert: Convert) -> Convert:
    """A rate or arguments, which mean nothing to the nearest of an optimizer that does not exist here."""

    def wrapped(value: Any, draft: Draft) -> Any:
        name = str(draft.given.get("optimizer", draft.given.get("optimizer_type", "adamw"))).strip()
        if "." not in name and name.lower() not in OPTIMIZERS:
            raise ValueError(value)
        return convert(value, draft)

    return wrapped


def arguments(value: Any, draft: Draft) -> Several:
    """Further arguments of the optimizer: those that have options here are these."""
    values = {}
    for name, item in pairs(value).items():
        has_option = name in ("weight_decay", "betas", "eps")
        values[f"train.optimizer.{'' if has_option else 'arguments.'}{name}"] = item
    return Several(values)


def beta(index: int) -> Convert:
    def convert(value: Any, draft: Draft) -> list[float]:
        both = list(draft.get("train.optimizer.betas") or (0.9, 0.999))
        both[index] = number(value)
        return both

    return convert


def schedule(value: Any, draft: Draft) -> Any:
    """diffusers' schedules. Its `constant` has no warm-up."""
    name = text(value).strip()
    ours = next((one for one in ("constant", "linear", "cosine", "polynomial") if name.startswith(one)), None)
    more: dict[str, float] = {"warmup": 0} if name == "constant" else {"lr_end": 1e-7} if name == "polynomial" else {}
    return below("train.optimizer", schedule=ours, **more) if ours else Nearest("cosine")


def warmup(value: Any, draft: Draft) -> Any:
    """Steps; a fraction is of all steps."""
    if draft.given.get("lr_scheduler") == "constant":
        return NOTHING
    steps = number(value)
    return round(steps * draft.get("train.steps", 1000)) if 0 < steps < 1 else whole(value)


# -- datasets


def new_dataset(draft: Draft, source: Any, ending: str = "") -> tuple[KeyPath, str]:
    """A further dataset, named as its folder or file `source`: its path, and its id, which no other has."""
    folder = re.split(r"[\\/]", str(source or "").rstrip("\\/"))[-1]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder).strip("-._")[:80] or "dataset"
    taken = [dataset.get("id") for dataset in draft.datasets()]
    dataset_id, count = f"{name}{ending}", 2
    while dataset_id in taken:
        dataset_id, count = f"{name}{ending}-{count}", count + 1
    at: KeyPath = ("datasets", len(taken))
    draft.put((*at, "id"), dataset_id)
    return at, dataset_id


def use_masks(draft: Draft) -> None:
    draft.values.setdefault(("train", "methods", "masked_loss"), {})


def has_regularization(draft: Draft) -> bool:
    return any(dataset.get("is_regularization_data") for dataset in draft.datasets())


def keep_data_as_target(draft: Draft, key: str) -> None:
    """Regularization data that are trained on as they are, not as the base model predicts them."""
    if has_regularization(draft):
        path = ("train", "methods", "regularization", "target")
        draft.put(path, "data")
        draft.say(key, "carried over", "", path)
