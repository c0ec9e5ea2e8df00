"""ai-toolkit: its YAML, a job with a process that trains."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from stages.importing import conversions as to
from stages.importing.draft import NOTHING, Draft, Nearest, Rows, Several, Table, Trainer, below, is_off, shown

#: Architecture there -> family and flavour here, None for the family's own default.
ARCHITECTURES = {
    "wan21": ("wan2.1", None), "wan22_5b": ("wan2.2-5b", "t2v-5b"), "wan22_14b": ("wan2.2-a14b", "t2v-a14b"),
    "wan22_14b_i2v": ("wan2.2-a14b", "i2v-a14b"), "qwen_image": ("qwen-image", None),
    "qwen_image_edit": ("qwen-image-edit", None), "qwen_image_edit_plus": ("qwen-image-edit-plus", None),
    "zimage": ("z-image", None), "flux2_klein_4b": ("flux2-klein", "klein-base-4b"),
    "flux2_klein_9b": ("flux2-klein", "klein-base-9b"),
}  # fmt: skip
#: Draws noise levels about as often as the factors of `weighted` count them: within 0.13 of 1, without it 0.31.
WEIGHTED_SHIFT = 1.6
#: Steps at which a sample is drawn, of so many.
FIXED_STEPS = {"one_step": 1, "two_step": 2, "four_step": 4, "eight_step": 8}


def _architecture(value: Any, draft: Draft) -> Several:
    family, flavour = ARCHITECTURES[to.text(value).partition(":")[0].lower()]
    exact = to.flavour_of_repo(str(draft.given.get("name_or_path", "")))
    flavour = exact if exact and to.FLAVOURS[exact] == family else flavour
    return to.chosen(flavour) if flavour else Several({"model.family": family})


def _experts(value: Any, draft: Draft) -> Any:
    if draft.get("model.family") != "wan2.2-a14b":
        return NOTHING
    high, low = (to.boolean(value.get(f"train_{name}_noise", True)) for name in ("high", "low"))
    return "both" if high and low else "high" if high else "low"


def _accumulate(value: Any, draft: Draft) -> Any:
    """-1 is a whole epoch."""
    if (count := to.whole(value)) > 0:
        return count
    if draft.samples is None:
        raise ValueError(value)
    return Nearest(max(1, math.ceil(draft.samples / draft.get("train.batch_size", 1))))


def _accumulate_batches(value: Any, draft: Draft) -> Any:
    """With this key each batch is a step there."""
    count = _accumulate(value, draft)
    draft.parts *= count.value if isinstance(count, Nearest) else count
    return count


def _sampling(value: Any, draft: Draft) -> Any:
    """The distribution of sigma. `weighted` is uniform, with factors of the loss measured on another model."""
    name, bias = to.text(value), draft.given.get("content_or_style", "balanced")
    if name in FIXED_STEPS:
        values = [1 - index / FIXED_STEPS[name] for index in range(FIXED_STEPS[name])]
        return below("train.timesteps", sampling="list", values=values)
    if bias in ("content", "style"):  # the cube of a uniform number, from noise or from data
        alpha, beta = (1.0, 0.333333) if bias == "content" else (0.333333, 1.0)
        cubic = below("train.timesteps", sampling="beta", alpha=alpha, beta=beta)
        ours = Several({"train.shift": 1.0, **cubic.values})
        return ours if name == "linear" else Nearest(ours)
    uniform = {"train.timesteps.sampling": "uniform"}
    if name in ("linear", "shift"):  # shift: the flavour's
        return Several(uniform | ({"train.shift": 1.0} if name == "linear" else {}))
    if name in ("flux_shift", "lumina2_shift"):
        return Several(uniform | {"train.timesteps.auto_shift": True})
    if name == "weighted":
        return Nearest(Several(uniform | {"train.shift": WEIGHTED_SHIFT}))
    ours = Several({"train.timesteps.sampling": "logit_normal", "train.shift": 1.0})
    return ours if name == "sigmoid" else Nearest(Several(uniform) if name == "next_sample" else ours)


def _optimizer(value: Any, draft: Draft) -> Any:
    """Adam's eps is 1e-6 there."""
    ours = to.optimizer(value, draft)
    adam = isinstance(ours, Several) and "betas" in str(ours)
    return Several({**ours.values, "train.optimizer.eps": 1e-6}) if isinstance(ours, Several) and adam else ours


def _rate(value: Any, draft: Draft) -> float:
    """A rate below 0.1 is 1 for Prodigy."""
    is_prodigy = str(draft.given.get("optimizer")).lower().startswith("prodigy")
    return 1.0 if is_prodigy and to.number(value) < 0.1 else to.number(value)


def _schedule(value: Any, draft: Draft) -> Any:
    """PyTorch's schedules: `linear` rises to the rate, and nothing else has a warm-up."""
    name, params = to.text(value), draft.given.get("lr_scheduler_params") or {}
    ours = partial(below, "train.optimizer")
    if name == "linear":
        return Nearest(ours(schedule="constant", warmup=draft.get("train.steps", 1000)))
    if name == "constant_with_warmup":
        return ours(schedule="constant", warmup=to.whole(params.get("num_warmup_steps", 1000)))
    if name in ("cosine", "cosine_with_restarts"):
        end = {"lr_end": to.number(params["eta_min"])} if "eta_min" in params else {}
        return ours(schedule="cosine", warmup=0, **end)
    if name == "step":
        return Nearest(ours(schedule="constant", warmup=0))
    return to.schedule(value, draft)


NETWORK: Rows = {
    "type": ("train.adapter.type", to.one_of({"lora": "lora", "lokr": "lokr"}, "lora")),
    "linear": ("train.adapter.rank", to.whole),
    "rank": ("train.adapter.rank", to.whole),
    "dropout": ("train.adapter.dropout", to.number),
    "lokr_factor": ("train.adapter.decompose_factor", to.whole),
    "lokr_full_rank": ("train.adapter.rank", lambda value, draft: to.WHOLE_MATRICES
        if to.boolean(value) and str(draft.given.get("type")).lower() == "lokr" else NOTHING),
    "pretrained_lora_path": ("train.adapter.init_from", to.place),
}  # fmt: skip
#: The alpha of these families' adapters is their rank.
NETWORK_IDLE = """
    linear_alpha alpha conv* transformer_only split_multistage_loras old_lokr_format layer_offloading all_layers
"""
MODEL: Rows = {
    "arch": ("model.family", _architecture),
    "name_or_path": ("model.path", to.checkpoint),
    "assistant_lora_path": ("model.assistant", to.assistant),
    "model_kwargs": ("train.experts", _experts),
    "quantize": (
        "train.base_precision",
        to.only_with(
            "quantize",
            lambda value, draft: to.quantized(str(draft.given.get("qtype", "qfloat8")).partition("|")[0], draft),
        ),
    ),
    "quantize_te": ("text.quantization", to.flag("int8-quanto")),
    **dict.fromkeys(("low_vram", "layer_offloading", "auto_memory"), ("train.offload.blocks", to.flag())),
    **dict.fromkeys(("compile", "block_compile"), ("train.compile", to.flag("blocks"))),
}
MODEL_IDLE = """
    qtype* *dtype compile_* cache_size_limit *_device layer_offloading_* attn_masking quantize_kwargs in_context
    extras_name_or_path
"""
TRAIN: Rows = {
    "batch_size": ("train.batch_size", to.whole),
    "gradient_accumulation": ("train.accumulate", _accumulate),
    "gradient_accumulation_steps": ("train.accumulate", _accumulate_batches),
    "steps": ("train.steps", to.steps(to.whole)),
    "optimizer": ("train.optimizer.name", _optimizer),
    "lr": ("train.optimizer.lr", to.with_optimizer(_rate)),
    "unet_lr": ("train.optimizer.lr", to.with_optimizer(_rate)),
    "optimizer_params": ("train.optimizer.arguments", to.with_optimizer(to.arguments)),
    "lr_scheduler": ("train.optimizer.schedule", _schedule),
    "max_grad_norm": ("train.optimizer.max_grad_norm", to.norm_limit),
    "gradient_checkpointing": ("train.gradient_checkpointing", to.boolean),
    "dtype": ("model.precision", to.dtype),
    "timestep_type": ("train.timesteps.sampling", _sampling),
    "linear_timesteps": ("train.loss.weighting", to.flag(Several(
        {"train.timesteps.sampling": "uniform", "train.shift": 1.0, "train.loss.weighting": "bell"}))),
    "linear_timesteps2": ("train.loss.weighting", to.flag(Several(
        {"train.timesteps.sampling": "uniform", "train.shift": 1.0, "train.loss.weighting": "half_bell"}))),
    "loss_type": ("train.loss.type", to.one_of({"mse": "mse", "pseudo_huber": "huber", "mae": "smooth_l1"}, "mse")),
    "ema_config": ("train.ema.decay", lambda value, draft: NOTHING if is_off(value.get("use_ema")) else to.number(
        value.get("ema_decay", 0.999))),
    "attention_backend": ("train.attention_backend", to.one_of(to.ATTENTION, "native")),
    "xformers": ("train.attention_backend", to.flag("xformers")),
    "prompt_dropout_prob": ("train.caption_dropout", to.number),
    "reg_weight": ("train.methods.regularization.weight", to.when(to.has_regularization, to.number)),
    "inverted_mask_prior_multiplier": ("train.methods.masked_loss.prior_weight", to.only_with(
        "inverted_mask_prior", to.when(
            lambda draft: draft.get("train.methods.masked_loss") is not None, to.number))),
}  # fmt: skip
TRAIN_IDLE = """
    lr_scheduler_params content_or_style switch_boundary_every inverted_mask_prior *snr_gamma train_unet
    text_encoder_lr embedding_lr adapter_lr refiner_lr train_refiner noise_scheduler num_train_timesteps
    cache_text_embeddings unload_text_encoder disable_sampling *_first_sample sdp max_loss_debug *negative_prompt*
    start_step bypass_guidance_embedding *_preservation_* guidance_loss_target differential_guidance_scale cfg_scale
    paramiter_swapping_factor next_sample_timesteps
"""
SAVE: Rows = {
    "save_every": ("train.checkpoint_every", to.steps(to.above_zero)),
    "max_step_saves_to_keep": ("train.keep_checkpoints", to.above_zero),
    "hf_repo_id": ("hub.repo", to.only_with("push_to_hub", to.text)),
    "hf_private": ("hub.private", to.only_with("push_to_hub", to.boolean)),
}
LOGGING: Rows = {
    "log_every": ("train.log_every", to.above_zero),
    "use_wandb": ("train.trackers", to.flag(["tensorboard", "wandb"])),
    "run_name": ("train.run", to.run_name),
}

# -- datasets and samples


def _frames(value: Any, draft: Draft) -> Any:
    """By default frames are spread evenly over a whole video, which changes its speed; here all clips have a rate."""
    if (count := to.whole(value)) <= 1:
        return NOTHING
    frames = {"dataset_type": "video", "video.num_frames": count, "video.min_frames": count}
    if is_off(draft.given.get("shrink_video_to_frames", True)):
        rate = to.number(draft.given.get("fps", 24))
        return Several({**frames, "video.clip_selection": "random", "video.frame_rate": rate})
    return Nearest(Several(frames))


def _control(value: Any, draft: Draft) -> Any:
    places = [str(draft.given[key]) for key in (f"control_path_{n}" for n in (1, 2, 3)) if draft.given.get(key)]
    places = [draft.files.place(place) for place in places or to.texts(value)]
    return places[0] if len(places) == 1 else places


def _trigger(value: Any, draft: Draft) -> Any:
    """It is added to captions without it, but never to those of regularization data."""
    return NOTHING if _is_regularization(draft.given) else to.text(value)


def _is_regularization(given: Mapping[str, Any]) -> bool:
    return not is_off(given.get("is_reg")) or not is_off(given.get("prior_reg"))


DATASET: Rows = {
    **dict.fromkeys(("folder_path", "dataset_path"), ("instance_data_dir", to.place)),
    "caption_ext": ("caption_strategy", to.text_files),
    "trigger_word": ("trigger_word", _trigger),
    "shuffle_tokens": ("tag_shuffle", to.only_with("shuffle_tokens", lambda value, draft: {
        "variants": 8, "keep": to.whole(draft.given.get("keep_tokens", 0))})),
    "resolution": ("resolution", to.resolutions),
    "num_repeats": ("repeats", to.repeats),
    "num_frames": ("video.num_frames", _frames),
    **dict.fromkeys(("is_reg", "prior_reg"), ("is_regularization_data", to.flag())),
    **dict.fromkeys(("control_path", "control_path_1", "control_path_2", "control_path_3"),
                    ("conditioning_data", _control)),
    "mask_path": ("mask_data", to.place),
    "mask_min_value": ("train.methods.masked_loss.unmasked_weight", to.only_with("mask_path", to.number)),
    "random_crop": ("crop_style", to.flag("random")),
    "square_crop": ("crop_aspect", to.flag("square")),
    "buckets": ("crop_aspect", to.flag(NOTHING, "square")),
    "bucket_tolerance": ("bucket_step", to.whole),
}  # fmt: skip
DATASET_IDLE = """
    shrink_video_to_frames fps keep_tokens cache_* load_image_when_caching_latents num_workers prefetch_factor debug
    fast_image_size replay_transforms type full_size_control_images do_i2v batch_size trim_auto_frame_count_tail
"""


def _size(value: Any, draft: Draft) -> str:
    given = draft.given
    return to.size(given.get("width") or 512, given.get("height") or 512, given.get("num_frames"))


SAMPLE: Rows = {
    "sample_every": ("validation.every", to.steps(to.above_zero)),
    **dict.fromkeys(("width", "height"), ("validation.size", _size)),
    "sample_steps": ("validation.steps", to.whole),
    "guidance_scale": ("validation.guidance", to.number),
    "seed": ("validation.seed", to.whole),
    "fps": ("validation.fps", to.number),
}
SAMPLE_IDLE = """
    num_frames neg walk_seed prompts samples sampler sample_start_step format do_cfg_norm network_multiplier
    extra_values guidance_rescale adapter_conditioning_scale refiner_start_at
"""
PROMPT: Rows = {
    "neg": ("negative_prompt", to.text),
    "images": ("image", lambda value, draft: value),
    **dict.fromkeys(("width", "height"), ("size", _size)),
    "sample_steps": ("steps", to.whole),
    "guidance_scale": ("guidance", to.number),
    "seed": ("seed", to.whole),
}
CONTROLS = ("ctrl_img", "ctrl_img_1", "ctrl_img_2", "ctrl_img_3")
TABLES: Mapping[str, Table] = {
    "process": Table({"training_folder": ("output", to.output_place), "device": ("train.device", to.text)},
                     "type trigger_word performance_log_every sqlite_db_path"),
    "model": Table(MODEL, MODEL_IDLE),
    "network": Table(NETWORK, NETWORK_IDLE, {"linear": 4, "lokr_full_rank": True}),
    "train": Table(TRAIN, TRAIN_IDLE, {
        "steps": 1000, "lr": 1e-6, "lr_scheduler": "constant", "optimizer": "adamw", "timestep_type": "sigmoid",
        "dtype": "fp32"}),
    "save": Table(SAVE, "push_to_hub dtype save_format", {
        "save_every": 1000, "max_step_saves_to_keep": 5}),
    "sample": Table(SAMPLE, SAMPLE_IDLE, {"sample_every": 100, "sample_steps": 20, "guidance_scale": 7, "width": 512}),
    "logging": Table(LOGGING, "project_name verbose use_ui_logger"),
    "datasets": Table(DATASET, DATASET_IDLE, {"resolution": 512}, {"allow_upscale": True, "captions_per_file": "one"}),
}  # fmt: skip


def _carry_datasets(draft: Draft, items: Sequence[Mapping[str, Any]], trigger: str) -> None:
    for item in items:
        at, name = to.new_dataset(draft, item.get("folder_path") or item.get("dataset_path"))
        given = {key: value for key, value in item.items() if key != "caption_dropout_rate"}
        given["trigger_word"] = given.get("trigger_word") or trigger
        if given.get("mask_path"):
            to.use_masks(draft)
        draft.carry(TABLES["datasets"], given, f"{name}: ", at)
        if is_off(given.get("prior_reg")):
            to.keep_data_as_target(draft, f"{name}: is_reg")
    rates = {"caption_dropout_rate": [item.get("caption_dropout_rate", 0.0) for item in items]}
    draft.carry(Table({"caption_dropout_rate": ("train.caption_dropout", to.largest)}), rates)


def _read_prompts(draft: Draft, section: Mapping[str, Any], trigger: str) -> Iterator[dict[str, Any]]:
    prompts, seed = section.get("prompts"), section.get("seed", 0)
    samples = draft.sections(section.get("samples"), "sample.samples")
    samples = samples or [{"prompt": words} for words in (prompts if isinstance(prompts, list) else [])]
    for index, item in enumerate(samples):
        words = str(item.get("prompt", "")).replace("[trigger]", trigger).replace("[name]", trigger)
        usual = {"neg": section.get("neg")}
        if item.keys() & {"width", "height"}:
            usual |= {key: section.get(key) for key in ("width", "height", "num_frames")}
        if not is_off(section.get("walk_seed")) and isinstance(seed, int):
            usual["seed"] = seed + index
        images = [draft.files.place(str(item[key])) for key in CONTROLS if item.get(key)]
        yield {**usual, **item, "prompt": words, "images": images[0] if len(images) == 1 else images}


# -- its file


def claims(content: Any) -> str:
    config = content.get("config") if isinstance(content, dict) else None
    return "arguments" if isinstance(config, dict) and isinstance(config.get("process"), list) else ""


def carry(draft: Draft, roles: Mapping[str, Any]) -> None:
    content = roles.get("arguments", {})
    config = draft.section(content.get("config"), "config")
    processes = draft.sections(config.get("process"), "process")
    for further in processes[1:]:
        draft.say("process", "not carried over", shown(further))
    process = processes[0] if processes else {}
    for key in content.keys() - {"config"}:
        draft.say(str(key), "needs nothing")
    draft.carry(Table({"name": ("train.run", to.run_name)}, "process"), config, "config.")
    trigger = str(process.get("trigger_word") or "")
    inner = {name: draft.section(process.get(name), name) for name in TABLES if name not in ("process", "datasets")}
    draft.carry(TABLES["model"], inner["model"], "model.")
    if "wan22_14b" in str(inner["model"].get("arch")) and is_off(inner["model"].get("model_kwargs")):
        draft.assume("model.model_kwargs", "train.experts", "both")
    draft.parts = 2 if draft.get("train.experts") == "both" else 1  # the experts share the steps there
    _carry_datasets(draft, draft.sections(process.get("datasets"), "datasets"), trigger)
    draft.carry(TABLES["process"], {key: value for key, value in process.items() if key not in TABLES})
    draft.samples = draft.files.count_media(draft.datasets())
    if process.get("network"):
        draft.carry(TABLES["network"], inner["network"], "network.")
    else:
        draft.assume("network", "train.adapter.type", "full")
    for name in ("train", "save", "logging"):
        draft.carry(TABLES[name], inner[name], f"{name}.")
    if inner["sample"] and is_off(inner["train"].get("disable_sampling")):
        draft.carry_prompts(_read_prompts(draft, inner["sample"], trigger), PROMPT, "sample.prompts")
        draft.carry(TABLES["sample"], inner["sample"], "sample.")


TRAINER = Trainer("ai-toolkit", TABLES, claims, carry)
