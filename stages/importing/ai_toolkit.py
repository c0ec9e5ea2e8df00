"""ai-toolkit: a YAML file with a job, whose process trains."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from stages.importing import conversions as to
from stages.importing.draft import (
    NOTHING,
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

#: Architecture in ai-toolkit -> (family, flavour); None for the family's default flavour.
ARCHITECTURES = {
    "wan21": ("wan2.1", None), "wan22_5b": ("wan2.2-5b", "t2v-5b"), "wan22_14b": ("wan2.2-a14b", "t2v-a14b"),
    "wan22_14b_i2v": ("wan2.2-a14b", "i2v-a14b"), "qwen_image": ("qwen-image", None),
    "qwen_image_edit": ("qwen-image-edit", None), "qwen_image_edit_plus": ("qwen-image-edit-plus", None),
    "zimage": ("z-image", None), "flux2_klein_4b": ("flux2-klein", "klein-base-4b"),
    "flux2_klein_9b": ("flux2-klein", "klein-base-9b"), "krea2": ("krea2", None),
    "qwen_image_2": ("qwen-image-2.1", None),
}  # fmt: skip
#: Shift whose distribution of noise levels is close to the factors of `weighted`: within 0.13 of 1, without it 0.31.
WEIGHTED_SHIFT = 1.6
#: Sampling -> number of fixed noise levels.
FIXED_STEPS = {"one_step": 1, "two_step": 2, "four_step": 4, "eight_step": 8}


def _architecture(value: Any, draft: Draft) -> Several:
    """The family and flavour. An architecture of a newer release is found by its published repository."""
    name = to.text(value).partition(":")[0].lower()
    exact = to.flavour_of_repo(str(draft.entries.get("name_or_path", "")))
    if name not in ARCHITECTURES and exact:
        return to.select_flavour(exact)
    family, flavour = ARCHITECTURES[name]
    flavour = exact if exact and to.FLAVOURS[exact] == family else flavour
    return to.select_flavour(flavour) if flavour else Several({"model.family": family})


def _experts(value: Any, draft: Draft) -> Any:
    if draft.get("model.family") != "wan2.2-a14b":
        return NOTHING
    high, low = (to.boolean(value.get(f"train_{name}_noise", True)) for name in ("high", "low"))
    return "both" if high and low else "high" if high else "low"


def _accumulate(value: Any, draft: Draft) -> Any:
    """The number of accumulated batches; -1 means a whole epoch."""
    if (count := to.integer(value)) > 0:
        return count
    if draft.samples is None:
        raise ValueError(value)
    return Nearest(max(1, math.ceil(draft.samples / draft.get("train.batch_size", 1))))


def _accumulate_batches(value: Any, draft: Draft) -> Any:
    """The number of accumulated batches. With this key, ai-toolkit counts each batch as a step."""
    count = _accumulate(value, draft)
    draft.step_ratio *= count.value if isinstance(count, Nearest) else count
    return count


def _sampling(value: Any, draft: Draft) -> Any:
    """The distribution of sigma. `weighted` is uniform with loss factors that were measured on another model."""
    name, bias = to.text(value), draft.entries.get("content_or_style", "balanced")
    if name in FIXED_STEPS:
        values = [1 - index / FIXED_STEPS[name] for index in range(FIXED_STEPS[name])]
        return section_options("train.timesteps", sampling="list", values=values)
    if bias in ("content", "style"):  # the cube of a uniform number, from noise or from data
        alpha, beta = (1.0, 0.333333) if bias == "content" else (0.333333, 1.0)
        cubic = section_options("train.timesteps", sampling="beta", alpha=alpha, beta=beta)
        ours = Several({"train.shift": 1.0, **cubic.values})
        return ours if name == "linear" else Nearest(ours)
    uniform = {"train.timesteps.sampling": "uniform"}
    if name in ("linear", "shift"):  # shift: the flavour's shift
        return Several(uniform | ({"train.shift": 1.0} if name == "linear" else {}))
    if name in ("flux_shift", "lumina2_shift"):
        return Several(uniform | {"train.timesteps.auto_shift": True})
    if name == "weighted":
        return Nearest(Several(uniform | {"train.shift": WEIGHTED_SHIFT}))
    ours = Several({"train.timesteps.sampling": "logit_normal", "train.shift": 1.0})
    return ours if name == "sigmoid" else Nearest(Several(uniform) if name == "next_sample" else ours)


def _optimizer(value: Any, draft: Draft) -> Any:
    """The optimizer. ai-toolkit's default eps of Adam is 1e-6."""
    ours = to.optimizer(value, draft)
    adam = isinstance(ours, Several) and "betas" in str(ours)
    return Several({**ours.values, "train.optimizer.eps": 1e-6}) if isinstance(ours, Several) and adam else ours


def _rate(value: Any, draft: Draft) -> float:
    """The learning rate. ai-toolkit uses 1 for Prodigy if the rate is below 0.1."""
    is_prodigy = str(draft.entries.get("optimizer")).lower().startswith("prodigy")
    return 1.0 if is_prodigy and to.number(value) < 0.1 else to.number(value)


def _schedule(value: Any, draft: Draft) -> Any:
    """A schedule of PyTorch: `linear` rises to the rate, and only constant_with_warmup has a warm-up."""
    name, params = to.text(value), draft.entries.get("lr_scheduler_params") or {}
    ours = partial(section_options, "train.optimizer")
    if name == "linear":
        return Nearest(ours(schedule="constant", warmup=draft.get("train.steps", 1000)))
    if name == "constant_with_warmup":
        return ours(schedule="constant", warmup=to.integer(params.get("num_warmup_steps", 1000)))
    if name in ("cosine", "cosine_with_restarts"):
        end = {"lr_end": to.number(params["eta_min"])} if "eta_min" in params else {}
        return ours(schedule="cosine", warmup=0, **end)
    if name == "step":
        return Nearest(ours(schedule="constant", warmup=0))
    return to.schedule(value, draft)


NETWORK: Rows = {
    "type": ("train.adapter.type", to.one_of({"lora": "lora", "lokr": "lokr"}, "lora")),
    "linear": ("train.adapter.rank", to.integer),
    "rank": ("train.adapter.rank", to.integer),
    "dropout": ("train.adapter.dropout", to.number),
    "lokr_factor": ("train.adapter.decompose_factor", to.integer),
    "lokr_full_rank": ("train.adapter.rank", lambda value, draft: to.WHOLE_MATRICES
        if to.boolean(value) and str(draft.entries.get("type")).lower() == "lokr" else NOTHING),
    "pretrained_lora_path": ("train.adapter.init_from", to.file_path),
}  # fmt: skip
#: Keys that need nothing. Alpha is one of them, because the alpha of these families' adapters is their rank.
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
            lambda value, draft: to.quantized(str(draft.entries.get("qtype", "qfloat8")).partition("|")[0], draft),
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
    "batch_size": ("train.batch_size", to.integer),
    "gradient_accumulation": ("train.accumulate", _accumulate),
    "gradient_accumulation_steps": ("train.accumulate", _accumulate_batches),
    "steps": ("train.steps", to.steps(to.integer)),
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
    "attention_backend": ("train.attention", to.one_of(to.ATTENTION, "sdpa")),
    "xformers": ("train.attention", to.flag(Nearest("sdpa"))),
    "prompt_dropout_prob": ("train.caption_dropout", to.number),
    "reg_weight": ("train.methods.regularization.weight", to.only_if(to.has_regularization, to.number)),
    "inverted_mask_prior_multiplier": ("train.methods.masked_loss.prior_weight", to.only_with(
        "inverted_mask_prior", to.only_if(
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
    "save_every": ("train.checkpoint_every", to.steps(to.positive_integer)),
    "max_step_saves_to_keep": ("train.keep_checkpoints", to.kept),
    "hf_repo_id": ("hub.repo", to.only_with("push_to_hub", to.text)),
    "hf_private": ("hub.private", to.only_with("push_to_hub", to.boolean)),
}
LOGGING: Rows = {
    "log_every": ("train.log_every", to.positive_integer),
    "use_wandb": ("train.trackers", to.flag(["tensorboard", "wandb"])),
    "run_name": ("train.run", to.run_name),
}

# -- datasets and samples


def _frames(value: Any, draft: Draft) -> Any:
    """The number of frames. By default, ai-toolkit spreads frames evenly over a whole video, which changes its speed;
    latentpress uses a constant rate."""
    if (count := to.integer(value)) <= 1:
        return NOTHING
    frames = {"dataset_type": "video", "video.num_frames": count, "video.min_frames": count}
    if is_off(draft.entries.get("shrink_video_to_frames", True)):
        return Several(
            {**frames, "video.clip_selection": "random", "video.frame_rate": to.number(draft.entries.get("fps", 24))}
        )
    return Nearest(Several(frames))


def _control(value: Any, draft: Draft) -> Any:
    places = [str(draft.entries[key]) for key in (f"control_path_{n}" for n in (1, 2, 3)) if draft.entries.get(key)]
    places = [draft.files.convert_path(place) for place in places or to.texts(value)]
    return places[0] if len(places) == 1 else places


def _trigger(value: Any, draft: Draft) -> Any:
    """The trigger word, which is added to captions that do not contain it, except captions of regularization data."""
    return NOTHING if _is_regularization(draft.entries) else to.text(value)


def _is_regularization(entries: Mapping[str, Any]) -> bool:
    return not is_off(entries.get("is_reg")) or not is_off(entries.get("prior_reg"))


DATASET: Rows = {
    **dict.fromkeys(("folder_path", "dataset_path"), ("instance_data_dir", to.file_path)),
    "caption_ext": ("caption_strategy", to.text_files),
    "trigger_word": ("trigger", _trigger),
    "default_caption": ("instance_prompt", to.text),
    "shuffle_tokens": ("tag_shuffle", to.only_with("shuffle_tokens", lambda value, draft: {
        "variants": 8, "keep": to.integer(draft.entries.get("keep_tokens", 0))})),
    "resolution": ("resolution", to.resolutions),
    "num_repeats": ("repeats", to.repeats),
    "num_frames": ("video.num_frames", _frames),
    **dict.fromkeys(("is_reg", "prior_reg"), ("is_regularization_data", to.flag())),
    **dict.fromkeys(("control_path", "control_path_1", "control_path_2", "control_path_3"),
                    ("conditioning_data", _control)),
    "mask_path": ("mask_data", to.file_path),
    "mask_min_value": ("train.methods.masked_loss.unmasked_weight", to.only_with("mask_path", to.number)),
    "random_crop": ("crop_style", to.flag("random")),
    "square_crop": ("crop_aspect", to.flag("square")),
    "buckets": ("crop_aspect", to.flag(NOTHING, "square")),
    "bucket_tolerance": ("bucket_step", to.integer),
}  # fmt: skip
DATASET_IDLE = """
    shrink_video_to_frames fps keep_tokens cache_* load_image_when_caching_latents num_workers prefetch_factor debug
    fast_image_size replay_transforms type full_size_control_images do_i2v batch_size trim_auto_frame_count_tail
"""


def _size(value: Any, draft: Draft) -> str:
    entries = draft.entries
    return to.size(entries.get("width") or 512, entries.get("height") or 512, entries.get("num_frames"))


SAMPLE: Rows = {
    "sample_every": ("validation.every", to.steps(to.interval)),
    **dict.fromkeys(("width", "height"), ("validation.size", _size)),
    "sample_steps": ("validation.steps", to.integer),
    "guidance_scale": ("validation.guidance", to.number),
    "seed": ("validation.seed", to.integer),
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
    "sample_steps": ("steps", to.integer),
    "guidance_scale": ("guidance", to.number),
    "seed": ("seed", to.integer),
}
CONTROLS = ("ctrl_img", "ctrl_img_1", "ctrl_img_2", "ctrl_img_3")
TABLES: Mapping[str, Table] = {
    "process": Table({"training_folder": ("output", to.output_path), "device": ("train.device", to.text)},
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
        dataset_path, name = to.new_dataset(draft, item.get("folder_path") or item.get("dataset_path"))
        entries = {key: value for key, value in item.items() if key != "caption_dropout_rate"}
        entries["trigger_word"] = entries.get("trigger_word") or trigger
        if entries.get("mask_path"):
            to.use_masks(draft)
        draft.carry(TABLES["datasets"], entries, f"{name}: ", dataset_path)
        if is_off(entries.get("prior_reg")):
            to.keep_data_as_target(draft, f"{name}: is_reg")
    rates = {"caption_dropout_rate": [item.get("caption_dropout_rate", 0.0) for item in items]}
    draft.carry(Table({"caption_dropout_rate": ("train.caption_dropout", to.largest)}), rates)


def _read_prompts(draft: Draft, section: Mapping[str, Any], trigger: str) -> Iterator[dict[str, Any]]:
    prompts, seed = section.get("prompts"), section.get("seed", 0)
    samples = draft.sections(section.get("samples"), "sample.samples")
    samples = samples or [{"prompt": words} for words in (prompts if isinstance(prompts, list) else [])]
    for index, item in enumerate(samples):
        words = str(item.get("prompt", "")).replace("[trigger]", trigger).replace("[name]", trigger)
        default_entries = {"neg": section.get("neg")}
        if item.keys() & {"width", "height"}:
            default_entries |= {key: section.get(key) for key in ("width", "height", "num_frames")}
        if not is_off(section.get("walk_seed")) and isinstance(seed, int):
            default_entries["seed"] = seed + index
        images = [draft.files.convert_path(str(item[key])) for key in CONTROLS if item.get(key)]
        yield {**default_entries, **item, "prompt": words, "images": images[0] if len(images) == 1 else images}


# -- the file


def find_role(content: Any) -> str:
    config = content.get("config") if isinstance(content, dict) else None
    return "arguments" if isinstance(config, dict) and isinstance(config.get("process"), list) else ""


def carry(draft: Draft, roles: Mapping[str, Any]) -> None:
    content = roles.get("arguments", {})
    config = draft.section(content.get("config"), "config")
    processes = draft.sections(config.get("process"), "process")
    for further in processes[1:]:
        draft.add_line("process", "not carried over", show_value(further))
    process = processes[0] if processes else {}
    for key in content.keys() - {"config"}:
        draft.add_line(str(key), "needs nothing")
    draft.carry(Table({"name": ("train.run", to.run_name)}, "process"), config, "config.")
    trigger = str(process.get("trigger_word") or "")
    inner = {name: draft.section(process.get(name), name) for name in TABLES if name not in ("process", "datasets")}
    draft.carry(TABLES["model"], inner["model"], "model.")
    if "wan22_14b" in str(inner["model"].get("arch")) and is_off(inner["model"].get("model_kwargs")):
        draft.assume("model.model_kwargs", "train.experts", "both")
    draft.step_ratio = 2 if draft.get("train.experts") == "both" else 1  # the experts share the steps in ai-toolkit
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


TRAINER = Trainer("ai-toolkit", TABLES, find_role, carry)
