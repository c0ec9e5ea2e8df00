"""SimpleTuner: config.json, .toml or .env, multidatabackend.json, prompt library and lycoris_config.json."""

from collections.abc import Mapping
from typing import Any

from schemas.foreign.draft import Draft, Files, NotNeeded, Row, Section, dropped, is_off, refused
from schemas.foreign.simpletuner_arguments import ADAPTER, TRAINING
from schemas.foreign.simpletuner_data import BACKEND_ARGUMENTS, carry_datasets
from schemas.foreign.simpletuner_data import SECTIONS as DATA_SECTIONS
from schemas.foreign.simpletuner_models import MODEL
from schemas.foreign.simpletuner_more import ENCODING, METHODS, NOT_NEEDED, SHARED, VALIDATION
from schemas.foreign.values import NAME_CHARACTERS, adapter_rank, boolean, number, one_of, whole

NAME = "SimpleTuner"
WHOLE = 1000  # a LoKr's dimension above which its matrices are whole, in all models here
#: What it means without these keys, where ours differ.
DEFAULTS = {
    "gradient_checkpointing": False,
    "caption_dropout_probability": 0.0,
    "lr_warmup_steps": 0,
    "max_grad_norm": 2.0,
}
ARGUMENTS = {
    **MODEL, **ADAPTER, **TRAINING, **METHODS, **VALIDATION, **SHARED, **ENCODING, **NOT_NEEDED,
    **dropped("the default of each dataset, which has it now", *BACKEND_ARGUMENTS),
}  # fmt: skip


def _alpha(value: Any, draft: Draft) -> float:
    if draft.given.get("full_matrix") or number(draft.given.get("linear_dim", 0)) >= WHOLE:
        raise NotNeeded("both matrices are whole, where LyCORIS ignores it")
    return number(value)


LYCORIS = {
    "algo": Row("train.adapter.type", one_of({"lokr": "lokr", "lora": "lora", "locon": "lora"},
                                             "train.adapter.type takes lora, lokr, full")),
    "linear_dim": Row("train.adapter.rank", adapter_rank),
    "linear_alpha": Row("train.adapter.alpha", _alpha),
    "factor": Row("train.adapter.decompose_factor", whole),
    "decompose_both": Row("train.adapter.decompose_both", boolean),
    "multiplier": Row("train.adapter.alpha", one_of({"1": None, "1.0": None}, "the strength is alpha over rank")),
    **dropped("whole matrices: a rank above their sides", "full_matrix"),
    **dropped("it changes no result", "bypass_mode", "use_tucker", "rs_lora"),
    **refused("train.adapter.targets takes regular expressions of module paths; without it, the family's",
              "apply_preset"),
    **refused("a LoKr has no dropout; train.adapter.dropout is of a LoRA", "dropout", "rank_dropout", "module_dropout"),
}  # fmt: skip
SECTIONS: Mapping[str, Section] = {
    "arguments": Section(
        "config.json",
        ARGUMENTS,
        DEFAULTS,
        first=("train_batch_size", "gradient_accumulation_steps", "max_train_steps", "lr_scheduler", "model_family"),
    ),
    **DATA_SECTIONS,
    "lycoris": Section("lycoris_config.json", LYCORIS),
}
#: Variables of config.env whose names are others than the arguments' in capitals.
VARIABLES = {
    "resume_checkpoint": "resume_from_checkpoint", "dataloader_config": "data_backend_config", "training_seed": "seed",
    "minimum_resolution": "minimum_image_size", "push_checkpoints": "push_checkpoints_to_hub",
    "max_num_steps": "max_train_steps", "num_epochs": "num_train_epochs",
    "checkpointing_limit": "checkpoints_total_limit",
    "checkpointing_steps": "checkpoint_step_interval", "hub_model_name": "hub_model_id",
    "model_name": "pretrained_model_name_or_path", "use_gradient_checkpointing": "gradient_checkpointing",
    "lr_schedule": "lr_scheduler", "training_num_processes": "num_processes", "training_num_machines": "num_machines",
    "validation_steps": "validation_step_interval", "training_dynamo_backend": "dynamo_backend",
    "accelerate_config_path": "accelerate_config",
}  # fmt: skip


def claims(content: Any) -> str:
    """The role of a file of this trainer, "" of another's: arguments or datasets."""
    if isinstance(content, list):
        keys = {key for item in content if isinstance(item, dict) for key in item}
        return "datasets" if "id" in keys and keys & {"instance_data_dir", "dataset_type", "type"} else ""
    if not isinstance(content, dict):
        return ""
    keys = {_plain(key) for key in content}
    return "arguments" if keys & {"data_backend_config", "model_family", "dataloader_config"} else ""


def _plain(key: Any) -> str:
    name = str(key).lstrip("-").lower().replace("-", "_")
    return VARIABLES.get(name, name)


def carry(draft: Draft, roles: Mapping[str, Any], files: Files) -> None:
    """Carry over a configuration. roles: the files given, by `claims`."""
    given = {_plain(key): value for key, value in draft.section(roles.get("arguments"), "arguments").items()}
    backends = roles.get("datasets") or _read(draft, given, files, "data_backend_config")
    common = {key: given[key] for key in BACKEND_ARGUMENTS if key in given and not is_off(given[key])}
    carry_datasets(draft, draft.sections(backends, "datasets"), common)
    draft.samples, draft.uncounted = files.count_media(draft.values.get("datasets", []))
    if library := draft.section(_read(draft, given, files, "user_prompt_library"), "user_prompt_library"):
        prompts: dict[str, Any] = {}
        for number_, (name, item) in enumerate(library.items(), 1):
            made = NAME_CHARACTERS.sub("-", name).strip("-._")[:90] or f"prompt-{number_}"
            prompts[made if made not in prompts else f"{made}-{number_}"] = item
        draft.put(("validation", "prompts"), [_library_prompt(name, item, given) for name, item in prompts.items()])
    draft.carry(SECTIONS["arguments"], given)
    if given.get("lora_type") == "lycoris" and (lycoris := _read(draft, given, files, "lycoris_config")):
        draft.carry(SECTIONS["lycoris"], draft.section(lycoris, "lycoris_config"), "lycoris_config: ")
    if not is_off(given.get("validation_disable")) and draft.get("validation.prompts"):
        draft.values["validation"].pop("prompts")


def _library_prompt(name: str, item: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """A prompt of the library: its text, or a section with it."""
    words = item.get("prompt", "") if isinstance(item, dict) else item
    negative = given.get("validation_negative_prompt")
    prompt = {"name": name, "prompt": str(words)}
    return {**prompt, "negative_prompt": str(negative)} if negative else prompt


def _read(draft: Draft, given: Mapping[str, Any], files: Files, key: str) -> Any:
    """The content of the file that an argument names."""
    name = given.get(key)
    if isinstance(name, dict | list):
        return name
    if is_off(name):
        return None
    content = files.read(str(name))
    if not isinstance(content, dict | list):
        draft.say(f"{key} (its file)", "refused", f"{name} is not found; name it as another file of the command")
        return None
    return content
