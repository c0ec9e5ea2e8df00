"""The validation prompts' part of a plan, and the image or clip that each starts from where the task has one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from schemas import identity
from schemas.clips import frames_available
from schemas.config.pipeline import VALIDATION, Config
from schemas.config.training import Prompt
from schemas.errors import LatentpressError
from schemas.geometry import Bucket, cover_crop
from schemas.tables import ACTIVE_SCHEMA, SAMPLES_SCHEMA
from stages.planning.plan_builder import DraftPlan, plan_text, prompt_image_columns

TableRow = dict[str, Any]


class PromptImage(NamedTuple):
    """What opening a prompt's image or clip tells: its content's id, its size in pixels, its length in seconds."""

    media_id: str
    width: int
    height: int
    duration: float = 0.0


def add_validation_prompts(
    plan: DraftPlan, config: Config, multiple: int, look: Callable[[Path, str], PromptImage]
) -> None:
    """Plan the validation prompts. `look` opens a prompt's image, or with "video" its clip.
    LatentpressError: it can't."""
    family, template = config.model.family_spec, config.model.template
    bucket = validation_bucket(config, multiple) if config.validation.prompts else None
    for prompt in config.validation.prompts:
        assert bucket is not None
        condition, image = None, None
        if prompt.image is not None and config.model.condition is not None:
            shown = Bucket(bucket.width, bucket.height, config.model.condition.frames)
            sample = _condition_sample(config, prompt, look, shown)
            condition = sample["sample_id"]
            table = pa.Table.from_pylist([sample], schema=SAMPLES_SCHEMA)
            plan.add(samples=table, active=pa.Table.from_pylist([_active_row(sample)], schema=ACTIVE_SCHEMA))
            if template.with_image:
                columns = {
                    name: table.column(name).combine_chunks() for name in ("dataset", "path", "media_id", "geometry")
                }
                image = prompt_image_columns(*columns.values())
        negative = family.negative_prompt if prompt.negative_prompt is None else prompt.negative_prompt
        rows = plan_text(config, prompt.prompt, image=image), plan_text(config, negative, negative=True, image=image)
        plan.add(texts=pa.concat_tables(rows))
        text, negative_text = (row.column("text_id")[0].as_py() for row in rows)
        plan.validation.append(
            {
                "name": prompt.name,
                "prompt": prompt.prompt,
                "negative_prompt": negative,
                "text": text,
                "negative": negative_text,
                "bucket": str(bucket),
                "condition": condition,
            }
        )


def validation_bucket(config: Config, multiple: int) -> Bucket:
    """validation.size, checked against the model's strides."""
    family = config.model.family_spec
    if config.validation.size is None:
        edge = max(multiple, round(family.resolution / multiple) * multiple)
        return Bucket(edge, edge, family.frames)
    try:
        bucket = Bucket.parse(config.validation.size)
        bucket.latent_shape(multiple, family.temporal_stride)
    except ValueError as error:
        raise LatentpressError(f"validation.size: {error}", "correct validation.size") from error
    return bucket


def _condition_sample(
    config: Config, prompt: Prompt, look: Callable[[Path, str], PromptImage], bucket: Bucket
) -> TableRow:
    """The sample that is given: an image, or the first frames of a clip at the rate of the first video dataset."""
    assert prompt.image is not None
    clip: TableRow = {"kind": "image"}
    if bucket.frames > 1:
        rates = [dataset.video.frame_rate for dataset in config.datasets if dataset.dataset_type == "video"]
        clip = {"kind": "video", "start": 0.0, "rate": rates[0]}
    found = look(Path(prompt.image), clip["kind"])
    if clip["kind"] == "video" and frames_available(found.duration, clip["rate"]) < bucket.frames:
        raise LatentpressError(
            f"validation prompt {prompt.name}: {config.model.task} of {config.model.family} starts from "
            f"{bucket.frames} frames, and {prompt.image} has fewer at {clip['rate']:g} per second",
            "give a longer clip",
        )
    crop = cover_crop(found.width, found.height, bucket.width, bucket.height)
    cut = dict(
        zip(
            ("resize_w", "resize_h", "x", "y"),
            map(int, (crop.resize_width, crop.resize_height, crop.x, crop.y)),
            strict=True,
        )
    )
    record = np.zeros(1, identity.SAMPLE_DTYPE)
    record["media"] = identity.id_bytes(pa.array([found.media_id]))
    record["geometry"] = [bucket.width, bucket.height, bucket.frames, *cut.values()]
    record["start"], record["rate"] = clip.get("start", 0.0), clip.get("rate", 0.0)
    return dict.fromkeys(SAMPLES_SCHEMA.names) | {
        "sample_id": identity.sample_ids(record)[0].as_py(),
        "role": VALIDATION,
        "dataset": VALIDATION,
        "path": prompt.name,
        "media_id": found.media_id,
        **clip,
        "geometry": {"bucket": str(bucket), **cut},
        "condition": "none",
    }


def _active_row(sample: TableRow) -> TableRow:
    given = {name: sample[name] for name in ("sample_id", "role", "dataset", "path")}
    counts = {"repeats": 0, "weight": 1.0, "regularisation": False, "texts": []}
    return dict.fromkeys(ACTIVE_SCHEMA.names) | given | counts | {"bucket": sample["geometry"]["bucket"]}
