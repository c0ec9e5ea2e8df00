"""diffusion-pipe's TOML of a dataset."""

from collections.abc import Mapping
from math import gcd
from typing import Any

from schemas.foreign.datasets import IN_BUCKETS, new_dataset, use_masks
from schemas.foreign.draft import Draft, NotNeeded, Row, Section, Several, dropped, is_off, refused
from schemas.foreign.values import NOTHING, boolean, if_true, number, off, repeats, resolutions, text, whole


def _aspect(value: Any, draft: Draft) -> float:
    """The larger of both limits: max_aspect is the same for upright and lying sizes."""
    low, high = number(draft.given.get("min_ar", 0.5)), number(draft.given.get("max_ar", 2.0))
    return max(high, 1 / low)


def _frames(value: Any, draft: Draft) -> Any:
    if not (longer := [whole(item) for item in value if whole(item) > 1]):
        raise NotNeeded("images alone")
    values = {"dataset_type": "video", "video.num_frames": max(longer), "video.min_frames": min(longer)}
    if len(longer) > 1:
        values["video.frame_interval"] = gcd(*(count - 1 for count in longer)) or 4
    return Several(values)


def _tags(value: Any, draft: Draft) -> dict[str, Any]:
    if (count := whole(value)) < 1:
        raise NotNeeded("0 is off")
    delimiter = str(draft.given.get("cache_shuffle_delimiter", ", ")).strip() or " "
    return {"variants": min(count, 64), "delimiter": delimiter}


DIRECTORY = {
    "path": Row("instance_data_dir", text),
    "num_repeats": Row("repeats", repeats, "extra passes, so that 0 is once"),
    "resolutions": Row("resolution", resolutions, "one or a list of them"),
    "enable_ar_bucket": IN_BUCKETS,
    **dict.fromkeys(("min_ar", "max_ar"),
                    Row("max_aspect", _aspect, "longest side of a bucket over its shorter one")),
    "frame_buckets": Row("video.num_frames", _frames,
              "the longest, with min_frames and frame_interval; video.clip says "
                         "which part"),
    "mask_path": Row("mask_data", text, "which train.methods.masked_loss trains on"),
    "control_path": Row("conditioning_data", text),
    "caption_prefix": Row("prepend", text),
    "cache_shuffle_num": Row("tag_shuffle", _tags),
    "shuffle_tags": Row("tag_shuffle", lambda value, draft: {"variants": 4} if boolean(value) and is_off(
        draft.given.get("cache_shuffle_num")) else off()),
    **dropped("a part of tag_shuffle", "cache_shuffle_delimiter"),
    **dropped("buckets are computed from resolution and strides (buckets: computed)", "num_ar_buckets"),
    **refused("buckets are computed, or the family's own (buckets: family); crop_aspect_buckets lists shapes of crops",
              "ar_buckets", "size_buckets"),
    "skip_empty_caption": Row("caption_strategy", if_true(NOTHING, "an item without caption is set aside")),
    **refused("one mask for all items: mask_data has a file for each", "default_mask_file"),
    **refused("weight is a factor of the draws in an epoch", "subsample_ratio"),
    **dropped("every caption is encoded before training", "online_captions", "shuffle_metadata"),
}  # fmt: skip
SECTIONS: Mapping[str, Section] = {
    "datasets": Section("a [[directory]] of the dataset's file", DIRECTORY, in_dataset=True)
}


def carry_datasets(draft: Draft, datasets: Mapping[str, Any]) -> None:
    common = {key: value for key, value in datasets.items() if key != "directory"}
    for item in draft.sections(datasets.get("directory"), "directory"):
        at, name = new_dataset(draft, item.get("path"))
        draft.carry(SECTIONS["datasets"], {**common, **item}, f"{name}: ", at)
        draft.put((*at, "allow_upscale"), True)  # it enlarges what is small
        if item.get("mask_path"):
            use_masks(draft)
