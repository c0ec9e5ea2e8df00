"""Every setting that determines a plan, texts, latents and vision features. Reads no file.

The stages name plans and caches by these settings, `index` writes them into set.json, and the trainer computes them
from its own configuration to find its set. Settings that change no bytes are not here. `cache/models/weights.py`
identifies the encoders' weights, which have to be read.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

from schemas.config.datasets import Dataset
from schemas.config.encoding import Caption, Features, Latents, Masks, Model, Text, Vision
from schemas.config.filters import feature_columns
from schemas.config.pipeline import Config
from schemas.config.section import listed
from schemas.identity import hash_json
from schemas.tables import TABLES_VERSION

# Raise a version if its stage produces different bytes for the same settings.
TEXT_VERSION, LATENTS_VERSION, VISION_VERSION, CAPTION_VERSION, FEATURES_VERSION, MASKS_VERSION = 1, 1, 1, 1, 1, 1
# Names of the pixel operations before an encoder. Change a name with its code, which is elsewhere, so that computing a
# fingerprint needs no Pillow.
RESIZE = "pillow-lanczos"  # stages/media/sample_reader.py: resize_and_crop
# for the text encoder that reads pictures (the pipeline halves both sides, the image processor does the rest)
PROMPT_IMAGE = "pillow-bicubic-half;torch-uint8-bicubic-antialias;fused-normalize"
# for text encoders that read references
PROMPT_REFERENCE = "torch-uint8-bicubic-antialias;fused-normalize"
# stages/media/sample_reader.py: read_sample_mask; stages/encoding/vae/worker.py: mask_to_latent_grid
MASK = "gray-over-black;pillow-bilinear;area-mean"
# stages/media: image.py, color.py, profiles.py and header.py
COLOR = (
    "srgb8-rounded-over-white;yuv-tagged-else-709-above-576-lines-601-below;profiles-and-wide-primaries-to-srgb;"
    "mirrored-as-shown;main-track;hdr-and-interlaced-refused"
)
#: For vision features: how the model's input pixels are made, and how its patch tokens are pooled.
VISION_PIXELS = "aspect-kept-to-multiples-of-14;pillow-bicubic;imagenet-mean-deviation"
VISION_POOLING = (
    "last-hidden-state-patches;space-area-mean-where-finer-than-tokens;time-mean-of-each-latent-frames-group"
)
#: For features of whole items: stages/encoding/features/worker.py and measures.py.
FEATURES_POOLING = "class-token;mean-of-frames;length-one"
MEASURES = "luminance-601;area-of-448;bars-of-24;motion-of-64;cosines-of-8-in-19"
#: Options of a dataset that do not change a plan.
MACHINE_OPTIONS = frozenset(("media_root", "skip_file_discovery", "disabled"))
#: Options of a dataset that are filters on columns.
FILTERS = ("where", "make_captions_where")
#: Options that change a dataset's media table.
DISCOVERY_OPTIONS = (
    *("instance_data_dir", "source", "dataset_type", "split", "media_column", "follow_links", "identity", "animations"),
    *("caption_strategy", "caption_file", "caption_column", "captions_per_file", "instance_prompt"),
    *("conditioning_data", "conditioning_column", "conditioning_count", "mask_data", "mask_column"),
)

Settings = dict[str, Any]


def build_recipe(config: Config, side_multiple: int) -> Settings:
    """All settings, as set.json has them. side_multiple: `cache.models.weights.side_multiple` of the model."""
    recipe = {
        "family": config.model.family,
        "flavour": config.model.flavour_spec.name,
        "task": config.model.task,
        "plan": plan_settings(config, side_multiple),
        "text": text_settings(config.model, config.text),
        "latents": latents_settings(config.model, config.latents),
    }
    if config.vision.source:  # only the model's name, since its folder may differ between machines
        recipe["vision"] = vision_settings(config.model, config.vision, config.latents) | {
            "model": PurePath(config.vision.source).name
        }
    return json.loads(json.dumps(recipe))  # the same types as after reading set.json


def plan_key(config: Config, side_multiple: int) -> str:
    """The key by which a configuration finds its plans."""
    return hash_json(plan_settings(config, side_multiple))


def plan_settings(config: Config, side_multiple: int) -> Settings:
    """Every setting that determines a plan."""
    datasets = [dataset_settings(dataset) for dataset in config.datasets if not dataset.disabled]
    prompts = []
    for prompt in config.validation.prompts:
        prompts.append(prompt.model_dump(include={"name", "prompt", "negative_prompt", "size"}, mode="json"))
        # Only an image's name, since its folder may differ between machines; its content is checked.
        names = [PurePath(image).name for image in listed(prompt.image)]
        prompts[-1]["image"] = names if isinstance(prompt.image, tuple) else next(iter(names), prompt.image)
    settings = {
        "tables": TABLES_VERSION,
        "family": config.model.family,
        "task": config.model.task,
        "flavour": config.model.flavour_spec.name if any(row["buckets"] == "family" for row in datasets) else None,
        "template": config.model.template.name,
        "side_multiple": side_multiple,
        "datasets": sorted(datasets, key=lambda dataset: dataset["id"]),
        "validation": {"size": config.validation.size, "prompts": prompts},
    }
    if config.model.condition is not None and config.model.condition.kind == "source":
        settings["sources"] = "as their targets"  # how they are cropped
    if config.model.condition is not None and config.model.condition.size is not None:
        settings["references"] = asdict(config.model.condition.size)
        if config.model.condition.sole_size is not None:
            settings["sole_reference"] = asdict(config.model.condition.sole_size)
    if config.features is not None and uses_features(config.features, config.datasets):
        model = config.features.source and PurePath(config.features.source).name
        compared = {"duplicates": config.features.duplicates, "clusters": config.features.clusters}
        settings["features"] = (
            features_settings(config.model, config.features, config.latents) | {"model": model} | compared
        )
    caption_sets = {name for dataset in config.datasets if not dataset.disabled for name in dataset.used_caption_sets}
    if config.caption is not None and "current" in caption_sets:
        # Only the model's name, since its folder may differ between machines; None: the checkpoint's text encoder.
        model = config.caption.model and PurePath(config.caption.model).name
        settings["caption"] = caption_settings(config.model, config.caption, config.latents) | {"model": model}
    if config.masks is not None and any(row.makes_masks for row in config.datasets if not row.disabled):
        model = PurePath(config.masks.model).name
        settings["masks"] = masks_settings(config.model, config.masks, config.latents) | {"model": model}
    return settings


def uses_features(features: Features | None, datasets: Sequence[Dataset]) -> bool:
    """Whether a plan depends on the tables of `features`: by filters, or because samples are held out for evaluation,
    which keeps near-duplicates on the same side."""
    enabled = [dataset for dataset in datasets if not dataset.disabled]
    is_filtered = any(feature_columns(getattr(dataset, option)) for dataset in enabled for option in FILTERS)
    has_eval = any(dataset.eval or dataset.eval_fraction for dataset in enabled)
    return features is not None and (is_filtered or has_eval)


def dataset_settings(dataset: Dataset) -> Settings:
    """A dataset's part of `plan_settings`. Locations of companions may differ between machines, so the settings
    only contain whether companions exist, and the number of locations if there are several."""
    sources = dataset.conditioning_data
    settings = dataset.model_dump(exclude={*MACHINE_OPTIONS}, mode="json") | {
        "instance_data_dir": dataset.portable_path("instance_data_dir"),
        "source": dataset.resolved_source,
        "caption_strategy": dataset.resolved_caption_strategy,
        "caption_file": dataset.portable_path("caption_file"),
        "conditioning_data": len(sources) if isinstance(sources, tuple) else sources is not None,
        "mask_data": dataset.mask_data is not None,
    }
    if dataset.face_detector is not None:  # its name alone; `discover` compares its content
        settings["face_detector"] = PurePath(dataset.face_detector).name
    return settings


def item_dataset_settings(dataset: Dataset, options: tuple[str, ...]) -> Settings:
    """A dataset's settings that determine an item plan: its media, how clips are cut, and the given options."""
    settings = dataset_settings(dataset)
    names = ("id", "instance_data_dir", "source", "split", "media_column", "video", "where", *options)
    return {name: settings[name] for name in names}


def discovery_settings(dataset: Dataset) -> Settings:
    """Settings that determine a dataset's media table, except the media and the face detector."""
    settings = dataset_settings(dataset)
    return {name: settings[name] for name in DISCOVERY_OPTIONS} | {
        "video.scenes": dataset.video.scenes,
        "accepts_missing_captions": dataset.accepts_missing_captions,
        "make_masks": bool(dataset.makes_masks and (dataset.mask_data or dataset.mask_column)),
    }


#: Quantization -> the exact modules that are quantized, if the library's default depends on its version or the CPU.
QUANTIZATION_NAMES = {"nf4-bnb": "nf4-bnb: matrices of the language model's blocks, multiples of 32x64"}


def text_settings(model: Model, text: Text) -> Settings:
    """Settings that determine the bytes of a shard of embeddings, except the texts and the encoder's weights."""
    family, template = model.family_spec, text.stored_template(model.template)
    precision, quantization = text.precision or model.precision, text.quantization
    if quantization == "bf16" and precision == "bfloat16":
        quantization = "no_change"
    settings = {
        "stage": "encode-text",
        "version": TEXT_VERSION,
        "encoder": family.text_encoder,
        "precision": precision,
        "quantization": QUANTIZATION_NAMES.get(quantization, quantization),
        "attention": text.attention or family.text_attention,
        "template": {"name": template.name, "text": template.text, "crop": template.crop},
        "max_length": text.max_length or template.max_length,
        "layers": template.layers,
        "padded": template.padded,
        "positions": text.positions,
        "storage": text.embeds_dtype(precision),
    }
    if text.storage != "exact" and len(template.layers) > 1:
        settings["scales"] = "token, layer"
    if template.keeps_end:
        settings["keeps_end"] = True
    if template.window is not None:
        settings["window"] = template.window
    if not template.is_normed:
        settings["is_normed"] = False
    if template.image_size is not None:
        settings |= {
            "resize": RESIZE,
            "color": COLOR,
            "image": PROMPT_REFERENCE,
            "image_size": asdict(template.image_size),
        }
        settings |= {"reference": template.reference, "sequential": template.sequential}
        if template.separator:
            settings["separator"] = template.separator
        if template.drops_images:
            settings["drops_images"] = True
    elif template.with_image:
        settings |= {"resize": RESIZE, "color": COLOR, "image": PROMPT_IMAGE}
    return settings


def latents_settings(model: Model, latents: Latents) -> Settings:
    """Settings that determine the bytes of a shard of latents, except the samples and the autoencoder's weights."""
    family = model.family_spec
    settings = {
        "stage": "encode-latents",
        "version": LATENTS_VERSION,
        "autoencoder": family.autoencoder,
        "settings": latents.settings(family),
        "precision": latents.precision or model.precision,
        "posterior": latents.posterior if family.posterior else None,
        "mask": MASK,
        "normalization": asdict(family.normalization),
        **_pixel_settings(model, latents),
    }
    # Tasks whose conditions are encoded as one frame share the latents of tasks that have none.
    if model.condition is not None and (model.condition.frames != 1 or model.condition.padded):
        settings["condition_frames"] = family.condition_frames(model.task)
    if model.condition is not None and model.condition.posterior is not None:
        settings["condition_posterior"] = model.condition.posterior
    return settings


def _pixel_settings(model: Model, latents: Latents) -> Settings:
    """How pictures and clips become pixels."""
    return {"decoder": latents.decoder if model.family_spec.video else None, "resize": RESIZE, "color": COLOR}


def caption_settings(model: Model, caption: Caption, latents: Latents) -> Settings:
    """Settings that determine captions, except the items and the model's weights."""
    has_sources = has_source_images(model)
    settings: Settings = {
        "stage": "caption",
        "version": CAPTION_VERSION,
        "prompts": list(caption.questions(has_sources)),
        "shown": {"edge": caption.resolution, "frames": caption.frames, "source": caption.shows_source(has_sources)},
        "max_tokens": caption.max_tokens,
        "repetition_penalty": caption.repetition_penalty,
        "prefix": caption.prefix,
        "forbidden": list(caption.forbidden_words),
        "precision": caption.precision or model.precision,
        "quantization": QUANTIZATION_NAMES.get(caption.quantization, caption.quantization),
        "attention": caption.attention,
        **_pixel_settings(model, latents),
    }
    if caption.temperature:
        settings["drawn"] = {name: getattr(caption, name) for name in ("temperature", "top_p", "seed")}
    return settings


def features_settings(model: Model, features: Features, latents: Latents) -> Settings:
    """Settings that determine features and measures, except the items and the model's weights."""
    settings: Settings = {
        "stage": "features",
        "version": FEATURES_VERSION,
        "frames": features.frames,
        "measures": MEASURES,
        **_pixel_settings(model, latents),
    }
    if features.source is not None:
        settings["shown"] = {
            "size": features.pixels,
            "precision": features.precision or model.precision,
            "pixels": VISION_PIXELS,
            "pooling": FEATURES_POOLING,
        }
    return settings


def masks_settings(model: Model, masks: Masks, latents: Latents) -> Settings:
    """Settings that determine generated masks, except the items and the model's weights."""
    names = ("classes", "box_column", "threshold", "grow", "blur", "invert", "min_area", "resolution")
    return masks.model_dump(include={*names}, mode="json") | {
        "stage": "masks",
        "version": MASKS_VERSION,
        "precision": masks.precision or model.precision,
        **_pixel_settings(model, latents),
    }


def has_source_images(model: Model) -> bool:
    """Whether the task generates a picture from source images or references."""
    return model.condition is not None and model.condition.kind in ("source", "references")


def vision_settings(model: Model, vision: Vision, latents: Latents) -> Settings:
    """Settings that determine the bytes of a shard of vision features, except the samples and the model's weights."""
    family = model.family_spec
    return {
        "stage": "encode-vision",
        "version": VISION_VERSION,
        "size": vision.pixels,
        "precision": vision.precision or model.precision,
        "pixels": VISION_PIXELS,
        "pooling": VISION_POOLING,
        # Instead of the family: families with tokens of the same size share their features.
        "token": [family.temporal_stride, family.side_multiple],
        **_pixel_settings(model, latents),
    }
