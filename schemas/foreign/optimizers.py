"""Optimizers and schedules of other trainers, by their names there."""

from collections.abc import Mapping
from typing import Any

from schemas.foreign.draft import Draft, NotNeeded, Refused, Several
from schemas.foreign.values import number, pairs, shown, whole
from schemas.optimizers import OPTIMIZERS

ADAM, OPTIMI = (0.9, 0.999), (0.9, 0.99)  # the libraries' default betas, where ours differ

#: Name there, in lower case -> name here, and betas that it has without any.
KNOWN: Mapping[str, tuple[str, tuple[float, float] | None]] = {
    **dict.fromkeys(("", "adamw", "adamw_bf16", "torch.optim.adamw", "adamw_optimi_torch"), ("adamw", ADAM)),
    **dict.fromkeys(("adamw8bit", "adamw8", "bnb-adamw8bit"), ("bnb-adamw8bit", ADAM)),
    **dict.fromkeys(
        ("pagedadamw8bit", "bnb-adamw8bit-paged", "bitsandbytes.optim.pagedadamw8bit"), ("bnb-adamw8bit-paged", ADAM)
    ),
    **dict.fromkeys(("lion8bit", "bnb-lion8bit"), ("bnb-lion8bit", None)),
    **dict.fromkeys(("pagedlion8bit", "bnb-lion8bit-paged"), ("bnb-lion8bit-paged", None)),
    **dict.fromkeys(("optimi-adamw", "adamw_optimi"), ("optimi-adamw", OPTIMI)),
    **dict.fromkeys(("optimi-lion", "lion"), ("optimi-lion", None)),
    **dict.fromkeys(("optimi-stableadamw", "stableadamw"), ("optimi.StableAdamW", None)),
    "optimi-radam": ("optimi.RAdam", None),
    "optimi-ranger": ("optimi.Ranger", None),
    "optimi-adan": ("optimi.Adan", None),
    "optimi-adam": ("optimi.Adam", None),
    "optimi-sgd": ("optimi.SGD", None),
    **dict.fromkeys(("prodigy", "prodigyopt.prodigy"), ("prodigy", None)),
    **dict.fromkeys(
        ("adamw_schedulefree", "adamwschedulefree", "schedulefree.adamwschedulefree"), ("adamw-schedulefree", None)
    ),
}
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine",
    "polynomial": "polynomial",
}


def optimizer(value: Any, draft: Draft) -> Several:
    name = str(value).strip()
    if name.lower() in KNOWN:
        ours, betas = KNOWN[name.lower()]
        values: dict[str, Any] = {"train.optimizer.name": ours}
        if betas and draft.get("train.optimizer.betas") is None:
            values["train.optimizer.betas"] = list(betas)
        return Several(values)
    if "." in name:
        return Several({"train.optimizer.name": name})
    raise Refused(
        f"{shown(name)} is none of {', '.join(OPTIMIZERS)}; choose one in train.optimizer.name, or name the dotted "
        "path of a class (docs/optimizers.md)"
    )


def arguments(value: Any, draft: Draft) -> Several:
    """Further arguments of the optimizer: those that have keys here go there."""
    values = {}
    for name, item in pairs(value).items():
        has_key = name in ("weight_decay", "betas", "eps")
        values["train.optimizer." + ("" if has_key else "arguments.") + name] = item
    if not values:
        raise NotNeeded("there are none")
    return Several(values)


def schedule(value: Any, draft: Draft) -> Several:
    """diffusers' schedules; its `constant` has no warm-up."""
    name = str(value).strip()
    if name not in SCHEDULES:
        raise Refused(f"{shown(name)} is not possible; valid: {', '.join(sorted(set(SCHEDULES.values())))}")
    values: dict[str, Any] = {"train.optimizer.schedule": SCHEDULES[name]}
    if name == "constant":
        values["train.optimizer.warmup"] = 0
    return Several(values)


def warmup(value: Any, draft: Draft) -> int:
    """Steps; a fraction is of all steps. None with diffusers' `constant`, which ignores it."""
    if draft.given.get("lr_scheduler") == "constant" and number(value):
        raise NotNeeded("the schedule `constant` has no warm-up there")
    steps = number(value)
    if 0 < steps < 1:
        return round(steps * draft.get("train.steps", 1000))
    return whole(value)


def cycles(value: Any, draft: Draft) -> int:
    if "restarts" not in str(draft.given.get("lr_scheduler")):
        raise NotNeeded("the schedule has no restarts")
    return max(1, whole(value))


def power(value: Any, draft: Draft) -> float:
    if draft.given.get("lr_scheduler") != "polynomial":
        raise NotNeeded("the schedule is not polynomial")
    return number(value)


def lr_end(value: Any, draft: Draft) -> float:
    if draft.get("train.optimizer.schedule", SCHEDULES.get(str(draft.given.get("lr_scheduler")))) == "constant":
        raise NotNeeded("the schedule is constant")
    return number(value)


def beta(index: int) -> Any:
    def convert(value: Any, draft: Draft) -> Several:
        both = list(draft.get("train.optimizer.betas") or ADAM)
        both[index] = number(value)
        return Several({"train.optimizer.betas": both})

    return convert
