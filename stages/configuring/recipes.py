"""The recipes as candidates: what each sets that differs from the defaults, for which tasks and cards it is tried, and
what is changed where a card has more memory or less than it was made for."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from schemas.config.datasets import Dataset
from schemas.config.encoding import Latents, Model, Text
from schemas.config.training import Train
from schemas.config.validation import Validation
from schemas.config.yaml_reader import KeyPath, parse_yaml
from stages.configuring.answers import TASKS, Answers

Settings = dict[KeyPath, Any]

_TOP = Path(__file__).resolve().parents[2]
#: In a wheel, and in a checkout.
FOLDER = next(path for path in (_TOP / "recipes", _TOP / "examples/recipes") if path.is_dir())
LISTS = {task: {"editing": "editing", "motion": "motion"}.get(task, "still") for task in TASKS}
QUICK_S = 2 * 3600.0  # at hand: the smaller model is preferred
ROOMY = 1.4  # a card with so much more memory than the recipe's is first tried without what saves memory
#: What saves memory and costs time, by the program whose memory it saves.
SAVERS: dict[str, tuple[KeyPath, ...]] = {
    "encode-text": (("text", "offload"), ("text", "batch_tokens")),
    "encode-latents": (("latents", "chunk_frames"), ("latents", "tiling")),
    "train": (
        ("train", "base_precision"),
        ("train", "quantize_via"),
        ("train", "offload", "blocks"),
        ("train", "offload", "streams"),
        ("train", "offload", "activations"),
    ),
}
DATASET = ("datasets", 0)


@dataclass(frozen=True)
class Candidate:
    """settings: those of the recipe that differ from the defaults, for an example's media. size: of its pictures."""

    recipe: str
    least_gib: float
    quick: bool = False
    settings: Settings = field(default_factory=dict)
    roomy: bool = False  # without what saves memory

    @property
    def family(self) -> str:
        return self.settings["model", "family"]

    @property
    def model(self) -> Model:
        chosen = {path[1]: value for path, value in self.settings.items() if path[0] == "model"}
        return Model.model_validate(chosen)

    def describe(self) -> str:
        kind = self.settings.get(("train", "adapter", "type"), "lora")
        trained = {"lora": "a LoRA", "lokr": "a LoKr", "full": "every weight"}[kind]
        return f"{trained} of {self.model.family} {self.model.flavour_spec.name}"

    @property
    def made_for(self) -> float:
        """GiB of the card that it is for."""
        return max(self.least_gib, float(self.recipe.rpartition("-")[2].removesuffix("gb")))

    def without_savers(self, *programs: str) -> "Candidate":
        """Without what saves memory of these programs; the same where it has none of that."""
        savers = {path for program in programs for path in SAVERS[program]}
        settings = {path: value for path, value in self.settings.items() if path not in savers}
        return self if settings == self.settings else replace(self, settings=settings, roomy=True)

    def tightened(self, too_large: set[str]) -> "Candidate | None":
        """With what saves memory of these programs; None where that changes nothing, or is a candidate already."""
        changes: Settings = {}
        if "encode-text" in too_large:
            changes |= dict(zip(SAVERS["encode-text"], ("blocks", 16384), strict=True))
        if "encode-latents" in too_large:
            video = self.settings.get((*DATASET, "dataset_type")) == "video"
            changes |= {("latents", "chunk_frames"): 2} if video else {("latents", "tiling"): True}
        if "train" in too_large and self.settings.get(("train", "adapter", "type"), "lora") != "full":
            changes |= dict.fromkeys(SAVERS["train"][2:], True)
        settings = self.settings | changes
        if changes.get(("train", "offload", "blocks")):
            settings.pop(("train", "gradient_checkpointing_interval"), None)
        return None if self.roomy or settings == self.settings else replace(self, settings=settings)


def list_candidates(task: str) -> list[Candidate]:
    """The recipes for a task, in the order in which they are preferred."""
    table = tomllib.loads((FOLDER / "choices.toml").read_text())
    rows = table[LISTS[task]]
    return [
        Candidate(
            row["recipe"],
            row["least_gib"],
            row.get("quick", False),
            read_recipe(row["recipe"]) | {tuple(key.split(".")): value for key, value in row.get("set", {}).items()},
        )
        for row in rows
    ]


def list_recipes() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def list_tasks(recipe: str) -> list[str]:
    """The tasks that a recipe is for."""
    (dataset,) = parse_yaml((FOLDER / f"{recipe}.yaml").read_text()).value["datasets"]
    kind = "motion" if dataset.get("dataset_type") == "video" else "still"
    kind = "editing" if "conditioning_data" in dataset else kind
    return [task for task in TASKS if LISTS[task] == kind]


def read_recipe(name: str) -> Settings:
    """The settings of a recipe that differ from the defaults, for any media."""
    document = parse_yaml((FOLDER / f"{name}.yaml").read_text()).value
    settings = dict(_leaves(document, ()))
    return {path: value for path, value in settings.items() if not _is_example(path) and is_written(path, value)}


def _is_example(path: KeyPath) -> bool:
    in_dataset = path[:2] == DATASET and path[2] in ("id", "instance_data_dir", "conditioning_data")
    return in_dataset or len(path) == 1 or path == ("train", "run") or path[:2] == ("validation", "prompts")


def is_written(path: KeyPath, value: Any) -> bool:
    """Whether a setting differs from its default, or has none."""
    always = path in (("root",), ("output",), ("model", "family"), ("model", "flavour"), ("train", "run"))
    return always or path[:2] == ("validation", "prompts") or default_at(path) != value


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def default_at(path: KeyPath) -> Any:
    """The default of an option below model, text, latents, train, validation or a dataset."""
    sections = {"text": Text(), "latents": Latents(), "train": Train(), "validation": Validation()}
    first, *rest = path[2:] if path[0] == "datasets" else path[1:]
    if (section := sections.get(str(path[0]))) is not None:
        here = getattr(section, str(first))
    else:
        here = (Model if path[0] == "model" else Dataset).model_fields[str(first)].default
    for key in rest:
        here = getattr(here, str(key))
    return here


def attempts(answers: Answers) -> Iterator[Candidate]:
    """Candidates to predict, the preferred one first. With memory to spare a recipe comes first without what saves
    it; one that is named comes as it is."""
    if answers.recipe is not None:
        yield Candidate(answers.recipe, 0.0, settings=read_recipe(answers.recipe))
        return
    candidates = [recipe for recipe in list_candidates(answers.task) if answers.family in (None, recipe.family)]
    candidates = [recipe for recipe in candidates if recipe.least_gib <= answers.card_gib] or candidates[-1:]
    if answers.seconds is not None and answers.seconds <= QUICK_S:
        candidates.sort(key=lambda recipe: not recipe.quick)
    else:
        candidates.sort(key=lambda recipe: recipe.quick)
    for candidate in candidates:
        if answers.card_gib >= ROOMY * candidate.made_for and (roomy := candidate.without_savers(*SAVERS)).roomy:
            yield roomy
        yield candidate


def families(task: str) -> list[str]:
    return list(dict.fromkeys(candidate.family for candidate in list_candidates(task)))
