"""SimpleTuner's config.json: methods, validation, what is reported and shared, and what is not needed."""

from typing import Any

from schemas.foreign.draft import (
    SECRET_ADVICE,
    Draft,
    NotNeeded,
    Refused,
    Row,
    Several,
    dropped,
    is_off,
    refused,
    secret,
)
from schemas.foreign.values import (
    above_zero,
    boolean,
    epochs,
    flag,
    if_true,
    number,
    off,
    one_of,
    only_with,
    run_name,
    shown,
    text,
    whole,
)

CREPA, ROLLOUT = "train.methods.crepa", "train.methods.scheduled_sampling"


def _crepa(to: str, convert: Any) -> Row:
    return Row(to, only_with("crepa_enabled", convert))


def _rollout(to: str, convert: Any) -> Row:
    return Row(f"{ROLLOUT}.{to}", only_with("scheduled_sampling_max_step_offset", convert))


def _with_ramp(convert: Any, ramp: bool = True) -> Any:
    def wrapped(value: Any, draft: Draft) -> Any:
        if is_off(draft.given.get("scheduled_sampling_ramp_steps")) == ramp:
            raise NotNeeded("there is no ramp" if ramp else "the ramp has its own probabilities")
        return convert(value, draft)

    return wrapped


METHODS = {
    "crepa_enabled": Row(
        f"{CREPA}.block_index",
        lambda value, draft: whole(draft.given.get("crepa_block_index", 8)) if boolean(value) else off(),
        "with vision.model",
    ),
    "crepa_block_index": _crepa(f"{CREPA}.block_index", whole),
    "crepa_lambda": _crepa(f"{CREPA}.weight", number),
    "crepa_adjacent_distance": _crepa(f"{CREPA}.adjacent_distance", whole),
    "crepa_adjacent_tau": _crepa(f"{CREPA}.adjacent_tau", number),
    "crepa_cumulative_neighbors": _crepa(
        f"{CREPA}.cumulative_neighbors", if_true()
    ),
    "crepa_normalize_by_frames": _crepa(f"{CREPA}.normalize_by_frames", boolean),
    "crepa_model": _crepa(
        "vision.model",
        one_of(
            {name: name for name in ("dinov2_vitg14", "dinov2_vits14")},
            "vision.model takes dinov2_vits14, dinov2_vitg14, or the folder or repository of a DINOv2",
        ),
    ),
    "crepa_encoder_image_size": _crepa("vision.size", whole),
    "crepa_encoder_frames_batch_size": _crepa("vision.batch_size", above_zero),
    "crepa_scheduler": _crepa(f"{CREPA}.schedule", text),
    "crepa_warmup_steps": _crepa(f"{CREPA}.warmup", whole),
    "crepa_decay_steps": _crepa(f"{CREPA}.decay_steps", above_zero),
    "crepa_lambda_end": _crepa(f"{CREPA}.weight_end", number),
    "crepa_power": _crepa(f"{CREPA}.power", number),
    "crepa_cutoff_step": _crepa(f"{CREPA}.cutoff_step", above_zero),
    "crepa_similarity_threshold": _crepa(f"{CREPA}.similarity_threshold", number),
    "crepa_similarity_ema_decay": _crepa(f"{CREPA}.similarity_ema_decay", number),
    "crepa_threshold_mode": _crepa(f"{CREPA}.threshold_mode", text),
    "crepa_feature_source": _crepa("vision.model", one_of({"encoder": None}, "features are of a DINOv2, vision.model")),
    **dropped("features are computed once, from the real frames, before training",
              "crepa_drop_vae_encoder", "crepa_spatial_align", "crepa_use_tae"),
    **refused("features are of a DINOv2, vision.model", "crepa_use_backbone_features", "crepa_self_flow",
              "crepa_normalize_neighbour_sum", "irepa_enabled"),
    "scheduled_sampling_max_step_offset": Row(f"{ROLLOUT}.max_step_offset", above_zero),
    "scheduled_sampling_probability": _rollout("probability", _with_ramp(number, ramp=False)),
    "scheduled_sampling_prob_end": _rollout("probability", _with_ramp(number)),
    "scheduled_sampling_prob_start": _rollout("prob_start", _with_ramp(number)),
    "scheduled_sampling_start_step": _rollout("start_step", whole),
    "scheduled_sampling_ramp_steps": _rollout("ramp_steps", whole),
    "scheduled_sampling_ramp_shape": _rollout("ramp_shape", _with_ramp(text)),
    "scheduled_sampling_strategy": _rollout("strategy", text),
    **dropped("rollouts take Euler steps", "scheduled_sampling_sampler", "scheduled_sampling_order"),
    **dropped("train.methods.scheduled_sampling.correction takes the rollout's error back",
              "scheduled_sampling_reflexflow", "scheduled_sampling_reflexflow_alpha",
              "scheduled_sampling_reflexflow_beta1", "scheduled_sampling_reflexflow_beta2"),
}  # fmt: skip


def _sizes(value: Any, draft: Draft) -> Any:
    """Sizes "1024x1024,1280x768" or one edge, for videos with the number of frames."""
    frames = draft.given.get("validation_num_video_frames")
    sizes = []
    for word in str(value).split(","):
        edge = word.strip() if "x" in word else f"{whole(word)}x{whole(word)}"
        sizes.append(f"{edge}@{whole(frames)}" if frames else edge)
    return sizes[0] if len(sizes) == 1 else sizes


def _prompt(value: Any, draft: Draft) -> Several:
    item = {"name": "validation", "prompt": text(value)}
    if negative := draft.given.get("validation_negative_prompt"):
        item["negative_prompt"] = text(negative)
    return Several({"validation.prompts": [*draft.get("validation.prompts", []), item]})


def _scores(value: Any, draft: Draft) -> str:
    if str(value) in ("none", ""):
        raise NotNeeded("nothing is scored")
    return text(draft.given.get("pretrained_evaluation_model_name_or_path") or "openai/clip-vit-large-patch14-336")


def _trackers(value: Any, draft: Draft) -> list[str]:
    words = {word.strip() for word in str(value).split(",")}
    known = [word for word in ("tensorboard", "wandb") if word in words or "all" in words]
    if not known and words - {"none", "simpletuner"}:
        raise Refused(f"{shown(value)}: train.trackers takes tensorboard and wandb; metrics.jsonl is always written")
    return known


def _push(value: Any, draft: Draft) -> Any:
    if is_off(value):
        raise NotNeeded("nothing is uploaded without hub.repo")
    if draft.given.get("hub_model_id"):
        raise NotNeeded("hub_model_id says where to")
    raise Refused("there is no hub_model_id: write hub.repo: USER/NAME")


def _repo(value: Any, draft: Draft) -> Any:
    if is_off(draft.given.get("push_to_hub")):
        raise NotNeeded("push_to_hub is off")
    if "/" not in str(value):
        raise Refused(f"hub.repo names the user as well: write USER/{shown(value)}")
    return text(value)


_ONE_OF_THE_DATA = "a prompt without an image takes one of the data"
VALIDATION = {
    "validation_prompt": Row("validation.prompts", _prompt, "a list with name and prompt"),
    "validation_negative_prompt": Row(drop="it is negative_prompt of each prompt in validation.prompts"),
    **dict.fromkeys(("user_prompt_library", "validation_prompt_library"),
                    Row(drop="its prompts are carried over as well: validation.prompts_file may be that file")),
    "validation_resolution": Row("validation.size", _sizes, "WxH, of videos WxH@F"),
    "validation_num_video_frames": Row(drop="a part of validation.size, WxH@F"),
    "validation_guidance": Row("validation.guidance", number),
    "validation_num_inference_steps": Row("validation.steps", whole),
    "validation_seed": Row("validation.seed", whole, "a number or a list"),
    **dict.fromkeys(("validation_step_interval", "validation_steps"), Row("validation.every", above_zero)),
    "validation_epoch_interval": Row("validation.every", epochs, "in optimizer steps"),
    "num_eval_images": Row("validation.eval_samples", whole),
    "evaluation_type": Row("validation.scores.clip", _scores),
    "pretrained_evaluation_model_name_or_path": Row(drop="it is validation.scores.clip, where samples are scored"),
    "num_validation_images": Row(
        "validation.seed", one_of({"1": None}, "validation.seed takes a list: a sample for each"), "a list of seeds"
    ),
    "eval_loss_disable": flag("validation.eval_samples", 0),
    "framerate": Row("validation.fps", number),
    "validation_disable": flag("validation.every", 10**9, "10^9 is never"),
    **dropped(_ONE_OF_THE_DATA, "validation_using_datasets", "eval_dataset_id"),
    **refused("an image of a prompt stands in validation.prompts", "validation_input"),
    **dropped("latentpress decode turns samples into pictures at every validation", "validation_image_format",
              "validation_image_quality", "validation_stitch_input_location", "validation_preview_steps",
              "validation_seed_source", "validation_torch_compile", "wan_validation_load_other_stage"),
    **refused("validation.preview_autoencoder names a tiny autoencoder for previews", "validation_preview"),
    **dropped("the base model's samples are those at step 0, which a run makes first", "disable_benchmark",
              "validation_on_startup"),
    **dropped("the eval loss has its own steps: that of validation.every", "eval_steps_interval", "eval_epoch_interval",
              "eval_dataset_pooling"),
    **refused("validation.eval_sigmas are its noise levels", "eval_timesteps"),
    **refused("samples are made by the family's own sampler and guidance", "validation_noise_scheduler",
              "validation_guidance_real", "validation_no_cfg_until_timestep", "validation_guidance_rescale",
              "validation_guidance_skip_layers", "validation_guidance_skip_layers_start",
              "validation_guidance_skip_layers_stop", "validation_guidance_skip_scale",
              "validation_disable_unconditional", "validation_adapter_path", "validation_adapter_config",
              "validate_after_step", "validate_after_epoch"),
    **refused("no program named in a file is run; score other programs' results by the files below output",
              "validation_method", "validation_external_script", "validation_external_background"),
}  # fmt: skip
SHARED = {
    **dropped("the datasets that it names are read", "data_backend_config"),
    "report_to": Row("train.trackers", _trackers, "metrics.jsonl is always written"),
    "tracker_run_name": Row("train.run", run_name),
    **dropped("wandb's project is the environment variable WANDB_PROJECT", "tracker_project_name"),
    "hub_model_id": Row("hub.repo", _repo, "to which `run` uploads at its end"),
    "push_to_hub": Row("hub.repo", _push, "to which `run` uploads at its end"),
    "model_card_private": Row("hub.private", only_with("push_to_hub", boolean)),
    **dropped("latentpress push uploads a checkpoint at any time", "push_checkpoints_to_hub", "push_to_hub_background"),
    **dropped("the card is written from the run", "model_card_note", "model_card_safe_for_work", "modelspec_comment"),
    **secret(f"notify.webhooks names the environment variable with the address; {SECRET_ADVICE}", "webhook_config"),
    **secret(f"latentpress push uploads to the hub; {SECRET_ADVICE}", "publishing_config"),
    **dropped("notify.webhooks says which events are sent", "webhook_reporting_interval"),
    **refused("no program named in a file is run: write a line after the command that trains",
              "post_upload_script", "post_checkpoint_script", "disk_low_script"),
}  # fmt: skip
ENCODING = {
    "vae_dtype": Row(
        "latents.precision",
        one_of({"default": None, "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}, "valid: bf16, fp16, fp32"),
    ),
    "vae_enable_tiling": flag("latents.tiling", note="gives other latents"),
    "vae_enable_slicing": flag("latents.slicing"),
    "vae_enable_patch_conv": flag("latents.chunk_frames", 4, "the same latents in less memory"),
    "torch_num_threads": Row("train.threads", above_zero),
    **dropped("latents.batch_pixels is the size of a batch", "vae_batch_size"),
    **dropped("text.batch_tokens is the size of a batch", "text_encoder_batch_size"),
    **dropped("latents and texts are encoded once, under root; cache.rolling keeps a part of them",
              "vae_cache_ondemand",
              "vae_cache_disable", "text_cache_ondemand", "text_cache_disable", "text_embed_full_cache",
              "vae_cache_scan_behaviour", "compress_disk_cache", "preserve_data_backend_cache",
              "override_dataset_config", "keep_vae_loaded", "cache_dir", "cache_dir_text", "cache_dir_vae",
              "cache_dir_conditioning_image_embeds", "conditioning_image_embed_batch_size"),
    **dropped("encoders and the transformer are never in memory together", "offload_during_startup",
              "fully_unload_text_encoder", "offload_during_save", "delete_model_after_load"),
}  # fmt: skip
NOT_NEEDED = {
    **dropped("torchrun or accelerate launch starts several processes", "num_processes", "num_machines", "local_rank",
              "accelerate_config", "accelerate_extra_args", "num_cpu_threads_per_process"),
    **dropped("stages.<stage>.workers and .threads say what each stage may use", "max_workers", "read_batch_size",
              "write_batch_size", "image_processing_batch_size", "aspect_bucket_worker_count",
              "enable_multiprocessing", "aws_max_pool_connections"),
    **dropped("train.reading.threads read ahead", "dataloader_prefetch", "dataloader_prefetch_qlen"),
    **dropped("discover reads sizes once, into a table", "metadata_update_interval", "aspect_bucket_disable_rebuild"),
    **dropped("buckets are computed from their sizes; none is left out", "aspect_bucket_rounding",
              "disable_bucket_pruning"),
    **dropped("a dataset's weight and repeats say how often it is drawn", "data_backend_sampling"),
    **dropped("few samples repeat by themselves until a batch is full", "allow_dataset_oversubscription"),
    **dropped("files are never deleted; what can't be used is set aside with its reason", "delete_unwanted_images",
              "delete_problematic_images", "delete_nsfw_images", "delete_invalid_checkpoints", "ignore_missing_files"),
    **dropped("it changes no result", "print_filenames", "print_sampler_statistics", "debug_aspect_buckets",
              "debug_dataset_loader", "logging_dir", "tracker_image_layout", "i_know_what_i_am_doing", "disable_tf32",
              "allow_tf32", "set_grads_to_none", "accelerator_cache_clear_interval", "dynamo_mode", "dynamo_fullgraph",
              "dynamo_dynamic", "dynamo_use_regional_compilation", "fuse_optimizer", "gradient_precision",
              "optimizer_release_gradients", "seed_for_each_device", "unet_attention_slice", "fuse_qkv_projections",
              "ema_cpu_only", "ema_foreach_disable", "config_backend", "env", "venv_path", "disk_low_threshold",
              "disk_low_action", "checkpointing_use_tempdir", "simpletuner_log_level",
              "training_dynamo_backend", "save_text_encoder", "disable_segmented_timestep_sampling",
              "strict_epoch_limit", "enable_watermark", "quantize_activations", "flow_timesteps_mode"),
    **dropped("of models that are not trained here", "t5_padding", "flux_guidance_mode", "flux_guidance_value",
              "flux_guidance_min", "flux_guidance_max", "flux_attention_masked_training", "ltx_train_mode",
              "training_scheduler_timestep_spacing", "inference_scheduler_timestep_spacing", "rescale_betas_zero_snr",
              "distillation_config", "hidream_use_load_balancing_loss", "hidream_load_balancing_loss_weight"),
    **refused("train.keep_every keeps checkpoints for ever, train.keep_checkpoints the newest",
              "checkpointing_rolling_steps", "checkpoints_rolling_total_limit"),
    **refused("pictures are not looked at; leave them out of the folder, or filter them by where", "enable_nsfw_check",
              "data_aesthetic_score"),
}  # fmt: skip
