"""The configuration of a rehearsal, made of the user's: tiny random weights, its own folders, few steps, and nothing
that only a card or another host could show. Pure."""

from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import Any

from schemas.config.datasets import Dataset
from schemas.config.encoding import PART_OPTIONS
from schemas.config.pipeline import Config
from schemas.config.section import listed
from schemas.geometry import largest_valid_frames
from stages.rehearsing.tiny_shapes import KIND_OF

Values = dict[str, Any]
EDGE = 256  # pixels: largest edge of the square of a bucket's area, when tiny weights encode and train
FRAMES = 9  # most frames of a clip
DENOISING_STEPS = 4  # most steps of a validation sample
VISION_KIND, SCORE_KIND = "dinov2", "clip"
#: Options that are set to their defaults. A rehearsal can't show their effect.
OFF = (
    *("model.assistant", "text.quantization", "text.offload", "text.attention", "latents.chunk_frames"),
    *("train.weight_precision", "train.base_precision", "train.offload", "train.parallel", "train.compile"),
    *("train.attention", "train.local_cache", "train.adapter.init_from", "validation.attention"),
    *("validation.adapter", "validation.preview_autoencoder", "stages.engine", "caption", "masks", "notify", "hub"),
)
#: Further options that are set to their defaults: they belong to the weights, or to an option in OFF.
IGNORED = (
    *("model.revision", "text.precision", "latents.precision", "latents.slicing", "latents.tiling", "vision.revision"),
    *("vision.precision", "train.precision", "train.quantize_via", "train.compile_backend", "train.keep_every"),
    *("validation.scores.clip_revision", "features.revision", "features.precision"),
)
#: Options of a dataset that are set to their defaults, because no model makes captions or masks.
DATASET_IGNORED = (
    *("make_captions", "make_captions_where", "generated_captions", "caption_sets", "make_masks"),
    "skip_file_discovery",
)

STAND_IN = "A stand-in for a caption that a model would write."


def needs_stand_in(dataset: Dataset) -> bool:
    """Whether a model writes captions for the dataset."""
    return bool(dataset.used_caption_sets)


def tiny_kinds(config: Config) -> dict[str, str]:
    """Sub-folder of the rehearsal's checkpoints -> kind."""
    kinds = {"model": KIND_OF[config.model.family, config.model.flavour_spec.name]}
    if config.vision.model or (config.features is not None and config.features.model):
        kinds[VISION_KIND] = VISION_KIND
    return kinds | ({SCORE_KIND: SCORE_KIND} if config.validation.scores.clip else {})


def rehearsal_values(config: Config, folder: Path, steps: int, device: str | None = None) -> Values:
    """The values of the configuration at its own sizes. folder: folder of the rehearsal."""
    values = config.model_dump(mode="json", by_alias=True)
    for path in (*OFF, *IGNORED):
        _remove(values, path)
    for dataset in values["datasets"]:
        for key in DATASET_IGNORED:
            dataset.pop(key, None)
    for dataset, own in zip(values["datasets"], config.datasets, strict=True):
        if needs_stand_in(own):
            dataset["instance_prompt"] = dataset["instance_prompt"] or STAND_IN  # caption of items without one
    train, validation = values["train"], values["validation"]
    values |= {"root": str(folder / "work"), "output": str(folder / "output")}
    values["model"] |= {"path": str(folder / "model"), "precision": "float32", **dict.fromkeys(PART_OPTIONS)}
    train |= {"set": "current", "steps": steps, "checkpoint_every": max(1, steps // 2), "log_every": 1}
    train["trackers"] = [tracker for tracker in config.train.trackers if tracker != "wandb"]
    values["stages"]["decode"]["while_training"] = False
    validation["every"] = min(config.validation.every, steps)
    for section in ("vision", "features"):
        if values[section] is not None and values[section]["model"]:
            values[section]["model"] = str(folder / VISION_KIND)
    if config.validation.scores.clip:
        validation["scores"]["clip"] = str(folder / SCORE_KIND)
    if device is not None:
        for section in (train, *(stage for stage in values["stages"].values() if isinstance(stage, dict))):
            section |= {"device": device} if "device" in section else {}
    return values


def small_values(config: Config, values: Values) -> Values:
    """`rehearsal_values` at sizes for tiny weights on a CPU: the same buckets and samples, scaled down."""
    family, factor = config.model.family_spec, min(1.0, EDGE / max(_edges(config)))
    sparse = family.sparse if config.model.flavour_spec.sparse else None
    step = family.side_multiple if sparse is None else sparse.side_multiple

    def scale(resolution: float, kind: str) -> float:
        return round(resolution * factor**2, 6) if kind == "area" else max(step, resolution * factor)

    def scale_size(size: str) -> str:
        sides, _, frames = size.partition("@")
        small = "x".join(str(max(step, round(int(side) * factor / step) * step)) for side in sides.split("x"))
        kept = largest_valid_frames(min(int(frames or 1), FRAMES), family.temporal_stride)
        return small + f"@{kept}" * bool(frames)

    datasets = []
    for dataset, given in zip(config.datasets, values["datasets"], strict=True):
        kind = "pixel_area" if dataset.buckets == "family" else dataset.resolution_type
        sizes = [scale(resolution, kind) for resolution in dataset.resolutions(family.resolution)]
        small: Values = {
            "buckets": "computed",
            "resolution_type": kind,
            "resolution": sizes if len(sizes) > 1 else sizes[0],
        }
        small["bucket_step"] = max(1, round(dataset.bucket_step * factor))
        if dataset.dataset_type == "video":
            frames = {key: min(getattr(dataset.video, key), FRAMES) for key in ("num_frames", "min_frames")}
            small["video"] = {**given["video"], **frames, "frame_interval": None}
        datasets.append({**given, **small})
    validation = {**values["validation"], "steps": DENOISING_STEPS}
    default = f"{family.resolution}x{family.resolution}" + f"@{family.frames}" * (family.frames > 1)
    validation["size"] = list(dict.fromkeys(map(scale_size, listed(config.validation.size) or (default,))))
    validation["prompts"] = [
        {**prompt, "steps": None, "size": list(dict.fromkeys(map(scale_size, listed(own.size)))) or None}
        for prompt, own in zip(validation["prompts"], config.validation.prompts, strict=True)
    ]
    return {**values, "datasets": datasets, "validation": validation}


def _edges(config: Config) -> Iterator[float]:
    """Edges in pixels of the squares of the buckets' areas."""
    for dataset in config.datasets:
        is_area = dataset.buckets == "computed" and dataset.resolution_type == "area"
        for resolution in dataset.resolutions(config.model.family_spec.resolution):
            yield sqrt(resolution * 1e6) if is_area else resolution


def options_off(config: Config) -> list[str]:
    """The options in OFF that the configuration uses, as "train.base_precision int8-torchao"."""
    given, plain = (it.model_dump(mode="json", by_alias=True) for it in (config, _defaults(config)))
    found = []
    for path in OFF:
        value, default = _value_at(given, path), _value_at(plain, path)
        if value not in (default, None):
            found.append(path if isinstance(value, dict | list) else f"{path} {value}")
    return found


def _defaults(config: Config) -> Config:
    """A configuration of the same model and datasets with the defaults of all other options."""
    return Config.model_validate(
        {
            "root": config.root,
            "model": {"family": config.model.family, "flavour": config.model.flavour},
            "datasets": [dataset.model_dump(by_alias=True) for dataset in config.datasets],
            "train": {"experts": config.train.experts},
        }
    )


def _value_at(values: Values, path: str) -> Any:
    for key in path.split("."):
        values = (values or {}).get(key)  # type: ignore[assignment]
    return values


def _remove(values: Values, path: str) -> None:
    *sections, key = path.split(".")
    for section in sections:
        values = values.get(section) or {}
    values.pop(key, None)
