"""What a configuration makes: every setting that shapes its plan, its texts, its latents and its vision features. Reads
no file.

The stages name plans and caches by these settings, `index` writes them into set.json, and the trainer computes them
from its own configuration: its set is the one of which they are equal. A setting that changes none of them has no
place here. Of the encoders' weights, which have to be read, see `cache/weights.py`.
"""

from dataclasses import asdict
from pathlib import PurePath
from typing import Any

from schemas import preprocessing
from schemas.config.datasets import Dataset
from schemas.config.pipeline import Config
from schemas.family import Normalisation
from schemas.identity import hash_json
from schemas.tables import TABLES_VERSION

TEXT_VERSION = 3  # of what encode-text does to bytes; raise it with any change of them
LATENTS_VERSION = 2  # of what encode-latents does to bytes; the same
VISION_VERSION = 1  # of what encode-vision does to bytes; the same
#: Options of a dataset that shape no plan: where the media lies on this machine, and whether it is looked at again.
MACHINE_OPTIONS = frozenset(("media_root", "skip_file_discovery", "disabled"))
#: Those that shape its media table: what is listed, and what is read of an item.
DISCOVERY_OPTIONS = (
    *("instance_data_dir", "source", "dataset_type", "split", "media_column", "follow_links", "identity", "animations"),
    *("caption_strategy", "caption_file", "caption_column", "instance_prompt"),
    *("conditioning_data", "conditioning_column", "mask_data", "mask_column"),
)

Settings = dict[str, Any]


def build_recipe(config: Config, side_multiple: int) -> Settings:
    """All of it, as it stands in set.json. side_multiple: `cache.weights.side_multiple` of the model."""
    return {
        "family": config.model.family,
        "flavour": config.model.flavour_spec.name,
        "task": config.model.task,
        "plan": plan_settings(config, side_multiple),
        "text": text_settings(config),
        "latents": latents_settings(config),
    } | ({"vision": _vision(config)} if config.vision.source else {})


def _vision(config: Config) -> Settings:
    """`vision_settings`, and the model by its name alone: its folder may lie elsewhere on another machine."""
    return vision_settings(config) | {"model": PurePath(config.vision.source or "").name}


def plan_key(config: Config, side_multiple: int) -> str:
    """The name of a configuration's plans."""
    return hash_json(plan_settings(config, side_multiple))


def plan_settings(config: Config, side_multiple: int) -> Settings:
    """Every setting that shapes a plan; where media lies on this machine and how it is encoded are no part of it."""
    datasets = [dataset_settings(dataset) for dataset in config.datasets if not dataset.disabled]
    # An image by its name alone: its folder may lie elsewhere on another machine, and its content is checked.
    shown = [
        prompt.model_dump(exclude={"image"}, mode="json") | {"image": prompt.image and PurePath(prompt.image).name}
        for prompt in config.validation.prompts
    ]
    what = {
        "tables": TABLES_VERSION,
        "family": config.model.family,
        "task": config.model.task,
        "flavour": config.model.flavour_spec.name if any(row["buckets"] == "family" for row in datasets) else None,
        "template": config.model.template.name,
        "side_multiple": side_multiple,
        "datasets": sorted(datasets, key=lambda dataset: dataset["id"]),
        "validation": {"size": config.validation.size, "prompts": shown},
    }
    if config.model.condition is not None and config.model.condition.kind == "source":
        what["sources"] = "as their targets"  # how they are cut; plans without it are made anew
    return what


def dataset_settings(dataset: Dataset) -> Settings:
    """A dataset's part of it. Places are named as the configuration names them. Those of companions may differ from
    machine to machine, so of them it counts whether there are any."""
    return dataset.model_dump(exclude=set(MACHINE_OPTIONS), mode="json") | {
        "instance_data_dir": dataset.portable_path("instance_data_dir"),
        "source": dataset.resolved_source,
        "caption_strategy": dataset.resolved_caption_strategy,
        "caption_file": dataset.portable_path("caption_file"),
        "conditioning_data": dataset.conditioning_data is not None,
        "mask_data": dataset.mask_data is not None,
    }


def discovery_settings(dataset: Dataset) -> Settings:
    """What shapes a dataset's media table, beyond the media."""
    made = dataset_settings(dataset)
    return {name: made[name] for name in DISCOVERY_OPTIONS} | {"video.scenes": dataset.video.scenes}


#: What is quantised, where a library's own answer would depend on its version or on the CPU.
QUANTIZATION_NAMES = {"nf4-bnb": "nf4-bnb: matrices of the language model's blocks, multiples of 32x64"}


def text_settings(config: Config) -> Settings:
    """What, beyond the texts and the encoder's weights, determines the bytes of a shard of embeddings. Settings that
    say the same have one name."""
    model, family, template = config.model, config.model.family_spec, config.model.template
    precision, quantization = config.text.precision or model.precision, config.text.quantization
    if quantization == "bf16" and precision == "bfloat16":
        quantization = "no_change"
    what = {
        "stage": "encode-text",
        "version": TEXT_VERSION,
        "encoder": family.text_encoder,
        "precision": precision,
        "quantization": QUANTIZATION_NAMES.get(quantization, quantization),
        "attention": config.text.attention or family.text_attention,
        "template": {"name": template.name, "text": template.text, "crop": template.crop},
        "max_length": config.text.max_length or template.max_length,
    }
    if template.layers != (-1,):
        what["layers"] = template.layers  # left out by default: caches that were made without it stay
    if template.with_image:
        what |= {"resize": preprocessing.RESIZE, "colour": preprocessing.COLOUR, "image": preprocessing.PROMPT_IMAGE}
    return what


def latents_settings(config: Config) -> Settings:
    """What, beyond the samples and the autoencoder's weights, determines the bytes of a shard of latents."""
    model, family = config.model, config.model.family_spec
    what = {
        "stage": "encode-latents",
        "version": LATENTS_VERSION,
        "autoencoder": family.autoencoder,
        "settings": config.latents.settings(family),
        "precision": config.latents.precision or model.precision,
        # What has no effect on this family's latents is no part of their name.
        "posterior": config.latents.posterior if family.posterior else None,
        "decoder": config.latents.decoder if family.video else None,
        "resize": preprocessing.RESIZE,
        "colour": preprocessing.COLOUR,
        "mask": preprocessing.MASK,
    }
    # Left out where they say what held before there was a choice, so that caches made without them stay.
    if family.normalisation != Normalisation():
        what["normalisation"] = asdict(family.normalisation)
    if model.condition is not None and model.condition.frames != 1:
        what["condition_frames"] = family.condition_frames(model.task)
    return what


def vision_settings(config: Config) -> Settings:
    """What, beyond the samples and the vision model's weights, determines the bytes of a shard of vision features."""
    vision, family = config.vision, config.model.family_spec
    return {
        "stage": "encode-vision",
        "version": VISION_VERSION,
        "size": vision.pixels,
        "precision": vision.precision or config.model.precision,
        "pixels": preprocessing.VISION_PIXELS,
        "pooling": preprocessing.VISION_POOLING,
        # Not the family: those with tokens of the same size share their features.
        "token": [family.temporal_stride, family.side_multiple],
        "decoder": config.latents.decoder if family.video else None,
        "resize": preprocessing.RESIZE,
        "colour": preprocessing.COLOUR,
    }
