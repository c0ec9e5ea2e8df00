"""The validation prompts' part of a plan, and for i2i and i2v the image that each of them starts from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from schemas import identity
from schemas.config import VALIDATION, Config, Prompt
from schemas.errors import LatentpressError
from schemas.geometry import Bucket, cover_crop
from schemas.tables import ACTIVE, SAMPLES
from stages.planning.draft import Draft, image_columns, one_text

Row = dict[str, Any]


class Found(NamedTuple):
    """What opening a prompt's image tells: its content's id and its size in pixels."""

    media_id: str
    width: int
    height: int


def add_validation(plan: Draft, config: Config, multiple: int, look: Callable[[Path], Found]) -> None:
    """Plan the validation prompts. `look` opens a prompt's image; it raises LatentpressError."""
    family, template = config.model.spec, config.model.template
    bucket = validation_bucket(config, multiple) if config.validation.prompts else None
    for prompt in config.validation.prompts:
        assert bucket is not None
        condition, image = None, None
        if prompt.image is not None and config.model.task in ("i2i", "i2v"):
            sample = _condition(prompt, look(Path(prompt.image)), Bucket(bucket.width, bucket.height))
            condition = sample["sample_id"]
            table = pa.Table.from_pylist([sample], schema=SAMPLES)
            plan.add(samples=table, active=pa.Table.from_pylist([_active(sample)], schema=ACTIVE))
            if template.with_image:
                columns = {
                    name: table.column(name).combine_chunks() for name in ("dataset", "path", "media_id", "geometry")
                }
                image = image_columns(*columns.values())
        negative = family.negative_prompt if prompt.negative_prompt is None else prompt.negative_prompt
        rows = one_text(config, prompt.prompt, image=image), one_text(config, negative, negative=True, image=image)
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
    family = config.model.spec
    if config.validation.size is None:
        edge = max(multiple, round(family.resolution / multiple) * multiple)
        return Bucket(edge, edge, 121 if family.video else 1)
    try:
        bucket = Bucket.parse(config.validation.size)
        bucket.latent_shape(multiple, family.temporal_stride)
    except ValueError as error:
        raise LatentpressError(f"validation.size: {error}", "correct validation.size") from error
    return bucket


def _condition(prompt: Prompt, found: Found, bucket: Bucket) -> Row:
    crop = cover_crop(found.width, found.height, bucket.width, bucket.height)
    cut = dict(
        zip(
            ("resize_w", "resize_h", "x", "y"),
            map(int, (crop.resize_width, crop.resize_height, crop.x, crop.y)),
            strict=True,
        )
    )
    record = np.zeros(1, identity.SAMPLE)
    record["media"] = identity.id_bytes(pa.array([found.media_id]))
    record["geometry"] = [bucket.width, bucket.height, 1, *cut.values()]
    return dict.fromkeys(SAMPLES.names) | {
        "sample_id": identity.sample_ids(record)[0].as_py(),
        "role": VALIDATION,
        "dataset": VALIDATION,
        "path": prompt.name,
        "media_id": found.media_id,
        "kind": "image",
        "geometry": {"bucket": str(bucket), **cut},
        "condition": "none",
    }


def _active(sample: Row) -> Row:
    given = {name: sample[name] for name in ("sample_id", "role", "dataset", "path")}
    counts = {"repeats": 0, "weight": 1.0, "regularisation": False, "texts": []}
    return dict.fromkeys(ACTIVE.names) | given | counts | {"bucket": sample["geometry"]["bucket"]}
