"""Families and flavours here, by the names of other trainers and by the repositories of checkpoints."""

from typing import Any

from schemas.catalog import FAMILIES
from schemas.foreign.draft import Draft, Refused, Several
from schemas.foreign.values import shown

CHOOSE = f"choose one here with --set model.family=NAME: {', '.join(FAMILIES)}"
#: Repositories of the same checkpoints, in other layouts, in lower case -> family and flavour.
REPOS = {flavour.repo.lower(): (name, key) for name, family in reversed(FAMILIES.items())
         for key, flavour in reversed(family.flavours.items())}  # fmt: skip


def flavour_of_repo(name: str) -> tuple[str, str] | None:
    """Family and flavour of a repository, also of the original checkpoint beside that in diffusers' layout."""
    word = name.lower().rstrip("/").removeprefix("hf://")
    for candidate in (word, f"{word}-diffusers", f"{word}_diffusers"):
        if candidate in REPOS:
            return REPOS[candidate]
    last = word.rpartition("/")[2].removesuffix("-bf16").removesuffix("-diffusers")
    return next(
        (published for repo, published in REPOS.items() if repo.rpartition("/")[2].removesuffix("-diffusers") == last),
        None,
    )


def chosen(family: str, flavour: str | None = None, expert: str | None = None) -> Several:
    values = {"model.family": family, "model.flavour": flavour, "train.experts": expert}
    return Several({key: value for key, value in values.items() if value})


def checkpoint(value: Any, draft: Draft) -> Several:
    """A checkpoint's repository or folder: the flavour where it is one of ours, else model.path."""
    if (published := flavour_of_repo(str(value))) is not None:
        family = draft.get("model.family")
        if family is None or family == published[0]:
            return chosen(*published)
    if str(value).endswith((".safetensors", ".pt", ".pth", ".ckpt", ".gguf", ".sft")):
        raise Refused(
            f"{shown(value)} is a single file; model.path takes a folder or repository in diffusers' layout, and the "
            "flavour's own repository is taken without it"
        )
    return Several({"model.path": str(value)})
