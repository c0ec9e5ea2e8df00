"""musubi-tuner: the dataset's TOML, the arguments of its training scripts as a TOML file or a command, and its files of
prompts, which have one prompt on each line, followed by options."""

import json
import re
from collections.abc import Mapping
from typing import Any

from schemas.foreign.datasets import IN_BUCKETS, new_dataset, share
from schemas.foreign.draft import (
    SECRET_ADVICE,
    Draft,
    Files,
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
from schemas.foreign.models import CHOOSE, chosen
from schemas.foreign.optimizers import arguments, cycles, optimizer, power, schedule, warmup
from schemas.foreign.values import (
    NOTHING,
    above_zero,
    boolean,
    caption_ending,
    dtype,
    epochs,
    flag,
    if_true,
    number,
    off,
    one_of,
    only_with,
    pairs,
    precision,
    refuse,
    repeats,
    resolution,
    run_name,
    shown,
    text,
    unless,
    whole,
)
from schemas.text_format import split_lines

NAME = "musubi-tuner"
#: Beginning of a training script's name -> the family, and by --task or --model_version the family and flavour.
SCRIPTS: dict[str, tuple[str | None, Mapping[str, tuple[str, str]]]] = {
    "kandinsky5": ("kandinsky5-video", {
        "k5-lite-t2v-5s-sd": ("kandinsky5-video", "t2v-lite-sft-5s"),
        "k5-lite-t2v-10s-sd": ("kandinsky5-video", "t2v-lite-sft-10s"),
        "k5-lite-i2v-5s-sd": ("kandinsky5-video", "i2v-lite-5s"),
        "k5-pro-t2v-5s-sd": ("kandinsky5-video", "t2v-pro-sft-5s-hd"),
        "k5-pro-t2v-5s-hd": ("kandinsky5-video", "t2v-pro-sft-5s-hd"),
        "k5-pro-t2v-10s-sd": ("kandinsky5-video", "t2v-pro-sft-10s-hd"),
        "k5-pro-t2v-10s-hd": ("kandinsky5-video", "t2v-pro-sft-10s-hd"),
        "k5-pro-i2v-5s-sd": ("kandinsky5-video", "i2v-pro-sft-5s"),
        "k5-pro-i2v-5s-hd": ("kandinsky5-video", "i2v-pro-sft-5s"),
    }),
    "wan": (None, {
        "t2v-1.3b": ("wan2.1", "t2v-1.3b"),
        "t2v-14b": ("wan2.1", "t2v-14b"),
        "t2i-14b": ("wan2.1", "t2v-14b"),
        "t2v-a14b": ("wan2.2-a14b", "t2v-a14b"),
        "i2v-a14b": ("wan2.2-a14b", "i2v-a14b"),
    }),
    "qwen_image": ("qwen-image", {
        "original": ("qwen-image", "qwen-image"),
        "edit": ("qwen-image-edit", "qwen-image-edit"),
        "edit-2509": ("qwen-image-edit-plus", "qwen-image-edit-2509"),
        "edit-2511": ("qwen-image-edit-plus", "qwen-image-edit-2511"),
    }),
    "zimage": ("z-image", {}),
    "flux_2": ("flux2-klein", {
        name: ("flux2-klein", name) for name in ("klein-base-4b", "klein-base-9b", "klein-4b", "klein-9b")
    }),
}  # fmt: skip


def _script(given: Mapping[str, Any]) -> str:
    """The beginning of SCRIPTS that the program's name, or the network's module, has."""
    program = str(given.get("(program)", "")).replace("\\", "/").rpartition("/")[2]
    module = str(given.get("network_module", "")).rpartition(".")[2].removeprefix("lora_")
    task = str(given.get("task", "")).lower()
    for name in SCRIPTS:
        if program.startswith(name) or module.replace("kandinsky", "kandinsky5") == name or module == name:
            return name
    return next((name for name, (_, tasks) in SCRIPTS.items() if task in tasks), "")


def _model(value: Any, draft: Draft) -> Several:
    name = _script(draft.given)
    if (family_and_flavour := SCRIPTS.get(name, (None, {}))[1].get(str(value).lower())) is None:
        known = ", ".join(SCRIPTS[name][1]) if name else ""
        raise Refused(f"{shown(value)} is not trained here; {f'known: {known}; ' if known else ''}{CHOOSE}")
    return chosen(*family_and_flavour)


def _weights(value: Any, draft: Draft) -> Any:
    word = str(value).lower()
    if (
        "pretrain" in word
        and "kandinsky" in word
        and (flavour := str(draft.get("model.flavour", ""))).startswith("t2v")
    ):
        return Several({"model.flavour": flavour.replace("sft", "pretrain")})
    raise NotNeeded(
        "the flavour's repository in diffusers' layout is taken; weights of your own go into model.path in that layout"
    )


def _fp8(value: Any, draft: Draft) -> Any:
    if not boolean(value) or boolean(draft.given.get("fp8_base", False)):
        raise NotNeeded("a part of fp8_base")
    raise Refused("train.base_precision takes fp8-torchao, int8-torchao, int8-quanto, nf4-bnb")


# -- arguments

#: What it means without these keys.
DEFAULTS = {
    "network_alpha": 1,
    "max_train_steps": 1600,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "optimizer_type": "AdamW",
    "gradient_checkpointing": False,
}
_OPTION = re.compile(r"\s--([a-z]+)\s+(.*?)(?=\s--[a-z]+\s|$)")
#: Options of a line -> what they are here; g is the guidance that is embedded in other models.
_KNOWN = {"w": "width", "h": "height", "f": "frame_count", "d": "seed", "s": "sample_steps", "l": "cfg_scale",
          "n": "negative_prompt", "i": "image_path", "ci": "control_image_path"}  # fmt: skip
SHIFTED = ("flux_shift", "flux2_shift", "qwen_shift")


def _alpha(value: Any, draft: Draft) -> Any:
    if draft.get("train.adapter.init") is not None or draft.given.get("dim_from_weights"):
        raise NotNeeded("it is that of network_weights")
    return number(value)


def _network(value: Any, draft: Draft) -> Several:
    name = str(value).rpartition(".")[2]
    if name in ("loha", "lora_fa", "oft", "dylora"):
        raise Refused(f"{name} is not trained here; train.adapter.type takes lora, lokr, full")
    algo = pairs(draft.given.get("network_args") or []).get("algo") if name == "kohya" else None
    return Several({"train.adapter.type": "lokr" if name == "lokr" or algo == "lokr" else "lora"})


def _network_arguments(value: Any, draft: Draft) -> Several:
    values: dict[str, Any] = {}
    for name, item in pairs(value).items():
        if name in ("factor", "lokr_factor"):
            values["train.adapter.decompose_factor"] = whole(item)
        elif name not in ("verbose", "algo") and not is_off(item):
            raise Refused(f"{name}: of further arguments of the network factor is known; train.adapter.targets chooses "
                          "modules, train.adapter.rank_pattern their ranks")  # fmt: skip
    if not values:
        raise NotNeeded("there is nothing in it that is not always so")
    return Several(values)


def sampling(value: Any, draft: Draft) -> Several:
    """The distribution of sigma. `sigma` draws a place in the schedule, from noise to data: the mean's sign turns."""
    name, given = str(value), draft.given
    std, shift = number(given.get("sigmoid_scale", 1)), number(given.get("discrete_flow_shift", 1))
    mean, spread = number(given.get("logit_mean", 0)), number(given.get("logit_std", 1))
    values: dict[str, Any] = {}
    if name == "uniform":
        values = {"train.timesteps.sampling": "uniform", "train.shift": 1.0}
    elif name in ("sigmoid", "shift"):
        values = {"train.timesteps.std": std, "train.shift": shift if name == "shift" else 1.0}
    elif name in SHIFTED:
        values = {"train.timesteps.std": std, "train.timesteps.auto_shift": True}
    elif name == "logsnr":
        values = {"train.timesteps.mean": -mean / 2, "train.timesteps.std": spread / 2, "train.shift": 1.0}
    elif name == "sigma":
        scheme = str(given.get("weighting_scheme", "none"))
        values["train.shift"] = shift
        if scheme == "logit_normal":
            values |= {"train.timesteps.mean": -mean, "train.timesteps.std": spread}
        elif scheme == "mode":
            scale = number(given.get("mode_scale", 1.29))
            values |= {"train.timesteps.sampling": "mode", "train.timesteps.mode_scale": scale}
        else:
            values["train.timesteps.sampling"] = "uniform"
    else:
        raise Refused(f"{shown(name)}: train.timesteps.sampling takes logit_normal, uniform, mode, beta, list")
    return Several({key: item + 0.0 if isinstance(item, float) else item for key, item in values.items()})


def _weighting(value: Any, draft: Draft) -> str:
    if str(value) not in ("cosmap", "sigma_sqrt"):
        raise NotNeeded("a part of train.timesteps.sampling")
    return text(value)


_SAVED = "a checkpoint has everything to continue, and the adapter"
SHARED = {
    "seed": Row("train.seed", whole),
    "max_train_steps": Row("train.steps", unless("max_train_epochs", above_zero, "max_train_epochs says how long")),
    "max_train_epochs": Row("train.steps", epochs, "counted in optimizer steps"),
    "gradient_accumulation_steps": Row("train.accumulate", whole),
    "mixed_precision": Row("model.precision", precision, "train.precision is of training alone"),
    "gradient_checkpointing": Row("train.gradient_checkpointing", boolean),
    **dict.fromkeys(("gradient_checkpointing_cpu_offload", "cpu_offload_checkpointing"),
                    flag("train.offload.activations")),
    "blocks_to_swap": Row("train.offload.blocks", lambda value, draft: above_zero(value) > 0,
                          "of all blocks, not of a number of them"),
    "use_pinned_memory_for_block_swap": Row(
        "train.offload.streams", only_with("blocks_to_swap", if_true())),
    "fp8_base": flag("train.base_precision", "fp8-torchao"),
    "learning_rate": Row("train.optimizer.lr", number),
    "optimizer_type": Row("train.optimizer.name", optimizer),
    "optimizer_args": Row("train.optimizer.arguments", arguments),
    "max_grad_norm": Row("train.optimizer.max_grad_norm",
                         lambda value, draft: number(value) or 1e9, "where it is 0, a norm that no gradient has"),
    "lr_scheduler": Row("train.optimizer.schedule", schedule),
    "lr_warmup_steps": Row("train.optimizer.warmup", warmup),
    "lr_scheduler_num_cycles": Row("train.optimizer.cycles", cycles),
    "lr_scheduler_power": Row("train.optimizer.power", power),
    "network_module": Row("train.adapter.type", _network, "lora or lokr"),
    "network_weights": Row("train.adapter.init", text),
    "network_dim": Row("train.adapter.rank", whole),
    "network_alpha": Row("train.adapter.alpha", _alpha, "without it 1 there, and rank here"),
    "network_dropout": Row("train.adapter.dropout", number),
    "network_args": Row("train.adapter.decompose_factor", _network_arguments, "of a LoKr"),
    "output_dir": Row("output", text),
    "output_name": Row("train.run", run_name),
    "save_every_n_steps": Row("train.checkpoint_every", above_zero),
    "save_every_n_epochs": Row("train.checkpoint_every", epochs, "in optimizer steps"),
    **dict.fromkeys(("save_last_n_epochs", "save_last_n_epochs_state"), Row("train.keep_checkpoints", above_zero)),
    "sample_every_n_steps": Row("validation.every", above_zero),
    "sample_every_n_epochs": Row("validation.every", epochs, "in optimizer steps"),
    "log_with": Row("train.trackers", one_of({"tensorboard": ["tensorboard"], "wandb": ["wandb"],
        "all": ["tensorboard", "wandb"]}, "train.trackers takes tensorboard, wandb")),
    "sdpa": Row("train.attention_backend", if_true(NOTHING, "it is the default"), "native"),
    "xformers": flag("train.attention_backend", "xformers"),
    "timestep_sampling": Row("train.timesteps.sampling", sampling, "with train.shift, and train.loss.weighting"),
    "weighting_scheme": Row("train.loss.weighting", _weighting, "and train.timesteps.sampling"),
    **dict.fromkeys(("discrete_flow_shift", "sigmoid_scale", "logit_mean", "logit_std", "mode_scale"),
                    Row(drop="a part of train.timesteps and train.shift, by the way of sampling")),
    "huggingface_repo_id": Row("hub.repo", text, "to which `run` uploads at its end"),
    "huggingface_repo_visibility": Row(
        "hub.private", only_with("huggingface_repo_id", lambda value, draft: str(value) != "public")),
    "metadata_license": Row("hub.license", only_with("huggingface_repo_id", text)),
    "ddp_timeout": Row("train.parallel.timeout", lambda value, draft: number(value) * 60, "in seconds"),
    **secret(SECRET_ADVICE, "huggingface_token", "wandb_api_key"),
    **dropped("the dataset's file is carried over as well", "dataset_config", "config_file"),
    **dropped("its prompts are carried over as well", "sample_prompts"),
    **dropped("a run makes samples at its first step", "sample_at_first"),
    **dropped(_SAVED, "save_state", "save_state_on_train_end", "save_precision", "save_model_as", "no_metadata",
              "metadata_title", "metadata_author", "metadata_description", "metadata_tags", "metadata_reso",
              "metadata_arch", "training_comment"),
    **dropped("the rank is that of the file", "dim_from_weights"),
    **dropped("train.run continues from its newest checkpoint (train.resume)", "initial_epoch", "initial_step",
              "skip_until_initial_step"),
    **refused("only this project's checkpoints are continued; train.adapter.init starts from an adapter", "resume",
              "resume_from_huggingface"),
    **refused("train.keep_checkpoints counts checkpoints, not steps", "save_last_n_steps", "save_last_n_steps_state"),
    **refused("merge adapters into a copy of the model with latentpress export-adapter --merge, and name it in "
              "model.path", "base_weights"),
    **dropped("of adapters that are merged first", "base_weights_multiplier"),
    **refused("weights of an adapter are not scaled down while it trains", "scale_weight_norms"),
    **refused("an adapter's weights are float32; full-rank training has train.weight_precision", "full_bf16",
              "full_fp16"),
    **refused("train.timesteps.mean and values choose noise levels; the experts of Wan 2.2 have their own ranges "
              "(train.experts)", "min_timestep", "max_timestep", "preserve_distribution_shape"),
    **refused("schedules are constant, linear, cosine, polynomial", "lr_scheduler_type", "lr_scheduler_args",
              "lr_scheduler_min_lr_ratio", "lr_decay_steps"),
    **dropped("of a schedule that is not there", "lr_scheduler_timescale"),
    **dropped("torchrun or accelerate launch starts several processes", "ddp_gradient_as_bucket_view",
              "ddp_static_graph",
              "num_cpu_threads_per_process", "num_processes"),
    **dropped("train.reading.threads read ahead", "max_data_loader_n_workers", "persistent_data_loader_workers"),
    **dropped("it changes no result", "logging_dir", "log_prefix", "log_tracker_name", "wandb_run_name", "log_config",
              "log_tracker_config", "huggingface_repo_type", "huggingface_path_in_repo", "async_upload",
              "save_state_to_huggingface", "debug_dataset", "show_timesteps", "disable_mmap_load_safetensors"),
}  # fmt: skip
ARGUMENTS = {
    **SHARED,
    **dict.fromkeys(("task", "model_version"), Row("model.flavour", _model)),
    "edit": flag("model.family", "qwen-image-edit"),
    "edit_plus": flag("model.family", "qwen-image-edit-plus"),
    "dit": Row("model.path", _weights, "a folder or repository in diffusers' layout"),
    "dit_high_noise": Row("train.experts", lambda value, draft: "both", "both"),
    "fp8_scaled": Row("train.base_precision", _fp8, "fp8-torchao"),
    **dict.fromkeys(
        ("fp8_vl", "fp8_llm", "fp8_t5", "fp8_text_encoder"),
        flag("text.quantization", "int8-quanto", "int8-quanto, its 8 bits"),
    ),
    "flash_attn": flag("train.attention_backend", "flash"),
    "flash3": flag("train.attention_backend", "_flash_3_hub"),
    **refused("its kernels have no backward pass; it is valid for validation.attention_backend", "sage_attn"),
    "compile": flag("train.compile", "blocks"),
    "compile_backend": Row("train.compile_backend", text),
    "vae_dtype": Row("latents.precision", dtype),
    "vae_tiling": flag("latents.tiling", note="gives other latents"),
    "vae_chunk_size": Row("latents.chunk_frames", whole),
    "num_timestep_buckets": Row(
        "train.timesteps.low_discrepancy", lambda value, draft: True if number(value) >= 2 else off(),
        "draws spread evenly"),
    **dropped("encoders are parts of the checkpoint in diffusers' layout", "vae", "text_encoder", "text_encoder1",
              "text_encoder2", "text_encoder_qwen", "text_encoder_clip", "t5", "clip", "text_encoder_dtype"),
    **dropped("attention is computed sample by sample where texts differ in length", "split_attn"),
    **dropped("all frozen blocks are offloaded", "block_swap_h2d_only", "block_swap_ring_size",
              "img_in_txt_in_offloading", "offload_inactive_dit"),
    **dropped("it changes no result", "compile_mode", "compile_dynamic", "compile_fullgraph",
              "compile_cache_size_limit",
              "cuda_allow_tf32", "cuda_cudnn_benchmark", "disable_numpy_memmap", "dynamo_mode", "dynamo_fullgraph",
              "dynamo_dynamic", "vae_cache_cpu", "no_vae_load", "offload_dit_during_sampling", "dit_dtype",
              "use_32bit_attention", "vae_spatial_tile_sample_min_size"),
    **dropped("samples are made by the family's own sampler", "guidance_scale", "flow_shift", "scheduler_scale",
              "one_frame"),
    **dropped("the experts' boundary is that of the checkpoint", "timestep_boundary"),
    **refused("which attention a model has is in the checkpoint's own config", "force_nabla_attention"),
    **dropped("of forced sparse attention", "nabla_P", "nabla_p", "nabla_wT", "nabla_wH", "nabla_wW", "nabla_method",
              "nabla_add_sta", "no_nabla_add_sta"),
    **refused("the model is that of the checkpoint", "override_dit", "num_layers", "dit_in_channels",
              "force_v2_1_time_embedding", "remove_first_image_from_target", "hidden_layers"),
    "i2v_mode": Row("model.flavour", lambda value, draft: off("the first frame is given") if value == "first" else
        refuse("the first frame alone is given")),
    "dynamo_backend": Row("train.compile_backend", lambda value, draft: off("nothing is compiled")
        if str(value).upper() == "NO" else Several({"train.compile": "blocks",
                  "train.compile_backend": str(value).lower()})),
}  # fmt: skip


# -- the dataset's TOML


def _clip(value: Any, draft: Draft) -> Several:
    name = str(value)
    if name == "full":
        frames = whole(draft.given.get("max_frames", 129))
        return Several({"video.num_frames": frames, "video.min_frames": 5})
    if name == "slide":
        return Several({"video.clip": "slide", "video.clip_stride": whole(draft.given.get("frame_stride", 1))})
    if name == "uniform":
        return Several({"video.clip": "uniform", "video.clips": whole(draft.given.get("frame_sample", 1))})
    if name not in ("head", "chunk"):
        raise Refused(f"{shown(name)}: video.clip takes head, middle, random, uniform, chunks, slide")
    return Several({"video.clip": "chunks" if name == "chunk" else "head"})


def _frames(value: Any, draft: Draft) -> Several:
    """One length of a list: a list makes a dataset for each before (see `split_frames`)."""
    if draft.given.get("frame_extraction") == "full":
        raise NotNeeded("frame_extraction full takes max_frames")
    count = whole(value[0] if isinstance(value, list) else value)
    return Several({"video.num_frames": count, "video.min_frames": count})


def _max_frames(value: Any, draft: Draft) -> Any:
    if draft.given.get("frame_extraction") != "full":
        raise NotNeeded("in force with frame_extraction full alone")
    raise NotNeeded("it is video.num_frames now")


DATASET = {
    "image_directory": Row("instance_data_dir", text),
    "video_directory": Row("instance_data_dir", text, "with dataset_type: video"),
    "image_jsonl_file": Row("instance_data_dir", lambda value, draft: Several(
        {"instance_data_dir": text(value), "media_column": "image_path"}), "the table, with media_column"),
    "video_jsonl_file": Row("instance_data_dir", lambda value, draft: Several(
        {"instance_data_dir": text(value), "media_column": "video_path"}), "the table, with media_column"),
    "control_directory": Row("conditioning_data", text),
    "resolution": Row("resolution", resolution, "the edge of the square of the area"),
    "caption_extension": Row("caption_strategy", caption_ending, "textfile"),
    "num_repeats": Row("repeats", repeats, "extra passes, so that 0 is once"),
    "bucket_no_upscale": Row("allow_upscale", lambda value, draft: not boolean(value), "the other way round"),
    "enable_bucket": IN_BUCKETS,
    "target_frames": Row("video.num_frames", _frames, "a dataset for each length; video.clip says which part"),
    "frame_extraction": Row("video.clip", _clip, "head, middle, random, uniform, chunks or slide"),
    "max_frames": Row("video.num_frames", _max_frames, "where all of a video is taken"),
    "source_fps": Row(drop="frames are chosen by their timestamps; video.frame_rate is the target"),
    **dropped("a part of video.clip", "frame_stride", "frame_sample"),
    **dropped("caches are under root, and each stage finds its own", "cache_directory"),
    **dropped("every dataset has the batch of train.batch_size", "batch_size"),
    **dropped("source images are fitted as the family's pipeline does it", "no_resize_control", "control_resolution",
              "flux_kontext_no_resize_control", "qwen_image_edit_no_resize_control",
              "qwen_image_edit_control_resolution"),
    **dropped("of models that are not trained here", "fp_latent_window_size", "fp_1f_clean_indices",
              "fp_1f_target_index",
              "fp_1f_no_post"),
    **refused("an item has one target", "multiple_target"),
}  # fmt: skip
DATASET_DEFAULTS = {"bucket_no_upscale": False, "resolution": [960, 544], "enable_bucket": False}
SECTIONS: Mapping[str, Section] = {
    "arguments": Section(
        "the training arguments", ARGUMENTS,
        {**DEFAULTS, "learning_rate": 2e-6, "timestep_sampling": "sigma", "discrete_flow_shift": 1.0},
        first=("max_train_steps", "lr_scheduler", "gradient_accumulation_steps", "task", "model_version",
               "network_weights"),
    ),
    "datasets": Section("a dataset of the TOML file", DATASET, DATASET_DEFAULTS, in_dataset=True),
}  # fmt: skip
_PLACES = ("image_directory", "video_directory", "image_jsonl_file", "video_jsonl_file")


def claims(content: Any) -> str:
    if not isinstance(content, dict):
        return ""
    items = content.get("datasets")
    if isinstance(items, list) and any(isinstance(item, dict) and item.keys() & {*_PLACES} for item in items):
        return "datasets"
    flat = flatten(content)
    known = "dit" in flat or _script(flat)
    return "arguments" if known and flat.keys() & {"dataset_config", "network_module", "config_file"} else ""


def carry(draft: Draft, roles: Mapping[str, Any], files: Files) -> None:
    given, datasets = read_files(roles, files)
    _carry_datasets(draft, datasets)
    draft.samples, draft.uncounted = files.count_media(draft.values.get("datasets", []))
    family, _ = SCRIPTS.get(_script(given), (None, {}))
    if family is not None:
        draft.put(("model", "family"), family)
    draft.carry(SECTIONS["arguments"], given)
    draft.assume("no captions are dropped", "train.caption_dropout", 0.0)
    carry_prompts(draft, files, given.get("sample_prompts"))


def _carry_datasets(draft: Draft, content: Mapping[str, Any]) -> None:
    general, items = (
        draft.section(content.get("general"), "general"),
        draft.sections(content.get("datasets"), "datasets"),
    )
    for item in items:
        given = {**general, **item}
        source = next((given[key] for key in _PLACES if key in given), "")
        video = bool(given.keys() & {"video_directory", "video_jsonl_file"})
        lengths = given.get("target_frames", [1]) if video and given.get("frame_extraction") != "full" else [0]
        lengths = lengths if isinstance(lengths, list) and lengths else [lengths]
        for length in lengths:
            at, name = new_dataset(
                draft, re.sub(r"\.jsonl$", "", str(source)), f"-{length}f" if len(lengths) > 1 else ""
            )
            if video:
                draft.put((*at, "dataset_type"), "video")
            more = {"target_frames": [length]} if length and "target_frames" in given else {}
            draft.carry(SECTIONS["datasets"], {**given, **more}, f"{name}: ", at)
    share(draft, "batch_size", "train.batch_size", [{**general, **item}.get("batch_size") for item in items], 1)


# -- its files


def read_files(roles: Mapping[str, Any], files: Files) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments, with those of their `config_file`, and what the dataset's file has."""
    given = flatten(roles.get("arguments", {}))
    if not is_off(name := given.get("config_file")) and isinstance(inside := files.read(str(name)), dict):
        given = {**flatten(inside), **given}
    datasets = roles.get("datasets") or (
        files.read(str(given["dataset_config"])) if "dataset_config" in given else None
    )
    return given, datasets if isinstance(datasets, dict) else {}


def flatten(content: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments without the sections of their file, whose names mean nothing."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= flatten(value) if isinstance(value, dict) else {key: value}
    return flat


def carry_prompts(draft: Draft, files: Files, name: Any) -> None:
    """Put the prompts of the file `name` into the draft."""
    if is_off(name):
        return
    content = files.read(str(name))
    if content is None:
        draft.say("sample_prompts (its file)", "refused", f"{name} is not found; write validation.prompts")
        return
    prompts = [_prompt(item, number_) for number_, item in enumerate(_items(content), 1)]
    if prompts:
        draft.set("sample_prompts (its file)", ("validation", "prompts"), prompts, "a prompt a line")


def _items(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [_line(line) for line in split_lines(content) if not line.startswith("#")]
    if isinstance(content, list):
        return [item if isinstance(item, dict) else _line(str(item)) for item in content]
    common = {key: value for key, value in content.get("prompt", {}).items() if key != "subset"}
    return [{**common, **item} for item in content.get("prompt", {}).get("subset", [])]


def _line(line: str) -> dict[str, Any]:
    text = f" {line}"
    options = {_KNOWN[key]: value.strip() for key, value in _OPTION.findall(text) if key in _KNOWN}
    return {"prompt": _OPTION.split(text)[0].strip(), **options}


def _prompt(item: dict[str, Any], index: int) -> dict[str, Any]:
    words = str(item.get("prompt", ""))
    short = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:40].rstrip("-")
    prompt: dict[str, Any] = {"name": run_name(f"{index:02}-{short}"), "prompt": words}
    for key, ours in (("negative_prompt", "negative_prompt"), ("image_path", "image"), ("control_image_path", "image")):
        if item.get(key):
            prompt[ours] = json.loads(json.dumps(item[key]))
    if item.get("width") and item.get("height"):
        frames = f"@{whole(item['frame_count'])}" if whole(item.get("frame_count") or 1) > 1 else ""
        prompt["size"] = f"{whole(item['width'])}x{whole(item['height'])}{frames}"
    for key, ours in (("sample_steps", "steps"), ("seed", "seed")):
        if item.get(key):
            prompt[ours] = whole(item[key])
    if item.get("cfg_scale"):
        prompt["guidance"] = number(item["cfg_scale"])
    return prompt
