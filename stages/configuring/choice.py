"""Computes the settings of a configuration from answers and facts about the media: the recipe that a table names for
the task and the card, with sizes and lengths that fit the media. No files except recipes are read."""

import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from schemas.clips import frames_available
from schemas.config.datasets import Dataset, MediaKind
from schemas.config.encoding import Latents, Model, Text, caption_settings
from schemas.config.training import Train
from schemas.config.validation import Validation
from schemas.config.yaml_reader import KeyPath, parse_yaml
from schemas.devices import RESERVED
from schemas.family import Family
from schemas.geometry import choose_buckets, largest_valid_frames, resolution_buckets
from stages.configuring.media import Media

Settings = dict[KeyPath, Any]

#: Task -> description.
TASKS = {
    "character": "a person, an animal, a figure",
    "style": "how pictures look",
    "object": "a thing, or a kind of picture that the model does not know",
    "editing": "a change of pictures, from pairs: before and after",
    "motion": "how things move, from clips",
}
LISTS = {task: {"editing": "editing", "motion": "motion"}.get(task, "still") for task in TASKS}
_TOP = Path(__file__).resolve().parents[2]
#: Folder of the recipes in a wheel, or in a checkout.
FOLDER = next(path for path in (_TOP / "recipes", _TOP / "examples/recipes") if path.is_dir())
DATASET = ("datasets", 0)
QUICK_S = 2 * 3600.0  # seconds; with less time, smaller models are preferred
MAX_SMALL_SHARE = 0.2  # a smaller resolution or length is chosen if it is too large for more items
SMALL_RESOLUTIONS = (768, 640, 512, 384, 256, 192)  # resolutions that are tried if the recipe's resolution is too large
PASSES_PER_ITEM = 100  # passes over each item, enough for a LoRA of few pictures
MIN_STEPS, MAX_STEPS = 500, 2000
MIN_HELD_OUT_ITEMS = 40  # items; the recipe's 5 % of them are two
FEW_ITEMS, FEW_RANK = 20, 16  # a lower rank memorizes few pictures less
CHECKPOINTS = 8  # checkpoints of a run
ROUND = 50  # numbers of steps are rounded down to multiples of this


@dataclass(frozen=True)
class Answers:
    """Answers to the questions. folder, sources: paths of media and source images for the file. name: name of the
    dataset. card_gib: memory of the card in GiB. seconds: available time, None without a limit. trigger: name or
    words for what is trained, None without one. family, recipe: None for the best candidate. is_in_media: whether the
    configuration is in the folder of media, so that caches must be in other folders. needs_captions: whether some items
    do not have a caption."""

    folder: str
    name: str
    task: str
    card_gib: float
    seconds: float | None = None
    sources: str | None = None
    trigger: str | None = None
    family: str | None = None
    recipe: str | None = None
    is_in_media: bool = False
    needs_captions: bool = False

    @property
    def kind(self) -> MediaKind:
        return "video" if self.task == "motion" else "image"


@dataclass(frozen=True)
class Candidate:
    """A row of the table. min_gib: smallest memory of the card. quick: whether it is preferred if time is short.
    settings: settings of the recipe that differ from the defaults."""

    recipe: str
    min_gib: float
    quick: bool = False
    settings: Settings = field(default_factory=dict)

    @property
    def model(self) -> Model:
        return Model.model_validate({path[1]: value for path, value in self.settings.items() if path[0] == "model"})

    def describe(self) -> str:
        kind = self.settings.get(("train", "adapter", "type"), "lora")
        trained = {"lora": "a LoRA", "lokr": "a LoKr", "full": "every weight"}[kind]
        return f"{trained} of {self.model.family} {self.model.flavour_spec.name}"


def parse_card_gib(recipe: str) -> float:
    """The memory in GB of the card that a recipe is made for."""
    return float(recipe.rpartition("-")[2].removesuffix("gb"))


def predicted_gib(recipe: str) -> float:
    """GiB of the card that training with a recipe needs, as its comment has it, with the memory that is reserved."""
    text = (FOLDER / f"{recipe}.yaml").read_text().replace("\n#", "")
    return float(text.partition("Predicted for training: ")[2].partition(" ")[0]) + RESERVED / 2**30


def list_candidates(task: str) -> list[Candidate]:
    """The recipes for a task, the preferred recipe first."""
    rows = tomllib.loads((FOLDER / "choices.toml").read_text())[LISTS[task]]
    return [
        Candidate(
            row["recipe"],
            row["least_gib"],
            row.get("quick", False),
            read_recipe(row["recipe"]) | {tuple(key.split(".")): value for key, value in row.get("set", {}).items()},
        )
        for row in rows
    ]


def choose_candidate(answers: Answers) -> Candidate:
    """The recipe that the answers name without changes; otherwise the first row of the table that fits the card, or the
    row for the smallest card."""
    if answers.recipe is not None:
        return Candidate(answers.recipe, 0.0, settings=read_recipe(answers.recipe))
    rows = [row for row in list_candidates(answers.task) if answers.family in (None, row.model.family)]
    fitting = [row for row in rows if row.min_gib <= answers.card_gib] or [min(rows, key=lambda row: row.min_gib)]
    is_short = answers.seconds is not None and answers.seconds <= QUICK_S
    return min(fitting, key=lambda row: row.quick != is_short)


def families(task: str) -> list[str]:
    return list(dict.fromkeys(candidate.model.family for candidate in list_candidates(task)))


def list_recipes() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


@dataclass(frozen=True)
class RecipeCard:
    """A recipe as a page shows it. about: what the model is for. size: number of its weights. license: license of its
    weights. need_gib: predicted memory of training. card_gib: memory of the card that the recipe is made for."""

    recipe: str
    task: str
    model: str
    about: str
    size: str
    license: str
    need_gib: float
    card_gib: float


def describe_recipes() -> list[RecipeCard]:
    """The recipes with descriptions of their models, grouped by task."""
    choices = tomllib.loads((FOLDER / "choices.toml").read_text())
    cards = []
    for kind in dict.fromkeys(LISTS.values()):
        for recipe in dict.fromkeys(row["recipe"] for row in choices[kind]):
            if LISTS[list_tasks(recipe)[0]] != kind:  # a row changes the recipe for this task
                continue
            model = Candidate(recipe, 0.0, settings=read_recipe(recipe)).model
            facts = choices["models"][f"{model.family}/{model.flavour_spec.name}"]
            card = parse_card_gib(recipe)
            cards.append(RecipeCard(recipe, kind, **facts, need_gib=predicted_gib(recipe), card_gib=card))
    return cards


def list_tasks(recipe: str) -> list[str]:
    """The tasks for which a recipe is made."""
    (dataset,) = _read_file(recipe)["datasets"]
    kind = "motion" if dataset.get("dataset_type") == "video" else "still"
    kind = "editing" if "conditioning_data" in dataset else kind
    return [task for task in TASKS if LISTS[task] == kind]


@cache
def _read_file(recipe: str) -> dict[str, Any]:
    return parse_yaml((FOLDER / f"{recipe}.yaml").read_text()).value


@cache
def read_recipe(name: str) -> Settings:
    """The settings of a recipe that differ from the defaults, without settings of its example media. They are read once
    and not changed."""

    def is_example(path: KeyPath) -> bool:
        in_dataset = path[:2] == DATASET and path[2] in ("id", "instance_data_dir", "conditioning_data")
        return in_dataset or len(path) == 1 or path == ("train", "run") or path[:2] == ("validation", "prompts")

    settings = dict(_leaves(_read_file(name), ()))
    return {path: value for path, value in settings.items() if not is_example(path) and is_written(path, value)}


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def is_written(path: KeyPath, value: Any) -> bool:
    """Whether a setting is written into the file: it differs from its default, or is always written."""
    always = path[0] == "caption" or path in (("root",), ("output",), ("model", "family"), ("model", "flavour"))
    return always or path == ("train", "run") or path[:2] == ("validation", "prompts") or default_at(path) != value


def default_at(path: KeyPath) -> Any:
    """The default of an option below model, text, latents, train, validation or a dataset."""
    sections = {"text": Text, "latents": Latents, "train": Train, "validation": Validation}
    first, *keys = path[2:] if path[0] == "datasets" else path[1:]
    if (section := sections.get(str(path[0]))) is not None:
        value = getattr(section(), str(first))
    else:
        value = (Model if path[0] == "model" else Dataset).model_fields[str(first)].default
    for key in keys:
        value = getattr(value, str(key), None)  # None: the section is absent by default
    return value


def choose_settings(answers: Answers, candidate: Candidate, media: Media) -> Settings:
    """Choose the settings, in the order of a file."""
    name = answers.name
    settings: Settings = {("root",): "./work"}
    if answers.is_in_media:
        settings = {("root",): f"../{name}-work", ("output",): f"../{name}-output"}
    settings[(*DATASET, "id")] = name
    settings[(*DATASET, "instance_data_dir")] = answers.folder
    if answers.sources is not None:
        settings[(*DATASET, "conditioning_data")] = answers.sources
    if answers.trigger is not None:
        settings[(*DATASET, "trigger")] = answers.trigger
    elif answers.needs_captions:
        section = caption_settings(candidate.model.family_spec)
        settings |= {("caption", option): value for option, value in section.items()}
    settings[("train", "run")] = f"{name}-{candidate.settings.get(('train', 'adapter', 'type'), 'lora')}"
    settings |= candidate.settings
    if answers.kind != "video":
        settings.pop((*DATASET, "dataset_type"), None)
    settings |= fit_media(answers, candidate, media) | train_length(settings, media)
    if media.count < MIN_HELD_OUT_ITEMS:
        settings.pop((*DATASET, "eval_fraction"), None)
    if media.count < FEW_ITEMS and ("train", "adapter", "rank") in settings:
        settings[("train", "adapter", "rank")] = FEW_RANK
    trigger = (answers.trigger or "").strip(" ,")
    prompts = media.prompts or ([(trigger, None)] if trigger and answers.sources is None else [])
    for number, (text, source) in enumerate(prompts):
        prompt_path = ("validation", "prompts", number)
        text = text if trigger in text else f"{answers.trigger} {text}"
        settings |= {(*prompt_path, "name"): f"sample-{number + 1}", (*prompt_path, "prompt"): text}
        if answers.sources is not None and source is not None:
            settings[(*prompt_path, "image")] = f"{answers.sources}/{source}"
    return {path: value for path, value in settings.items() if is_written(path, value)}


def fit_media(answers: Answers, candidate: Candidate, media: Media) -> Settings:
    """Choose resolution, frames and the size of validation samples: the recipe's values, or smaller ones if the media
    are smaller."""
    family, flavour = candidate.model.family_spec, candidate.model.flavour_spec
    edge = float(candidate.settings.get((*DATASET, "resolution"), family.resolution))
    has_own_sizes = candidate.settings.get((*DATASET, "buckets")) == "family"
    sizes, changes = list(flavour.sizes) if has_own_sizes else bucket_sizes(edge, family), Settings()
    if _share(media, sizes) < 1 - MAX_SMALL_SHARE:
        smaller_edges = [smaller for smaller in SMALL_RESOLUTIONS if smaller < edge]
        shares = {float(smaller): _share(media, bucket_sizes(smaller, family)) for smaller in smaller_edges}
        large = [smaller for smaller, share in shares.items() if share >= 1 - MAX_SMALL_SHARE]
        edge = large[0] if large else max(shares, key=lambda smaller: (shares[smaller], -smaller), default=edge)
        sizes = bucket_sizes(edge, family)
        changes = {(*DATASET, "resolution"): int(edge), (*DATASET, "buckets"): "computed"}
    numbers = Counter[int](choose_buckets(media.width, media.height, sizes).tolist())
    width, height = sizes[numbers.most_common(1)[0][0]]
    size = f"{width}x{height}"
    if answers.kind == "video":
        frames = choose_frames(candidate, family, media)
        changes |= {(*DATASET, "video", key): count for key, count in frames.items()}
        size += f"@{frames['num_frames']}"
    return changes | {("validation", "size"): size}


def least_edge(model: Model) -> float:
    """The resolution below which the model loses details: half of its default resolution, or the lower end of its valid
    sides."""
    window = model.family_spec.scale_window
    return window.low if window is not None and model.flavour_spec.in_window else model.family_spec.resolution / 2


def _share(media: Media, sizes: list[tuple[int, int]]) -> float:
    """Share of the items that cover their bucket without being enlarged."""
    width, height = np.array(sizes)[choose_buckets(media.width, media.height, sizes)].T
    return float(((media.width >= width) & (media.height >= height)).mean())


def cropped_shares(sizes: list[tuple[int, int]], media: Media) -> np.ndarray:
    """(n,) share of each item's area that is cut off, so that it fills its bucket."""
    width, height = np.array(sizes)[choose_buckets(media.width, media.height, sizes)].T
    ratio = (media.width / media.height) / (width / height)
    return 1 - np.minimum(ratio, 1 / ratio)


def bucket_sizes(edge: float, family: Family) -> list[tuple[int, int]]:
    step, aspect = default_at((*DATASET, "bucket_step")), default_at((*DATASET, "max_aspect"))
    return list(resolution_buckets(edge, "pixel_area", family.side_multiple, step=step, max_aspect=aspect))


def choose_frames(candidate: Candidate, family: Family, media: Media) -> dict[str, int]:
    """Choose num_frames and min_frames: the recipe's values, or fewer frames if most clips are shorter."""
    paths = [(*DATASET, "video", key) for key in ("num_frames", "min_frames")]
    max_frames, min_frames = (int(candidate.settings.get(path, default_at(path))) for path in paths)
    rate = candidate.settings.get((*DATASET, "video", "frame_rate"), family.frame_rate)
    available = np.sort(frames_available(media.duration, family.frame_rate if rate == "source" else float(rate)))
    common_frames = int(available[int(MAX_SMALL_SHARE * len(available))])  # in four fifths of the clips
    stride = family.temporal_stride
    frames = int(largest_valid_frames(max(stride + 1, min(max_frames, common_frames)), stride))
    if frames < min_frames:
        min_frames = int(largest_valid_frames(max(stride + 1, frames // 2), stride))
    return {"num_frames": frames, "min_frames": min_frames}


def train_length(settings: Settings, media: Media) -> Settings:
    """Choose the number of steps by the number of items, and spread checkpoints and validations evenly over them."""
    batch = settings.get(("train", "batch_size"), 1) * settings.get(("train", "accumulate"), 1)
    steps = min(MAX_STEPS, max(MIN_STEPS, media.count * PASSES_PER_ITEM // batch // ROUND * ROUND))
    every = max(ROUND, steps // CHECKPOINTS // ROUND * ROUND)
    rarer = settings.get(("validation", "every"), every) // settings.get(("train", "checkpoint_every"), every)
    return {
        ("train", "steps"): steps,
        ("train", "checkpoint_every"): every,
        ("validation", "every"): min(steps, every * max(1, rarer)),
    }
