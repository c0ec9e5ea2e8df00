"""Media rows -> samples, texts and units: pure functions of tables and settings, in no order of their own.

Nothing here opens a file, so a plan for a million rows is arithmetic, and the same rows give the same plan
whatever order they are listed in.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import PurePath
from typing import Any

from cache.rejects import reject
from schemas import identity, prompts
from schemas.catalogue import Family
from schemas.config import Config, Dataset
from schemas.errors import LatentpressError
from schemas.geometry import (
    Bucket,
    choose_bucket,
    cover_crop,
    frames_available,
    largest_valid_frames,
    resolution_buckets,
)

Row = dict[str, Any]

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CLEANED_AWAY = ("empty-caption", "nothing is left of its caption once the pipeline has cleaned it; write another")
CONDITION = {"t2i": "none", "t2v": "none", "i2i": "source", "i2v": "first-frame"}


@dataclass
class Draft:
    """A whole plan, before what earlier generations already hold is taken out."""

    samples: dict[str, Row] = field(default_factory=dict)
    texts: dict[str, Row] = field(default_factory=dict)
    active: list[Row] = field(default_factory=list)
    set_aside: list[Row] = field(default_factory=list)
    validation: list[Row] = field(default_factory=list)
    null_text: str | None = None


def plan_key(config: Config, side_multiple: int) -> str:
    """Hash of every setting that shapes a plan; where media lies and how it is encoded are no part of it."""
    datasets = [
        dataset.model_dump(exclude={"instance_data_dir", "media_root", "conditioning_data"}, mode="json")
        for dataset in config.datasets
        if not dataset.disabled
    ]
    # An image by its name alone: its folder may lie elsewhere on another machine, and its content is checked.
    shown = [
        prompt.model_dump(exclude={"image"}, mode="json") | {"image": prompt.image and PurePath(prompt.image).name}
        for prompt in config.validation.prompts
    ]
    return identity.hash_json(
        {
            "family": config.model.family,
            "task": config.model.task,
            "template": config.model.template.name,
            "side_multiple": side_multiple,
            "datasets": sorted(datasets, key=lambda dataset: dataset["id"]),
            "validation": {"size": config.validation.size, "prompts": shown},
        }
    )


def geometry(width: int, height: int, bucket: Bucket) -> Row:
    """Row of schemas.tables.GEOMETRY: media of this size cut to this bucket (sizes in pixels)."""
    crop = cover_crop(width, height, bucket.width, bucket.height)
    return {
        "bucket": str(bucket),
        "resize_w": crop.resize_width,
        "resize_h": crop.resize_height,
        "x": crop.x,
        "y": crop.y,
    }


def draft(config: Config, media: Mapping[str, Sequence[Row]], side_multiple: int) -> Draft:
    """Plan all datasets. `media` maps a dataset's id to its rows of schemas.tables.MEDIA."""
    plan = Draft()
    template = config.model.template
    if not template.with_image:
        plan.null_text = add_text(plan, config, "", negative=True)
    for dataset in config.datasets:
        if dataset.disabled:
            continue
        sizes = bucket_sizes(config.model.spec, dataset, side_multiple)
        for row in sorted(media[dataset.id], key=lambda row: row["path"]):
            _plan_item(plan, config, dataset, sizes, row)
    return plan


def bucket_sizes(family: Family, dataset: Dataset, side_multiple: int) -> tuple[tuple[int, int], ...]:
    """The (width, height) in pixels that this dataset's items can be cut to."""
    try:
        return resolution_buckets(dataset.resolution or family.resolution, dataset.resolution_type, side_multiple)
    except ValueError as error:
        raise LatentpressError(f"datasets.{dataset.id}.resolution: {error}", "raise it") from error


def _plan_item(plan: Draft, config: Config, dataset: Dataset, sizes: Iterable[tuple[int, int]], row: Row) -> None:
    captions = [caption for caption in row["captions"] if prompts.clean(caption, config.model.template)]
    reason = _unfit(config, dataset, sizes, row) if captions else _CLEANED_AWAY
    if reason:
        item = f"{dataset.id}/{row['path']}"
        plan.set_aside.append(reject("bucket", item, row["path"], *reason))
        return
    bucket = _bucket(config.model.spec, dataset, sizes, row)
    sample = _sample(config, dataset, bucket, row)
    plan.samples.setdefault(sample["sample_id"], sample)
    image = None
    if config.model.template.with_image:
        image = (dataset.id, row["source"], row["source_id"], sample["source_geometry"])
    plan.active.append(
        {
            "sample_id": sample["sample_id"],
            "role": "train",
            "dataset": dataset.id,
            "path": row["path"],
            "source_path": sample["source_path"],
            "bucket": str(bucket),
            "repeats": dataset.repeats,
            "texts": [add_text(plan, config, caption, image=image) for caption in captions],
            "null_text": add_text(plan, config, "", negative=True, image=image) if image else None,
        }
    )


def _bucket(family: Family, dataset: Dataset, sizes: Iterable[tuple[int, int]], row: Row) -> Bucket:
    frames = clip_frames(family, dataset, row) if row["kind"] == "video" else 1
    return Bucket(*choose_bucket(row["width"], row["height"], sizes), frames)


def clip_frames(family: Family, dataset: Dataset, row: Row) -> int:
    """Frames of the clip that a video yields: as many as asked for or there are, 1 + a multiple of the stride."""
    available = frames_available(row["duration"], dataset.video.frame_rate)
    return largest_valid_frames(max(1, min(dataset.video.num_frames, available)), family.temporal_stride)


def _unfit(config: Config, dataset: Dataset, sizes: Iterable[tuple[int, int]], row: Row) -> tuple[str, str] | None:
    """(reason, message) why an item can't become a sample, or None."""
    shorter = min(row["width"], row["height"])
    if shorter < dataset.minimum_image_size:
        return "too-small", (
            f"{row['path']} is {row['width']}x{row['height']}; its shorter side is under minimum_image_size = "
            f"{dataset.minimum_image_size}; lower it or remove the file"
        )
    if row["kind"] == "video":
        frames = clip_frames(config.model.spec, dataset, row)
        if frames < dataset.video.min_frames:
            return "too-short", (
                f"{row['path']} lasts {row['duration']:.2f} s and yields {frames} frames at "
                f"{dataset.video.frame_rate:g} per second; video.min_frames is {dataset.video.min_frames}"
            )
    elif config.model.task == "i2v":
        return "no-motion", f"{row['path']} is a still image; i2v learns from videos only"
    bucket = _bucket(config.model.spec, dataset, sizes, row)
    if not dataset.allow_upscale and (row["width"] < bucket.width or row["height"] < bucket.height):
        return "needs-upscale", (
            f"{row['path']} is {row['width']}x{row['height']}, smaller than its bucket {bucket}; lower resolution, "
            "set allow_upscale: true, or remove the file"
        )
    return None


def _sample(config: Config, dataset: Dataset, bucket: Bucket, row: Row) -> Row:
    condition = CONDITION[config.model.task]
    clip = {"start": 0.0, "rate": dataset.video.frame_rate} if row["kind"] == "video" else None
    companions: Row = {}
    source_geometry = None
    if condition == "source":
        source_geometry = geometry(row["source_width"], row["source_height"], Bucket(bucket.width, bucket.height))
        companions["source"] = {"media": row["source_id"], "geometry": source_geometry}
    elif condition == "first-frame":
        companions["first-frame"] = True
    cut = geometry(row["width"], row["height"], bucket)
    return {
        "sample_id": identity.sample_id(row["media_id"], cut, clip, companions),
        "role": "train",
        "dataset": dataset.id,
        "path": row["path"],
        "media_id": row["media_id"],
        "kind": row["kind"],
        "geometry": cut,
        "start": clip["start"] if clip else None,
        "rate": clip["rate"] if clip else None,
        "condition": condition,
        "source_path": row["source"] if condition == "source" else None,
        "source_id": row["source_id"] if condition == "source" else None,
        "source_geometry": source_geometry,
    }


def add_text(
    plan: Draft,
    config: Config,
    caption: str,
    *,
    negative: bool = False,
    image: tuple[str, str, str, Row] | None = None,
) -> str:
    """Add one text to the plan (once, however many samples share it) and return its id.

    image: (dataset, path, media id, geometry) of the image inside the prompt. The null prompt is "" by the path
    of a negative prompt.
    """
    template = config.model.template
    cleaned = prompts.clean(caption, template)
    rendered = prompts.render(cleaned, template, negative=negative)
    dataset, path, media_id, cut = image or (None, None, None, None)
    images = [identity.image_in_prompt_id(image[2], image[3])] if image else []
    name = identity.text_id(rendered, images)
    plan.texts.setdefault(
        name,
        {
            "text_id": name,
            "template": template.name,
            "text": cleaned,
            "negative": negative and not template.negative_uses_template,
            "image_dataset": dataset,
            "image_path": path,
            "image_id": media_id,
            "image_geometry": cut,
        },
    )
    return name


def latent_bytes(family: Family, sample: Row, precision: str) -> int:
    """Bytes of a sample's tensors in its shard."""
    frames, height, width = Bucket.parse(sample["geometry"]["bucket"]).latent_shape(
        family.spatial_stride, family.temporal_stride
    )
    if sample["condition"] != "none":
        frames += 1
    return family.latent_channels * frames * height * width * _BYTES[precision]


def text_bytes(family: Family, text: Row, precision: str) -> int:
    """Estimated bytes of a text's tensors: about four characters a token, and an image's tokens."""
    tokens = 8 + len(text["text"]) // 4
    if text["image_geometry"]:
        bucket = Bucket.parse(text["image_geometry"]["bucket"])
        tokens += (bucket.width // 56) * (bucket.height // 56)
    return tokens * family.text_width * _BYTES[precision]


def sample_units(config: Config, samples: Iterable[Row]) -> list[Row]:
    """Divide samples into units: one bucket and role each, in the order of their ids."""
    precision = config.latents.precision or config.model.precision
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for sample in samples:
        groups[sample["role"], sample["geometry"]["bucket"]].append(sample)
    units = []
    for (_, bucket), members in sorted(groups.items()):
        members.sort(key=lambda sample: sample["sample_id"])
        sized = [(row["sample_id"], latent_bytes(config.model.spec, row, precision)) for row in members]
        units += _divide("latents", bucket, sized, config.cache.unit_mib)
    return units


def text_units(config: Config, texts: Iterable[Row]) -> list[Row]:
    """Divide texts into units of similar length (an image's size counts first), so that batches waste little."""
    precision = config.text.precision or config.model.precision

    def shape(text: Row) -> tuple[str, int, str]:
        return (text["image_geometry"] or {}).get("bucket", ""), len(text["text"]), text["text_id"]

    units = []
    for _, members in groupby(sorted(texts, key=shape), key=lambda text: shape(text)[0]):
        sized = [(row["text_id"], text_bytes(config.model.spec, row, precision)) for row in members]
        units += _divide("text", "", sized, config.cache.unit_mib)
    return units


def _divide(kind: str, bucket: str, sized: list[tuple[str, int]], unit_mib: float) -> list[Row]:
    """Cut a list of (id, bytes) into runs of at most unit_mib; an item larger than that is a unit of its own."""
    limit = unit_mib * 2**20
    runs: list[list[tuple[str, int]]] = []
    total = 0.0
    for item in sized:
        if not runs or total + item[1] > limit:
            runs.append([])
            total = 0
        runs[-1].append(item)
        total += item[1]
    return [
        {
            "unit_id": identity.unit_id(bucket or kind, [name for name, _ in run]),
            "kind": kind,
            "bucket": bucket,
            "members": [name for name, _ in run],
            "estimated_bytes": sum(size for _, size in run),
        }
        for run in runs
    ]
