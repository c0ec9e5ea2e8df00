"""Conversions of single values, for the tables of other trainers' keys."""

import math
import re
from collections.abc import Mapping
from typing import Any

from schemas.foreign.draft import Convert, Draft, NotNeeded, Refused, Row, Several, is_off

NOTHING = Several({})  # the value of a key that asks for nothing, or for what is always so
NAME_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")
DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16"), "float16"),
    **dict.fromkeys(("no", "fp32", "float32", "float"), "float32"),
}
ATTENTION = {
    "flash": "flash", "flash-attn": "flash", "flash-attn-2": "flash", "flash-attn-3": "_flash_3_hub",
    "flash3": "_flash_3_hub", "_flash_3_hub": "_flash_3_hub", "xformers": "xformers", "cudnn": "_native_cudnn",
    "native-flash": "_native_flash", "native-efficient": "_native_efficient", "native-math": "_native_math",
}  # fmt: skip


def boolean(value: Any, draft: Draft | None = None) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("true", "1", "yes", "on"):
        return True
    if text in ("false", "0", "no", "off", "none", ""):
        return False
    raise Refused("its value is neither true nor false")


def number(value: Any, draft: Draft | None = None) -> float:
    if isinstance(value, bool):
        raise ValueError
    try:
        result = float(value)
    except OverflowError as error:
        raise ValueError from error
    if not math.isfinite(result):
        raise ValueError
    return result


def whole(value: Any, draft: Draft | None = None) -> int:
    result = number(value)
    if result != int(result):
        raise ValueError
    return int(result)


def above_zero(value: Any, draft: Draft | None = None) -> int:
    """A number; 0, which is "never" or "no limit" there, is left out."""
    if (result := whole(value)) <= 0:
        raise NotNeeded("0 is off")
    return result


def adapter_rank(value: Any, draft: Draft | None = None) -> int:
    """A rank above every side of a matrix asks a LoKr for whole matrices, as in peft."""
    return min(whole(value), 65_536)


def text(value: Any, draft: Draft | None = None) -> str:
    if isinstance(value, dict | list | bool):
        raise ValueError
    return str(value)


def run_name(value: Any, draft: Draft | None = None) -> str:
    """A name of a run or dataset, with what can't be in one as "-"."""
    name = NAME_CHARACTERS.sub("-", str(value)).strip("-._")
    if not name:
        raise Refused("no letter or digit of it can be in a name here")
    return name[:100]


def one_of(choices: Mapping[str, Any], nearest: str) -> Convert:
    """By a table of values; `nearest` is said where a value is not in it. A None in it: the value is not needed."""

    def convert(value: Any, draft: Draft) -> Any:
        name = ("true" if value else "false") if isinstance(value, bool) else str(value).strip()
        lower = {key.lower(): result for key, result in choices.items()}
        if name.lower() not in lower:
            raise Refused(f"{shown(name)} is not possible here; {nearest}")
        if (result := lower[name.lower()]) is None:
            raise NotNeeded("it is the default")
        return result

    return convert


def off(reason: str = "it is off, or the default") -> Any:
    raise NotNeeded(reason)


def refuse(reason: str) -> Any:
    raise Refused(reason)


def shown(value: Any) -> str:
    """A value for a message; long ones, and those that may be secrets, are cut."""
    word = str(value)
    return word if len(word) <= 24 else f"{word[:21]}..."


def if_true(value: Any = True, off: str = "it is off") -> Convert:
    """A value of ours while a key is on."""

    def convert(given: Any, draft: Draft) -> Any:
        if not boolean(given):
            raise NotNeeded(off)
        return value

    return convert


def flag(to: str, value: Any = True, note: str | None = None) -> Row:
    """The row of a key that is on or off. note: the value, unless it is True."""
    return Row(to, if_true(value), ("" if value is True else str(value)) if note is None else note)


def only_with(key: str, convert: Convert, off: str = "") -> Convert:
    """A value that counts only while another key is on."""

    def wrapped(value: Any, draft: Draft) -> Any:
        if is_off(draft.given.get(key)):
            raise NotNeeded(off or f"{key} is off")
        return convert(value, draft)

    return wrapped


def unless(key: str, convert: Convert, reason: str) -> Convert:
    """A value that counts only while another key is off."""

    def wrapped(value: Any, draft: Draft) -> Any:
        if not is_off(draft.given.get(key)):
            raise NotNeeded(reason)
        return convert(value, draft)

    return wrapped


def dtype(value: Any, draft: Draft) -> str:
    return DTYPES[str(value)]


def precision(value: Any, draft: Draft) -> Several:
    """The dtype of the whole model: the trainer's and the encoders'."""
    name = DTYPES.get(str(value).lower())
    if name is None:
        raise Refused(f"{shown(value)} is not possible here; valid: bf16, fp16, no")
    if name == "float16":
        return Several({"model.precision": "float16", "train.precision": "float32"})
    return Several({"model.precision": name})


def repeats(value: Any, draft: Draft) -> int:
    """num_repeats of kohya's kind, where 1 is once."""
    if (count := whole(value)) < 1:
        raise Refused("0 repeats leave the dataset out; set disabled: true")
    if count == 1:
        raise NotNeeded("1 is once, and so is the default here")
    return count - 1


def resolution(value: Any, draft: Draft) -> Several:
    """One edge, or width and height: the edge of the square of this area."""
    edges = list(value) if isinstance(value, list | tuple) else re.split(r"[x,]", str(value))
    sides = [number(edge) for edge in edges]
    edge = compact(sides[0]) if len(sides) == 1 else area_edge(*sides)
    return Several({"resolution": edge, "resolution_type": "pixel_area"})


def resolutions(value: Any, draft: Draft) -> Several:
    """One edge of squares, or a list of edges, or of widths with heights."""
    edges = [
        area_edge(*map(number, item)) if isinstance(item, list) else compact(number(item))
        for item in (value if isinstance(value, list) else [value])
    ]
    return Several({"resolution": edges[0] if len(edges) == 1 else edges, "resolution_type": "pixel_area"})


def area_edge(width: float, height: float) -> float:
    return compact(round(math.sqrt(width * height), 3))


def compact(value: float) -> float:
    return int(value) if value == int(value) else value


def caption_ending(value: Any, draft: Draft) -> Any:
    if str(value).lstrip(".").lower() != "txt":
        raise Refused(f"{shown(value)}: captions here are in .txt files; rename them, or name a table in caption_file")
    raise NotNeeded("captions are in .txt files beside the media (caption_strategy: textfile)")


def epochs(value: Any, draft: Draft) -> int:
    """Optimizer steps of so many epochs, where the files could be counted."""
    if (count := number(value)) <= 0:
        raise NotNeeded("0 is off")
    batch = draft.get("train.batch_size", 1) * draft.get("train.accumulate", 1)
    formula = f"steps = epochs x draws of an epoch / {batch}, the draws being files x (repeats + 1) of all datasets"
    if draft.samples is None:
        raise Refused(
            f"train.steps counts optimizer steps: {formula}; {draft.uncounted or 'no file was counted'}; "
            "until then train.steps has its default"
        )
    return max(1, math.ceil(count * draft.samples / batch))


def pairs(value: Any) -> dict[str, Any]:
    """Arguments as "name=value" texts, in a list or divided by commas outside of brackets, or a mapping."""
    if isinstance(value, Mapping):
        return dict(value)
    words = (
        list(value)
        if isinstance(value, list | tuple)
        else re.split(r",(?![^(\[]*[)\]])(?=\s*[A-Za-z_]\w*=)", str(value))
    )
    arguments = {}
    for word in words:
        name, equals, right = str(word).partition("=")
        if not equals:
            raise Refused(f"{shown(word)} is no NAME=VALUE")
        arguments[name.strip()] = literal(right.strip())
    return arguments


def literal(word: str) -> Any:
    """A value as Python or a shell writes it: numbers, truth values, lists of numbers, else text."""
    lower = word.lower()
    if lower in ("true", "false"):
        return lower == "true"
    if lower in ("none", "null"):
        return None
    inside = word.strip("()[]")
    if inside != word or ("," in word and re.fullmatch(r"[-+0-9.eE, ]+", word)):
        return [literal(part.strip()) for part in inside.split(",") if part.strip()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word.strip("'\"")
