"""diffusion-pipe: its TOML, and that of its dataset."""

from collections.abc import Mapping
from typing import Any

from schemas.foreign.diffusion_pipe_data import SECTIONS as DATA_SECTIONS
from schemas.foreign.diffusion_pipe_data import carry_datasets
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
    refused,
    secret,
)
from schemas.foreign.models import CHOOSE, checkpoint, chosen, flavour_of_repo
from schemas.foreign.optimizers import optimizer as find_optimizer
from schemas.foreign.values import (
    DTYPES,
    NOTHING,
    above_zero,
    adapter_rank,
    boolean,
    dtype,
    epochs,
    flag,
    if_true,
    number,
    off,
    one_of,
    refuse,
    run_name,
    shown,
    text,
    unless,
    whole,
)

NAME = "diffusion-pipe"
FAMILIES = {
    "wan": ("wan2.1", "t2v-1.3b"),
    "qwen_image": ("qwen-image", None),
    "z_image": ("z-image", None),
    "flux2": ("flux2-klein", None),
}


def _batch(value: Any, draft: Draft) -> int:
    if isinstance(value, list):
        raise Refused("train.batch_size is one number for all resolutions; take the smallest of these")
    return whole(value)


def _checkpointing(value: Any, draft: Draft) -> Several:
    if str(value) == "unsloth":
        return Several({"train.gradient_checkpointing": True, "train.offload.activations": True})
    return Several({"train.gradient_checkpointing": boolean(value)})


def _clip(value: Any, draft: Draft) -> Any:
    choices = {"single_beginning": "head", "single_middle": "middle", "multiple_overlapping": "uniform"}
    clip = one_of(choices, "video.clip takes head, middle, random, uniform, chunks, slide")(value, draft)
    videos = [number_ for number_, item in enumerate(draft.values.get("datasets", [])) if "video" in item]
    if not videos:
        raise NotNeeded("there are no videos")
    return Several({f"datasets.{number_}.video.clip": clip for number_ in videos})


def _family(value: Any, draft: Draft) -> Several:
    given = draft.given
    for key in ("ckpt_path", "diffusers_path", "transformer_path", "diffusion_model"):
        word = str(given.get(key, "")).replace("\\", "/").rstrip("/")
        parts = [part for part in word.split("/") if part not in ("high_noise_model", "low_noise_model")]
        if parts and (published := flavour_of_repo(parts[-1])):
            expert = next(
                (name for name in ("high", "low") if f"{name}_noise" in str(given.get("transformer_path"))), None
            )
            return chosen(*published, expert if published[0] == "wan2.2-a14b" else None)
    if (family := FAMILIES.get(str(value))) is None:
        raise Refused(f"{shown(value)} is not trained here; {CHOOSE}")
    return chosen(*family)


def _folder(value: Any, draft: Draft) -> Any:
    last = str(value).replace("\\", "/").rstrip("/").rpartition("/")[2]
    if flavour_of_repo(last) and draft.get("model.flavour"):
        raise NotNeeded(
            f"{draft.get('model.flavour')} is this checkpoint; model.path names a folder in diffusers' layout"
        )
    return checkpoint(value, draft)


def _original(value: Any, draft: Draft) -> Any:
    raise NotNeeded("the flavour's repository in diffusers' layout is taken; a model.path must have that layout")


def _eight_bits(value: Any, draft: Draft) -> str:
    name = str(value)
    if name in DTYPES:
        raise NotNeeded("base weights are not quantized")
    if name.startswith("float8"):
        return "fp8-torchao"
    return one_of({"nf4": "nf4-bnb"}, "train.base_precision takes fp8-torchao, int8-quanto, nf4-bnb")(value, draft)


def _sampling(value: Any, draft: Draft) -> Several:
    if str(value) == "uniform":
        return Several({"train.timesteps.sampling": "uniform"})
    if str(value) != "logit_normal":
        raise Refused(f"{shown(value)}: train.timesteps.sampling takes logit_normal, uniform, mode, beta, list")
    scale = number(draft.given.get("sigmoid_scale", 1))
    return (
        Several({"train.timesteps.std": scale}) if scale != 1 else Several({"train.timesteps.sampling": "logit_normal"})
    )


def _range(value: Any, draft: Draft) -> Any:
    if draft.get("train.experts"):
        raise NotNeeded("the range of the expert in train.experts is that of the checkpoint")
    if number(value) in (0, 1):
        raise NotNeeded("it is the whole range")
    raise Refused(
        "train.timesteps.values lists noise levels; of Wan 2.2's experts each has its own range (train.experts)"
    )


def _optimizer(value: Any, draft: Draft) -> Several:
    name = {"adamw8bitkahan": "adamw8bit"}.get(str(value).lower(), str(value))
    return find_optimizer(name, draft)


TOP = {
    "output_dir": Row("output", text),
    "dataset": Row(drop="the dataset's file is carried over as well"),
    "epochs": Row("train.steps", unless("max_steps", epochs, "max_steps says how long"), "counted in optimizer steps"),
    "max_steps": Row("train.steps", above_zero),
    "micro_batch_size_per_gpu": Row("train.batch_size", _batch),
    "gradient_accumulation_steps": Row("train.accumulate", whole),
    "gradient_clipping": Row("train.optimizer.max_grad_norm", number),
    "warmup_steps": Row("train.optimizer.warmup", whole),
    "lr_scheduler": Row(
        "train.optimizer.schedule", one_of({name: name for name in ("constant", "linear", "cosine")}, "")
    ),
    "force_constant_lr": Row("train.optimizer.lr", number, "with schedule: constant"),
    "blocks_to_swap": Row(
        "train.offload.blocks", lambda value, draft: above_zero(value) > 0, "of all blocks, not of a number of them"
    ),
    "activation_checkpointing": Row("train.gradient_checkpointing", _checkpointing),
    "pseudo_huber_c": Row(
        "train.loss.huber_c",
        lambda value, draft: Several({"train.loss.type": "huber", "train.loss.huber_c": number(value)}),
        "with type: huber",
    ),
    "compile": flag("train.compile", "blocks"),
    "uncond_fraction": Row("train.caption_dropout", number),
    **dict.fromkeys(("save_every_n_steps", "checkpoint_every_n_steps"), Row("train.checkpoint_every", above_zero)),
    **dict.fromkeys(("save_every_n_epochs", "checkpoint_every_n_epochs"),
                    Row("train.checkpoint_every", epochs, "in optimizer steps")),
    "eval_every_n_steps": Row("validation.every", above_zero),
    "eval_every_n_epochs": Row("validation.every", epochs, "in optimizer steps"),
    "steps_per_print": Row("train.log_every", above_zero),
    "video_clip_mode": Row("datasets.N.video.clip", _clip, "head, middle, random, uniform, chunks or slide"),
    "eval_datasets": Row(refuse="datasets with eval: true, or eval_fraction of one, are held out for the eval loss"),
    "resume_from_checkpoint": Row(refuse="only this project's checkpoints are continued; train.adapter.init "
                                  "starts from an adapter"),
    **dropped("train.checkpoint_every counts steps", "checkpoint_every_n_minutes", "save_every_n_examples",
              "eval_every_n_examples"),
    **dropped("the eval loss is computed with the batch of training", "eval_micro_batch_size_per_gpu",
              "eval_gradient_accumulation_steps", "image_eval_micro_batch_size_per_gpu", "eval_before_first_step",
              "disable_block_swap_for_eval"),
    **dropped("images and clips have the same batch", "image_micro_batch_size_per_gpu"),
    **dropped("adapters are written in float32", "save_dtype"),
    **dropped("latents.batch_pixels and text.batch_tokens are the sizes of batches", "caching_batch_size"),
    **dropped("stages.<stage>.workers and .threads say what each stage may use", "map_num_proc"),
    **dropped("it changes no result", "partition_method", "partition_split", "reentrant_activation_checkpointing",
              "x_axis_examples", "logging_steps", "regenerate_cache"),
    "pipeline_stages": Row("train.parallel.strategy", one_of({"1": None},
              "train.parallel.strategy: fsdp2 shards a model"),
                           "fsdp2 shards a model over devices"),
}  # fmt: skip
MODEL = {
    "type": Row("model.family", _family),
    "diffusers_path": Row("model.path", _folder),
    "ckpt_path": Row("model.path", _original, "a folder or repository in diffusers' layout"),
    "dtype": Row("model.precision", dtype),
    **dict.fromkeys(("transformer_dtype", "diffusion_model_dtype"),
                    Row("train.base_precision", _eight_bits, "fp8-torchao")),
    "timestep_sample_method": Row("train.timesteps.sampling", _sampling),
    "sigmoid_scale": Row(drop="it is train.timesteps.std, of logit_normal"),
    "shift": Row("train.shift", lambda value, draft: number(value) or off()),
    **dict.fromkeys(("flux_shift", "lumina_shift"), flag("train.timesteps.auto_shift")),
    **dict.fromkeys(("min_t", "max_t"), Row("train.experts", _range, "high or low; each has its own range")),
    **dropped("encoders are parts of the checkpoint in diffusers' layout", "vae_path", "llm_path", "clip_path",
              "text_encoder_path", "t5_path", "vae", "text_encoders", "byt5_path"),
    **dict.fromkeys(("transformer_path", "diffusion_model"),
                    Row("model.path", _original, "a folder or repository in diffusers' layout")),
    "merge_adapters": Row("model.assistant", lambda value, draft: text(value[0]) if len(value) == 1 else refuse(
        "model.assistant is one file: merge them with latentpress export-adapter --merge"),
        "of a distilled checkpoint; samples are without it"),
    "cache_text_embeddings": Row("text.storage", if_true(NOTHING, ""), "texts are always encoded before training"),
    "text_encoder_fp8": flag("text.quantization", "int8-quanto", "int8-quanto, its 8 bits"),
    "guidance": Row(drop="no model here has an embedded guidance that is trained"),
    "single_file_path": Row(refuse="model.path takes a folder or repository in diffusers' layout"),
    **refused("train.optimizer.groups gives parameters rates of their own", "self_attn_lr", "cross_attn_lr", "mlp_lr",
              "mod_lr", "unet_lr"),
    **dropped("no text encoder is trained", "text_encoder_1_lr", "text_encoder_2_lr"),
}  # fmt: skip


ADAPTER = {
    "type": Row("train.adapter.type", one_of({"lora": "lora", "lokr": "lokr"}, "valid: lora, lokr, full")),
    "rank": Row("train.adapter.rank", adapter_rank),
    "alpha": Row(drop="it is the rank, as here"),
    "dropout": Row("train.adapter.dropout", number),
    "decompose_factor": Row("train.adapter.decompose_factor", whole),
    "init_from_existing": Row("train.adapter.init", text),
    "dtype": Row(drop="an adapter's own weights are float32"),
    "rank_dropout": Row(refuse="train.adapter.dropout is of a LoRA's input"),
    "fuse_adapters": Row(refuse="merge them into a copy of the model with latentpress export-adapter --merge"),
    "target_modules": Row(refuse="train.adapter.targets takes regular expressions of whole module paths"),
    "exclude_linear_modules": Row(refuse="train.adapter.targets takes regular expressions of whole module paths"),
}
OPTIMIZER = {
    "type": Row("train.optimizer.name", _optimizer),
    "lr": Row("train.optimizer.lr", number),
    "betas": Row("train.optimizer.betas", lambda value, draft: [number(item) for item in value]),
    "weight_decay": Row("train.optimizer.weight_decay", number),
    "eps": Row("train.optimizer.eps", number),
    **dropped("of an optimizer that is not used here", "stabilize", "gradient_release"),
}
MONITORING = {
    "enable_wandb": flag("train.trackers", ["tensorboard", "wandb"], "tensorboard, wandb"),
    **secret(SECRET_ADVICE, "wandb_api_key"),
    **dropped("wandb's project is the environment variable WANDB_PROJECT", "wandb_tracker_name"),
    "wandb_run_name": Row("train.run", run_name),
}
DEFAULTS = {"warmup_steps": 0, "activation_checkpointing": False, "uncond_fraction": 0.0}
SECTIONS: Mapping[str, Section] = {
    "top": Section(
        "the TOML file", TOP, DEFAULTS, first=("micro_batch_size_per_gpu", "gradient_accumulation_steps", "max_steps")
    ),
    "model": Section("[model]", MODEL),
    "adapter": Section("[adapter]", ADAPTER),
    "optimizer": Section("[optimizer]", OPTIMIZER),
    "monitoring": Section("[monitoring]", MONITORING),
    **DATA_SECTIONS,
}


def claims(content: Any) -> str:
    if not isinstance(content, dict):
        return ""
    if isinstance(content.get("directory"), list):
        return "datasets"
    model = content.get("model")
    return "arguments" if isinstance(model, dict) and "type" in model and "dataset" in content else ""


def carry(draft: Draft, roles: Mapping[str, Any], files: Files) -> None:
    given = dict(roles.get("arguments", {}))
    datasets = roles.get("datasets") or (files.read(str(given["dataset"])) if given.get("dataset") else None)
    if isinstance(datasets, dict):
        carry_datasets(draft, datasets)
    draft.samples, draft.uncounted = files.count_media(draft.values.get("datasets", []))
    draft.carry(SECTIONS["model"], draft.section(given.get("model"), "model"), "model.")
    if "adapter" in given:
        draft.carry(SECTIONS["adapter"], draft.section(given["adapter"], "adapter"), "adapter.")
    else:
        draft.set("adapter", ("train", "adapter", "type"), "full", "without it the model itself is trained")
    optimizer = draft.section(given.get("optimizer"), "optimizer")
    draft.carry(
        SECTIONS["optimizer"], {key: value for key, value in optimizer.items() if key in OPTIMIZER}, "optimizer."
    )
    for key in optimizer.keys() - OPTIMIZER.keys():
        draft.set(f"optimizer.{key}", ("train", "optimizer", "arguments", key), optimizer[key])
    draft.carry(SECTIONS["monitoring"], draft.section(given.get("monitoring"), "monitoring"), "monitoring.")
    draft.carry(SECTIONS["top"], {key: value for key, value in given.items() if not isinstance(value, dict)})
