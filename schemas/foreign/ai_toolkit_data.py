"""ai-toolkit's sections model, datasets and sample."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from schemas.foreign.datasets import IN_BUCKETS, new_dataset, share, use_masks
from schemas.foreign.draft import Draft, NotNeeded, Refused, Row, Section, Several, dropped, is_off, refused
from schemas.foreign.models import CHOOSE, checkpoint, chosen, flavour_of_repo
from schemas.foreign.values import (
    above_zero,
    boolean,
    caption_ending,
    flag,
    number,
    off,
    only_with,
    refuse,
    repeats,
    resolutions,
    shown,
    text,
    whole,
)

ARCHITECTURES: dict[str, tuple[str, str | None]] = {
    "wan21": ("wan2.1", None),
    "wan22_5b": ("wan2.2-5b", "t2v-5b"),
    "wan22_14b": ("wan2.2-a14b", "t2v-a14b"),
    "wan22_14b_i2v": ("wan2.2-a14b", "i2v-a14b"),
    "qwen_image": ("qwen-image", None),
    "qwen_image_edit": ("qwen-image-edit", None),
    "qwen_image_edit_plus": ("qwen-image-edit-plus", None),
    "zimage": ("z-image", None),
    "flux2_klein_4b": ("flux2-klein", "klein-base-4b"),
    "flux2_klein_9b": ("flux2-klein", "klein-base-9b"),
}


def _architecture(value: Any, draft: Draft) -> Several:
    name = str(value).partition(":")[0].lower()
    if (family_and_flavour := ARCHITECTURES.get(name)) is None:
        raise Refused(f"{shown(value)} is not trained here; {CHOOSE}")
    exact = flavour_of_repo(str(draft.given.get("name_or_path", "")))
    return chosen(*(exact if exact and exact[0] == family_and_flavour[0] else family_and_flavour))


def _checkpoint(value: Any, draft: Draft) -> Several:
    """A published checkpoint, or a copy of it by its author, is its flavour."""
    name = str(draft.given.get("arch", "")).partition(":")[0].lower()
    published, family = flavour_of_repo(str(value)), ARCHITECTURES.get(name, (None, None))[0]
    if published and published[0] == family:
        return chosen(*published)
    return checkpoint(value, draft)


def _quantized(value: Any, draft: Draft) -> str:
    if not boolean(value):
        raise NotNeeded("it is off")
    name, _, recovery = str(draft.given.get("qtype", "qfloat8")).partition("|")
    choices = {"qfloat8": "fp8-torchao", "float8": "fp8-torchao", "qint8": "int8-quanto", "int8": "int8-torchao"}
    if name.lower() not in choices:
        what = "an adapter that recovers accuracy" if recovery else "this many bits"
        raise Refused(f"{shown(name)}: {what} is not there; nearest: train.base_precision: nf4-bnb, with 4 bits")
    return choices[name.lower()]


def _experts(value: Any, draft: Draft) -> Several:
    high, low = (boolean(value.get(f"train_{name}_noise", True)) for name in ("high", "low"))
    rest = {key for key in value if key not in ("train_high_noise", "train_low_noise")}
    if rest:
        raise Refused(f"{', '.join(sorted(rest))}: of these train.experts is known, high, low or both")
    return Several({"train.experts": "both" if high and low else "high" if high else "low"})


MODEL = {
    "name_or_path": Row("model.path", _checkpoint, "a published checkpoint is its model.flavour"),
    "arch": Row("model.family", _architecture),
    "quantize": Row("train.base_precision", _quantized, "such as int8-quanto"),
    "qtype": Row(drop="a part of train.base_precision"),
    "quantize_te": flag("text.quantization", "int8-quanto", "int8-quanto, its 8 bits"),
    "qtype_te": Row(drop="a part of text.quantization"),
    **dict.fromkeys(("low_vram", "layer_offloading", "auto_memory"), flag("train.offload.blocks")),
    "assistant_lora_path": Row("model.assistant", text, "samples are without it"),
    "model_kwargs": Row("train.experts", _experts, "high, low or both"),
    **dict.fromkeys(("compile", "block_compile"), flag("train.compile", "blocks")),
    **dropped("precisions are model.precision and latents.precision", "dtype", "vae_dtype", "te_dtype"),
    **dropped("it changes no result", "compile_mode", "compile_fullgraph", "compile_dynamic", "cache_size_limit",
              "vae_device", "te_device", "layer_offloading_transformer_percent",
              "layer_offloading_text_encoder_percent", "attn_masking", "quantize_kwargs", "in_context"),
    **dropped("encoders are parts of the checkpoint in diffusers' layout", "extras_name_or_path"),
    **refused("a checkpoint is one folder in diffusers' layout: put this part into a copy of it, and name that in "
              "model.path", "te_name_or_path", "vae_path", "unet_path", "model_paths", "refiner_name_or_path"),
    **refused("merge adapters with latentpress export-adapter --merge, and name the result in model.path", "lora_path",
              "inference_lora_path", "unconditional_lora_path", "accuracy_recovery_adapter"),
    **refused("train.parallel.strategy: fsdp2 shards a model over devices", "split_model_over_gpus"),
    **refused("train.adapter.targets takes regular expressions of module paths", "ignore_if_contains",
              "only_if_contains"),
    **refused("models with a U-Net are not trained here", "is_xl", "is_v2", "is_v3", "is_flux", "is_lumina2",
              "is_pixart", "is_v_pred"),
}  # fmt: skip


def _frames(value: Any, draft: Draft) -> Several:
    if (count := whole(value)) <= 1:
        raise NotNeeded("images alone")
    if is_off(draft.given.get("shrink_video_to_frames", True)):
        return Several({"dataset_type": "video", "video.num_frames": count, "video.min_frames": count})
    raise Refused(
        "frames spread evenly over a whole video change its speed: set dataset_type: video, video.num_frames, and "
        "video.clip: uniform for parts of it"
    )


def _tags(value: Any, draft: Draft) -> dict[str, Any]:
    if not boolean(value):
        raise NotNeeded("it is off")
    return {"variants": 8, "keep": whole(draft.given.get("keep_tokens", 0))}


def _folders(value: Any, draft: Draft) -> Any:
    if is_off(value):
        raise NotNeeded("there are none")
    return [text(item) for item in value] if isinstance(value, list) else text(value)


def _numbered(value: Any, draft: Draft) -> list[str]:
    return [str(draft.given[key]) for key in (f"control_path_{n}" for n in (1, 2, 3)) if draft.given.get(key)]


DATASET = {
    **dict.fromkeys(("folder_path", "dataset_path"), Row("instance_data_dir", text)),
    "caption_ext": Row("caption_strategy", caption_ending, "textfile"),
    "default_caption": Row("instance_prompt", lambda value, draft: refuse(
        "an item without caption is set aside; give all of them one with caption_strategy: instanceprompt and "
        "instance_prompt"), "with caption_strategy: instanceprompt"),
    "trigger_word": Row("prepend", lambda value, draft: f"{value}, ", "words before every caption"),
    "caption_dropout_rate": Row("train.caption_dropout", number, "of all datasets"),
    "shuffle_tokens": Row("tag_shuffle", _tags, "with its keep"),
    "keep_tokens": Row("tag_shuffle.keep", lambda value, draft: off("a part of tag_shuffle"), "with tag_shuffle"),
    "resolution": Row("resolution", resolutions, "one or a list of them"),
    "num_repeats": Row("repeats", repeats, "extra passes, so that 0 is once"),
    "num_frames": Row("video.num_frames", _frames, "with dataset_type: video"),
    "shrink_video_to_frames": Row("video.clip", lambda value, draft: off("it says where the frames of a clip are"),
                                  "head, middle, random, uniform, chunks or slide"),
    "fps": Row("video.frame_rate", lambda value, draft: number(value) if whole(draft.given.get("num_frames", 1)) > 1
               else off("images alone")),
    **dict.fromkeys(("is_reg", "prior_reg"), flag("is_regularization_data")),
    "control_path": Row("conditioning_data", _folders),
    **dict.fromkeys(("control_path_1", "control_path_2", "control_path_3"), Row("conditioning_data", _numbered)),
    "mask_path": Row("mask_data", _folders, "which train.methods.masked_loss trains on"),
    "mask_min_value": Row("train.methods.masked_loss.unmasked_weight",
                          only_with("mask_path", number, "there are no masks")),
    "random_crop": flag("crop_style", "random"),
    "square_crop": flag("crop_aspect", "square"),
    "buckets": IN_BUCKETS,
    "bucket_tolerance": Row("bucket_step", whole),
    "network_weight": Row("weight", lambda value, draft: off("1 is the default") if number(value) == 1 else refuse(
        "weight is a factor of the draws, and the adapter has one strength")),
    "loss_multiplier": Row("weight", lambda value, draft: off("1 is the default") if number(value) == 1 else refuse(
        "weight is a factor of the draws, not of the loss")),
    **dropped("latents and texts are always encoded before training, under root", "cache_latents",
              "cache_latents_to_disk", "cache_text_embeddings", "cache_tensors_to_disk", "cache_clip_vision_to_disk",
              "cache_latents_num_workers", "load_image_when_caching_latents"),
    **dropped("it changes no result", "num_workers", "prefetch_factor", "debug", "fast_image_size", "replay_transforms",
              "type", "full_size_control_images", "do_i2v", "batch_size", "trim_auto_frame_count_tail"),
    **refused("pictures are never changed: put changed copies into a folder of their own", "flip_x", "flip_y",
              "random_scale", "augments", "augmentations", "standardize_images", "scale"),
    **refused("masks are files, named as the media: mask_data", "alpha_mask", "invert_mask", "inpaint_path"),
    **refused("captions are encoded before training; tag_shuffle makes several of one", "token_dropout_rate",
              "random_triggers", "use_short_captions"),
    **refused("video.num_frames is the longest clip; shorter videos make shorter ones", "auto_frame_count"),
    **refused("source images are in conditioning_data", "unconditional_path", "clip_image_path", "poi",
              "control_from_same_folder"),
    **refused("no sound is trained", "do_audio"),
}  # fmt: skip


def _size(value: Any, draft: Draft) -> str:
    width, height = whole(draft.given.get("width", 512)), whole(draft.given.get("height", 512))
    frames = whole(draft.given.get("num_frames", 1))
    return f"{width}x{height}@{frames}" if frames > 1 else f"{width}x{height}"


SAMPLE = {
    "sample_every": Row("validation.every", above_zero),
    **dict.fromkeys(("width", "height"), Row("validation.size", _size, "WxH, of videos WxH@F")),
    "num_frames": Row(drop="a part of validation.size, WxH@F"),
    "sample_steps": Row("validation.steps", whole),
    "guidance_scale": Row("validation.guidance", number),
    "seed": Row("validation.seed", whole),
    "fps": Row("validation.fps", number),
    "neg": Row(drop="it is negative_prompt of each prompt"),
    "walk_seed": Row(drop="each prompt has a seed of its own now"),
    **dropped("its prompts are carried over as well", "prompts", "samples"),
    **dropped("samples are made by the family's own sampler", "sampler", "sample_start_step", "format", "do_cfg_norm",
              "network_multiplier", "extra_values"),
    **refused("samples are made by the family's own guidance", "guidance_rescale", "adapter_conditioning_scale",
              "refiner_start_at"),
}  # fmt: skip
SECTIONS: Mapping[str, Section] = {
    "model": Section("model", MODEL),
    "datasets": Section("a dataset", DATASET, in_dataset=True),
    "sample": Section("sample", SAMPLE),
}


def carry_datasets(draft: Draft, items: Sequence[Mapping[str, Any]], trigger: str) -> None:
    for item in items:
        at, name = new_dataset(draft, item.get("folder_path") or item.get("dataset_path"))
        given = {key: value for key, value in item.items() if key != "caption_dropout_rate"}
        if trigger and not given.get("trigger_word"):
            given["trigger_word"] = trigger
        draft.carry(SECTIONS["datasets"], given, f"{name}: ", at)
        draft.put((*at, "allow_upscale"), True)  # there, what is small gets smaller buckets
        if given.get("mask_path"):
            use_masks(draft)
    rates = [item.get("caption_dropout_rate") for item in items]
    share(draft, "caption_dropout_rate", "train.caption_dropout", rates, 0.0)


def carry_samples(draft: Draft, section: Mapping[str, Any], disabled: bool) -> None:
    prompts = section.get("prompts")
    items = [{"prompt": words} for words in prompts] if isinstance(prompts, list) else []
    items = draft.sections(section.get("samples"), "sample.samples") or items
    seed = draft.attempt("sample.seed", whole, section.get("seed") or 0, 0)
    carried = []
    for index, item in enumerate([] if disabled else items):
        prompt: dict[str, Any] = {"name": f"sample-{index + 1}", "prompt": str(item.get("prompt", ""))}
        if words := item.get("neg") or section.get("neg"):
            prompt["negative_prompt"] = str(words)
        images = [item[key] for key in ("ctrl_img", "ctrl_img_1", "ctrl_img_2", "ctrl_img_3") if item.get(key)]
        if images:
            prompt["image"] = str(images[0]) if len(images) == 1 else [*map(str, images)]
        draft.given = {**section, **item}
        conversions: dict[str, tuple[Callable[..., Any], str]] = {
            "size": (_size, "width"),
            "steps": (whole, "sample_steps"),
            "guidance": (number, "guidance_scale"),
            "seed": (whole, "seed"),
        }
        for ours, (convert, key) in conversions.items():
            if item.get(key) is not None:
                convert_here: Callable[[Any], Any] = partial(convert, draft=draft)
                value = draft.attempt(f"sample.samples {index + 1}: {key}", convert_here, item[key], None)
                prompt |= {ours: value} if value is not None else {}
        if "seed" not in prompt and section.get("walk_seed") not in (None, False):
            prompt["seed"] = seed + index
        carried.append(prompt)
    if carried:
        draft.put(("validation", "prompts"), carried)
    draft.carry(SECTIONS["sample"], section, "sample.")
