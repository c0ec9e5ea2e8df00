"""musubi-tuner: the dataset's TOML, and the arguments of its training scripts, as a TOML file or a command."""

import re
from collections.abc import Mapping
from typing import Any

from schemas.foreign.datasets import IN_BUCKETS, new_dataset, share
from schemas.foreign.draft import Draft, Files, NotNeeded, Refused, Row, Section, Several, dropped, refused
from schemas.foreign.kohya_common import DEFAULTS, SHARED, carry_prompts, flatten, read_files
from schemas.foreign.models import CHOOSE, chosen
from schemas.foreign.values import (
    boolean,
    caption_ending,
    dtype,
    flag,
    number,
    off,
    refuse,
    repeats,
    resolution,
    shown,
    text,
    whole,
)

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
