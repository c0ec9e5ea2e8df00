"""Keys of other trainers' configurations (SimpleTuner, musubi-tuner, diffusion-pipe): what they are called here, or why
they are not needed. Shown in the error for such a key."""

from schemas.config.sharing import URL_ADVICE

_CACHE_HINT = "not needed: caches are under root, and each stage finds its own"
_FRAMES_HINT = "here video.num_frames, and video.clip says which part"
_RESOURCES_HINT = "stages.<stage>.workers and .threads say what each stage may use"

#: Key -> hint; "datasets.KEY": below datasets only.
HINTS = {
    # Several of them
    **dict.fromkeys(("datasets.cache_dir", "cache_directory", "cache_dir_vae", "cache_dir_text"), _CACHE_HINT),
    "cache_dir_conditioning_image_embeds": _CACHE_HINT,
    **dict.fromkeys(("resolution_frames", "target_frames", "frame_buckets"), _FRAMES_HINT),
    **dict.fromkeys(("enable_bucket", "enable_ar_bucket"), "not needed: media always go into buckets by aspect"),
    **dict.fromkeys(("train_batch_size", "micro_batch_size_per_gpu"), "here train.batch_size"),
    **dict.fromkeys(("num_train_epochs", "epochs"), "here train.steps, counted in optimizer steps"),
    **dict.fromkeys(("checkpointing_steps", "save_every_n_steps"), "here train.checkpoint_every"),
    **dict.fromkeys(("lora_rank", "network_dim"), "here train.adapter.rank"),
    **dict.fromkeys(("lora_alpha", "network_alpha"), "here train.adapter.alpha"),
    # SimpleTuner: multidatabackend.json
    "datasets.type": "here source: folder (its local), remote, webdataset, huggingface, manifest; without it, by "
    "instance_data_dir",
    "datasets.csv_file": "here instance_data_dir names the table, or caption_file one of captions alone",
    "metadata_backend": "not needed: discover reads sizes from the files into one table",
    "metadata_update_interval": "not needed: discover keeps what it has read as it goes",
    "write_batch_size": "not needed: cache.unit_mib says how large a shard is",
    **dict.fromkeys(("read_batch_size", "image_processing_batch_size", "max_workers"), _RESOURCES_HINT),
    "vae_cache_clear_each_epoch": "not needed: what changes is encoded again",
    "vae_batch_size": "here latents.batch_pixels",
    "text_embeds": "not needed: texts are cached under root",
    "image_embeds": "not needed: latents are cached under root",
    "default": "not needed: there is one cache of texts, under root",
    "hash_filenames": "not needed: items are named by their content",
    "preserve_data_backend_cache": "not needed: nothing in a cache is overwritten; latentpress gc lists what is unused",
    "probability": "here weight: draws in an epoch, times this",
    "prepend_instance_prompt": "here prepend: the words before every caption",
    "only_instance_prompt": "here caption_strategy: instanceprompt, with instance_prompt",
    "is_regularization_data": "here is_regularisation_data",
    "conditioning_type": "not needed: conditioning_data names i2i source images, mask_data masks",
    "crop_enabled": "here crop: true or false",
    "aws_bucket_name": "here instance_data_dir: s3://BUCKET/FOLDER; credentials come from the environment",
    "aws_endpoint_url": "here the environment variable AWS_ENDPOINT_URL",
    "aws_access_key_id": "here the environment variable AWS_ACCESS_KEY_ID",
    "aws_secret_access_key": "here the environment variable AWS_SECRET_ACCESS_KEY",
    "data_backend_config": "here the list datasets, in this file",
    # SimpleTuner: config.json
    "model_family": "here model.family",
    "model_flavour": "here model.flavour",
    "model_type": "here train.adapter.type: lora or full",
    "pretrained_model_name_or_path": "here model.path",
    "output_dir": "here output",
    "gradient_accumulation_steps": "here train.accumulate",
    "max_train_steps": "here train.steps",
    "learning_rate": "here train.optimizer.lr",
    "lr_scheduler": "here train.optimizer.schedule",
    "lr_warmup_steps": "here train.optimizer.warmup",
    "lora_dropout": "here train.adapter.dropout",
    "mixed_precision": "here model.precision, and train.precision",
    "base_model_precision": "here text.quantization, of the text encoder; the transformer is not quantised",
    "checkpoints_total_limit": "here train.keep_checkpoints",
    "resume_from_checkpoint": "here train.resume",
    **dict.fromkeys(("flow_schedule_shift", "discrete_flow_shift"), "here train.shift"),
    "flow_schedule_auto_shift": "here train.timesteps.auto_shift",
    "flow_use_uniform_schedule": "here train.timesteps.sampling: uniform",
    "flow_use_beta_schedule": "here train.timesteps.sampling: beta",
    "flow_beta_schedule_alpha": "here train.timesteps.alpha",
    "flow_beta_schedule_beta": "here train.timesteps.beta",
    "flow_custom_timesteps": "here train.timesteps: {sampling: list, values: [...]}, in sigmas from 0 to 1",
    **dict.fromkeys(
        ("timestep_sampling", "weighting_scheme"), "here train.timesteps.sampling, and train.loss.weighting"
    ),
    "logit_mean": "here train.timesteps.mean",
    "logit_std": "here train.timesteps.std",
    "loss_type": "here train.loss.type: mse (its l2), huber, smooth_l1",
    "min_snr_gamma": "here train.loss.snr_gamma, with weighting: min_snr",
    "loss_weighting": "here train.loss.weighting",
    "masked_prior_preservation_weight": "here train.methods.masked_loss.prior_weight",
    "normalize_masked_area_loss": "here train.methods.masked_loss.normalise_area",
    "masked_loss_probability": "here train.methods.masked_loss.unmasked_probability, which is 1 minus it",
    "scheduled_sampling_prob_end": "here train.methods.scheduled_sampling.probability",
    **{
        f"scheduled_sampling_{name}": f"here train.methods.scheduled_sampling.{name}"
        for name in (
            "probability",
            "prob_start",
            "start_step",
            "ramp_steps",
            "ramp_shape",
            "max_step_offset",
            "strategy",
        )
    },
    "scheduled_sampling_sampler": "not needed: rollouts take Euler steps",
    "input_perturbation_steps": "here train.methods.input_perturbation.decay_steps",
    "ip_noise_gamma": "here train.methods.input_perturbation.strength",
    "prior_loss_weight": "here train.methods.regularisation.weight, with target: data",
    "caption_dropout_probability": "here train.caption_dropout",
    "validation_prompt": "here validation.prompts, a list with name and prompt",
    **dict.fromkeys(
        ("user_prompt_library", "validation_prompt_library"),
        "here validation.prompts_file, which may be that JSON file",
    ),
    "validation_seed": "here validation.seed, a number or a list",
    "validation_negative_prompt": "here negative_prompt of a prompt",
    "validation_num_video_frames": "here validation.size, WxH@F",
    "validation_steps": "here validation.every",
    "validation_resolution": "here validation.size, WxH or WxH@F",
    "validation_guidance": "here validation.guidance",
    "validation_num_inference_steps": "here validation.steps",
    "tokenizer_max_length": "here text.max_length",
    "webhook_config": "here notify.webhooks; the URL comes from an environment variable",
    **dict.fromkeys(("notify.url", "notify.webhook_url"), f"here url_env; {URL_ADVICE}"),
    **dict.fromkeys(("push_to_hub", "hub_model_id"), "here hub.repo, to which `run` uploads at its end"),
    "model_card_private": "here hub.private",
    "report_to": "train.trackers; metrics.jsonl is always written",
    "tracker_run_name": "here train.run",
    # musubi-tuner
    "general": "not needed: each item of datasets has its own settings",
    "image_directory": "here instance_data_dir",
    "video_directory": "here instance_data_dir, with dataset_type: video",
    "image_jsonl_file": "here instance_data_dir names the table",
    "video_jsonl_file": "here instance_data_dir names the table, with dataset_type: video",
    "control_directory": "here conditioning_data",
    "caption_extension": "not needed: captions are the .txt files beside the media (caption_strategy: textfile)",
    "num_repeats": "here repeats: extra passes, so that 0 is once",
    "bucket_no_upscale": "here allow_upscale: false, the default",
    "frame_extraction": "here video.clip: head, middle, random, uniform, chunks or slide",
    "source_fps": "not needed: frames are chosen by their timestamps; video.frame_rate is the target",
    # diffusion-pipe
    "directory": "here datasets, an item with instance_data_dir: the path",
    "resolutions": "here resolution, one for each item of datasets",
    **dict.fromkeys(("min_ar", "max_ar"), "here max_aspect: longest side of a bucket over its shorter one"),
    "num_ar_buckets": "not needed: buckets are computed from resolution and strides (buckets: computed)",
}


def find_hint(path: tuple[str | int, ...]) -> str | None:
    """The hint for the unknown key at `path`; None where no other trainer has such a key."""
    return HINTS.get(f"{path[0]}.{path[-1]}", HINTS.get(str(path[-1])))
