"""Arguments that kohya's two projects, musubi-tuner and sd-scripts, have in common, and their files of prompts, which
have a prompt a line with options behind it."""

import json
import re
from collections.abc import Mapping
from typing import Any

from schemas.foreign.draft import (
    SECRET_ADVICE,
    Draft,
    Files,
    NotNeeded,
    Refused,
    Row,
    Several,
    dropped,
    is_off,
    refused,
    secret,
)
from schemas.foreign.optimizers import arguments, cycles, optimizer, power, schedule, warmup
from schemas.foreign.values import (
    NOTHING,
    above_zero,
    boolean,
    epochs,
    flag,
    if_true,
    number,
    one_of,
    only_with,
    pairs,
    precision,
    run_name,
    shown,
    text,
    unless,
    whole,
)
from schemas.text_format import split_lines

#: What both mean without these keys.
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
