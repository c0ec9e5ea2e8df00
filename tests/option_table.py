"""What a change of each option does: a row for every option of the configuration."""

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
FULL = "train.adapter.type=full"
ENCODING = ("features", "caption", "masks", "encode-text", "encode-latents", "encode-vision")
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
    "stages.order": (MACHINE, "stages.order=[discover]"),
    "stages.engine": (MACHINE, "stages.engine=ray"),
    "stages.ray.address": (MACHINE, "stages.ray.address=head:6379"),
    "stages.ray.ready_timeout_s": (MACHINE, "stages.ray.ready_timeout_s=60"),
    "stages.ray.stall_timeout_s": (MACHINE, "stages.ray.stall_timeout_s=3600"),
    "stages.max_reject_fraction": (MACHINE, "stages.max_reject_fraction=0.5"),
    "stages.item_timeout_s": (MACHINE, "stages.item_timeout_s=5"),
    "stages.item_memory_mib": (MACHINE, "stages.item_memory_mib=4096"),
    **{
        f"stages.{stage}.{option}": (MACHINE, f"stages.{stage}.{option}={value}")
        for stage in ("discover", *ENCODING, "decode", "score")
        for option, value in (("workers", 2), ("threads", 3), ("device", "auto" if stage == "score" else "cpu"))
    },
    **{
        f"stages.{stage}.{option}": (MACHINE, f"stages.{stage}.{option}=2")
        for stage in ENCODING
        for option in ("readers", "prefetch", "num_cpus", "num_gpus", "memory_gib")
    },
    "stages.decode.while_training": (MACHINE, "stages.decode.while_training=true"),
    "train.run": (RUN, "train.run=other"),
    "train.experts": (REFUSED, "train.experts=high"),  # of a model with one transformer
    "train.set": (REFUSED, "train.set=0123456789abcdef"),
    "train.optimizer.name": (REFUSED, "train.optimizer.name=lion"),
    "train.optimizer.arguments": (RUN, "train.optimizer.arguments={foreach: false}"),
    "train.optimizer.groups.0.match": (REFUSED, "train.optimizer.groups=[{match: '('}]"),
    "train.optimizer.groups.0.lr": (RUN, "train.optimizer.groups=[{match: .*bias, lr: 1e-5}]"),
    "train.optimizer.groups.0.weight_decay": (RUN, "train.optimizer.groups=[{match: .*bias, weight_decay: 0.5}]"),
    "train.weight_precision": (
        MACHINE,
        f"{FULL} train.optimizer.name=optimi-adamw train.precision=bfloat16 train.weight_precision=bfloat16",
    ),
    "train.ema.decay": (RUN, "train.ema={decay: 0.9}"),
    "train.ema.warmup": (RUN, "train.ema={warmup: power}"),
    "train.ema.device": (RUN, "train.ema={device: cpu}"),
    "train.ema.validate": (RUN, "train.ema={validate: true}"),
    "train.optimizer.betas": (RUN, "train.optimizer.betas=[0.8, 0.9]"),
    "train.optimizer.schedule": (RUN, "train.optimizer.schedule=polynomial"),
    "train.timesteps.sampling": (MACHINE, "train.timesteps.sampling=uniform"),
    "train.timesteps.mean": (RUN, "train.timesteps.mean=0.5"),
    "train.timesteps.std": (RUN, "train.timesteps.std=0.5"),
    "train.timesteps.mode_scale": (MACHINE, "train.timesteps={sampling: mode, mode_scale: 0.5}"),
    "train.timesteps.alpha": (MACHINE, "train.timesteps={sampling: beta, alpha: 3}"),
    "train.timesteps.beta": (REFUSED, "train.timesteps.beta=3"),  # sampling is logit_normal
    "train.timesteps.values": (MACHINE, "train.timesteps={sampling: list, values: [0.5]}"),
    "train.timesteps.auto_shift": (MACHINE, "train.timesteps.auto_shift=true"),  # not with train.shift
    "train.timesteps.low_discrepancy": (RUN, "train.timesteps.low_discrepancy=true"),
    "train.loss.type": (RUN, "train.loss.type=huber"),
    "train.loss.huber_c": (RUN, "train.loss.huber_c=0.2"),
    "train.loss.huber_schedule": (RUN, "train.loss.huber_schedule=snr"),
    "train.loss.weighting": (RUN, "train.loss.weighting=min_snr"),
    "train.loss.snr_gamma": (RUN, "train.loss.snr_gamma=3"),
    "train.methods.masked_loss.unmasked_weight": (REFUSED, "train.methods.masked_loss={}"),  # the set has no masks
    "train.methods.masked_loss.unmasked_probability": (
        REFUSED,
        "train.methods.masked_loss={unmasked_probability: 0.5}",
    ),
    "train.methods.masked_loss.prior_weight": (REFUSED, "train.methods.masked_loss={prior_weight: 1}"),
    "train.methods.masked_loss.normalize_area": (REFUSED, "train.methods.masked_loss={normalize_area: true}"),
    **{
        f"train.methods.tread.{name}": (RUN, "train.methods.tread={routes: [{" + route + "}]" + more + "}")
        for name, route, more in (
            ("routes.0.selection_ratio", "selection_ratio: 0.5, start_layer_idx: 0, end_layer_idx: 1", ""),
            ("routes.0.start_layer_idx", "selection_ratio: 0, start_layer_idx: -1, end_layer_idx: 1", ""),
            ("routes.0.end_layer_idx", "selection_ratio: 0, start_layer_idx: 0, end_layer_idx: -1", ""),
            (
                "drop_first_frame",
                "selection_ratio: 0, start_layer_idx: 0, end_layer_idx: 0",
                ", drop_first_frame: true",
            ),
            ("keep_masked", "selection_ratio: 0, start_layer_idx: 0, end_layer_idx: 0", ", keep_masked: false"),
        )
    },
    **{
        f"train.methods.crepa.{name}": (RUN, f"train.methods.crepa={{block_index: 1{more}}}")
        for name, more in {
            "block_index": "",
            "weight": ", weight: 1",
            "adjacent_distance": ", adjacent_distance: 2",
            "adjacent_tau": ", adjacent_tau: 2",
            "cumulative_neighbors": ", cumulative_neighbors: true",
            "normalize_by_frames": ", normalize_by_frames: false",
            "schedule": ", schedule: cosine",
            "warmup": ", warmup: 3",
            "decay_steps": ", decay_steps: 9, schedule: linear",
            "weight_end": ", weight_end: 0.1, schedule: linear",
            "power": ", power: 2, schedule: polynomial",
            "cutoff_step": ", cutoff_step: 5",
            "similarity_threshold": ", similarity_threshold: 0.9",
            "similarity_ema_decay": ", similarity_ema_decay: 0.5, similarity_threshold: 0.9",
            "threshold_mode": ", threshold_mode: recoverable, similarity_threshold: 0.9",
        }.items()
    },
    **{
        f"train.methods.input_perturbation.{option}": (RUN, f"train.methods.input_perturbation={{{option}: {value}}}")
        for option, value in (("strength", 0.2), ("decay_steps", 9))
    },
    "train.methods.regularization.target": (REFUSED, "train.methods.regularization={}"),  # nor regularization data
    "train.methods.regularization.weight": (REFUSED, "train.methods.regularization={weight: 2}"),
    **{
        f"train.methods.scheduled_sampling.{option}": (RUN, f"train.methods.scheduled_sampling={{{option}: {value}}}")
        for option, value in (
            *dict.fromkeys(("probability", "correction"), 0.1).items(),
            *dict.fromkeys(("start_step", "ramp_steps", "max_step_offset", "schedule_steps"), 7).items(),
            *(("prob_start", "0.1, start_step: 7"), ("ramp_shape", "cosine, ramp_steps: 7")),
            ("strategy", "biased_late"),
        )
    },
    "train.adapter.formats": (RUN, "train.adapter.formats=[diffusers, comfyui]"),
    "train.adapter.init": (REFUSED, "train.adapter.init=absent.safetensors"),
    # MACHINE: not with other options of an adapter.
    "train.adapter.type": (MACHINE, FULL),
    "train.adapter.decompose_factor": (MACHINE, "train.adapter.type=lokr train.adapter.decompose_factor=4"),
    "train.adapter.decompose_both": (MACHINE, "train.adapter.type=lokr train.adapter.decompose_both=true"),
    "train.adapter.rank_pattern": (RUN, "train.adapter.rank_pattern={'.*': 2}"),
    "train.adapter.alpha_pattern": (RUN, "train.adapter.alpha_pattern={'.*': 2}"),
    "train.adapter.rslora": (RUN, "train.adapter.rslora=true"),
    "train.adapter.dora": (MACHINE, "train.adapter.dora=true"),
    "train.adapter.init_weights": (RUN, "train.adapter.init_weights=gaussian"),
    "train.base_precision": (RUN, "train.base_precision=nf4-bnb"),
    "train.quantize_via": (RUN, "train.base_precision=nf4-bnb train.quantize_via=cpu"),
    "train.adapter.targets": (RUN, "train.adapter.targets=[.*to_query]"),
    "train.precision": (RUN, "train.precision=bfloat16"),
    "train.device": (RUN, "train.device=cpu"),
    "train.trackers": (RUN, "train.trackers=[]"),
    **{f"train.{name}": (RUN, f"train.{name}=2") for name in ("steps", "batch_size", "accumulate", "seed", "shift")},
    **{f"train.{name}": (RUN, f"train.{name}=false") for name in ("gradient_checkpointing", "resume")},
    "train.gradient_checkpointing_interval": (MACHINE, "train.gradient_checkpointing_interval=2"),
    "train.parallel.strategy": (MACHINE, "train.parallel.strategy=fsdp2"),
    "train.parallel.cpu_offload": (REFUSED, "train.parallel={strategy: fsdp2, cpu_offload: true}"),  # in one process
    "train.parallel.gradient_compression": (MACHINE, "train.parallel.gradient_compression=bfloat16"),
    "train.parallel.timeout": (MACHINE, "train.parallel.timeout=60"),
    "train.parallel.reshard_after_forward": (MACHINE, "train.parallel={strategy: fsdp2, reshard_after_forward: false}"),
    "train.offload.blocks": (MACHINE, "train.offload.blocks=true"),
    "train.offload.blocks_per_group": (MACHINE, "train.offload={blocks: true, blocks_per_group: 2}"),
    "train.offload.streams": (MACHINE, "train.offload={blocks: true, streams: true}"),
    "train.offload.activations": (MACHINE, "train.offload.activations=true"),
    "train.offload.to": (REFUSED, "train.offload.to=disk"),
    "train.shuffle_shards": (RUN, "train.shuffle_shards=2"),
    "train.on_new_data": (RUN, "train.on_new_data=continue"),
    "train.reading.threads": (RUN, "train.reading.threads=3"),
    "train.local_cache.folder": (MACHINE, "train.local_cache.folder=COPY"),  # of a local root there are no copies
    "train.local_cache.max_gb": (MACHINE, "train.local_cache.max_gb=1e-6"),
    "train.local_cache.downloads": (MACHINE, "train.local_cache.downloads=1"),
    "train.attention_backend": (RUN, "train.attention_backend=_native_flash"),
    "train.compile": (RUN, "train.compile=blocks"),
    "train.compile_backend": (RUN, "train.compile=blocks train.compile_backend=eager"),
    **{
        f"train.{name}": (RUN, f"train.{name}=7")
        for name in ("checkpoint_every", "keep_checkpoints", "keep_every", "log_every")
    },
    **{f"train.{name}": (RUN, f"train.{name}=3") for name in ("threads", "max_bad_steps", "adapter.rank")},
    **{f"train.{name}": (RUN, f"train.{name}=0.5") for name in ("caption_dropout", "adapter.alpha", "adapter.dropout")},
    **{
        f"train.optimizer.{name}": (RUN, f"train.optimizer.{name}={value}")
        for name, value in {
            "lr": 0.1,
            "weight_decay": 0.1,
            "eps": 0.1,
            "warmup": 3,
            "max_grad_norm": 0.5,
            "lr_end": 0.01,
            "cycles": 2,
            "power": 3,
        }.items()
    },
    "notify.webhooks.0.url_env": (RUN, "notify.webhooks=[{url_env: A_HOOK}]"),
    "notify.webhooks.0.events": (RUN, "notify.webhooks=[{url_env: A_HOOK, events: [failed]}]"),
    "hub.repo": (RUN, "hub.repo=me/tabby"),
    "hub.private": (RUN, "hub.private=false"),
    "hub.license": (RUN, "hub.license=cc0-1.0"),
    "hub.tags": (RUN, "hub.tags=[cat]"),
    "notify.pictures": (RUN, "notify.pictures=3"),
    "notify.picture_size": (RUN, "notify.picture_size=300"),
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
