"""From answers, media and a candidate to the settings of a configuration. Pure."""

from collections import Counter

import numpy as np

from schemas.clips import frames_available
from schemas.config.encoding import Model
from schemas.family import Family
from schemas.geometry import choose_buckets, largest_valid_frames, resolution_buckets
from stages.configuring.answers import Answers
from stages.configuring.folder import Media
from stages.configuring.recipes import DATASET, Candidate, Settings, default_at, is_written

MOST_SET_ASIDE = 0.2  # share of items that a resolution or a length may cost, before a smaller one is chosen
LEAST_KEPT = 0.5  # share of items, before a resolution is too low for the model
EDGES = (768, 640, 512, 384, 256)  # resolutions below a recipe's
PASSES = 100  # of each item: what a LoRA of few pictures takes
LEAST_STEPS, MOST_STEPS = 500, 2000
LEAST_HELD_OUT = 40  # items, of which the recipe's 5 % are two
FEW_ITEMS, FEW_RANK = 20, 16  # a lower rank has less to remember few pictures with
CHECKPOINTS = 8  # of a run
ROUND = 50  # steps, to which these numbers are rounded down
WHOLE_FOLDER = "instanceprompt"


def choose_settings(
    answers: Answers, candidate: Candidate, media: Media | None, steps_limit: int | None = None
) -> Settings:
    """The settings, in the order of a file. media: None before they are looked at, for which the dataset's own
    settings suffice. steps_limit: what the time at hand allows, where a rate is known."""
    name = answers.name
    settings: Settings = {("root",): "./work"}
    if answers.around:
        settings = {("root",): f"../{name}-work", ("output",): f"../{name}-output"}
    settings[(*DATASET, "id")] = name
    settings[(*DATASET, "instance_data_dir")] = answers.folder
    if answers.sources is not None:
        settings[(*DATASET, "conditioning_data")] = answers.sources
    if answers.caption is not None:
        settings |= {(*DATASET, "caption_strategy"): WHOLE_FOLDER, (*DATASET, "instance_prompt"): answers.caption}
    settings[("train", "run")] = f"{name}-{candidate.settings.get(('train', 'adapter', 'type'), 'lora')}"
    settings |= candidate.settings
    if answers.kind != "video":
        settings.pop((*DATASET, "dataset_type"), None)
    if media is not None:
        settings |= fit_media(answers, candidate, media)
        settings |= train_length(settings, media, steps_limit)
        if len(media) < LEAST_HELD_OUT:
            settings.pop((*DATASET, "eval_fraction"), None)
        if len(media) < FEW_ITEMS and ("train", "adapter", "rank") in settings:
            settings[("train", "adapter", "rank")] = FEW_RANK
        settings |= prompts(answers, media)
    return {path: value for path, value in settings.items() if is_written(path, value)}


def fit_media(answers: Answers, candidate: Candidate, media: Media) -> Settings:
    """Resolution, frames and the size of validation samples: the recipe's, or less where the media are smaller."""
    family, flavour = candidate.model.family_spec, candidate.model.flavour_spec
    changed: Settings = {}
    edge = float(candidate.settings.get((*DATASET, "resolution"), family.resolution))
    own_sizes = candidate.settings.get((*DATASET, "buckets")) == "family"
    sizes = list(flavour.sizes) if own_sizes else _sizes(edge, family)
    if _share(media, sizes) < 1 - MOST_SET_ASIDE:
        edge = smaller_edge(media, candidate.model, edge)
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


def smaller_edge(media: Media, model: Model, edge: float) -> float:
    """The largest resolution below `edge` of which four fifths of the items cover a bucket; below `least_edge` only
    where that would cost more than half of them."""
    family = model.family_spec
    shares = {float(size): _share(media, _sizes(size, family)) for size in EDGES if size < edge} or {edge: 0.0}
    least = min(shares, key=lambda size: abs(size - least_edge(model)))
    good = [size for size, share in shares.items() if share >= 1 - MOST_SET_ASIDE]
    if good and (good[0] >= least or shares[least] < LEAST_KEPT):
        return good[0]
    return least if shares[least] >= LEAST_KEPT else max(shares, key=lambda size: (shares[size], size))


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
    """num_frames and min_frames: the recipe's, or fewer where most clips are shorter."""
    paths = [(*DATASET, "video", key) for key in ("num_frames", "min_frames")]
    most, least = (int(candidate.settings.get(path, default_at(path))) for path in paths)
    rate = float(candidate.settings.get((*DATASET, "video", "frame_rate"), family.frame_rate))
    there = np.sort(frames_available(media.duration, rate))
    typical = int(there[int(MOST_SET_ASIDE * len(there))])  # that four fifths have
    stride = family.temporal_stride
    frames = int(largest_valid_frames(max(stride + 1, min(most, typical)), stride))
    if frames < least:
        least = int(largest_valid_frames(max(stride + 1, frames // 2), stride))
    return {"num_frames": frames, "min_frames": least}


def train_length(settings: Settings, media: Media, steps_limit: int | None) -> Settings:
    """Steps by the number of items, at most `steps_limit`; checkpoints and validations evenly over them."""
    batch = settings.get(("train", "batch_size"), 1) * settings.get(("train", "accumulate"), 1)
    wanted = min(MOST_STEPS, max(LEAST_STEPS, len(media) * PASSES // batch // ROUND * ROUND))
    steps = max(1, min(wanted, steps_limit or wanted))
    every = min(steps, max(ROUND, steps // CHECKPOINTS // ROUND * ROUND))
    rarer = settings.get(("validation", "every"), every) // settings.get(("train", "checkpoint_every"), every)
    lengths: Settings = {("train", "steps"): steps, ("train", "checkpoint_every"): every}
    lengths[("validation", "every")] = min(steps, every * max(1, rarer))
    if steps < LEAST_STEPS:
        lengths[("train", "optimizer", "warmup")] = steps // 10
    return lengths


def prompts(answers: Answers, media: Media) -> Settings:
    """Validation prompts from captions of the data; of an edit with the sources that they belong to."""
    settings: Settings = {}
    for number, (text, source) in enumerate(media.prompts):
        here = ("validation", "prompts", number)
        settings |= {(*here, "name"): f"sample-{number + 1}", (*here, "prompt"): text}
        if answers.sources is not None and source is not None:
            settings[(*here, "image")] = f"{answers.sources}/{source}"
    return settings
