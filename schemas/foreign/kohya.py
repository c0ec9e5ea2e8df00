"""kohya's sd-scripts: the dataset's TOML, and the arguments, as a TOML file or a command. It trains other families than
this project, so the family is chosen; datasets and training are carried over."""

from collections.abc import Mapping
from typing import Any

from schemas.foreign.datasets import IN_BUCKETS, new_dataset, share
from schemas.foreign.draft import Draft, Files, NotNeeded, Refused, Row, Section, Several, dropped, is_off, refused
from schemas.foreign.kohya_common import DEFAULTS, SHARED, carry_prompts, flatten, read_files
from schemas.foreign.models import CHOOSE, chosen, flavour_of_repo
from schemas.foreign.values import (
    boolean,
    caption_ending,
    flag,
    number,
    off,
    one_of,
    refuse,
    repeats,
    resolution,
    shown,
    text,
    whole,
)

NAME = "sd-scripts"


def _model(value: Any, draft: Draft) -> Any:
    if (published := flavour_of_repo(str(value))) is not None:
        return chosen(*published)
    raise Refused(f"{shown(value)} is of no family that is trained here; {CHOOSE}")


ARGUMENTS = {
    **SHARED,
    "pretrained_model_name_or_path": Row("model.family", _model),
    "train_batch_size": Row("train.batch_size", whole),
    "unet_lr": Row("train.optimizer.lr", number),
    "use_8bit_adam": flag("train.optimizer.name", "bnb-adamw8bit"),
    "use_lion_optimizer": flag("train.optimizer.name", "optimi-lion"),
    "loss_type": Row("train.loss.type", one_of({"l2": None, "huber": "huber", "smooth_l1": "smooth_l1"},
                                               "valid: mse, huber, smooth_l1"), "its l2 is mse"),
    "huber_c": Row("train.loss.huber_c", number),
    "huber_schedule": Row("train.loss.huber_schedule", text),
    "ip_noise_gamma": Row("train.methods.input_perturbation.strength", number),
    "prior_loss_weight": Row("train.methods.regularization.weight", lambda value, draft: Several(
        {"train.methods.regularization.target": "data", "train.methods.regularization.weight": number(value)})
        if any(item.get("is_regularization_data") for item in draft.values.get("datasets", []))
        else off("no dataset is one of regularization"), "with target: data"),
    "validation_split": Row("datasets.N.eval_fraction", lambda value, draft: Several(
        {f"datasets.{index}.eval_fraction": number(value) for index in range(len(draft.values.get("datasets", [])))})
        if number(value) else off(), "of each dataset"),
    "validate_every_n_steps": Row("validation.every", whole),
    "torch_compile": flag("train.compile", "blocks"),
    "fp8_base_unet": flag("train.base_precision", "fp8-torchao"),
    **dict.fromkeys(("text_encoder_lr", "network_train_unet_only"),
                    Row(drop="the transformer is trained, and nothing else")),
    **refused("no text encoder is trained", "network_train_text_encoder_only"),
    **dropped("latents and texts are always encoded before training, under root", "cache_latents",
              "cache_latents_to_disk", "cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk",
              "skip_cache_check"),
    **dropped("latents.batch_pixels and text.batch_tokens are the sizes of batches", "vae_batch_size",
              "text_encoder_batch_size"),
    **dropped("not in force for models that predict a velocity; here train.loss.weighting: min_snr", "min_snr_gamma",
              "debiased_estimation_loss", "scale_v_pred_loss_like_noise_pred", "v_pred_like_loss"),
    **refused("the noise has no offset; train.timesteps.mean moves training to more noise", "noise_offset",
              "multires_noise_iterations", "adaptive_noise_scale", "noise_offset_random_strength"),
    **dropped("of a noise that is not there", "multires_noise_discount", "zero_terminal_snr", "huber_scale",
              "ip_noise_gamma_random_strength"),
    **refused("masks are files, named as the media: mask_data of a dataset, and train.methods.masked_loss",
              "masked_loss",
              "alpha_mask"),
    **refused("model.path takes a folder or repository in diffusers' layout", "vae", "clip_l", "clip_g", "t5xxl", "ae",
              "controlnet_model_name_or_path", "tokenizer_cache_dir"),
    **dropped("of models that are not trained here", "v2", "v_parameterization", "clip_skip", "no_half_vae",
              "apply_t5_attn_mask", "t5xxl_max_token_length", "guidance_scale", "model_prediction_type", "model_type",
              "split_mode", "apply_lg_attn_mask", "training_shift", "network_args_te", "weighted_captions"),
    "max_token_length": Row("text.max_length", lambda value, draft: off("the pipeline's own length is taken")),
    **dropped("it changes no result", "lowram", "highvram", "mem_eff_attn", "use_safetensors", "output_config",
              "validation_seed", "max_validation_steps", "dataset_class", "disable_mmap_load_safetensors"),
    **dropped("samples are made by the family's own sampler", "sample_sampler"),
    **refused("schedules and sizes of checkpoints are counted in steps", "validate_every_n_epochs",
              "save_n_epoch_ratio"),
    **refused("train.parallel.strategy: fsdp2 shards a model", "deepspeed"),
    **dropped("of DeepSpeed", "zero_stage", "offload_optimizer_device", "offload_param_device", "zero3_init_flag"),
    **refused("an optimizer's step is taken when all gradients are there", "fused_backward_pass"),
    "dynamo_backend": Row("train.compile_backend", lambda value, draft: off("nothing is compiled")
        if is_off(draft.given.get("torch_compile")) else Several({"train.compile_backend": text(value)})),
}  # fmt: skip


def _tags(value: Any, draft: Draft) -> dict[str, Any]:
    if not boolean(value):
        raise NotNeeded("it is off")
    delimiter = str(draft.given.get("caption_separator", ",")) or ","
    return {"variants": 8, "delimiter": delimiter, "keep": whole(draft.given.get("keep_tokens", 0))}


def _affix(value: Any, draft: Draft) -> str:
    if is_off(value):
        raise NotNeeded("it is empty")
    return text(value)


SUBSET = {
    **dict.fromkeys(("image_dir", "train_data_dir", "reg_data_dir"), Row("instance_data_dir", text)),
    "metadata_file": Row("caption_file", lambda value, draft: refuse(
        "caption_file takes a table of captions, .csv, .jsonl or .parquet: write the JSON as JSON lines"), "a table"),
    "in_json": Row("caption_file", lambda value, draft: refuse("caption_file takes .csv, .jsonl or .parquet"),
              "a table"),
    "conditioning_data_dir": Row("conditioning_data", text),
    "class_tokens": Row("instance_prompt", text, "with caption_strategy: instanceprompt, where there are no captions"),
    "is_reg": flag("is_regularization_data"),
    **dict.fromkeys(("num_repeats", "dataset_repeats"),
                    Row("repeats", repeats, "extra passes, so that 0 is once")),
    **dict.fromkeys(("caption_extension", "caption_extention"), Row("caption_strategy", caption_ending, "textfile")),
    "shuffle_caption": Row("tag_shuffle", _tags, "in datasets"),
    "keep_tokens": Row(drop="a part of tag_shuffle, keep"),
    "caption_separator": Row(drop="a part of tag_shuffle, delimiter"),
    "caption_prefix": Row("prepend", _affix),
    "caption_suffix": Row("append", _affix),
    "random_crop": flag("crop_style", "random"),
    "resolution": Row("resolution", resolution, "the edge of the square of the area"),
    "bucket_no_upscale": Row("allow_upscale", lambda value, draft: not boolean(value), "the other way round"),
    "bucket_reso_steps": Row("bucket_step", whole, "in datasets"),
    "enable_bucket": IN_BUCKETS,
    **dropped("buckets are computed from resolution and max_aspect; minimum_image_size and maximum_image_size, in "
              "datasets, leave items out", "min_bucket_reso", "max_bucket_reso"),
    "caption_dropout_rate": Row(drop="train.caption_dropout is of all datasets"),
    **refused("whole captions are dropped at random: train.caption_dropout", "caption_dropout_every_n_epochs",
              "caption_tag_dropout_rate"),
    **refused("pictures are never changed: put changed copies into a folder of their own", "flip_aug", "color_aug",
              "face_crop_aug_range"),
    **refused("a caption's words are as they are: write alternatives on lines of their own", "enable_wildcard",
              "keep_tokens_separator", "secondary_separator", "token_warmup_min", "token_warmup_step"),
    **dropped("every dataset has the batch of train.batch_size", "batch_size"),
    **dropped("it changes no result", "cache_info", "resize_interpolation", "custom_attributes", "validation_seed"),
    **refused("weight is a factor of the draws, and the adapter has one strength", "network_multiplier"),
    **refused("masks are files, named as the media: mask_data", "alpha_mask"),
    "validation_split": Row("eval_fraction", lambda value, draft: number(value) or off()),
}  # fmt: skip
SUBSET_DEFAULTS = {"enable_bucket": False, "bucket_no_upscale": False}
SECTIONS: Mapping[str, Section] = {
    "arguments": Section(
        "the arguments",
        ARGUMENTS,
        {**DEFAULTS, "learning_rate": 2e-6},
        first=("train_batch_size", "gradient_accumulation_steps", "max_train_steps", "lr_scheduler"),
    ),
    "datasets": Section("a subset of the dataset's file", SUBSET, SUBSET_DEFAULTS, in_dataset=True),
}
#: Arguments that are options of the one dataset where there is no dataset's file, or of each.
_OF_DATASETS = tuple(
    SUBSET.keys() - ARGUMENTS.keys() - {"image_dir", "is_reg", "metadata_file", "batch_size", "class_tokens"}
)


def claims(content: Any) -> str:
    if not isinstance(content, dict):
        return ""
    items = content.get("datasets")
    if isinstance(items, list) and any(isinstance(item, dict) and "subsets" in item for item in items):
        return "datasets"
    flat = flatten(content)
    known = flat.keys() & {"train_data_dir", "dataset_config", "network_module"}
    return "arguments" if known and "pretrained_model_name_or_path" in flat else ""


def carry(draft: Draft, roles: Mapping[str, Any], files: Files) -> None:
    given, content = read_files(roles, files)
    common = {key: given.pop(key) for key in list(given) if key in _OF_DATASETS}
    subsets = _subsets(draft, content)
    if not subsets:
        folders = [
            (common.pop(key, None), more) for key, more in (("train_data_dir", {}), ("reg_data_dir", {"is_reg": True}))
        ]
        subsets = [subset for folder, more in folders if folder for subset in _folders(str(folder), more, files)]
    for subset in subsets:
        given_here = {**common, **subset}
        at, name_ = new_dataset(draft, given_here.get("image_dir"))
        draft.carry(SECTIONS["datasets"], given_here, f"{name_}: ", at)
    if any("batch_size" in subset for subset in subsets):
        share(draft, "batch_size", "train.batch_size", [subset.get("batch_size") for subset in subsets], 1)
    rates = [{**common, **subset}.get("caption_dropout_rate") for subset in subsets]
    share(draft, "caption_dropout_rate", "train.caption_dropout", rates, 0.0)
    draft.samples, draft.uncounted = files.count_media(draft.values.get("datasets", []))
    draft.carry(SECTIONS["arguments"], given)
    carry_prompts(draft, files, given.get("sample_prompts"))


def _subsets(draft: Draft, content: Mapping[str, Any]) -> list[dict[str, Any]]:
    general = draft.section(content.get("general"), "general")
    return [
        {**general, **{key: value for key, value in dataset.items() if key != "subsets"}, **subset}
        for dataset in draft.sections(content.get("datasets"), "datasets")
        for subset in draft.sections(dataset.get("subsets"), "subsets")
    ]


def _folders(folder: str, more: Mapping[str, Any], files: Files) -> list[dict[str, Any]]:
    """Folders named REPEATS_WORDS below train_data_dir, as DreamBooth's; the folder itself where there are none."""
    subsets = []
    for name in files.folders_in(folder):
        count, underscore, words = name.partition("_")
        if underscore and count.isdecimal():
            subsets.append({"image_dir": f"{folder}/{name}", "num_repeats": int(count), "class_tokens": words, **more})
    return subsets or [{"image_dir": folder, **more}]
