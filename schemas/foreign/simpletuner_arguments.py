"""SimpleTuner's config.json: the adapter, and training."""

import json
from typing import Any

from schemas.foreign.draft import Draft, NotNeeded, Refused, Row, Several, dropped, refused
from schemas.foreign.optimizers import arguments, beta, cycles, lr_end, optimizer, power, schedule, warmup
from schemas.foreign.values import (
    ATTENTION,
    above_zero,
    boolean,
    epochs,
    flag,
    if_true,
    number,
    off,
    one_of,
    only_with,
    text,
    unless,
    whole,
)


def _lora_type(value: Any, draft: Draft) -> Any:
    if str(value) == "lycoris":
        raise NotNeeded("lycoris_config says which kind")
    return one_of({"standard": None}, "train.adapter.type is lora, lokr or full")(value, draft)


def _timesteps(value: Any, draft: Draft) -> Several:
    items = json.loads(value) if isinstance(value, str) and value.startswith("[") else value
    numbers = [number(item) for item in (items.split(",") if isinstance(items, str) else items)]
    scale = 1000 if max(numbers) > 1 else 1
    return Several({"train.timesteps.sampling": "list", "train.timesteps.values": [item / scale for item in numbers]})


def _masked(convert: Any) -> Any:
    def wrapped(value: Any, draft: Draft) -> Any:
        if draft.get("train.methods.masked_loss") is None:
            raise NotNeeded("no dataset has masks")
        return convert(value, draft)

    return wrapped


def _tread(value: Any, draft: Draft) -> list[dict[str, Any]]:
    config = json.loads(value) if isinstance(value, str) else value
    return [dict(route) for route in config["routes"]]


def _compile(value: Any, draft: Draft) -> Several:
    if str(value).lower() in ("no", "none", ""):
        raise NotNeeded("nothing is compiled")
    backend = {} if value == "inductor" else {"train.compile_backend": text(value)}
    return Several({"train.compile": "blocks", **backend})


def _resume(value: Any, draft: Draft) -> bool:
    if str(value) != "latest":
        raise Refused("only this project's checkpoints are continued; train.adapter.init starts from the adapter there")
    return True


ADAPTER = {
    "lora_rank": Row("train.adapter.rank", whole),
    "lora_alpha": Row("train.adapter.alpha", number),
    "lora_dropout": Row("train.adapter.dropout", number),
    "lora_type": Row("train.adapter.type", _lora_type, "lora or lokr"),
    "use_dora": flag("train.adapter.dora"),
    "init_lora": Row("train.adapter.init", text),
    "lora_init_type": Row(
        "train.adapter.init_weights",
        one_of({"default": None, "gaussian": "gaussian", "pissa": "pissa", "olora": "olora"}, "see init_weights"),
    ),
    "lora_format": Row("train.adapter.formats", lambda value, draft: [text(value)], "diffusers, comfyui, or both"),
    **dropped("its file is carried over as well", "lycoris_config"),
    **dropped("of a kind of adapter that is not trained here", "peft_lora_mode", "singlora_ramp_up_steps",
              "validation_lycoris_strength"),
    **refused("train.adapter.targets takes regular expressions of whole module paths; without it, the family's",
              "peft_lora_target_modules", "flux_lora_target"),
    **refused("the first weights of a LoKr are those of peft", "init_lokr_norm"),
    **refused("a new run counts its steps from 0", "init_lora_step", "init_lora_ema"),
}  # fmt: skip
TRAINING = {
    "output_dir": Row("output", text),
    "max_train_steps": Row("train.steps", above_zero),
    "num_train_epochs": Row(
        "train.steps",
        unless("max_train_steps", epochs, "max_train_steps says how long"),
        "counted in optimizer steps",
    ),
    "train_batch_size": Row("train.batch_size", whole),
    "gradient_accumulation_steps": Row("train.accumulate", whole),
    "seed": Row("train.seed", whole),
    "learning_rate": Row("train.optimizer.lr", number),
    "lr_scheduler": Row("train.optimizer.schedule", schedule),
    "lr_warmup_steps": Row("train.optimizer.warmup", warmup),
    "lr_num_cycles": Row("train.optimizer.cycles", cycles),
    "lr_power": Row("train.optimizer.power", power),
    "lr_end": Row("train.optimizer.lr_end", lr_end),
    "optimizer": Row("train.optimizer.name", optimizer),
    "optimizer_config": Row("train.optimizer.arguments", arguments),
    **dict.fromkeys(("optimizer_beta1", "adam_beta1"), Row("train.optimizer.betas", beta(0))),
    **dict.fromkeys(("optimizer_beta2", "adam_beta2"), Row("train.optimizer.betas", beta(1))),
    "adam_weight_decay": Row("train.optimizer.weight_decay", number),
    "adam_epsilon": Row("train.optimizer.eps", number),
    "max_grad_norm": Row("train.optimizer.max_grad_norm", number),
    "grad_clip_method": Row("train.optimizer.max_grad_norm", one_of({"norm": None}, "gradients are clipped by norm")),
    "gradient_checkpointing": Row("train.gradient_checkpointing", boolean),
    "gradient_checkpointing_interval": Row(
        "train.gradient_checkpointing_interval", only_with("gradient_checkpointing", whole)
    ),
    "enable_group_offload": flag("train.offload.blocks"),
    "group_offload_blocks_per_group": Row(
        "train.offload.blocks_per_group", only_with("enable_group_offload", whole)
    ),
    "group_offload_use_stream": Row(
        "train.offload.streams", only_with("enable_group_offload", if_true())
    ),
    "group_offload_type": Row("train.offload.blocks", one_of({"block_level": None}, "whole blocks are offloaded")),
    "musubi_blocks_to_swap": Row(
        "train.offload.blocks", lambda value, draft: above_zero(value) > 0, "of all blocks, not of a number of them"
    ),
    "gradient_checkpointing_backend": Row(
        "train.offload.activations",
        one_of({"torch": None, "unsloth": True}, "train.offload.activations keeps activations on the host"),
    ),
    "caption_dropout_probability": Row("train.caption_dropout", number),
    "use_ema": Row(
        "train.ema.decay", lambda value, draft: number(draft.given.get("ema_decay", 0.995)) if boolean(value) else off()
    ),
    "ema_decay": Row("train.ema.decay", only_with("use_ema", number)),
    "ema_device": Row("train.ema.device", only_with("use_ema", one_of({"accelerator": None, "cpu": "cpu"}, ""))),
    "ema_validation": Row(
        "train.ema.validate",
        only_with("use_ema", one_of({"none": None, "ema_only": True, "comparison": True}, "valid: true, false")),
    ),
    **refused("the average takes every step", "ema_update_interval", "ema_warmup_steps"),
    "flow_schedule_shift": Row(
        "train.shift", unless("flow_schedule_auto_shift", number, "flow_schedule_auto_shift computes it")
    ),
    "flow_schedule_auto_shift": flag("train.timesteps.auto_shift"),
    "flow_sigmoid_scale": Row(
        "train.timesteps.std", lambda value, draft: number(value) if number(value) != 1 else off()
    ),
    "flow_use_uniform_schedule": flag("train.timesteps.sampling", "uniform"),
    "flow_use_beta_schedule": flag("train.timesteps.sampling", "beta"),
    "flow_beta_schedule_alpha": Row("train.timesteps.alpha", number),
    "flow_beta_schedule_beta": Row("train.timesteps.beta", number),
    "flow_custom_timesteps": Row("train.timesteps.values", _timesteps, "sigmas from 0 to 1, with sampling: list"),
    "loss_type": Row(
        "train.loss.type", one_of({"l2": None, "huber": "huber", "smooth_l1": "smooth_l1"}, ""), "its l2 is mse"
    ),
    "huber_c": Row("train.loss.huber_c", number),
    "huber_schedule": Row("train.loss.huber_schedule", text),
    "masked_loss_probability": Row(
        "train.methods.masked_loss.unmasked_probability",
        _masked(lambda value, draft: round(1 - number(value), 9)),
        "which is 1 minus it",
    ),
    "masked_prior_preservation_weight": Row("train.methods.masked_loss.prior_weight", _masked(number)),
    "normalize_masked_area_loss": Row("train.methods.masked_loss.normalize_area", _masked(boolean)),
    "input_perturbation": Row(
        "train.methods.input_perturbation.strength", lambda value, draft: number(value) or off()
    ),
    "input_perturbation_steps": Row(
        "train.methods.input_perturbation.decay_steps", only_with("input_perturbation", above_zero)
    ),
    "tread_config": Row("train.methods.tread.routes", _tread),
    "attention_mechanism": Row(
        "train.attention_backend", one_of({"diffusers": None, **ATTENTION}, "see train.attention_backend")
    ),
    "dynamo_backend": Row("train.compile_backend", _compile, "with train.compile: blocks"),
    "checkpoint_step_interval": Row("train.checkpoint_every", above_zero),
    "checkpointing_steps": Row("train.checkpoint_every", above_zero),
    "checkpoint_epoch_interval": Row("train.checkpoint_every", epochs, "in optimizer steps"),
    "checkpoints_total_limit": Row("train.keep_checkpoints", above_zero),
    "resume_from_checkpoint": Row("train.resume", _resume),
    **dropped("not in force there for models that predict a velocity; here train.loss.weighting: min_snr",
              "snr_gamma", "snr_weight", "use_soft_min_snr", "soft_min_snr_sigma_data"),
    **refused("noise has no offset; train.timesteps.mean moves training to more noise", "offset_noise"),
    **dropped("in force with offset_noise alone", "noise_offset", "noise_offset_probability"),
    **refused("write the rate itself into train.optimizer.lr", "lr_scale", "lr_scale_sqrt"),
    **refused("no text encoder is trained", "train_text_encoder"),
    **dropped("no text encoder is trained", "text_encoder_lr"),
    **refused("diffusers' offload to disk loses trained weights; train.offload.blocks keeps them in memory",
              "group_offload_to_disk_path", "offload_param_path"),
    **refused("train.offload.blocks keeps frozen weights on the host", "ramtorch", "enable_model_cpu_offload"),
    **refused("train.timesteps.sampling takes logit_normal, uniform, mode, beta, list", "flow_cubic_schedule_weights",
              "timestep_bias_strategy", "flux_fast_schedule", "mixflow_enabled"),
    **refused("nothing is distilled here", "distillation_method"),
    **refused("parameters are chosen by train.adapter.targets", "layer_freeze_strategy"),
}  # fmt: skip
