"""The caption stage without torch: its model, the fingerprint of its captions, and the media that it reads."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.models.places import fingerprint_parts, read_part_config
from cache.models.weights import MODEL_FILES, SingleModel
from cache.sets.table_checks import Provenance
from cache.store.json_checks import Foreign
from cache.store.store import Store
from schemas.config.datasets import Dataset
from schemas.config.encoding import PIXEL_MULTIPLE, Caption, Model
from schemas.config.pipeline import Config
from schemas.errors import UsageError
from schemas.recipe import caption_settings
from stages.planning.candidates import passes_filter
from stages.planning.items import ItemRequest

ADVICE = (
    "set caption.model to the folder or repository of a vision-language model that transformers loads for "
    "image-text-to-text, such as Qwen/Qwen2.5-VL-7B-Instruct"
)
#: Sub-folders of a checkpoint that belong to a text encoder which can also write captions.
TEXT_ENCODER_PARTS = ("text_encoder", "tokenizer", "processor")
OWN_MODEL_TYPE = "qwen2_5_vl"  # model_type in the text encoder's config.json


def require_caption(config: Config) -> Caption:
    if config.caption is None:
        raise UsageError(
            "caption has nothing to do: the configuration has no section `caption`",
            "add `caption: {}` to describe items without a caption; see docs/guides/captions-and-cleaning.md",
        )
    return config.caption


def single_model(caption: Caption) -> SingleModel:
    """The model of `caption.model`."""
    assert caption.model is not None
    return SingleModel(caption.model, caption.revision, "caption.model", ADVICE, MODEL_FILES)


def encoder_parts(model: Model) -> tuple[str, ...]:
    """The sub-folders of the model's own text encoder. Raises UsageError if the text encoder can't describe a
    picture."""
    parts = tuple(part for part in model.family_spec.text_components if part in TEXT_ENCODER_PARTS)
    kind = read_part_config(model, "text_encoder").get("model_type")
    if kind != OWN_MODEL_TYPE:
        raise UsageError(f"the text encoder of {model.source} is a {kind}, which does not describe pictures", ADVICE)
    return parts


def caption_fingerprint_inputs(config: Config) -> dict[str, Any]:
    caption, memo = require_caption(config), Store(config.root)
    if caption.model is not None:
        weights = single_model(caption).fingerprint(memo)
    else:
        weights = fingerprint_parts(config.model, encoder_parts(config.model), memo)
    return caption_settings(config.model, caption, config.latents) | {"weights": weights}


def caption_request(config: Config) -> ItemRequest:
    """Media that the stage reads."""
    settings = caption_settings(config.model, require_caption(config), config.latents)
    return make_request(PictureSettings.model_validate(settings["shown"]))


class PictureSettings(Foreign):
    """Settings of the pictures for the captioning model."""

    edge: int
    frames: int
    source: bool


class CaptionProvenance(Provenance):
    shown: PictureSettings


def make_request(pictures: PictureSettings) -> ItemRequest:
    """The request for items that were described with these picture settings."""
    return ItemRequest(
        stage="caption",
        pixels=pictures.edge**2,
        multiple=PIXEL_MULTIPLE,
        frames=pictures.frames,
        sources=pictures.source,
        options=("make_captions", "make_captions_where"),
        choose=choose_items,
    )


def choose_items(dataset: Dataset, table: pa.Table) -> NDArray[np.bool_]:
    """bool (n,): which rows of a media table are described. Only the captions of files count, because edited captions
    appear and disappear while machines work."""
    if not dataset.describes_missing:
        return np.zeros(len(table), bool)
    mask = passes_filter(dataset, "make_captions_where", table)
    if dataset.make_captions == "missing":
        mask = mask & (np.asarray(pc.fill_null(pc.list_value_length(table.column("captions")), 0)) == 0)
    return mask
