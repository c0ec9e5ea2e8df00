"""SimpleTuner: config.json, .toml or .env, multidatabackend.json, prompt library and lycoris_config.json."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from schemas.config.yaml_reader import KeyPath
from stages.importing import conversions as to
from stages.importing.draft import (
    NOTHING,
    Convert,
    Draft,
    Nearest,
    Rows,
    Several,
    Table,
    Trainer,
    is_off,
    section_options,
    show_value,
)

# -- the model

#: Family in SimpleTuner -> flavour in SimpleTuner -> flavour in latentpress. The first flavour is the default.
FLAVOURS = {
    "sana": {
        "sana1.5-4.8b-1024": "sana1.5-4.8b-1024px", "sana1.5-1.6b-1024": "sana1.5-1.6b-1024px",
        "sana1.0-1.6b-2048": "sana-1600m-2kpx-bf16", "sana1.0-1.6b-1024": "sana-1600m-1024px-bf16",
        "sana1.0-600m-1024": "sana-600m-1024px", "sana1.0-600m-512": "sana-600m-512px",
    },
    "z_image": {"turbo-ostris-v2": "z-image-turbo", "turbo": "z-image-turbo", "base": "z-image"},
    "krea2": {"raw": "krea-2-raw", "turbo": "krea-2-turbo"},
    "qwen_image": {
        "v2.0": "qwen-image-2512", "v1.0": "qwen-image", "edit-v1": "qwen-image-edit",
        "edit-v2": "qwen-image-edit-2509", "edit-v2+": "qwen-image-edit-2509", "edit-v3": "qwen-image-edit-2511",
        "v2.1": "qwen-image-2.1",
    },
    "wan": {
        "t2v-480p-1.3b-2.1": "t2v-1.3b", "t2v-480p-14b-2.1": "t2v-14b", "ti2v-5b-2.2": "t2v-5b",
        "i2v-14b-2.2-high": "i2v-a14b", "i2v-14b-2.2-low": "i2v-a14b",
    },
    "flux2": {"klein-9b": "klein-base-9b", "klein-4b": "klein-base-4b"},
}  # fmt: skip
#: Family in SimpleTuner -> flavour in SimpleTuner -> its assistant adapter.
ASSISTANTS = {
    "z_image": {
        name: f"ostris/zimage_turbo_training_adapter/zimage_turbo_training_adapter_{version}.safetensors"
        for name, version in (("turbo-ostris-v2", "v2"), ("turbo", "v1"))
    },
    "qwen_image": {"v2.1": "SimpleTuner/Qwen-Image-2.1-training-assistant-v3/pytorch_lora_weights.safetensors"},
}  # fmt: skip


def _family_name(entries: Mapping[str, Any]) -> str:
    name = str(entries.get("model_family"))
    return name if name.startswith("kandinsky5-") else name.replace("-", "_").replace("kandinsky5_", "kandinsky5-")


def _published(draft: Draft) -> str | None:
    """The flavour of the published checkpoint that the file names, if any."""
    return to.flavour_of_repo(str(draft.entries.get("pretrained_model_name_or_path", "")))


def _family(value: Any, draft: Draft) -> Several:
    """The family. A family of a newer release is found by its published repository."""
    name, word = _family_name(draft.entries), draft.entries.get("model_flavour")
    if name.startswith("kandinsky5-"):
        return Several({"model.family": name})
    if (word is None or name not in FLAVOURS) and (published := _published(draft)):
        return to.select_flavour(published)
    return _flavour(word or next(iter(FLAVOURS[name])), draft)


def _flavour(value: Any, draft: Draft) -> Any:
    name, word = _family_name(draft.entries), to.text(value)
    if name.startswith("kandinsky5-"):
        return Several({"model.flavour": word})
    if name not in FLAVOURS and _published(draft):
        return NOTHING
    return to.select_flavour(
        FLAVOURS[name][word], word.rpartition("-")[2] if word.endswith(("-high", "-low")) else None
    )


# -- training


def _if_lora(convert: Convert) -> Convert:
    """Make a conversion of a value that is not used with lycoris, which has a separate file."""
    return to.only_if(lambda draft: draft.entries.get("lora_type") != "lycoris", convert)


def _schedule(value: Any, draft: Draft) -> Any:
    """The schedule. SimpleTuner's cosine has no warm-up: it falls for lr_warmup_steps, then rises for as many steps. In
    latentpress, each period falls."""
    name = to.text(value).strip()
    if name not in ("cosine", "cosine_with_restarts", "sine"):
        return to.schedule(value, draft)
    steps, fall = draft.get("train.steps", 1000), to.positive_integer(draft.entries.get("lr_warmup_steps", 0))
    fall = 1000 if fall is NOTHING else fall
    cycles = max(1, round(steps / fall / (1 if name == "cosine_with_restarts" else 2)))
    ours = section_options("train.optimizer", schedule="cosine", warmup=0, cycles=cycles)
    return ours if name == "cosine" and fall == steps else Nearest(ours)


def _clipping(value: Any, draft: Draft) -> Any:
    """The limit of the gradient norm. By default, SimpleTuner clips gradients by value; latentpress clips only by
    norm."""
    by_norm = draft.entries.get("grad_clip_method") == "norm"
    return to.number(value) or to.NO_LIMIT if by_norm else Nearest(to.NO_LIMIT)


def _shift(value: Any, draft: Draft) -> Any:
    """The shift. Sana's sigmas are uniform with the shift of its scheduler, and FLUX.3 Image always has the shift of
    its pipeline; 0 means no shift, or the automatic shift."""
    if _family_name(draft.entries) == "sana":
        return Several({"train.timesteps.sampling": "uniform", "train.shift": 3.0})
    if draft.get("model.family") == "flux3":
        return NOTHING
    if to.number(value):
        return to.number(value)
    auto = not is_off(draft.entries.get("flow_schedule_auto_shift"))
    return Several({"train.timesteps.auto_shift": True} if auto else {"train.shift": 1.0})


def _sampling(name: str) -> Convert:
    settings = Several({"train.timesteps.sampling": name})
    return lambda value, draft: settings if to.boolean(value) and _family_name(draft.entries) != "sana" else NOTHING


def _timesteps(value: Any, draft: Draft) -> Several:
    items = value.strip("[]").split(",") if isinstance(value, str) else value
    numbers = [to.number(item) for item in items]
    scale = 1000 if max(numbers) > 1 else 1
    return section_options("train.timesteps", sampling="list", values=[item / scale for item in numbers])


def _masked(convert: Convert) -> Convert:
    return to.only_if(lambda draft: draft.get("train.methods.masked_loss") is not None, convert)


def _sizes(value: Any, draft: Draft) -> Any:
    """Sizes such as "1024x1024,1280x768", or one edge; for videos with the number of frames."""
    frames = draft.entries.get("validation_num_video_frames")
    edges = [word.strip().partition("x") for word in str(value).split(",")]
    sizes = [to.size(width, height or width, frames) for width, _, height in edges]
    return sizes[0] if len(sizes) == 1 else sizes


DEFAULTS = {
    "model_type": "full", "train_batch_size": 4, "num_train_epochs": 1, "learning_rate": 4e-7,
    "optimizer": "adamw_bf16", "lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 0, "lr_power": 0.8,
    "lr_end": 4e-7, "lora_dropout": 0.1, "lora_rank": 16, "flow_schedule_shift": 3.0, "max_grad_norm": 2.0,
    "caption_dropout_probability": 0.1, "gradient_checkpointing": True, "checkpoints_total_limit": 5,
}  # fmt: skip
#: Further defaults, if prompts exist.
VALIDATION_DEFAULTS = {
    "validation_step_interval": 100, "validation_guidance": 7.5, "validation_num_inference_steps": 30,
    "validation_resolution": 256,
}  # fmt: skip
ARGUMENTS: Rows = {
    "model_family": ("model.family", _family),
    "model_flavour": ("model.flavour", _flavour),
    "pretrained_model_name_or_path": ("model.path", to.checkpoint),
    "revision": ("model.revision", to.text),
    "assistant_lora_path": ("model.assistant", to.unless("disable_assistant_lora", to.assistant)),
    "mixed_precision": ("model.precision", to.precision),
    "base_model_precision": ("train.base_precision", to.quantized),
    "text_encoder_1_precision": ("text.quantization", to.one_of({
        "no_change": NOTHING, "int8-quanto": "int8-quanto", "nf4-bnb": "nf4-bnb"}, "int8-quanto")),
    "quantize_via": ("train.quantize_via", to.one_of({"cpu": "cpu", "accelerator": "device", "pipeline": NOTHING})),
    "tokenizer_max_length": ("text.max_length", to.integer),
    "vae_dtype": ("latents.precision", to.one_of({
        "default": NOTHING, "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"})),
    "vae_enable_tiling": ("latents.tiling", to.flag()),
    "vae_enable_slicing": ("latents.slicing", to.flag()),
    "vae_enable_patch_conv": ("latents.chunk_frames", to.flag(4)),
    "torch_num_threads": ("train.threads", to.positive_integer),
    "model_type": ("train.adapter.type", to.one_of({"lora": "lora", "full": "full"})),
    "lora_type": ("train.adapter.type", to.one_of({"standard": NOTHING, "lycoris": NOTHING}, "lora")),
    "lora_rank": ("train.adapter.rank", _if_lora(to.integer)),
    "lora_alpha": ("train.adapter.alpha", _if_lora(to.number)),
    "lora_dropout": ("train.adapter.dropout", _if_lora(to.number)),
    "use_dora": ("train.adapter.dora", to.flag()),
    "init_lora": ("train.adapter.init_from", to.file_path),
    "lora_init_type": ("train.adapter.init_weights", to.one_of({
        **{name: name for name in ("gaussian", "pissa", "olora")}, "default": NOTHING}, "default")),
    "lora_format": ("train.adapter.type", to.one_of({"diffusers": NOTHING, "comfyui": NOTHING})),
    "train_batch_size": ("train.batch_size", to.integer),
    "gradient_accumulation_steps": ("train.accumulate", to.integer),
    "max_train_steps": ("train.steps", to.positive_integer),
    "num_train_epochs": ("train.steps", to.unless("max_train_steps", to.epochs)),
    "seed": ("train.seed", to.integer),
    "optimizer": ("train.optimizer.name", to.optimizer),
    "learning_rate": ("train.optimizer.lr", to.with_optimizer(to.number)),
    "optimizer_config": ("train.optimizer.arguments", to.with_optimizer(to.arguments)),
    **dict.fromkeys(("optimizer_beta1", "adam_beta1"), ("train.optimizer.betas", to.beta(0))),
    **dict.fromkeys(("optimizer_beta2", "adam_beta2"), ("train.optimizer.betas", to.beta(1))),
    "adam_weight_decay": ("train.optimizer.weight_decay", to.number),
    "adam_epsilon": ("train.optimizer.eps", to.number),
    "lr_scheduler": ("train.optimizer.schedule", _schedule),
    "lr_warmup_steps": ("train.optimizer.warmup", to.with_schedule(
        to.warmup, "constant_with_warmup", "linear", "polynomial")),
    "lr_power": ("train.optimizer.power", to.with_schedule(to.number, "polynomial")),
    "lr_end": ("train.optimizer.lr_end", to.with_schedule(
        to.number, "polynomial", "cosine", "cosine_with_restarts", "sine")),
    "max_grad_norm": ("train.optimizer.max_grad_norm", _clipping),
    "gradient_checkpointing": ("train.gradient_checkpointing", to.boolean),
    "gradient_checkpointing_interval": ("train.gradient_checkpointing_interval", to.only_with(
        "gradient_checkpointing", to.integer)),
    "gradient_checkpointing_backend": ("train.offload.activations", to.one_of({"torch": NOTHING, "unsloth": True})),
    "enable_group_offload": ("train.offload.blocks", to.flag()),
    "group_offload_blocks_per_group": ("train.offload.blocks_per_group", to.only_with(
        "enable_group_offload", to.integer)),
    "group_offload_use_stream": ("train.offload.streams", to.only_with("enable_group_offload", to.flag())),
    "musubi_blocks_to_swap": ("train.offload.blocks", to.if_positive),
    "ramtorch": ("train.offload.blocks", to.flag()),
    "attention_mechanism": ("train.attention", to.one_of(to.ATTENTION, "sdpa")),
    "dynamo_backend": ("train.compile_backend", to.compiled),
    "caption_dropout_probability": ("train.caption_dropout", to.number),
    "use_ema": ("train.ema.decay", to.only_with("use_ema", lambda value, draft: to.number(
        draft.entries.get("ema_decay", 0.995)))),
    "ema_device": ("train.ema.device", to.only_with("use_ema", to.one_of({"accelerator": NOTHING, "cpu": "cpu"}))),
    "ema_validation": ("train.ema.validate", to.only_with("use_ema", to.one_of({
        "none": NOTHING, "ema_only": True, "comparison": True}))),
    "flow_use_uniform_schedule": ("train.timesteps.sampling", _sampling("uniform")),
    "flow_use_beta_schedule": ("train.timesteps.sampling", _sampling("beta")),
    "flow_beta_schedule_alpha": ("train.timesteps.alpha", to.only_with("flow_use_beta_schedule", to.number)),
    "flow_beta_schedule_beta": ("train.timesteps.beta", to.only_with("flow_use_beta_schedule", to.number)),
    "flow_sigmoid_scale": ("train.timesteps.std", to.number),
    "flow_schedule_shift": ("train.shift", to.unless("flow_custom_timesteps", _shift)),
    "flow_custom_timesteps": ("train.timesteps.values", _timesteps),
    "loss_type": ("train.loss.type", to.one_of({
        "l2": NOTHING, "huber": "huber", "smooth_l1": "smooth_l1"}, "smooth_l1")),
    "huber_c": ("train.loss.huber_c", to.number),
    "huber_schedule": ("train.loss.huber_schedule", to.text),
    "masked_loss_probability": ("train.methods.masked_loss.unmasked_probability", _masked(
        lambda value, draft: round(1 - to.number(value), 9))),
    "masked_prior_preservation_weight": ("train.methods.masked_loss.prior_weight", _masked(to.number)),
    "normalize_masked_area_loss": ("train.methods.masked_loss.normalize_area", _masked(to.boolean)),
    "input_perturbation": ("train.methods.input_perturbation.strength", to.only_with("input_perturbation", to.number)),
    "input_perturbation_steps": ("train.methods.input_perturbation.decay_steps", to.only_with(
        "input_perturbation", to.positive_integer)),
    "tread_config": ("train.methods.tread.routes", lambda value, draft: [
        dict(route) for route in (json.loads(value) if isinstance(value, str) else value)["routes"]]),
    **dict.fromkeys(("checkpoint_step_interval", "checkpointing_steps"), (
        "train.checkpoint_every", to.positive_integer)),
    "checkpoint_epoch_interval": ("train.checkpoint_every", to.epochs),
    "checkpoints_total_limit": ("train.keep_checkpoints", to.kept),
    "resume_from_checkpoint": ("train.resume", to.one_of({"latest": NOTHING})),
    "output_dir": ("output", to.output_path),
    "report_to": ("train.trackers", lambda value, draft: [
        name for name in ("tensorboard", "wandb") if name in to.text(value) or "all" in to.text(value)]),
    "tracker_run_name": ("train.run", to.run_name),
    "hub_model_id": ("hub.repo", to.only_with("push_to_hub", to.text)),
    "model_card_private": ("hub.private", to.only_with("push_to_hub", to.boolean)),
    "validation_resolution": ("validation.size", _sizes),
    "validation_guidance": ("validation.guidance", to.number),
    "validation_num_inference_steps": ("validation.steps", to.integer),
    "validation_seed": ("validation.seed", to.integer),
    **dict.fromkeys(("validation_step_interval", "validation_steps"), (
        "validation.every", to.unless("validation_epoch_interval", to.interval))),
    "validation_epoch_interval": ("validation.every", to.epochs),
    "validation_disable": ("validation.every", to.flag(0)),
    "num_eval_images": ("validation.eval_samples", to.integer),
    "eval_loss_disable": ("validation.eval_samples", to.flag(0)),
    "evaluation_type": ("validation.scores.clip", to.one_of({
        "none": NOTHING, "clip": "openai/clip-vit-large-patch14-336"})),
    "framerate": ("validation.fps", to.number),
}  # fmt: skip
#: Keys that need nothing: parts of other keys, fixed behavior of latentpress, and keys without effect on results.
IDLE = """
    lycoris_config data_backend_config user_prompt_library validation_prompt* validation_negative_prompt
    validation_num_video_frames validation_using_datasets validation_image_* validation_stitch_input_location
    validation_preview* validation_seed_source validation_lycoris_strength validation_on_startup
    validation_adapter_strength num_validation_images eval_* ema_*  flow_schedule_auto_shift disable_assistant_lora
    grad_clip_method group_offload_type push_* pretrained_evaluation_model_name_or_path lr_num_cycles model_card_*
    text_encoder_2_precision base_model_default_dtype sana_complex_human_instruction variant trust_remote_code snr_*
    *soft_min_snr* noise_offset* text_encoder_lr disable_benchmark tracker_* *_batch_size vae_cache_* text_cache_*
    text_embed_full_cache *cache_dir* compress_disk_cache preserve_data_backend_cache override_dataset_config
    keep_vae_loaded offload_d* fully_unload_text_encoder delete_* num_processes num_machines accelerat* max_workers
    *_worker_count enable_multiprocessing dataloader_* metadata_* aspect_bucket_* disable_bucket_pruning
    data_backend_sampling allow_dataset_oversubscription ignore_missing_files print_* debug_* logging_dir *allow_tf32
    disable_tf32 set_grads_to_none dynamo_* training_dynamo_backend fuse_* gradient_precision
    optimizer_release_gradients seed_for_each_device save_text_encoder disable_segmented_timestep_sampling
    strict_epoch_limit enable_model_cpu_offload resolution* *_image_size target_downsample_size caption_strategy
    *instance_prompt max_upscale_threshold skip_file_discovery parquet_* disable_multiline_split sdnq_* ramtorch_*
"""

# -- datasets

NOT_TRAINED = ("text_embeds", "image_embeds", "conditioning_image_embeds", "conditioning")
#: Arguments that are defaults of every dataset.
DATASET_ARGUMENTS = (
    "resolution", "resolution_type", "minimum_image_size", "maximum_image_size", "target_downsample_size",
    "caption_strategy", "instance_prompt", "prepend_instance_prompt", "only_instance_prompt", "aspect_bucket_alignment",
    "max_upscale_threshold", "parquet_caption_column", "disable_multiline_split",
)  # fmt: skip


def _size(value: Any, draft: Draft) -> Any:
    return to.compact(to.number(value)) if to.number(value) > 0 else NOTHING


def _place(value: Any, draft: Draft) -> str:
    if draft.entries.get("type") == "aws":
        prefix = str(draft.entries.get("aws_data_prefix") or "").strip("/")
        return f"s3://{draft.entries['aws_bucket_name']}/{prefix}".rstrip("/")
    return to.text(value) if draft.entries.get("type") == "huggingface" else to.file_path(value, draft)


def _only_prompt(draft: Draft) -> bool:
    """Whether the instance prompt is the only caption."""
    return not is_off(draft.entries.get("only_instance_prompt"))


def _caption_strategy(value: Any, draft: Draft) -> str:
    if _only_prompt(draft):
        return "instanceprompt"
    strategies = ("textfile", "filename", "instanceprompt", "parquet", "csv", "huggingface")
    return {**{name: name for name in strategies}, "instance_prompt": "instanceprompt"}[to.text(value)]


def _prepend(value: Any, draft: Draft) -> Any:
    return f"{draft.entries['instance_prompt']} " if to.boolean(value) and not _only_prompt(draft) else NOTHING


def _instance_prompt(value: Any, draft: Draft) -> Any:
    is_caption = draft.entries.get("caption_strategy") in ("instanceprompt", "instance_prompt")
    return to.text(value) if is_caption or _only_prompt(draft) else NOTHING


def _per_file(value: Any, draft: Draft) -> Any:
    is_file = draft.entries.get("caption_strategy") == "textfile" and not _only_prompt(draft)
    return "one" if to.boolean(value) and is_file else NOTHING


def _shuffle(value: Any, draft: Draft) -> Any:
    if not to.boolean(value.get("enable", False)):
        return NOTHING
    keep = to.boolean(value.get("include_original", True))
    return {
        "variants": to.integer(value.get("count", 1)) + int(keep),
        "delimiter": {"comma": ",", "space": " ", "period": "."}[str(value.get("split_on", "comma"))],
        "keep": to.integer(value.get("position_start", 0)),
    }


def _filters(value: Any, draft: Draft) -> list[str]:
    if not isinstance(value, list) or any(str(word).startswith("s/") for word in value):
        raise ValueError("must be a list of words or regular expressions without replacements")
    return [f"/{word}/" if any(mark in word for mark in r"\^$.*+?[](){}|") else str(word) for word in value]


def _table(value: Any, draft: Draft) -> Several:
    columns = [str(value[key]) for key in ("caption_column", "fallback_caption_column") if value.get(key)]
    more = {"caption_column": columns[:1]} if columns else {}
    return Several({"caption_file": to.file_path(value["path"], draft), **more})


def _crop(value: Any, draft: Draft) -> Several:
    default_entries = {"crop_aspect": "square", "crop_style": "random"} if to.boolean(value) else {}
    missing_entries = {key: item for key, item in default_entries.items() if not draft.entries.get(key)}
    return Several({"crop": to.boolean(value), **missing_entries})


def _paired(value: Any, draft: Draft) -> Several:
    """Add the masks and source images that a dataset names to the dataset."""
    backends = [draft.entries["(backends)"][name] for name in to.texts(value)]
    values: dict[str, Any] = {}
    for option, kind in (("mask_data", "mask"), ("conditioning_data", "reference")):
        matches = [backend for backend in backends if str(backend.get("conditioning_type")).startswith(kind)]
        backends = [backend for backend in backends if backend not in matches]
        if folders := [to.file_path(backend["instance_data_dir"], draft) for backend in matches]:
            values[option] = folders[0] if len(folders) == 1 else folders
    if backends:
        raise ValueError(value)
    if "mask_data" in values:
        to.use_masks(draft)
    return Several(values)


DATASET: Rows = {
    "id": ("id", to.run_name),
    "type": ("source", to.one_of({"local": NOTHING, "aws": NOTHING, "huggingface": "huggingface", "csv": "manifest"})),
    "dataset_type": ("dataset_type", to.one_of({"image": NOTHING, "video": "video"})),
    **dict.fromkeys(("disabled", "disable"), ("disabled", to.flag())),
    **dict.fromkeys(("instance_data_dir", "aws_bucket_name"), ("instance_data_dir", _place)),
    "dataset_name": ("instance_data_dir", to.text),
    "csv_file": ("instance_data_dir", to.file_path),
    **dict.fromkeys(("csv_caption_column", "caption_column", "parquet_caption_column"), ("caption_column", to.texts)),
    **dict.fromkeys(("image_column", "video_column"), ("media_column", to.text)),
    "split": ("split", to.text),
    "conditioning_data": ("conditioning_data", _paired),
    "caption_strategy": ("caption_strategy", _caption_strategy),
    "disable_multiline_split": ("captions_per_file", _per_file),
    "only_instance_prompt": ("caption_strategy", to.flag("instanceprompt")),
    "instance_prompt": ("instance_prompt", _instance_prompt),
    "prepend_instance_prompt": ("prepend", _prepend),
    "caption_filter_list": ("caption_filter", _filters),
    "caption_shuffle": ("tag_shuffle", _shuffle),
    "parquet": ("caption_file", _table),
    "huggingface": ("media_column", lambda value, draft: Several({
        ours: to.text(value[key]) if ours == "media_column" else [to.text(value[key])] for key, ours in (
            ("image_column", "media_column"), ("video_column", "media_column"), ("caption_column", "caption_column"))
        if value.get(key)})),
    "resolution": ("resolution", _size),
    "resolution_type": ("resolution_type", to.text),
    **dict.fromkeys(("crop", "crop_enabled"), ("crop", _crop)),
    "crop_aspect": ("crop_aspect", to.only_with("crop", to.text)),
    "crop_style": ("crop_style", to.only_with("crop", to.one_of({
        name: name for name in ("center", "centre", "random", "corner", "face")}, "center"))),
    "crop_aspect_buckets": ("crop_aspect_buckets", lambda value, draft: [to.number(item) for item in value]),
    **{name: (name, _size) for name in ("minimum_image_size", "maximum_image_size", "target_downsample_size")},
    "max_upscale_threshold": ("allow_upscale", to.if_positive),
    "aspect_bucket_alignment": ("bucket_step", to.integer),
    "repeats": ("repeats", to.integer),
    "probability": ("weight", to.number),
    **dict.fromkeys(("is_regularisation_data", "is_regularization_data"), ("is_regularization_data", to.flag())),
}  # fmt: skip
DATASET_IDLE = """
    *cache_dir* *_embeds default hash_filenames preserve_data_backend_cache vae_cache_* text_cache_* *_batch_size
    metadata_* parquet_filename_column skip_file_discovery conditioning_type source_dataset_id delete_* aws_*
"""
DATASET_DEFAULTS = {"crop": False, "max_upscale_threshold": 1, "resolution": 1024, "caption_strategy": "filename"}
VIDEO: Rows = {
    "num_frames": ("video.num_frames", to.integer),
    "min_frames": ("video.min_frames", to.integer),
    "max_frames": ("video.max_frames", to.integer),
    "bucket_strategy": ("video.bucket_strategy", to.text),
    "frame_interval": ("video.frame_interval", to.integer),
}


def _carry_datasets(draft: Draft, backends: Sequence[Mapping[str, Any]], common: Mapping[str, Any]) -> None:
    """common: values of DATASET_ARGUMENTS."""
    by_id = {str(backend.get("id")): backend for backend in backends}
    for backend in backends:
        label, kind = f"{backend.get('id', 'dataset')}: ", backend.get("dataset_type", "image")
        is_cache = backend.get("type") == "local" and set(backend) <= {"id", "type", "cache_dir"}
        if kind in NOT_TRAINED or is_cache:
            draft.add_line(f"{label}dataset_type", "needs nothing")
            continue
        dataset_path: KeyPath = ("datasets", len(draft.datasets()))
        entries, default_entries = {**common, **backend, "(backends)": by_id}, dict(DATASET_DEFAULTS)
        video = entries.pop("video", None)
        if entries.get("type", "local") not in ("local", "aws"):
            default_entries.pop("caption_strategy")
        draft.carry(TABLES["datasets"], entries, label, dataset_path, default_entries)
        if kind == "video":
            video = draft.section(video, f"{label}video")
            frames = {"min_frames": video["num_frames"]} if "num_frames" in video else {}
            draft.carry(TABLES["video"], {**frames, **video}, f"{label}video.", dataset_path)


# -- files


def _alpha(value: Any, draft: Draft) -> Any:
    """The alpha, which LyCORIS ignores if both matrices are full."""
    is_whole = draft.entries.get("full_matrix") or to.number(draft.entries.get("linear_dim", 0)) >= 1000
    return NOTHING if is_whole else to.number(value)


LYCORIS: Rows = {
    "algo": ("train.adapter.type", to.one_of({"lokr": "lokr", "lora": "lora", "locon": "lora"}, "lokr")),
    "linear_dim": ("train.adapter.rank", lambda value, draft: min(to.integer(value), to.WHOLE_MATRICES)),
    "full_matrix": ("train.adapter.rank", to.flag(to.WHOLE_MATRICES)),
    "linear_alpha": ("train.adapter.alpha", _alpha),
    "factor": ("train.adapter.decompose_factor", to.integer),
    "decompose_both": ("train.adapter.decompose_both", to.boolean),
    "multiplier": ("train.adapter.alpha", to.one_of({"1": NOTHING, "1.0": NOTHING})),
}
TABLES: Mapping[str, Table] = {
    "arguments": Table(ARGUMENTS, IDLE, DEFAULTS),
    "datasets": Table(DATASET, DATASET_IDLE, DATASET_DEFAULTS),
    "video": Table(VIDEO, "is_i2v frame_rate", {"bucket_strategy": "aspect_ratio"},
                   {"video.frame_rate": "source"}),
    "lycoris": Table(LYCORIS, "bypass_mode use_tucker rs_lora", {"algo": "lokr", "linear_dim": 4, "linear_alpha": 1}),
}  # fmt: skip
#: Variable of config.env, in lower case -> argument with another name.
VARIABLES = {
    "resume_checkpoint": "resume_from_checkpoint", "dataloader_config": "data_backend_config", "training_seed": "seed",
    "minimum_resolution": "minimum_image_size", "push_checkpoints": "push_checkpoints_to_hub",
    "max_num_steps": "max_train_steps", "num_epochs": "num_train_epochs",
    "checkpointing_limit": "checkpoints_total_limit",
    "checkpointing_steps": "checkpoint_step_interval", "hub_model_name": "hub_model_id",
    "model_name": "pretrained_model_name_or_path", "use_gradient_checkpointing": "gradient_checkpointing",
    "lr_schedule": "lr_scheduler", "training_num_processes": "num_processes", "training_num_machines": "num_machines",
    "validation_steps": "validation_step_interval", "training_dynamo_backend": "dynamo_backend",
    "accelerate_config_path": "accelerate_config",
}  # fmt: skip


def find_role(content: Any) -> str:
    if isinstance(content, list):
        keys = {key for item in content if isinstance(item, dict) for key in item}
        return "datasets" if "id" in keys and keys & {"instance_data_dir", "dataset_type", "type"} else ""
    keys = {_plain(key) for key in content} if isinstance(content, dict) else set()
    return "arguments" if keys & {"data_backend_config", "model_family"} else ""


def _plain(key: Any) -> str:
    name = str(key).lstrip("-").lower().replace("-", "_")
    return VARIABLES.get(name, name)


def carry(draft: Draft, roles: Mapping[str, Any]) -> None:
    entries = {_plain(key): value for key, value in draft.section(roles.get("arguments"), "arguments").items()}
    backends = roles.get("datasets") or _read(draft, entries, "data_backend_config")
    common = {key: entries[key] for key in DATASET_ARGUMENTS if not is_off(entries.get(key))}
    _carry_datasets(draft, draft.sections(backends, "datasets"), common)
    if "arguments" not in roles:
        return
    draft.samples = draft.files.count_media(draft.datasets())
    library = draft.section(_read(draft, entries, "user_prompt_library"), "user_prompt_library")
    library |= {"validation": entries["validation_prompt"]} if not is_off(entries.get("validation_prompt")) else {}
    default_entries: dict[str, Any] = {**DEFAULTS, **(VALIDATION_DEFAULTS if library else {})}
    if assistants := ASSISTANTS.get(family := _family_name(entries)):
        flavour = entries.get("model_flavour", next(iter(FLAVOURS[family])))
        default_entries["assistant_lora_path"] = assistants.get(flavour, "")
    if is_off(entries.get("validation_disable")):
        negative = {"negative_prompt": entries.get("validation_negative_prompt", "blurry, cropped, ugly")}
        sections = {name: item if isinstance(item, dict) else {"prompt": item} for name, item in library.items()}
        prompts = [{"name": name, "prompt": item.get("prompt", ""), **negative} for name, item in sections.items()]
        draft.carry_prompts(prompts, {"negative_prompt": ("negative_prompt", to.text)}, "prompts")
    draft.carry(TABLES["arguments"], entries, defaults=default_entries)
    if entries.get("lora_type") == "lycoris" and (lycoris := _read(draft, entries, "lycoris_config")):
        draft.carry(TABLES["lycoris"], draft.section(lycoris, "lycoris_config"), "lycoris_config: ")
    if draft.get("train.adapter.type") == "full":
        to.keep_data_as_target(draft, "is_regularisation_data")


def _read(draft: Draft, entries: Mapping[str, Any], key: str) -> Any:
    """Read the file that an argument names."""
    name = entries.get(key)
    if is_off(name) or isinstance(name, dict | list):
        return name or None
    content = draft.files.read(str(name))
    if not isinstance(content, dict | list):
        draft.add_line(f"{key} (its file)", "not carried over", f"{show_value(name)} is not found")
        return None
    return content


TRAINER = Trainer("SimpleTuner", TABLES, find_role, carry)
