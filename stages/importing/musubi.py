"""musubi-tuner: the TOML file of datasets, arguments of training scripts as a TOML file or a command, and files of
prompts, which have a prompt per line, followed by options."""

import re
from collections.abc import Mapping
from typing import Any

from schemas.config.encoding import is_weight_file
from schemas.text_format import split_lines
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

#: First part of a training script's name -> (family, value of --task or --model_version -> flavour).
SCRIPTS: dict[str, tuple[str | None, Mapping[str, str]]] = {
    "kandinsky5": ("kandinsky5-video", {
        "k5-lite-t2v-5s-sd": "t2v-lite-sft-5s", "k5-lite-t2v-10s-sd": "t2v-lite-sft-10s",
        "k5-lite-i2v-5s-sd": "i2v-lite-5s", "k5-pro-t2v-5s-sd": "t2v-pro-sft-5s-hd",
        "k5-pro-t2v-5s-hd": "t2v-pro-sft-5s-hd", "k5-pro-t2v-10s-sd": "t2v-pro-sft-10s-hd",
        "k5-pro-t2v-10s-hd": "t2v-pro-sft-10s-hd", "k5-pro-i2v-5s-sd": "i2v-pro-sft-5s",
        "k5-pro-i2v-5s-hd": "i2v-pro-sft-5s",
    }),
    "wan": (None, {
        "t2v-1.3b": "t2v-1.3b", "t2v-14b": "t2v-14b", "t2i-14b": "t2v-14b", "t2v-a14b": "t2v-a14b",
        "i2v-a14b": "i2v-a14b",
    }),
    "qwen_image_21": ("qwen-image-2.1", {}),  # names of its scripts begin with qwen_image, so it is first
    "qwen_image": ("qwen-image", {
        "original": "qwen-image", "edit": "qwen-image-edit", "edit-2509": "qwen-image-edit-2509",
        "edit-2511": "qwen-image-edit-2511",
    }),
    "zimage": ("z-image", {}),
    "krea2": ("krea2", {}),
    "flux_2": ("flux2-klein", {
        name: name for name in ("klein-base-4b", "klein-base-9b", "klein-4b", "klein-9b")
    }),
}  # fmt: skip


def _program(entries: Mapping[str, Any]) -> str:
    return str(entries.get("(program)", "")).replace("\\", "/").rpartition("/")[2]


def _script(entries: Mapping[str, Any]) -> str:
    """The key of SCRIPTS that matches the program, the network's module or the task; "" if none matches."""
    program, task = _program(entries), str(entries.get("task", "")).lower()
    module = str(entries.get("network_module", "")).rpartition(".")[2].removeprefix("lora_")
    for name in SCRIPTS:
        if program.startswith(name) or name in (module, module.replace("kandinsky", "kandinsky5")):
            return name
    return next((name for name, (_, tasks) in SCRIPTS.items() if task in tasks), "")


def _model(value: Any, draft: Draft) -> Several:
    return to.select_flavour(SCRIPTS[_script(draft.entries)][1][to.text(value).lower()])


def _weights(value: Any, draft: Draft) -> Any:
    """Settings from the file of the checkpoint: its place if it exists, a pretrained flavour, or the expert that is
    trained."""
    name, flavour = to.text(value).lower().replace("\\", "/").rpartition("/")[2], draft.get("model.flavour")
    if draft.get("model.family") != "wan2.2-a14b":
        settings: dict[str, Any] = {}
        if flavour and flavour.startswith("t2v-") and "pretrain" in name and "sft" in flavour:
            settings["model.flavour"] = flavour.replace("sft", "pretrain")
        if flavour and is_weight_file(name) and draft.files.find(to.text(value)):
            settings["model.path"] = draft.files.convert_path(to.text(value))
        return Several(settings) if settings else NOTHING
    if not is_off(draft.entries.get("dit_high_noise")):
        return "both"
    lowest = to.number(draft.entries.get("min_timestep", 0))
    highest = to.number(draft.entries.get("max_timestep", 1000))
    is_high = lowest >= 800 or (highest > 900 and "high" in name)
    return "high" if is_high else "low"


def _if_adapter(convert: Convert) -> Convert:
    """Make a conversion of an adapter's value, which is used only if an adapter is trained."""
    return to.only_if(lambda draft: not _is_full(draft.entries), convert)


def _is_full(entries: Mapping[str, Any]) -> bool:
    return is_off(entries.get("network_module")) or bool(re.search(r"_train(\.py)?$", _program(entries)))


def _alpha(value: Any, draft: Draft) -> Any:
    started = draft.get("train.adapter.init_from") is not None or draft.entries.get("dim_from_weights")
    return NOTHING if started else to.number(value)


def _network(value: Any, draft: Draft) -> Any:
    if _is_full(draft.entries):
        return "full"
    name = to.text(value).rpartition(".")[2]
    algo = to.parse_pairs(draft.entries.get("network_args") or []).get("algo") if name == "kohya" else None
    nearest = Nearest("lokr" if name == "loha" else "lora")
    return nearest if name in ("loha", "lora_fa", "oft", "dylora") else "lokr" if "lokr" in (name, algo) else "lora"


def _network_arguments(value: Any, draft: Draft) -> Any:
    entries = to.parse_pairs(value)
    unknown = entries.keys() - {"factor", "lokr_factor", "verbose", "algo"}
    if not all(is_off(entries[name]) for name in unknown):
        raise ValueError(value)
    factor = entries.get("factor", entries.get("lokr_factor"))
    return NOTHING if factor is None else to.integer(factor)


def _sampling(value: Any, draft: Draft) -> Any:
    """The distribution of sigma. `sigma` draws a position in the schedule from noise to data, so the mean changes its
    sign."""
    name, entries = to.text(value), draft.entries
    std, shift = to.number(entries.get("sigmoid_scale", 1)), to.number(entries.get("discrete_flow_shift", 1))
    mean, spread = to.number(entries.get("logit_mean", 0)), to.number(entries.get("logit_std", 1))
    scheme = str(entries.get("weighting_scheme", "none")) if name == "sigma" else ""
    by_name: dict[str, dict[str, Any]] = {
        "uniform": {"sampling": "uniform", "shift": 1.0},
        "sigmoid": {"std": std, "shift": 1.0},
        "shift": {"std": std, "shift": shift},
        **{key: {"std": std, "auto_shift": True} for key in ("flux_shift", "flux2_shift", "qwen_shift", "krea2_shift")},
        "logsnr": {"mean": -mean / 2, "std": spread / 2, "shift": 1.0},
        "sigma": {"sampling": "uniform", "shift": shift},
    }
    by_scheme: dict[str, dict[str, Any]] = {
        "logit_normal": {"mean": -mean, "std": spread, "shift": shift},
        "mode": {"sampling": "mode", "mode_scale": to.number(entries.get("mode_scale", 1.29)), "shift": shift},
    }
    settings = by_scheme.get(scheme) or by_name.get(name) or by_name["sigmoid"]
    ours = {f"train.{'' if key == 'shift' else 'timesteps.'}{key}": item + 0.0 if isinstance(item, float) else item
            for key, item in settings.items()}  # fmt: skip
    return Several(ours) if name in by_name else Nearest(Several(ours))


DEFAULTS = {
    "max_train_steps": 1600, "learning_rate": 2e-6, "optimizer_type": "adamw", "lr_scheduler": "constant",
    "lr_warmup_steps": 0, "gradient_checkpointing": False, "timestep_sampling": "sigma",
    "network_module": "", "network_dim": 4, "network_alpha": 1,
}  # fmt: skip
ARGUMENTS: Rows = {
    "task": ("model.flavour", _model),
    "model_version": ("model.flavour", _model),
    "edit": ("model.family", to.flag("qwen-image-edit")),
    "edit_plus": ("model.family", to.flag("qwen-image-edit-plus")),
    "dit": ("train.experts", _weights),
    "mixed_precision": ("model.precision", to.precision),
    "fp8_base": ("train.base_precision", to.flag("fp8-torchao")),
    "fp8_scaled": ("train.base_precision", to.flag("fp8-torchao")),
    **dict.fromkeys(("fp8_vl", "fp8_llm", "fp8_t5", "fp8_text_encoder"), ("text.quantization", to.flag("int8-quanto"))),
    "vae_dtype": ("latents.precision", to.dtype),
    "vae_tiling": ("latents.tiling", to.flag()),
    "vae_chunk_size": ("latents.chunk_frames", to.integer),
    "network_module": ("train.adapter.type", _network),
    "network_weights": ("train.adapter.init_from", _if_adapter(to.file_path)),
    "network_dim": ("train.adapter.rank", _if_adapter(to.unless("dim_from_weights", to.integer))),
    "network_alpha": ("train.adapter.alpha", _if_adapter(_alpha)),
    "network_dropout": ("train.adapter.dropout", _if_adapter(to.number)),
    "network_args": ("train.adapter.decompose_factor", _if_adapter(_network_arguments)),
    "full_bf16": ("train.weight_precision", to.flag("bfloat16")),
    "gradient_accumulation_steps": ("train.accumulate", to.integer),
    "max_train_steps": ("train.steps", to.unless("max_train_epochs", to.steps(to.positive_integer))),
    "max_train_epochs": ("train.steps", to.steps(to.epochs)),
    "seed": ("train.seed", to.integer),
    "optimizer_type": ("train.optimizer.name", to.optimizer),
    "learning_rate": ("train.optimizer.lr", to.with_optimizer(to.number)),
    "optimizer_args": ("train.optimizer.arguments", to.with_optimizer(to.arguments)),
    "max_grad_norm": ("train.optimizer.max_grad_norm", to.norm_limit),
    "lr_scheduler": ("train.optimizer.schedule", to.schedule),
    "lr_warmup_steps": ("train.optimizer.warmup", to.warmup),
    "lr_scheduler_num_cycles": ("train.optimizer.cycles", to.with_schedule(
        lambda value, draft: max(1, to.integer(value)), "cosine_with_restarts")),
    "lr_scheduler_power": ("train.optimizer.power", to.with_schedule(to.number, "polynomial")),
    "lr_scheduler_min_lr_ratio": ("train.optimizer.lr_end", to.with_schedule(
        lambda value, draft: to.number(value) * draft.get("train.optimizer.lr", 1e-4), "cosine_with_min_lr")),
    "gradient_checkpointing": ("train.gradient_checkpointing", to.boolean),
    "gradient_checkpointing_cpu_offload": ("train.offload.activations", to.flag()),
    "cpu_offload_checkpointing": ("train.offload.activations", to.flag()),
    "blocks_to_swap": ("train.offload.blocks", to.if_positive),
    "use_pinned_memory_for_block_swap": ("train.offload.streams", to.only_with("blocks_to_swap", to.flag())),
    "xformers": ("train.attention", to.flag(Nearest("sdpa"))),
    "flash_attn": ("train.attention", to.flag("flash")),
    "flash3": ("train.attention", to.flag(Nearest("flash"))),
    "sage_attn": ("train.attention", to.flag(Nearest("sdpa"))),
    "compile": ("train.compile", to.flag("blocks")),
    "compile_backend": ("train.compile_backend", to.text),
    "dynamo_backend": ("train.compile_backend", to.compiled),
    "timestep_sampling": ("train.timesteps.sampling", _sampling),
    "weighting_scheme": ("train.loss.weighting", to.one_of({name: name for name in ("cosmap", "sigma_sqrt")} | {
        name: NOTHING for name in ("none", "logit_normal", "mode")})),
    "num_timestep_buckets": ("train.timesteps.low_discrepancy", lambda value, draft: to.number(value) >= 2 or NOTHING),
    "output_dir": ("output", to.output_path),
    "output_name": ("train.run", to.run_name),
    "save_every_n_steps": ("train.checkpoint_every", to.steps(to.positive_integer)),
    "save_every_n_epochs": ("train.checkpoint_every", to.steps(to.epochs)),
    "save_last_n_epochs": ("train.keep_checkpoints", to.kept),
    "save_last_n_epochs_state": ("train.keep_checkpoints", to.kept),
    "sample_every_n_steps": ("validation.every", to.unless("sample_every_n_epochs", to.steps(to.interval))),
    "sample_every_n_epochs": ("validation.every", to.steps(to.epochs)),
    "log_with": ("train.trackers", to.one_of({
        "tensorboard": ["tensorboard"], "wandb": ["wandb"], "all": ["tensorboard", "wandb"]})),
    "huggingface_repo_id": ("hub.repo", to.text),
    "huggingface_repo_visibility": ("hub.private", to.only_with(
        "huggingface_repo_id", lambda value, draft: to.text(value) != "public")),
    "metadata_license": ("hub.license", to.only_with("huggingface_repo_id", to.text)),
    "ddp_timeout": ("train.parallel.timeout", lambda value, draft: to.number(value) * 60),
}  # fmt: skip
IDLE = """
    sdpa dataset_config config_file sample_prompts sample_at_first dim_from_weights dit_high_noise discrete_flow_shift
    sigmoid_scale logit_* mode_scale preserve_distribution_shape save_* no_metadata metadata_* training_comment
    initial_* skip_until_initial_step base_weights_multiplier lr_scheduler_timescale lr_decay_steps ddp_* num_processes
    *_workers num_cpu_threads_per_process logging_dir log_* wandb_run_name huggingface_* async_upload debug_dataset
    show_timesteps disable_* vae* text_encoder* t5 clip split_attn block_swap_* img_in_txt_in_offloading offload_*
    compile_* cuda_* dynamo_* no_vae_load dit_dtype use_32bit_attention guidance_scale flow_shift scheduler_scale
    one_frame timestep_boundary nabla_* no_nabla_* fused_backward_pass mem_eff_save
"""

# -- the dataset's TOML


def _clip(value: Any, draft: Draft) -> Several:
    name = to.text(value)
    by_name: dict[str, dict[str, Any]] = {
        "full": {"num_frames": to.integer(draft.entries.get("max_frames", 129)), "min_frames": 5},
        "slide": {"clip_selection": "slide", "clip_stride": to.integer(draft.entries.get("frame_stride", 1))},
        "uniform": {"clip_selection": "uniform", "clips_per_video": to.integer(draft.entries.get("frame_sample", 1))},
        "chunk": {"clip_selection": "chunks"},
        "head": {"clip_selection": "head"},
    }
    return section_options("video", **by_name[name])


def _frames(value: Any, draft: Draft) -> Any:
    """The first of several lengths, because a dataset is made for each length."""
    if draft.entries.get("frame_extraction") == "full":
        return NOTHING
    count = to.integer(value[0] if isinstance(value, list) else value)
    return section_options("video", num_frames=count, min_frames=count)


def _bucket(value: Any, draft: Draft) -> Any:
    """Without buckets, all media are cropped to the aspect ratio of [width, height]."""
    size = draft.entries["resolution"]
    width, height = map(to.number, size if isinstance(size, list) else (size, size))
    if to.boolean(value):
        return NOTHING
    return Several({"crop_aspect": "closest", "crop_aspect_buckets": [round(width / height, 6)], "max_aspect": max(
        4.0, width / height, height / width)})  # fmt: skip


def _table(column: str) -> Convert:
    return lambda value, draft: Several({"instance_data_dir": to.file_path(value, draft), "media_column": column})


DATASET: Rows = {
    **dict.fromkeys(("image_directory", "video_directory"), ("instance_data_dir", to.file_path)),
    "image_jsonl_file": ("instance_data_dir", _table("image_path")),
    "video_jsonl_file": ("instance_data_dir", _table("video_path")),
    "control_directory": ("conditioning_data", to.file_path),
    "resolution": ("resolution", lambda value, draft: to.resolutions([value], draft)),
    "enable_bucket": ("crop_aspect", _bucket),
    "bucket_no_upscale": ("allow_upscale", to.only_with("enable_bucket", to.flag(False, True))),
    "caption_extension": ("caption_strategy", to.text_files),
    "num_repeats": ("repeats", to.repeats),
    "target_frames": ("video.num_frames", _frames),
    "frame_extraction": ("video.clip_selection", _clip),
    "source_fps": (
        "video.frame_rate",
        lambda value, draft: (
            16.0  # the model's rate
            if str(draft.get("model.family")).startswith("wan")
            else 24.0
        ),
    ),
}
DATASET_IDLE = """
    max_frames frame_stride frame_sample cache_directory batch_size *no_resize_control *control_resolution fp_*
"""
TABLES: Mapping[str, Table] = {
    "arguments": Table(ARGUMENTS, IDLE, DEFAULTS),
    "datasets": Table(DATASET, DATASET_IDLE, {"resolution": [960, 544], "enable_bucket": False},
                      {"bucket_step": 16, "max_aspect": 4.0, "allow_upscale": True}),
}  # fmt: skip
_PLACES = ("image_directory", "video_directory", "image_jsonl_file", "video_jsonl_file")


def find_role(content: Any) -> str:
    if not isinstance(content, dict):
        return ""
    items = content.get("datasets")
    if isinstance(items, list) and any(isinstance(item, dict) and item.keys() & {*_PLACES} for item in items):
        return "datasets"
    flat = _flatten(content)
    has_trainer = "dit" in flat or _script(flat)
    return "arguments" if has_trainer and flat.keys() & {"dataset_config", "network_module", "config_file"} else ""


def carry(draft: Draft, roles: Mapping[str, Any]) -> None:
    entries = _flatten(roles.get("arguments", {}))
    if not is_off(name := entries.get("config_file")) and isinstance(content := draft.files.read(str(name)), dict):
        entries = {**_flatten(content), **entries}
    family, flavours = SCRIPTS.get(_script(entries), (None, {}))
    flavour = flavours.get(str(entries.get("task", "")).lower())
    family = to.FLAVOURS[flavour] if flavour else family
    if family is not None:
        draft.set(("model", "family"), family)
    dataset_file = draft.files.read(str(entries["dataset_config"])) if "dataset_config" in entries else None
    datasets = roles.get("datasets") or dataset_file
    _carry_datasets(draft, datasets if isinstance(datasets, dict) else {})
    if "arguments" not in roles:
        return
    draft.samples = draft.files.count_media(draft.datasets())
    if family == "wan2.2-a14b" and not is_off(entries.get("dit_high_noise")):
        draft.step_ratio = 2  # the two experts share the steps in musubi-tuner, and each has a run in latentpress
    draft.carry(TABLES["arguments"], entries)
    draft.assume("no caption dropout", "train.caption_dropout", 0.0)
    if not is_off(name := entries.get("sample_prompts")):
        prompts = _read_prompts(draft, draft.files.read(str(name)))
        draft.carry_prompts(prompts, PROMPT, "sample_prompts (its file)")
        if not prompts:
            draft.add_line("sample_prompts (its file)", "not carried over", show_value(name))


def _carry_datasets(draft: Draft, content: Mapping[str, Any]) -> None:
    general = draft.section(content.get("general"), "general")
    items = [{**general, **item} for item in draft.sections(content.get("datasets"), "datasets")]
    for entries in items:
        source = next((str(entries[key]) for key in _PLACES if key in entries), "")
        video = bool(entries.keys() & {"video_directory", "video_jsonl_file"})
        lengths = entries.get("target_frames", [1]) if video and entries.get("frame_extraction") != "full" else [0]
        lengths = lengths if isinstance(lengths, list) and lengths else [lengths]
        for length in lengths:
            ending = f"-{length}f" if len(lengths) > 1 else ""
            dataset_path, name = to.new_dataset(draft, source.removesuffix(".jsonl"), ending)
            length_entries = {"target_frames": [length]} if length and "target_frames" in entries else {}
            draft.carry(TABLES["datasets"], {**entries, **length_entries}, f"{name}: ", dataset_path)
            fixed_options = {"dataset_type": "video", "video.frame_rate": "source"} if video else {}
            fixed_options |= {} if source.endswith(".jsonl") else {"captions_per_file": "one"}
            for option, value in fixed_options.items():
                draft.assume(f"{name}: always", option, value)
    sizes = {"batch_size": [entries.get("batch_size", 1) for entries in items]}
    draft.carry(Table({"batch_size": ("train.batch_size", to.largest)}), sizes)


# -- prompts

_OPTION = re.compile(r"\s--([a-z]+)\s+(.*?)(?=\s--[a-z]+\s|$)")
#: Option in a line of a prompt file -> key.
_OPTIONS = {"w": "width", "h": "height", "f": "frame_count", "d": "seed", "s": "sample_steps", "l": "cfg_scale",
            "n": "negative_prompt", "i": "image_path", "ci": "control_image_path"}  # fmt: skip
PROMPT: Rows = {
    "width": ("size", lambda value, draft: to.size(value, draft.entries["height"], draft.entries.get("frame_count"))),
    "negative_prompt": ("negative_prompt", to.text),
    **dict.fromkeys(("image_path", "control_image_path"), ("image", to.file_path)),
    "sample_steps": ("steps", to.integer),
    "seed": ("seed", to.integer),
    "cfg_scale": ("guidance", to.number),
}


def _flatten(content: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of all sections of a file, because the names of sections have no effect."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= _flatten(value) if isinstance(value, dict) else {key: value}
    return flat


def _read_prompts(draft: Draft, content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [_read_line(line) for line in split_lines(content) if line and not line.startswith("#")]
    if isinstance(content, list):
        return [item if isinstance(item, dict) else _read_line(str(item)) for item in content]
    section = draft.section(draft.section(content, "sample_prompts").get("prompt"), "prompt")
    subset = draft.sections(section.pop("subset", None), "prompt.subset")
    return [{**section, **item} for item in subset]


def _read_line(line: str) -> dict[str, Any]:
    words = f" {line}"
    options = {_OPTIONS[key]: value.strip() for key, value in _OPTION.findall(words) if key in _OPTIONS}
    return {"prompt": _OPTION.split(words)[0].strip(), **options}


TRAINER = Trainer("musubi-tuner", TABLES, find_role, carry)
