"""A change of each option of the configuration, and what becomes of it: from what stands on the option's field."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic.fields import FieldInfo

from schemas.config.generated import affects, options
from schemas.config.pipeline import Config
from schemas.config.section import Section


class Option(NamedTuple):
    """affects: what a change makes again; the values of `json_schema_extra` of the field and of the optional section
    that it is in. change: overrides of the configuration. is_refused: the change is not valid in the tests' project."""

    affects: frozenset[str]
    change: str
    is_refused: bool


ITEMS = {"datasets": "clips", "prompts": "one", "groups": "0", "routes": "0", "webhooks": "0"}
ENCODERS = ("encode-text", "encode-latents", "encode-vision")
ROUTE = "selection_ratio: 0, start_layer_idx: 0, end_layer_idx: 0"
#: Section without a default -> the options that it needs.
NEEDED = {
    "features": {"model": "DINO"},
    "masks": {"model": "DINO"},
    "train.methods.crepa": {"block_index": "1"},
    "validation.adapter": {"path": "missing.safetensors", "steps": "4", "guidance": "1"},
}
#: Option -> overrides, if the type does not tell a valid value, or if the option needs other options.
EXAMPLES = {
    "model.flavour": "model.flavour=i2v-pro-sft-5s",  # the checkpoint at model.path stays the same
    **{f"model.{name}": f"model.{name}=COPY" for name in ("path", "transformer", "text_encoder", "vae")},
    "datasets.clips.dataset_type": "datasets.clips.dataset_type=image",
    "datasets.clips.id": "datasets.0.id=others",
    "datasets.clips.source": "datasets.clips.source=remote",
    "datasets.clips.caption_strategy": "datasets.clips.caption_strategy=filename",
    "datasets.clips.caption_file": "datasets.clips.caption_strategy=csv datasets.clips.caption_file=c.csv",
    "datasets.clips.caption_column": "datasets.clips.caption_strategy=csv datasets.clips.caption_file=c.csv "
    "datasets.clips.caption_column=[words]",
    "datasets.clips.make_captions": "datasets.clips.make_captions=all",
    "datasets.clips.make_masks": "masks={model: DINO} datasets.clips.make_masks=none",
    "datasets.clips.make_captions_where": "caption={} datasets.clips.make_captions_where=score > 5",
    "datasets.clips.generated_captions": "caption={} datasets.clips.generated_captions=add",
    "datasets.clips.caption_sets": "datasets.clips.caption_sets=[0123456789abcdef01234567]",
    "datasets.clips.conditioning_count": "datasets.clips.conditioning_data=other datasets.clips.conditioning_count=1",
    "datasets.clips.where": "datasets.clips.where=score > 5",
    "datasets.clips.eval_fraction": "datasets.clips.eval_fraction=0.1",
    "datasets.clips.resolution": "datasets.clips.resolution=96",
    "datasets.clips.buckets": "datasets.clips.buckets=family",
    "datasets.clips.bucket_step": "datasets.clips.bucket_step=128",
    "datasets.clips.max_aspect": "datasets.clips.max_aspect=2",
    "datasets.clips.crop_aspect_buckets": "datasets.clips.crop_aspect=closest datasets.clips.crop_aspect_buckets=[1.0]",
    "datasets.clips.minimum_image_size": "datasets.clips.minimum_image_size=8",
    "datasets.clips.maximum_image_size": "datasets.clips.maximum_image_size=512",
    "datasets.clips.target_downsample_size": "datasets.clips.maximum_image_size=512 "
    "datasets.clips.target_downsample_size=256",
    "datasets.clips.max_cropped": "datasets.clips.max_cropped=0.9",
    "datasets.clips.animations": "datasets.clips.animations=video",
    "datasets.clips.video.num_frames": "datasets.clips.video.num_frames=5",
    "datasets.clips.video.min_frames": "datasets.clips.video.min_frames=1",
    "datasets.clips.video.max_frames": "datasets.clips.video.max_frames=1000",
    "datasets.clips.video.frame_rate": "datasets.clips.video.frame_rate=6",
    "datasets.clips.video.bucket_strategy": "datasets.clips.video.bucket_strategy=aspect_ratio",
    "datasets.clips.video.frame_interval": "datasets.clips.video.frame_interval=8",
    "datasets.clips.video.clip_selection": "datasets.clips.video.clip_selection=middle",
    "datasets.clips.video.clips_per_video": "datasets.clips.video.clip_selection=random "
    "datasets.clips.video.clips_per_video=2",
    "datasets.clips.video.clip_stride": "datasets.clips.video.clip_selection=slide datasets.clips.video.clip_stride=8",
    "datasets.clips.allow_upscale": "datasets.clips.allow_upscale=false",
    "text.attention": "text.attention=eager",
    "text.precision": "text.precision=bfloat16",
    "latents.precision": "latents.precision=bfloat16",
    "vision.precision": "vision.precision=bfloat16",
    "model.precision": "model.precision=bfloat16",
    "features.size": "features={model: DINO, size: 28}",
    "features.duplicates": "features={duplicates: false, model: null}",
    "caption.prompts": "caption={prompts: [plain]}",
    "caption.resolution": "caption={resolution: 56}",
    "caption.top_p": "caption={top_p: 0.9, temperature: 1.0}",
    "caption.repetition_penalty": "caption={repetition_penalty: 1.1}",
    "masks.classes": "masks={model: DINO, classes: [a cat]}",
    "vision.model": "vision.model=DINO",
    "vision.size": "vision.size=28",
    "caption.model": "caption={model: DINO}",
    **{
        f"stages.{stage}.device": f"stages.{stage}.device={'auto' if stage == 'score' else 'cpu'}"
        for stage in ("discover", "features", "caption", "masks", *ENCODERS, "decode", "score")
    },
    "stages.order": "stages.order=[discover]",
    "stages.ray.address": "stages.ray.address=head:6379",
    "stages.item_timeout_s": "stages.item_timeout_s=5",
    "train.set": "train.set=0123456789abcdef",
    "train.weight_precision": "train.adapter.type=full train.optimizer.name=optimi-adamw train.precision=bfloat16 "
    "train.weight_precision=bfloat16",
    "train.optimizer.arguments": "train.optimizer.arguments={foreach: false}",
    "train.optimizer.groups.0.match": "train.optimizer.groups=[{match: '('}]",
    "train.optimizer.groups.0.lr": "train.optimizer.groups=[{match: .*bias, lr: 1e-5}]",
    "train.optimizer.groups.0.weight_decay": "train.optimizer.groups=[{match: .*bias, weight_decay: 0.5}]",
    "train.optimizer.betas": "train.optimizer.betas=[0.8, 0.9]",
    "train.optimizer.schedule": "train.optimizer.schedule=polynomial",
    "train.optimizer.lr_end": "train.optimizer.lr_end=0.01",
    "train.precision": "train.precision=bfloat16",
    "train.base_precision": "train.base_precision=nf4-bnb",
    "train.quantize_via": "train.base_precision=nf4-bnb train.quantize_via=cpu",
    "train.timesteps.mode_scale": "train.timesteps={sampling: mode, mode_scale: 0.5}",
    "train.timesteps.alpha": "train.timesteps={sampling: beta, alpha: 3}",
    "train.timesteps.values": "train.timesteps={sampling: list, values: [0.5]}",
    **{
        f"train.methods.tread.{name}": "train.methods.tread={routes: [{" + route + "}]" + more + "}"
        for name, route, more in (
            ("routes.0.selection_ratio", "selection_ratio: 0.5, start_layer_idx: 0, end_layer_idx: 1", ""),
            ("routes.0.start_layer_idx", "selection_ratio: 0, start_layer_idx: -1, end_layer_idx: 1", ""),
            ("routes.0.end_layer_idx", "selection_ratio: 0, start_layer_idx: 0, end_layer_idx: -1", ""),
            ("drop_first_frame", ROUTE, ", drop_first_frame: true"),
            ("keep_masked", ROUTE, ", keep_masked: false"),
        )
    },
    **{
        f"train.methods.crepa.{name}": f"train.methods.crepa={{block_index: 1{more}}}"
        for name, more in {
            "block_index": "",
            "decay_steps": ", decay_steps: 9, schedule: linear",
            "weight_end": ", weight_end: 0.1, schedule: linear",
            "power": ", power: 2, schedule: polynomial",
            "cutoff_step": ", cutoff_step: 5",
            "similarity_ema_decay": ", similarity_ema_decay: 0.5, similarity_threshold: 0.9",
            "threshold_mode": ", threshold_mode: recoverable, similarity_threshold: 0.9",
        }.items()
    },
    "train.methods.scheduled_sampling.prob_start": "train.methods.scheduled_sampling={prob_start: 0.1, start_step: 7}",
    "train.methods.scheduled_sampling.ramp_shape": "train.methods.scheduled_sampling={ramp_shape: cosine, "
    "ramp_steps: 7}",
    "train.adapter.type": "train.adapter.type=full",
    "train.adapter.rank_pattern": "train.adapter.rank_pattern={'.*': 2}",
    "train.adapter.alpha_pattern": "train.adapter.alpha_pattern={'.*': 2}",
    "train.adapter.decompose_factor": "train.adapter.type=lokr train.adapter.decompose_factor=4",
    "train.adapter.decompose_both": "train.adapter.type=lokr train.adapter.decompose_both=true",
    "train.adapter.targets": "train.adapter.targets=[.*to_query]",
    "train.trackers": "train.trackers=[]",
    "train.parallel.cpu_offload": "train.parallel={strategy: fsdp2, cpu_offload: true}",
    "train.parallel.reshard_after_forward": "train.parallel={strategy: fsdp2, reshard_after_forward: false}",
    "train.offload.blocks_per_group": "train.offload={blocks: true, blocks_per_group: 2}",
    "train.offload.streams": "train.offload={blocks: true, streams: true}",
    "train.local_cache.folder": "train.local_cache.folder=COPY",
    "train.local_cache.max_gb": "train.local_cache.max_gb=1e-6",
    "train.loss.weighting": "train.loss.weighting=min_snr",
    "train.device": "train.device=cpu",
    "train.compile": "train.compile=blocks",
    "train.compile_backend": "train.compile=blocks train.compile_backend=eager",
    "notify.webhooks.0.url_env": "notify.webhooks=[{url_env: A_HOOK}]",
    "notify.webhooks.0.events": "notify.webhooks=[{url_env: A_HOOK, events: [failed]}]",
    "notify.picture_size": "notify.picture_size=300",
    "hub.repo": "hub.repo=me/tabby",
    "hub.license": "hub.license=cc0-1.0",
    "validation.prompts.one.name": "validation.prompts.0.name=two",
    "validation.prompts.one.image": "validation.prompts.one.image=second.png",
    "validation.prompts.one.size": "validation.prompts.one.size=64x64@5",
    "validation.prompts.one.guidance": "validation.prompts.one.guidance=[1, 3]",
    "validation.prompts_file": "validation.prompts_file=prompts.yaml validation.placeholders={token: cat}",
    "validation.placeholders": "validation.placeholders={token: cat}",
    "validation.size": "validation.size=64x64@5",
    "validation.scores.clip": "validation.scores={clip: ./clip}",
    "validation.scores.frames": "validation.scores={clip: ./clip, frames: 3}",
    "validation.scores.clip_revision": "validation.scores={clip: org/clip, clip_revision: main}",
    "validation.eval_sigmas": "validation.eval_sigmas=[0.3]",
}
#: Options without another valid value in the tests' project: of another model or source, or without what they need.
REFUSED = {
    *(
        "model.family",
        "model.assistant",
        "model.transformer_2",
        "text.positions",
        "train.experts",
        "train.set",
        "train.optimizer.name",
    ),
    *(f"datasets.clips.{name}" for name in ("dataset_type", "disabled", "split", "media_column", "identity")),
    *(f"datasets.clips.{name}" for name in ("conditioning_column", "mask_column", "face_detector")),
    *(f"train.{name}" for name in ("timesteps.beta", "adapter.init_from", "parallel.cpu_offload", "offload.to")),
    "train.optimizer.groups.0.match",
    *(f"train.methods.masked_loss.{name}" for name in ("unmasked_weight", "unmasked_probability", "prior_weight")),
    "train.methods.masked_loss.normalize_area",
    *(f"train.methods.regularization.{name}" for name in ("target", "weight")),
    *(f"validation.{name}" for name in ("guidance_low", "placeholders", "preview_autoencoder")),
    *(f"validation.adapter.{name}" for name in ("path", "steps", "guidance")),
}


def all_options(
    section: type[Section] = Config, above: str = "", optional: str = "", parent: frozenset[str] = frozenset()
) -> Iterator[tuple[str, Option]]:
    """The dotted names of all options; of a list those of one item. optional: the section without a default that the
    options are in. parent: what that section affects."""
    for key, info, inner in options(section):
        name = above + key
        if inner is None:
            own = frozenset(affects(section, info).split(", "))
            yield name, Option(parent | own, EXAMPLES.get(name) or _change(name, info, optional), name in REFUSED)
        elif info.default is None:
            effect = affects(section, info)
            yield from all_options(inner, f"{name}.", name, frozenset([effect]) if effect else frozenset())
        else:
            yield from all_options(inner, f"{name}.{ITEMS[key] + '.' if key in ITEMS else ''}", optional, parent)


def _change(name: str, info: FieldInfo, optional: str) -> str:
    """An override with another value than the default."""
    value = _another(info)
    if not optional:
        return f"{name}={value}"
    values = {name.removeprefix(f"{optional}."): value} | NEEDED.get(optional, {})
    return f"{optional}={{{', '.join(f'{key}: {value}' for key, value in values.items())}}}"


def _another(info: FieldInfo) -> Any:
    kinds = [*_all_kinds(info.annotation)]
    if bool in kinds:
        return "false" if info.default is True else "true"
    for kind in kinds:
        if get_origin(kind) is Literal:
            return next(choice for choice in get_args(kind) if choice != info.default)
    if int in kinds:
        return info.default + 1 if isinstance(info.default, int) else 2
    if float in kinds:
        return 0.5 if info.default != 0.5 else 0.4
    return "[other]" if isinstance(info.default, tuple) else "other"


def _all_kinds(kind: Any) -> Iterator[Any]:
    """A type and the types that it is made of."""
    yield kind
    for part in get_args(kind) if get_origin(kind) is not Literal else ():
        yield from _all_kinds(part)


TABLE = dict(all_options())
