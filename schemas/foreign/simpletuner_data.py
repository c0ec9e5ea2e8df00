"""SimpleTuner's multidatabackend.json, and the arguments that are the defaults of its datasets."""

from collections.abc import Mapping, Sequence
from typing import Any

from schemas.foreign.datasets import use_masks
from schemas.foreign.draft import (
    SECRET_ADVICE,
    Draft,
    NotNeeded,
    Refused,
    Row,
    Section,
    Several,
    dropped,
    is_off,
    refused,
    secret,
)
from schemas.foreign.values import boolean, compact, flag, number, one_of, only_with, run_name, shown, text, whole

CACHES = ("text_embeds", "image_embeds", "conditioning_image_embeds")
#: Arguments that every dataset has where it does not say otherwise.
BACKEND_ARGUMENTS = (
    "resolution", "resolution_type", "minimum_image_size", "maximum_image_size", "target_downsample_size",
    "caption_strategy", "instance_prompt", "prepend_instance_prompt", "only_instance_prompt", "aspect_bucket_alignment",
    "max_upscale_threshold", "skip_file_discovery", "parquet_caption_column", "parquet_filename_column",
)  # fmt: skip


def _size(value: Any, draft: Draft) -> Any:
    if (size := number(value)) <= 0:
        raise NotNeeded("0 is no limit")
    return compact(size)


def _place(value: Any, draft: Draft) -> str:
    given = draft.given
    if given.get("type") == "aws":
        prefix = str(given.get("aws_data_prefix") or value or "").strip("/")
        return f"s3://{given['aws_bucket_name']}/{prefix}".rstrip("/")
    return text(value)


def _caption_strategy(value: Any, draft: Draft) -> str:
    if not is_off(draft.given.get("only_instance_prompt")):
        raise NotNeeded("only_instance_prompt is on")
    known = ("textfile", "filename", "instanceprompt", "parquet", "csv", "huggingface")
    choices = {**{name: name for name in known}, "instance_prompt": "instanceprompt"}
    return one_of(choices, "see caption_strategy in docs/datasets.md")(value, draft)


def _prepend(value: Any, draft: Draft) -> str:
    if not boolean(value) or not is_off(draft.given.get("only_instance_prompt")):
        raise NotNeeded("nothing is put before captions")
    return f"{text(draft.given['instance_prompt'])} "


def _instance_prompt(value: Any, draft: Draft) -> str:
    only = not is_off(draft.given.get("only_instance_prompt"))
    if not only and draft.given.get("caption_strategy") not in ("instanceprompt", "instance_prompt"):
        raise NotNeeded("captions are not this text")
    return text(value)


def _shuffle(value: Any, draft: Draft) -> dict[str, Any]:
    if not boolean(value.get("enable", False)):
        raise NotNeeded("it is off")
    ends = {"comma": ",", "space": " ", "period": "."}
    keep = boolean(value.get("include_original", True))
    return {
        "variants": whole(value.get("count", 1)) + int(keep),
        "delimiter": ends[str(value.get("split_on", "comma"))],
        "keep": whole(value.get("position_start", 0)),
    }


def _filters(value: Any, draft: Draft) -> list[str]:
    if not isinstance(value, list):
        raise Refused("it names a file: write its lines into the list caption_filter, regular expressions as /.../")
    if any(str(word).startswith("s/") for word in value):
        raise Refused("caption_filter removes words, and replaces none: leave out the lines that begin with s/")
    return [f"/{word}/" if any(mark in word for mark in r"\^$.*+?[](){}|") else str(word) for word in value]


def _table(value: Any, draft: Draft) -> Several:
    values = {"caption_file": text(value["path"])}
    columns = [str(value[key]) for key in ("caption_column", "fallback_caption_column") if value.get(key)]
    return Several({**values, **({"caption_column": columns[:1]} if columns else {})})


def _columns(value: Any, draft: Draft) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [text(value)]


def _crop(value: Any, draft: Draft) -> Several:
    crop = boolean(value)
    aspect = {} if not crop or draft.given.get("crop_aspect") else {"crop_aspect": "square"}  # its default
    style = {} if not crop or draft.given.get("crop_style") else {"crop_style": "random"}
    return Several({"crop": crop, **aspect, **style})


def _kind(value: Any, draft: Draft) -> Any:
    if value in ("local", "aws"):
        raise NotNeeded("by instance_data_dir")
    return one_of({"huggingface": "huggingface", "csv": "manifest"}, "source takes folder, remote, webdataset, "
                  "huggingface, manifest")(value, draft)  # fmt: skip


DATASET = {
    "id": Row("id", run_name),
    "type": Row("source", _kind, "folder (its local), remote, webdataset, huggingface, manifest"),
    "dataset_type": Row(
        "dataset_type", one_of({"image": None, "video": "video"}, "image and video datasets are trained on")
    ),
    **dict.fromkeys(("disabled", "disable"), flag("disabled")),
    "instance_data_dir": Row("instance_data_dir", _place),
    "aws_bucket_name": Row("instance_data_dir", _place, "s3://BUCKET/FOLDER; credentials come from the environment"),
    "dataset_name": Row("instance_data_dir", text, "of a dataset of the hub"),
    "csv_file": Row("instance_data_dir", text, "of a table; caption_file names one of captions alone"),
    "csv_caption_column": Row("caption_column", _columns),
    "caption_column": Row("caption_column", _columns),
    "image_column": Row("media_column", text),
    "video_column": Row("media_column", text),
    "split": Row("split", text),
    "caption_strategy": Row("caption_strategy", _caption_strategy),
    "instance_prompt": Row("instance_prompt", _instance_prompt),
    "only_instance_prompt": flag("caption_strategy", "instanceprompt", "instanceprompt, with instance_prompt"),
    "prepend_instance_prompt": Row("prepend", _prepend, "the words before every caption"),
    "caption_filter_list": Row("caption_filter", _filters),
    "caption_shuffle": Row("tag_shuffle", _shuffle),
    "parquet": Row("caption_file", _table),
    "parquet_caption_column": Row("caption_column", _columns),
    "resolution": Row("resolution", _size),
    "resolution_type": Row("resolution_type", text),
    "crop": Row("crop", _crop),
    "crop_aspect": Row("crop_aspect", only_with("crop", text)),
    "crop_style": Row(
        "crop_style",
        only_with("crop", one_of({"center": None, "random": "random", "corner": "corner", "face": "face"},
                  "valid: center, random, corner, face")),
    ),
    "crop_aspect_buckets": Row("crop_aspect_buckets", lambda value, draft: [number(item) for item in value]),
    "crop_enabled": Row("crop", _crop),
    "minimum_image_size": Row("minimum_image_size", _size),
    "maximum_image_size": Row("maximum_image_size", _size),
    "target_downsample_size": Row("target_downsample_size", _size),
    "max_upscale_threshold": Row("allow_upscale", lambda value, draft: number(value) > 0),
    "aspect_bucket_alignment": Row("bucket_step", whole),
    "repeats": Row("repeats", whole),
    "probability": Row("weight", number, "draws in an epoch, times this"),
    **dict.fromkeys(("is_regularisation_data", "is_regularization_data"),
                    flag("is_regularization_data")),
    "conditioning_data": Row("conditioning_data", _columns),
    **dropped("caches are under root, where each stage finds its own: latents in root/latents, texts in root/text",
              "cache_dir_vae", "cache_dir", "text_embeds", "image_embeds", "conditioning_image_embeds",
              "cache_dir_conditioning_image_embeds", "csv_cache_dir", "default", "hash_filenames",
              "preserve_data_backend_cache", "vae_cache_clear_each_epoch", "vae_cache_ondemand", "vae_cache_disable",
              "text_cache_ondemand", "text_cache_disable", "write_batch_size", "text_encoder_batch_size"),
    **dropped("discover reads sizes from the files into one table, and keeps what it has read", "metadata_backend",
              "metadata_update_interval", "parquet_filename_column"),
    **dropped("discover looks at the folder each time, and opens what is new alone", "skip_file_discovery"),
    **dropped("conditioning_data names source images, mask_data masks", "conditioning_type", "source_dataset_id"),
    **dropped("files are never deleted", "delete_unwanted_images", "delete_problematic_images", "delete_nsfw_images"),
    **secret(f"the variables are AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY; {SECRET_ADVICE}", "aws_access_key_id",
             "aws_secret_access_key"),
    **dropped("a part of instance_data_dir, s3://BUCKET/FOLDER", "aws_data_prefix"),
    **dropped("the environment variables AWS_ENDPOINT_URL and AWS_REGION", "aws_endpoint_url", "aws_region_name"),
    **refused("max_aspect is the longest side of a bucket over its shorter one, and max_cropped sets aside what would "
              "be cropped too much", "minimum_aspect_ratio", "maximum_aspect_ratio"),
    **refused("the lines of a caption file are alternatives: write each caption on one line",
              "disable_multiline_split"),
    **refused("a dataset takes all of its items; where filters them, weight says how often they are drawn",
              "max_num_samples"),
    **refused("a dataset is drawn from at every step; continue with another one by train.on_new_data",
              "start_epoch", "start_step", "end_epoch", "end_step"),
    **refused("every dataset has the batch of train.batch_size", "train_batch_size"),
    **refused("train.timesteps.mean moves training of all datasets to more or less noise", "timestep_sampling_offset"),
    **refused("no dataset is made of another; make the images beforehand, and name them in conditioning_data",
              "conditioning"),
    **refused("no sound is trained", "audio", "s2v_datasets"),
    **refused("nothing is trained in two directions", "slider_strength"),
}  # fmt: skip
VIDEO = {
    "num_frames": Row("video.num_frames", whole),
    "min_frames": Row("video.min_frames", whole),
    "max_frames": Row("video.max_frames", whole),
    "frame_rate": Row("video.frame_rate", number, "frames are chosen by their time, where it took the first ones"),
    "bucket_strategy": Row("video.bucket_strategy", text),
    "frame_interval": Row("video.frame_interval", whole),
    **dropped("by model.flavour", "is_i2v"),
}
#: Of a dataset in SimpleTuner.
DATASET_DEFAULTS = {"crop": False, "max_upscale_threshold": 1}
SECTIONS = {
    "datasets": Section("a dataset of multidatabackend.json", DATASET, DATASET_DEFAULTS, in_dataset=True),
    "video": Section("its section video", VIDEO, {"bucket_strategy": "aspect_ratio"}, in_dataset=True),
}


def carry_datasets(draft: Draft, backends: Sequence[Mapping[str, Any]], common: Mapping[str, Any]) -> None:
    """Carry over the datasets; caches are left out, and masks and source images join the dataset that names them.
    common: arguments that every dataset has, by BACKEND_ARGUMENTS."""
    by_id = {str(backend.get("id")): backend for backend in backends}
    number_ = 0
    for backend in backends:
        label = f"{backend.get('id', 'dataset')}: "
        kind = backend.get("dataset_type", "image")
        if kind in CACHES or (backend.get("type") == "local" and set(backend) <= {"id", "type", "cache_dir"}):
            draft.say(f"{label}dataset_type", "not needed", f"{kind}: texts and latents are cached under root")
            continue
        if kind == "conditioning":
            draft.say(f"{label}dataset_type", "not needed", "its folder joins the datasets that name it")
            continue
        given = {**common, **backend}
        at = ("datasets", number_)
        video, paired = given.pop("video", None), given.pop("conditioning_data", None)
        draft.carry(SECTIONS["datasets"], given, label, at)
        if kind == "video":
            _carry_video(draft, video or {}, label, at)
        for name in [paired] if isinstance(paired, str) else paired or ():
            _pair(draft, by_id.get(str(name)), str(name), label, at)
        number_ += 1


def _carry_video(draft: Draft, video: Mapping[str, Any], label: str, at: tuple[str, int]) -> None:
    given = dict(video)
    if "num_frames" in given and "min_frames" not in given:
        given["min_frames"] = given["num_frames"]  # as it is there
    draft.carry(SECTIONS["video"], given, f"{label}video.", at)


def _pair(draft: Draft, other: Mapping[str, Any] | None, name: str, label: str, at: tuple[str, int]) -> None:
    key = f"{label}conditioning_data"
    kind = str(other.get("conditioning_type", "controlnet")) if other else ""
    if other is None or not other.get("instance_data_dir"):
        draft.say(key, "refused", f"no dataset {shown(name)} with a folder is in the file")
    elif kind == "mask":
        draft.put((*at, "mask_data"), str(other["instance_data_dir"]))
        use_masks(draft)
        draft.say(key, "carried over", "its masks", (*at, "mask_data"), ("train", "methods", "masked_loss"))
    elif kind.startswith("reference"):
        path = (*at, "conditioning_data")
        before = draft.values["datasets"][at[1]].get("conditioning_data")
        folder = str(other["instance_data_dir"])
        draft.put(path, [*([before] if isinstance(before, str) else before), folder] if before else folder)
        draft.say(key, "carried over", "its source images", path)
    else:
        draft.say(key, "refused", f"{kind}: source images (reference_strict) and masks are trained with")
