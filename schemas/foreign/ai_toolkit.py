"""ai-toolkit: its YAML, a job with a process that trains."""

from collections.abc import Mapping
from typing import Any

from schemas.foreign.ai_toolkit_data import SECTIONS as DATA_SECTIONS
from schemas.foreign.ai_toolkit_data import carry_datasets, carry_samples
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
from schemas.foreign.optimizers import arguments, optimizer, schedule
from schemas.foreign.values import (
    NOTHING,
    above_zero,
    boolean,
    dtype,
    flag,
    if_true,
    number,
    off,
    one_of,
    only_with,
    refuse,
    run_name,
    shown,
    text,
    whole,
)

NAME = "ai-toolkit"


def _sampling(value: Any, draft: Draft) -> Several:
    name = str(value)
    if name == "sigmoid":
        return Several({"train.timesteps.sampling": "logit_normal", "train.shift": 1.0})
    if name == "linear":
        return Several({"train.timesteps.sampling": "uniform", "train.shift": 1.0})
    if name == "shift":
        return Several({"train.timesteps.sampling": "uniform"})  # with the flavour's shift
    if name in ("flux_shift", "lumina2_shift"):
        return Several({"train.timesteps.sampling": "uniform", "train.timesteps.auto_shift": True})
    if name == "weighted":
        raise Refused(
            "weighted takes factors that were measured of another model; nearest: train.timesteps.sampling: uniform "
            "with train.shift: 1 and train.loss.weighting: bell"
        )
    raise Refused(f"{shown(name)}: train.timesteps.sampling takes logit_normal, uniform, mode, beta, list")


_BIAS = one_of({"balanced": None}, "train.timesteps.mean moves training to more noise (content) or less (style)")


def _ema(value: Any, draft: Draft) -> Several:
    if not isinstance(value, Mapping) or not boolean(value.get("use_ema", False)):
        raise NotNeeded("it is off")
    return Several({"train.ema.decay": number(value.get("ema_decay", 0.999))})


def _accumulate(value: Any, draft: Draft) -> int:
    if (count := whole(value)) < 1:
        raise Refused("train.accumulate is a number of batches, not an epoch")
    if count == 1:
        raise NotNeeded("1 is the default")
    return count


def _conv(value: Any, draft: Draft) -> Any:
    raise NotNeeded("the transformers here have linear modules; train.adapter.targets names others")


PROCESS = {
    "type": Row(
        "train.adapter.type",
        one_of(
            {name: None for name in ("sd_trainer", "diffusion_trainer", "ui_trainer")}, "it is no process that trains"
        ),
        "a process that trains",
    ),
    "training_folder": Row("output", text),
    "trigger_word": Row(drop="the words before every caption: prepend of each dataset"),
    "device": Row("train.device", text),
    **dropped("it changes no result", "performance_log_every", "sqlite_db_path"),
    **refused("this is one run, with a transformer alone", "slider", "embedding", "adapter", "decorator"),
}
NETWORK = {
    "type": Row("train.adapter.type", one_of({"lora": "lora", "lokr": "lokr"},
              "train.adapter.type takes lora, lokr, full")),
    **dict.fromkeys(("linear", "rank"), Row("train.adapter.rank", whole)),
    **dict.fromkeys(("linear_alpha", "alpha"), Row("train.adapter.alpha", number, "without it 1 there, and rank here")),
    "dropout": Row("train.adapter.dropout", number),
    "lokr_factor": Row("train.adapter.decompose_factor", whole),
    "lokr_full_rank": Row("train.adapter.rank", lambda value, draft: 65_536 if boolean(value) and draft.given.get(
        "type") == "lokr" else off("of a LoKr"), "of a LoKr a rank above every side: whole matrices"),
    "pretrained_lora_path": Row("train.adapter.init", text),
    **dict.fromkeys(("conv", "conv_alpha"), Row("train.adapter.targets", _conv, "regular expressions of module paths")),
    **dropped("the transformer is trained, and nothing else", "transformer_only", "split_multistage_loras",
              "old_lokr_format", "layer_offloading", "all_layers"),
    **refused("train.adapter.targets takes regular expressions of module paths", "network_kwargs", "lorm"),
}  # fmt: skip
SAVE = {
    "save_every": Row("train.checkpoint_every", above_zero),
    "max_step_saves_to_keep": Row("train.keep_checkpoints", above_zero),
    "push_to_hub": Row("hub.repo", if_true(NOTHING, "it is off"), "to which `run` uploads at its end"),
    "hf_repo_id": Row("hub.repo", only_with("push_to_hub", text), "to which `run` uploads at its end"),
    "hf_private": Row("hub.private", only_with("push_to_hub", boolean)),
    **dropped("an adapter is written in float32, in the formats of train.adapter.formats", "dtype", "save_format"),
}  # fmt: skip
TRAIN = {
    "batch_size": Row("train.batch_size", whole),
    "steps": Row("train.steps", whole),
    **dict.fromkeys(("gradient_accumulation", "gradient_accumulation_steps"), Row("train.accumulate", _accumulate)),
    "lr": Row("train.optimizer.lr", number),
    "unet_lr": Row("train.optimizer.lr", number),
    "optimizer": Row("train.optimizer.name", optimizer),
    "optimizer_params": Row("train.optimizer.arguments", arguments),
    "lr_scheduler": Row("train.optimizer.schedule", schedule),
    "lr_scheduler_params": Row("train.optimizer.warmup", lambda value, draft: whole(value["num_warmup_steps"])
        if set(value) == {"num_warmup_steps"} else (off() if not value else refuse("of these train.optimizer.warmup "
        "is known"))),
    "gradient_checkpointing": Row("train.gradient_checkpointing", boolean),
    "max_grad_norm": Row("train.optimizer.max_grad_norm", number),
    "ema_config": Row("train.ema", _ema, "{decay: 0.9999}"),
    "dtype": Row("model.precision", dtype),
    "timestep_type": Row("train.timesteps.sampling", _sampling, "with train.shift"),
    "content_or_style": Row("train.timesteps.mean", _BIAS),
    "loss_type": Row("train.loss.type", one_of({"mse": None, "pseudo_huber": "huber"}, "valid: mse, huber, smooth_l1"),
                     "mse, huber, smooth_l1"),
    "attention_backend": Row("train.attention_backend", one_of({"native": None, "flash": "flash",
        "_flash_3_hub": "_flash_3_hub", "_flash_3": "_flash_3_hub"}, "see train.attention_backend")),
    "xformers": flag("train.attention_backend", "xformers"),
    "switch_boundary_every": Row(drop="the experts are trained one after the other: train.experts: both"),
    "reg_weight": Row("train.methods.regularization.weight", lambda value, draft: number(value) if any(
        item.get("is_regularization_data") for item in draft.values.get("datasets",
                  [])) else off("no dataset is one of "
        "regularization")),
    "prompt_dropout_prob": Row("train.caption_dropout", number),
    "inverted_mask_prior": Row(drop="inverted_mask_prior_multiplier says how much"),
    "inverted_mask_prior_multiplier": Row("train.methods.masked_loss.prior_weight", lambda value, draft: number(value)
        if not is_off(draft.given.get("inverted_mask_prior")) and draft.get("train.methods.masked_loss") is not None
        else off("it is off")),
    **dict.fromkeys(("min_snr_gamma", "snr_gamma"), Row(
        drop="not in force for models that predict a velocity; here train.loss.weighting: min_snr")),
    **dropped("the transformer is trained, and nothing else", "train_unet", "text_encoder_lr", "embedding_lr",
              "adapter_lr", "refiner_lr", "train_refiner"),
    **refused("no text encoder is trained", "train_text_encoder"),
    "linear_timesteps": flag("train.loss.weighting", "bell"),
    "linear_timesteps2": flag("train.loss.weighting", "half_bell"),
    **dropped("every model here is trained with flow matching", "noise_scheduler", "num_train_timesteps"),
    **dropped("texts are encoded before training, and the text encoder is not there while it trains",
              "cache_text_embeddings", "unload_text_encoder"),
    "disable_sampling": Row("validation.prompts", if_true(NOTHING, "samples are made"),
              "without prompts there are no samples"),
    **dropped("a run makes samples at its first step", "skip_first_sample", "force_first_sample"),
    **dropped("it changes no result", "sdp", "max_loss_debug", "max_negative_prompts", "negative_prompt", "start_step",
              "bypass_guidance_embedding"),
    **refused("the noise has no offset; train.timesteps.mean moves training to more noise", "noise_offset",
              "dynamic_noise_offset", "random_noise_shift"),
    **refused("train.methods.regularization keeps the model as it was", "diff_output_preservation",
              "blank_prompt_preservation", "do_prior_divergence"),
    **dropped("of a method that is off, or of no counterpart", "diff_output_preservation_multiplier",
              "diff_output_preservation_class", "blank_prompt_preservation_multiplier"),
    **refused("train.methods has what is added to the loss", "do_fft_loss", "do_guidance_loss", "do_cfg",
              "do_random_cfg",
              "do_differential_guidance", "train_turbo", "correct_pred_norm", "match_noise_norm", "t0_loss_target",
              "learnable_snr_gos", "do_paramiter_swapping", "latent_feature_extractor_path", "weight_jitter",
              "force_consistent_noise", "standardize_images", "standardize_latents", "max_loss",
              "single_item_batching", "short_and_long_captions"),
    **dropped("of a method that is off, or of no counterpart", "guidance_loss_target", "differential_guidance_scale",
              "cfg_scale", "paramiter_swapping_factor"),
    **refused("train.timesteps.values lists noise levels", "min_denoising_steps", "max_denoising_steps"),
}  # fmt: skip


LOGGING = {
    "log_every": Row("train.log_every", above_zero),
    "use_wandb": flag("train.trackers", ["tensorboard", "wandb"], "tensorboard, wandb"),
    "run_name": Row("train.run", run_name),
    **dropped("wandb's project is the environment variable WANDB_PROJECT", "project_name"),
    **dropped("it changes no result", "verbose", "use_ui_logger"),
    **secret(SECRET_ADVICE, "wandb_api_key"),
}
SECTIONS: Mapping[str, Section] = {
    "process": Section("a process of the job", PROCESS),
    "network": Section("network", NETWORK),
    "save": Section("save", SAVE),
    "train": Section(
        "train",
        TRAIN,
        {"steps": 1000, "lr": 1e-6, "lr_scheduler": "constant", "optimizer": "adamw", "timestep_type": "sigmoid"},
    ),
    "logging": Section("logging", LOGGING),
    **DATA_SECTIONS,
}
_SECTIONS = ("model", "network", "save", "train", "logging", "sample")


def claims(content: Any) -> str:
    if not isinstance(content, dict):
        return ""
    config = content.get("config")
    return "arguments" if isinstance(config, dict) and isinstance(config.get("process"), list) else ""


def carry(draft: Draft, roles: Mapping[str, Any], files: Files) -> None:
    content = roles.get("arguments", {})
    config = draft.section(content.get("config"), "config")
    processes = draft.sections(config.get("process"), "process")
    if len(processes) != 1:
        words = f"a run is one process, and there are {len(processes)}; the first is carried over"
        draft.say("process", "refused", words)
    process = processes[0] if processes else {}
    for key in content.keys() - {"config"}:
        draft.say(str(key), "not needed", "a run has neither jobs nor notes")
    for key in config.keys() - {"name", "process"}:
        draft.say(f"config.{key}", "unknown", "no key of a job that is known here")
    if (name := config.get("name")) and (run := draft.attempt("config.name", run_name, name, "")):
        draft.set("config.name", ("train", "run"), run)
    datasets = draft.sections(process.get("datasets"), "datasets")
    sections = {key: draft.section(process[key], key) for key in _SECTIONS if process.get(key) is not None}
    settings = {key: value for key, value in process.items() if key not in (*_SECTIONS, "datasets")}
    draft.carry(SECTIONS["process"], settings)
    carry_datasets(draft, datasets, str(process.get("trigger_word") or ""))
    carry_samples(draft, sections.pop("sample", {}), not is_off(sections.get("train", {}).get("disable_sampling")))
    if "network" not in sections:
        draft.set("network", ("train", "adapter", "type"), "full", "without it the model itself is trained")
    elif not sections["network"].keys() & {"alpha", "linear_alpha"}:
        sections["network"] = {**sections["network"], "linear_alpha": 1.0}  # as it is there
    for key, section in sections.items():
        draft.carry(SECTIONS[key], section, f"{key}.")
