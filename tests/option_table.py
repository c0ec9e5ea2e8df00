"""What a change of each option does: a row for every option of the sections that something is made of."""

from typing import NamedTuple


class Kind(NamedTuple):
    """What becomes of a change. plan: what has to run first. again: stages with work to do. trains: whether training
    takes the same set. next_run: whether it is in force at the next run. of_items: stages before `bucket` with work to
    do."""

    plan: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    trains: bool = True
    next_run: bool = False
    of_items: tuple[str, ...] = ()


REFUSED = Kind(trains=False)  # no valid value but the one in use, or it does not go with the rest
MEDIA = Kind(("discover", "bucket"), trains=False)  # shapes the media table: looked at anew, then planned
PLAN = Kind(("bucket",), trains=False)
TEXT = Kind(again=("encode-text",), trains=False)
LATENTS = Kind(again=("encode-latents",), trains=False)
PIXELS = Kind(again=("encode-latents", "encode-vision"), trains=False)
WEIGHTS = Kind(again=("encode-text", "encode-latents"), trains=False)
ENCODERS = Kind(again=("encode-text", "encode-latents", "encode-vision"), trains=False)
JOIN = Kind(again=("index",), trains=False)
VISION = Kind(again=("encode-vision",), trains=False)
FEATURES = Kind(of_items=("features",))  # of items, before there is a plan
MACHINE = Kind()  # where and how fast, not what: places and resources of this machine, sizes of what is still to come
RUN = Kind(next_run=True)  # of training, validation and decoding, on the same set
#: Sections that no stage makes anything of: training, notifications and uploads, resources of this machine.
WITHOUT_ROWS = ("train.", "notify.", "hub.", "stages.")
TABLE: dict[str, tuple[Kind, str]] = {
    "root": (MEDIA, "root=elsewhere"),
    "output": (MACHINE, "output=elsewhere"),
    "cache.format": (MACHINE, "cache.format=webdataset"),  # of shards that are still to be made; both count as done
    "cache.unit_mib": (MACHINE, "cache.unit_mib=3"),  # of units that are still to be planned
    "model.family": (REFUSED, "model.family=sana"),
    "model.flavour": (JOIN, "model.flavour=i2v-pro-sft-5s"),  # the checkpoint at model.path stays the same
    "model.path": (WEIGHTS, "model.path=COPY"),
    "model.revision": (MACHINE, "model.revision=main"),  # of a repository; a folder has none
    "model.assistant": (REFUSED, "model.assistant=absent.safetensors"),
    "model.precision": (ENCODERS, "model.precision=bfloat16"),
    "datasets.clips.id": (MEDIA, "datasets.0.id=others"),
    "datasets.clips.dataset_type": (REFUSED, "datasets.clips.dataset_type=image"),
    "datasets.clips.disabled": (REFUSED, "datasets.clips.disabled=true"),
    "datasets.clips.source": (MEDIA, "datasets.clips.source=remote"),
    "datasets.clips.instance_data_dir": (MEDIA, "datasets.clips.instance_data_dir=other"),
    "datasets.clips.media_root": (MACHINE, "datasets.clips.media_root=other"),
    "datasets.clips.split": (REFUSED, "datasets.clips.split=test"),
    "datasets.clips.media_column": (REFUSED, "datasets.clips.media_column=url"),
    "datasets.clips.follow_links": (MEDIA, "datasets.clips.follow_links=true"),
    "datasets.clips.identity": (REFUSED, "datasets.clips.identity=store"),
    "datasets.clips.skip_file_discovery": (MACHINE, "datasets.clips.skip_file_discovery=true"),
    "datasets.clips.caption_strategy": (MEDIA, "datasets.clips.caption_strategy=filename"),
    "datasets.clips.caption_file": (
        MEDIA,
        "datasets.clips.caption_strategy=csv datasets.clips.caption_file=captions.csv",
    ),
    "datasets.clips.caption_column": (
        MEDIA,
        "datasets.clips.caption_strategy=csv datasets.clips.caption_file=c.csv datasets.clips.caption_column=[words]",
    ),
    "datasets.clips.instance_prompt": (
        MEDIA,
        "datasets.clips.caption_strategy=instanceprompt datasets.clips.instance_prompt=a clip of it",
    ),
    "datasets.clips.captions_per_file": (MEDIA, "datasets.clips.captions_per_file=one"),
    "datasets.clips.trigger_word": (PLAN, "datasets.clips.trigger_word=ohwx"),
    "datasets.clips.prepend": (PLAN, "datasets.clips.prepend=look"),
    "datasets.clips.append": (PLAN, "datasets.clips.append=look"),
    "datasets.clips.tag_shuffle.variants": (PLAN, "datasets.clips.tag_shuffle={variants: 2}"),
    "datasets.clips.tag_shuffle.delimiter": (PLAN, "datasets.clips.tag_shuffle={delimiter: ;}"),
    "datasets.clips.tag_shuffle.keep": (PLAN, "datasets.clips.tag_shuffle={keep: 1}"),
    "datasets.clips.caption_filter": (PLAN, "datasets.clips.caption_filter=[clip]"),
    "datasets.clips.make_captions": (MEDIA, "datasets.clips.make_captions=all"),
    "datasets.clips.make_masks": (PLAN, "masks={model: DINO} datasets.clips.make_masks=none"),
    "datasets.clips.make_captions_where": (MEDIA, "caption={} datasets.clips.make_captions_where=score > 5"),
    "datasets.clips.made_captions": (MEDIA, "caption={} datasets.clips.made_captions=beside"),
    "datasets.clips.caption_sets": (PLAN, "datasets.clips.caption_sets=[0123456789abcdef01234567]"),
    "datasets.clips.conditioning_data": (MEDIA, "datasets.clips.conditioning_data=other"),
    "datasets.clips.conditioning_column": (REFUSED, "datasets.clips.conditioning_column=source"),
    "datasets.clips.conditioning_count": (
        MEDIA,
        "datasets.clips.conditioning_data=other datasets.clips.conditioning_count=1",
    ),
    "datasets.clips.mask_data": (MEDIA, "datasets.clips.mask_data=other"),
    "datasets.clips.mask_column": (REFUSED, "datasets.clips.mask_column=mask"),
    "datasets.clips.where": (PLAN, "datasets.clips.where=score > 5"),
    "datasets.clips.repeats": (PLAN, "datasets.clips.repeats=2"),
    "datasets.clips.weight": (PLAN, "datasets.clips.weight=0.5"),
    "datasets.clips.is_regularization_data": (PLAN, "datasets.clips.is_regularization_data=true"),
    "datasets.clips.eval": (PLAN, "datasets.clips.eval=true"),
    "datasets.clips.eval_fraction": (PLAN, "datasets.clips.eval_fraction=0.1"),
    "datasets.clips.resolution": (PLAN, "datasets.clips.resolution=96"),
    "datasets.clips.resolution_type": (PLAN, "datasets.clips.resolution_type=pixel"),
    "datasets.clips.buckets": (PLAN, "datasets.clips.buckets=family"),
    "datasets.clips.bucket_step": (PLAN, "datasets.clips.bucket_step=128"),
    "datasets.clips.max_aspect": (PLAN, "datasets.clips.max_aspect=2"),
    "datasets.clips.crop": (PLAN, "datasets.clips.crop=false"),
    "datasets.clips.crop_aspect": (PLAN, "datasets.clips.crop_aspect=square"),
    "datasets.clips.crop_aspect_buckets": (
        PLAN,
        "datasets.clips.crop_aspect=closest datasets.clips.crop_aspect_buckets=[1.0]",
    ),
    "datasets.clips.crop_style": (PLAN, "datasets.clips.crop_style=corner"),
    "datasets.clips.face_detector": (REFUSED, "datasets.clips.face_detector=yunet.onnx"),
    "datasets.clips.minimum_image_size": (PLAN, "datasets.clips.minimum_image_size=8"),
    "datasets.clips.maximum_image_size": (PLAN, "datasets.clips.maximum_image_size=512"),
    "datasets.clips.target_downsample_size": (
        PLAN,
        "datasets.clips.maximum_image_size=512 datasets.clips.target_downsample_size=256",
    ),
    "datasets.clips.allow_upscale": (PLAN, "datasets.clips.allow_upscale=false"),
    "datasets.clips.max_distortion": (PLAN, "datasets.clips.max_distortion=0.5"),
    "datasets.clips.max_cropped": (PLAN, "datasets.clips.max_cropped=0.9"),
    "datasets.clips.animations": (MEDIA, "datasets.clips.animations=video"),
    "datasets.clips.video.num_frames": (PLAN, "datasets.clips.video.num_frames=5"),
    "datasets.clips.video.min_frames": (PLAN, "datasets.clips.video.min_frames=1"),
    "datasets.clips.video.max_frames": (PLAN, "datasets.clips.video.max_frames=1000"),
    "datasets.clips.video.frame_rate": (PLAN, "datasets.clips.video.frame_rate=6"),
    "datasets.clips.video.bucket_strategy": (PLAN, "datasets.clips.video.bucket_strategy=aspect_ratio"),
    "datasets.clips.video.frame_interval": (PLAN, "datasets.clips.video.frame_interval=8"),
    "datasets.clips.video.clip": (PLAN, "datasets.clips.video.clip=middle"),
    "datasets.clips.video.clips": (PLAN, "datasets.clips.video.clip=random datasets.clips.video.clips=2"),
    "datasets.clips.video.clip_stride": (PLAN, "datasets.clips.video.clip=slide datasets.clips.video.clip_stride=8"),
    "datasets.clips.video.scenes": (MEDIA, "datasets.clips.video.scenes=true"),
    "datasets.clips.video.max_repeated_frames": (PLAN, "datasets.clips.video.max_repeated_frames=0.5"),
    "text.max_length": (TEXT, "text.max_length=64"),
    "text.batch_tokens": (MACHINE, "text.batch_tokens=128"),
    "text.precision": (TEXT, "text.precision=bfloat16"),
    "text.quantization": (TEXT, "text.quantization=int8-quanto"),
    "text.attention": (TEXT, "text.attention=eager"),
    "text.storage": (TEXT, "text.storage=int8"),
    "text.positions": (REFUSED, "text.positions=real"),  # for klein alone
    "text.offload": (MACHINE, "text.offload=blocks"),  # the same numbers
    "latents.posterior": (LATENTS, "latents.posterior=mode"),
    "latents.batch_pixels": (MACHINE, "latents.batch_pixels=4096"),
    "latents.precision": (LATENTS, "latents.precision=bfloat16"),
    "latents.decoder": (PIXELS, "latents.decoder=decord"),
    "latents.chunk_frames": (LATENTS, "latents.chunk_frames=4"),
    "latents.slicing": (MACHINE, "latents.slicing=true"),
    "latents.tiling": (LATENTS, "latents.tiling=true"),
    **{
        f"caption.{name}": (MEDIA, f"caption={{{name}: {value}}}")  # items without a caption are then kept
        for name, value in {
            **{"model": "DINO", "revision": "main", "prompts": "[plain]", "source_image": "true", "resolution": "56"},
            **{"frames": 4, "max_tokens": 50, "temperature": 0.5, "seed": 7, "repetition_penalty": 1.1},
            **{"top_p": "0.9, temperature: 1.0", "prefix": "look,", "forbidden": "[ugly]", "precision": "bfloat16"},
            **{"quantization": "bf16", "attention": "eager", "offload": "blocks", "batch_tokens": 100},
        }.items()
    },
    **{
        # of a `where` that names their columns
        f"features.{name}": (FEATURES, f"features={{model: DINO, {name}: {value}}}")
        for name, value in {
            **{"revision": "main", "size": 28, "batch_size": 1, "precision": "bfloat16", "frames": 4},
            "clusters": 2,
        }.items()
    },
    **{
        f"masks.{name}": (PLAN, f"masks={{model: DINO, {name}: {value}}}")  # masks are a part of samples
        for name, value in {
            **{"revision": "main", "classes": "[a cat]", "box_column": "box", "threshold": 0.4},
            **{"grow": 2, "blur": 1.5, "invert": "true", "min_area": 0.1, "resolution": 64, "batch_size": 1},
            **{"precision": "bfloat16"},
        }.items()
    },
    "masks.model": (PLAN, "masks={model: DINO}"),
    "features.model": (FEATURES, "features={model: DINO}"),
    "features.duplicates": (FEATURES, "features={duplicates: false, model: null}"),
    "vision.model": (VISION, "vision.model=DINO"),
    "vision.revision": (MACHINE, "vision.revision=main"),  # of a repository; a folder has none
    "vision.size": (VISION, "vision.size=28"),
    "vision.batch_size": (MACHINE, "vision.batch_size=1"),
    "vision.precision": (VISION, "vision.precision=bfloat16"),
    "stages.item_timeout_s": (MACHINE, "stages.item_timeout_s=5"),
    "validation.prompts.one.name": (PLAN, "validation.prompts.0.name=two"),
    "validation.prompts.one.prompt": (PLAN, "validation.prompts.one.prompt=something else"),
    "validation.prompts.one.negative_prompt": (PLAN, "validation.prompts.one.negative_prompt=ugly"),
    "validation.prompts.one.image": (PLAN, "validation.prompts.one.image=second.png"),
    "validation.prompts.one.size": (PLAN, "validation.prompts.one.size=64x64@5"),
    "validation.prompts.one.steps": (RUN, "validation.prompts.one.steps=3"),
    "validation.guidance_low": (REFUSED, "validation.guidance_low=2"),
    "validation.prompts.one.guidance": (RUN, "validation.prompts.one.guidance=[1, 3]"),
    "validation.prompts.one.seed": (RUN, "validation.prompts.one.seed=[3, 4]"),
    "validation.prompts_file": (PLAN, "validation.prompts_file=prompts.yaml validation.placeholders={token: cat}"),
    "validation.placeholders": (REFUSED, "validation.placeholders={token: cat}"),
    "validation.size": (PLAN, "validation.size=64x64@5"),
    "validation.preview_autoencoder": (REFUSED, "validation.preview_autoencoder=tiny"),  # not for clips
    "validation.attention_backend": (RUN, "validation.attention_backend=_native_flash"),
    "validation.scores.clip": (RUN, "validation.scores={clip: ./clip}"),
    "validation.scores.clip_revision": (RUN, "validation.scores={clip: org/clip, clip_revision: main}"),
    "validation.scores.frames": (RUN, "validation.scores={clip: ./clip, frames: 3}"),
    "validation.eval_sigmas": (RUN, "validation.eval_sigmas=[0.3]"),
    **{
        f"validation.{name}": (RUN, f"validation.{name}=3")
        for name in ("every", "steps", "guidance", "shift", "seed", "eval_samples", "fps")
    },
}
#: Changes of the other sections, all at once.
CHANGES = [
    *("train.run=other", "train.steps=2", "train.seed=2", "train.shuffle_shards=2", "train.ema={decay: 0.9}"),
    *("train.adapter.rank=3", "train.optimizer.lr=0.1", "train.base_precision=nf4-bnb", "train.loss.type=huber"),
    *("train.methods.crepa={block_index: 1}", "notify.pictures=3", "hub.repo=me/tabby", "stages.encode-text.workers=2"),
]
