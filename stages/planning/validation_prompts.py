"""Plan validation prompts, and the image or clip from which each prompt starts if the task needs an image.

A prompt without an image starts from an image of the data: for i2v the first frames of a sample, for i2i its source.
The choice depends only on the prompt's name and the samples' contents, not on other prompts or the items' paths.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.sets.plans import PlannedPrompt
from cache.store.json_checks import PromptImage
from schemas.clips import frames_available
from schemas.config.datasets import Dataset
from schemas.config.encoding import Model
from schemas.config.pipeline import VALIDATION, Config
from schemas.config.section import listed
from schemas.config.validation import Prompt, sized_prompts
from schemas.errors import LatentpressError
from schemas.family import SOURCE_ROLES, Condition, Family
from schemas.geometry import Bucket, cover_crop
from schemas.identity import derive_seeds
from schemas.tables import SAMPLES_SCHEMA, TRAINED_ROLES, active_schema
from stages.planning.candidates import drop_duplicate_ids
from stages.planning.plan_builder import DraftPlan
from stages.planning.samples import Geometries, active_rows, geometry_numbers, reference_rows, sample_table
from stages.planning.texts import plan_text, prompt_image_columns, prompt_reference_columns

TableRow = dict[str, Any]


class DataImage(NamedTuple):
    """An image or clip of the data. described: its dataset, role and path. media: its "media_id", "kind", "width" and
    "height", and for a clip "start" and "rate"."""

    described: PromptImage
    media: TableRow


def choose_sample(plan: DraftPlan, name: str) -> TableRow:
    """The active row of the sample from whose image the prompt `name` starts. If the plan has held-out samples, which
    are not trained on, the sample is held out."""
    active = plan.active
    for role in TRAINED_ROLES:
        if pc.any(pc.equal(plan.active.column("role"), role)).as_py():
            active = plan.active.filter(pc.equal(plan.active.column("role"), role))
    if pc.any(pc.invert(active.column("regularization"))).as_py():
        active = active.filter(pc.invert(active.column("regularization")))
    ids = active.column("sample_id").combine_chunks()
    return active.slice(int(np.argmin(derive_seeds(ids, f"validation image of {name}"))), 1).to_pylist()[0]


def choose_image(plan: DraftPlan, media: Mapping[str, pa.Table], condition: Condition, name: str) -> DataImage:
    """The image of the prompt `name`, from the sample that `choose_sample` returns. media: dataset id -> media table,
    see `build_plan`."""
    row = choose_sample(plan, name)
    sample = plan.samples.filter(pc.equal(plan.samples.column("sample_id"), row["sample_id"])).to_pylist()[0]
    item = media[row["dataset"]]
    (item,) = item.slice(pc.index(item.column("path"), row["path"]).as_py(), 1).to_pylist()
    if condition.kind == "source":
        described = PromptImage(dataset=row["dataset"], role="source", path=row["source_path"])
        sizes = {"width": item["source_width"], "height": item["source_height"]}
        return DataImage(described, {"media_id": sample["source_id"], "kind": "image", **sizes})
    described = PromptImage(dataset=row["dataset"], role="media", path=row["path"], start=sample["start"])
    clip = {key: sample[key] for key in ("media_id", "kind", "start", "rate")}
    return DataImage(described, clip | {"width": item["width"], "height": item["height"]})


def choose_references(plan: DraftPlan, name: str) -> tuple[list[str], list[PromptImage]]:
    """The ids and images of the references of the prompt `name`, which are the references of the sample that
    `choose_sample` returns."""
    ids = choose_sample(plan, name)["references"]
    active = plan.active.filter(pc.is_in(plan.active.column("role"), value_set=pa.array(SOURCE_ROLES)))
    active = active.filter(pc.is_in(active.column("sample_id"), value_set=pa.array(ids)))
    rows = {row["sample_id"]: row for row in active.to_pylist()}
    return ids, [PromptImage(**{key: rows[id][key] for key in ("dataset", "role", "path")}) for id in ids]


def plan_references(plan: DraftPlan, model: Model, prompt: Prompt, probe: Callable[[Path, str], TableRow]) -> list[str]:
    """Plan the references in a prompt, and return their ids in order. probe: see `add_validation_prompts`."""
    condition = model.condition
    assert condition is not None
    images = [probe(Path(image), "image") for image in listed(prompt.image)]
    size = condition.size_of(len(images) == 1)
    for image, path in zip(images, listed(prompt.image), strict=True):
        if size.refused(np.array([image["width"]]), np.array([image["height"]]))[0]:
            raise LatentpressError(
                f"validation prompt {prompt.name}: {path} has {image['width']}x{image['height']} pixels; "
                f"{model.family} supports references with {size.limits}",
                "choose another image",
            )
    columns = {name: [image[name] for image in images] for name in ("media_id", "width", "height")}
    columns |= {
        "role": [VALIDATION] * len(images),
        "dataset": [VALIDATION] * len(images),
        "path": [f"{prompt.name}/{number}" for number in range(1, len(images) + 1)],
    }
    rows = reference_rows(condition, pa.table(columns), np.full(len(images), len(images) == 1))
    plan.samples = drop_duplicate_ids(pa.concat_tables([plan.samples, rows]), "sample_id")
    plan.active = pa.concat_tables([plan.active, active_rows(rows, active_schema(references=True))])
    return rows.column("sample_id").to_pylist()


def describe_image(image: PromptImage | list[PromptImage]) -> str:
    """A text like "clips: a.mp4 at 1.5 s"; for several references, all of them."""
    if isinstance(image, list):
        return ", ".join(map(describe_image, image))
    words = f"{image.dataset}: {image.path}"
    return words if image.start is None else f"{words} at {image.start:g} s"


def add_validation_prompts(
    plan: DraftPlan,
    config: Config,
    multiple: int,
    probe: Callable[[Path, str], TableRow],
    media: Mapping[str, pa.Table],
) -> None:
    """Plan the validation prompts and add them to `plan`.

    probe: function from a prompt's file and "image" or "video" to a row with the file's media_id, width, height and
        duration; raises LatentpressError. media: dataset id -> media table, see `build_plan`.
    """
    family, template = config.model.family_spec, config.model.template
    prompts = {prompt.name: prompt for prompt in config.validation.prompts}
    for name, size in sized_prompts(config.validation):
        prompt, bucket = prompts[name], validation_bucket(family, multiple, size)
        prompt_images: TableRow = {}  # references and image, if the prompt has them
        condition, image, data_image = None, None, None
        if config.model.condition is not None and config.model.condition.kind == "references":
            if prompt.image is None:
                prompt_images["references"], prompt_images["image"] = choose_references(plan, name)
            else:
                prompt_images["references"] = plan_references(plan, config.model, prompt, probe)
            if template.with_image:
                dataset = prompt_images["image"][0].dataset if "image" in prompt_images else VALIDATION
                image = prompt_reference_columns(
                    pa.array([dataset]), pa.array([prompt_images["references"]], pa.list_(pa.string()))
                )
        elif config.model.condition is not None:
            condition_bucket = Bucket(bucket.width, bucket.height, config.model.condition.frames)
            if prompt.image is None:
                data_image = choose_image(plan, media, config.model.condition, name)
            start = (
                _probe_image(config.model, config.datasets, prompt, probe, condition_bucket)
                if data_image is None
                else data_image.media
            )
            bucket_of = bucket if config.model.condition.padded else condition_bucket
            covering = cover_crop(start["width"], start["height"], bucket_of.width, bucket_of.height)
            geometry = geometry_numbers(bucket_of.width, bucket_of.height, bucket_of.frames, covering)
            sample = _condition_sample(prompt, start, geometry)
            condition = sample.column("sample_id")[0].as_py()
            plan.samples = drop_duplicate_ids(pa.concat_tables([plan.samples, sample]), "sample_id")
            plan.active = pa.concat_tables([plan.active, active_rows(sample)])
            if data_image is not None:
                prompt_images["image"] = data_image.described
            if template.with_image:
                dataset, path, media_id = (sample[name].combine_chunks() for name in ("dataset", "path", "media_id"))
                image = prompt_image_columns(dataset, path, media_id, geometry)
        negative = family.negative_prompt or "" if prompt.negative_prompt is None else prompt.negative_prompt
        rows = (
            plan_text(template, prompt.prompt, image=image),
            plan_text(template, negative, negative=True, image=image),
        )
        plan.texts = drop_duplicate_ids(pa.concat_tables([plan.texts, *rows]), "text_id")
        text, negative_text = (row.column("text_id")[0].as_py() for row in rows)
        planned_prompt = PlannedPrompt(
            name=prompt.name,
            prompt=prompt.prompt,
            negative_prompt=negative,
            text=text,
            negative=negative_text,
            bucket=str(bucket),
            condition=condition,
            **prompt_images,
        )
        plan.validation.append(planned_prompt)


def validation_bucket(family: Family, multiple: int, size: str | None) -> Bucket:
    """The bucket for a size of validation prompts. Raises LatentpressError if the model does not support the size.
    multiple: number of pixels that divides the sides. size: "WxH@F"; None: the family's default."""
    if size is None:
        edge = max(multiple, round(family.resolution / multiple) * multiple)
        return Bucket(edge, edge, family.frames)
    try:
        bucket = Bucket.parse(size)
        bucket.latent_shape(multiple, family.temporal_stride)
    except ValueError as error:
        raise LatentpressError(f"validation.size: {error}", "correct validation.size") from error
    return bucket


def _probe_image(
    model: Model, datasets: Sequence[Dataset], prompt: Prompt, probe: Callable[[Path, str], TableRow], bucket: Bucket
) -> TableRow:
    """The row of a prompt's image or, if the bucket has several frames, of the first frames of its clip at the rate of
    the first video dataset."""
    (path,) = listed(prompt.image)
    clip: TableRow = {"kind": "image"}
    if bucket.frames > 1:
        family_rate = model.family_spec.frame_rate
        rates = [dataset.video.rate_or(family_rate) for dataset in datasets if dataset.dataset_type == "video"]
        clip = {"kind": "video", "start": 0.0, "rate": rates[0]}
    image = probe(Path(path), clip["kind"])
    if clip["kind"] == "video" and frames_available(image["duration"], clip["rate"]) < bucket.frames:
        raise LatentpressError(
            f"validation prompt {prompt.name}: {model.task} of {model.family} starts from "
            f"{bucket.frames} frames, but {path} has fewer at {clip['rate']:g} per second",
            "choose a longer clip",
        )
    return {key: image[key] for key in ("media_id", "width", "height")} | clip


def _condition_sample(prompt: Prompt, image: TableRow, geometry: Geometries) -> pa.Table:
    """The row of SAMPLES_SCHEMA for the image or clip from which a prompt starts. image: media_id, width, height, kind,
    and for a clip start and rate."""
    columns = {"role": VALIDATION, "dataset": VALIDATION, "path": prompt.name}
    columns |= {name: image[name] for name in ("media_id", "kind")}
    times = {name: np.array([image[name]]) for name in ("start", "rate") if image.get(name) is not None}
    row = sample_table({name: pa.array([value]) for name, value in columns.items()}, geometry, **times).to_pylist()
    return pa.Table.from_pylist(row, SAMPLES_SCHEMA)  # a plan's file includes the bytes under nulls
