"""From answers and facts about the media to the settings of a configuration: the recipe that a table names for the task
and the card, with sizes and lengths that the media have. Pure."""

import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from schemas.clips import frames_available
from schemas.config.datasets import Dataset, MediaKind
from schemas.config.encoding import Latents, Model, Text
from schemas.config.training import Train
from schemas.config.validation import Validation
from schemas.config.yaml_reader import KeyPath, parse_yaml
from schemas.devices import RESERVED
from schemas.family import Family
from schemas.geometry import choose_buckets, largest_valid_frames, resolution_buckets
from stages.configuring.media import Media

Settings = dict[KeyPath, Any]

#: Task -> what it trains.
TASKS = {
    "style": "how pictures look",
    "character": "a person, an animal, a figure",
    "concept": "a thing or a kind of picture that the model does not know",
    "editing": "a change of pictures, from pairs: before and after",
    "motion": "how things move, from clips",
}
LISTS = {task: {"editing": "editing", "motion": "motion"}.get(task, "still") for task in TASKS}
_TOP = Path(__file__).resolve().parents[2]
#: In a wheel, and in a checkout.
FOLDER = next(path for path in (_TOP / "recipes", _TOP / "examples/recipes") if path.is_dir())
DATASET = ("datasets", 0)
QUICK_S = 2 * 3600.0  # at hand: the smaller model is preferred
MOST_SMALL = 0.2  # share of items that a resolution or a length may cost, before a smaller one is chosen
EDGES = (768, 640, 512, 384, 256, 192)  # resolutions below a recipe's
PASSES = 100  # of each item: what a LoRA of few pictures takes
LEAST_STEPS, MOST_STEPS = 500, 2000
LEAST_HELD_OUT = 40  # items, of which the recipe's 5 % are two
FEW_ITEMS, FEW_RANK = 20, 16  # a lower rank has less to remember few pictures with
CHECKPOINTS = 8  # of a run
ROUND = 50  # steps, to which these numbers are rounded down
OWN_DESCRIBER = "qwen2_5_vl"  # a text encoder that describes pictures; any other family takes DESCRIBER
DESCRIBER = "Qwen/Qwen2.5-VL-3B-Instruct"


@dataclass(frozen=True)
class Answers:
    """folder, sources: paths as they are to be written. name: of the dataset. card_gib: memory of the card. seconds: at
    hand, None without a limit. caption: of every item. family, recipe: None if any will do. inside_media: whether the
    configuration is in the folder of media, so that caches have to be elsewhere. needs_captions: whether items have no
    caption."""

    folder: str
    name: str
    task: str
    card_gib: float
    seconds: float | None = None
    sources: str | None = None
    caption: str | None = None
    family: str | None = None
    recipe: str | None = None
    inside_media: bool = False
    needs_captions: bool = False

    @property
    def kind(self) -> MediaKind:
        return "video" if self.task == "motion" else "image"


@dataclass(frozen=True)
class Candidate:
    """A row of the table. settings: those of the recipe that differ from the defaults, for any media."""

    recipe: str
    least_gib: float
    quick: bool = False
    settings: Settings = field(default_factory=dict)

    @property
    def model(self) -> Model:
        return Model.model_validate({path[1]: value for path, value in self.settings.items() if path[0] == "model"})

    def describe(self) -> str:
        kind = self.settings.get(("train", "adapter", "type"), "lora")
        trained = {"lora": "a LoRA", "lokr": "a LoKr", "full": "every weight"}[kind]
        return f"{trained} of {self.model.family} {self.model.flavour_spec.name}"


def made_for(recipe: str) -> float:
    """GB of the card that a recipe is for."""
    return float(recipe.rpartition("-")[2].removesuffix("gb"))


def predicted_gib(recipe: str) -> float:
    """GiB of the card that training with a recipe needs, as its comment has it, with the memory that is reserved."""
    text = (FOLDER / f"{recipe}.yaml").read_text().replace("\n#", "")
    return float(text.partition("Predicted for training: ")[2].partition(" ")[0]) + RESERVED / 2**30


def list_candidates(task: str) -> list[Candidate]:
    """The recipes for a task, in the order in which they are preferred."""
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
    """The named recipe as it is; else the first row of the table whose card is not larger than this one, or the row for
    the smallest card."""
    if answers.recipe is not None:
        return Candidate(answers.recipe, 0.0, settings=read_recipe(answers.recipe))
    rows = [row for row in list_candidates(answers.task) if answers.family in (None, row.model.family)]
    fitting = [row for row in rows if row.least_gib <= answers.card_gib] or [min(rows, key=lambda row: row.least_gib)]
    is_short = answers.seconds is not None and answers.seconds <= QUICK_S
    return min(fitting, key=lambda row: row.quick != is_short)


def families(task: str) -> list[str]:
    return list(dict.fromkeys(candidate.model.family for candidate in list_candidates(task)))


def list_recipes() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def list_tasks(recipe: str) -> list[str]:
    """The tasks that a recipe is for."""
    (dataset,) = parse_yaml((FOLDER / f"{recipe}.yaml").read_text()).value["datasets"]
    kind = "motion" if dataset.get("dataset_type") == "video" else "still"
    kind = "editing" if "conditioning_data" in dataset else kind
    return [task for task in TASKS if LISTS[task] == kind]


def read_recipe(name: str) -> Settings:
    """The settings of a recipe that differ from the defaults, without those of its example media."""

    def is_example(path: KeyPath) -> bool:
        in_dataset = path[:2] == DATASET and path[2] in ("id", "instance_data_dir", "conditioning_data")
        return in_dataset or len(path) == 1 or path == ("train", "run") or path[:2] == ("validation", "prompts")

    settings = dict(_leaves(parse_yaml((FOLDER / f"{name}.yaml").read_text()).value, ()))
    return {path: value for path, value in settings.items() if not is_example(path) and is_written(path, value)}


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def is_written(path: KeyPath, value: Any) -> bool:
    """Whether a setting differs from its default, or has none."""
    always = path[0] == "caption" or path in (("root",), ("output",), ("model", "family"), ("model", "flavour"))
    return always or path == ("train", "run") or path[:2] == ("validation", "prompts") or default_at(path) != value


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


def choose_settings(answers: Answers, candidate: Candidate, media: Media) -> Settings:
    """The settings, in the order of a file."""
    name = answers.name
    settings: Settings = {("root",): "./work"}
    if answers.inside_media:
        settings = {("root",): f"../{name}-work", ("output",): f"../{name}-output"}
    settings[(*DATASET, "id")] = name
    settings[(*DATASET, "instance_data_dir")] = answers.folder
    if answers.sources is not None:
        settings[(*DATASET, "conditioning_data")] = answers.sources
    if answers.caption is not None:
        settings |= {(*DATASET, "caption_strategy"): "instanceprompt", (*DATASET, "instance_prompt"): answers.caption}
    elif answers.needs_captions:
        own = candidate.model.family_spec.model_classes.get("text_encoder") == OWN_DESCRIBER
        settings |= {("caption", "prompts"): ["detailed"]} if own else {("caption", "model"): DESCRIBER}
    settings[("train", "run")] = f"{name}-{candidate.settings.get(('train', 'adapter', 'type'), 'lora')}"
    settings |= candidate.settings
    if answers.kind != "video":
        settings.pop((*DATASET, "dataset_type"), None)
    settings |= fit_media(answers, candidate, media) | train_length(settings, media)
    if media.count < LEAST_HELD_OUT:
        settings.pop((*DATASET, "eval_fraction"), None)
    if media.count < FEW_ITEMS and ("train", "adapter", "rank") in settings:
        settings[("train", "adapter", "rank")] = FEW_RANK
    for number, (text, source) in enumerate(media.prompts):
        here = ("validation", "prompts", number)
        settings |= {(*here, "name"): f"sample-{number + 1}", (*here, "prompt"): text}
        if answers.sources is not None and source is not None:
            settings[(*here, "image")] = f"{answers.sources}/{source}"
    return {path: value for path, value in settings.items() if is_written(path, value)}


def fit_media(answers: Answers, candidate: Candidate, media: Media) -> Settings:
    """Resolution, frames and the size of validation samples: the recipe's, or less if the media are smaller."""
    family, flavour = candidate.model.family_spec, candidate.model.flavour_spec
    edge = float(candidate.settings.get((*DATASET, "resolution"), family.resolution))
    own_sizes = candidate.settings.get((*DATASET, "buckets")) == "family"
    sizes, changed = list(flavour.sizes) if own_sizes else _sizes(edge, family), Settings()
    if _share(media, sizes) < 1 - MOST_SMALL:
        shares = {float(smaller): _share(media, _sizes(smaller, family)) for smaller in EDGES if smaller < edge}
        large = [smaller for smaller, share in shares.items() if share >= 1 - MOST_SMALL]
        edge = large[0] if large else max(shares, key=lambda smaller: (shares[smaller], -smaller), default=edge)
        sizes = _sizes(edge, family)
        changed = {(*DATASET, "resolution"): int(edge), (*DATASET, "buckets"): "computed"}
    numbers = Counter[int](choose_buckets(media.width, media.height, sizes).tolist())
    width, height = sizes[numbers.most_common(1)[0][0]]
    size = f"{width}x{height}"
    if answers.kind == "video":
        frames = choose_frames(candidate, family, media)
        changed |= {(*DATASET, "video", key): count for key, count in frames.items()}
        size += f"@{frames['num_frames']}"
    return changed | {("validation", "size"): size}


def least_edge(model: Model) -> float:
    """A resolution below which the model loses details: half of its own, or the lower end of the sides it was made
    for."""
    window = model.family_spec.scale_window
    return window.low if window is not None and model.flavour_spec.in_window else model.family_spec.resolution / 2


def _share(media: Media, sizes: list[tuple[int, int]]) -> float:
    """Share of the items that cover their bucket without being enlarged."""
    width, height = np.array(sizes)[choose_buckets(media.width, media.height, sizes)].T
    return float(((media.width >= width) & (media.height >= height)).mean())


def _sizes(edge: float, family: Family) -> list[tuple[int, int]]:
    step, aspect = default_at((*DATASET, "bucket_step")), default_at((*DATASET, "max_aspect"))
    return list(resolution_buckets(edge, "pixel_area", family.side_multiple, step=step, max_aspect=aspect))


def choose_frames(candidate: Candidate, family: Family, media: Media) -> dict[str, int]:
    """num_frames and min_frames: the recipe's, or fewer if most clips are shorter."""
    paths = [(*DATASET, "video", key) for key in ("num_frames", "min_frames")]
    most, least = (int(candidate.settings.get(path, default_at(path))) for path in paths)
    rate = candidate.settings.get((*DATASET, "video", "frame_rate"), family.frame_rate)
    available = np.sort(frames_available(media.duration, family.frame_rate if rate == "source" else float(rate)))
    typical = int(available[int(MOST_SMALL * len(available))])  # that four fifths have
    stride = family.temporal_stride
    frames = int(largest_valid_frames(max(stride + 1, min(most, typical)), stride))
    if frames < least:
        least = int(largest_valid_frames(max(stride + 1, frames // 2), stride))
    return {"num_frames": frames, "min_frames": least}


def train_length(settings: Settings, media: Media) -> Settings:
    """Steps by the number of items; checkpoints and validations evenly over them."""
    batch = settings.get(("train", "batch_size"), 1) * settings.get(("train", "accumulate"), 1)
    steps = min(MOST_STEPS, max(LEAST_STEPS, media.count * PASSES // batch // ROUND * ROUND))
    every = max(ROUND, steps // CHECKPOINTS // ROUND * ROUND)
    rarer = settings.get(("validation", "every"), every) // settings.get(("train", "checkpoint_every"), every)
    return {
        ("train", "steps"): steps,
        ("train", "checkpoint_every"): every,
        ("validation", "every"): min(steps, every * max(1, rarer)),
    }
