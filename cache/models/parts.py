"""Checks by their small files that the parts of a checkpoint fit each other, before any of them is loaded. Imports no
torch."""

from collections.abc import Mapping
from typing import Any

from cache.models import weights
from cache.models.compatibility import (
    MODEL_HINT,
    CheckpointMismatch,
    check_autoencoder_config,
    check_class,
    check_index,
    check_task,
    check_transformer_config,
    find_json,
)
from cache.store.json_checks import printable
from schemas.catalog import FAMILIES
from schemas.config.encoding import Model
from schemas.config.pipeline import Config
from schemas.family import TEXT_PARTS

SCHEDULER_CONFIG = "scheduler_config.json"
#: Keys of a text encoder's config for its width and for its number of layers: of most models, of T5.
WIDTH_KEYS, LAYER_KEYS = ("hidden_size", "d_model"), ("num_hidden_layers", "num_layers")


def check_parts(config: Config, ask_hub: bool) -> None:
    """CheckpointMismatch if the parts of a checkpoint do not fit its family or each other, by their small files: those
    in its folder or, if ask_hub, those of its repository. Parts that are absent are not checked."""
    model, family = config.model, config.model.family_spec
    check_task(model)
    local = weights.local_folder(model.source) is not None
    if not local and not ask_hub:
        return
    if not local:
        index = find_json(model, "", weights.MODEL_INDEX, ask_hub)
        if index is None:
            return
        check_index(model, index)
    configs = {part: find_json(model, part, ask_hub=ask_hub) or {} for part in family.model_classes}
    for part, settings in configs.items():
        if settings:
            check_class(model, part, settings)
        if settings and part in family.components:
            check_transformer_config(model, part, settings)
    if configs["vae"]:
        check_autoencoder_config(model, configs["vae"])
    for part in family.components:
        _check_text_widths(model, part, configs)
    _check_text_layers(model, configs["text_encoder"])
    for part in family.tokenizers:
        _check_tokenizer(model, part, ask_hub)
    check_scheduler(config, ask_hub)


def _size_of_text_model(config: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, int]:
    """(key, value) of the first of `keys` in the config of a text model, or of the text model inside of another; the
    value 0 if there is none."""
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    return next(((key, config[key]) for key in keys if isinstance(config.get(key), int)), (keys[0], 0))


def _check_text_widths(model: Model, part: str, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """CheckpointMismatch if a transformer reads texts of another width than its text encoders make."""
    for tensor, read in model.family_spec.text_widths.items():
        encoder, wanted = TEXT_PARTS[tensor], configs[part].get(read)
        key, width = _size_of_text_model(configs.get(encoder, {}), WIDTH_KEYS)
        taken = len(model.template.layers) if tensor == "embeds" else 1
        if not width or not isinstance(wanted, int) or width * taken == wanted:
            continue
        joined = f", of {taken} layers {taken * width}" if taken > 1 else ""
        raise CheckpointMismatch(
            f"{model.source}: {encoder}/config.json has {key} = {width}{joined}, and {part}/config.json has {read} = "
            f"{wanted}: the transformer can't read the texts of this text encoder",
            f"take {encoder}/ and its tokenizer from the repository that {part}/ is from, such as "
            f"{model.flavour_spec.repo}, or {MODEL_HINT}",
        )


def _check_text_layers(model: Model, config: Mapping[str, Any]) -> None:
    """CheckpointMismatch if a text encoder has fewer layers than the template takes hidden states of."""
    needed = max(layer if layer >= 0 else -layer - 1 for layer in model.template.layers)
    key, layers = _size_of_text_model(config, LAYER_KEYS)
    if 0 < layers < needed:
        raise CheckpointMismatch(
            f"{model.source}: text_encoder/config.json has {key} = {layers}, and the template {model.template.name} "
            f"takes the hidden states {', '.join(map(str, model.template.layers))}: it needs {needed} layers or more",
            f"take text_encoder/ from the repository of the transformer, such as {model.flavour_spec.repo}, or "
            f"{MODEL_HINT}",
        )


def _check_tokenizer(model: Model, part: str, ask_hub: bool) -> None:
    """CheckpointMismatch if a tokenizer is of the class of another family. Unknown classes pass, since a tokenizer may
    be saved under a general one."""
    wanted = model.family_spec.tokenizers[part]
    settings = find_json(model, part, "tokenizer_config.json", ask_hub) or {}
    stated = str(settings.get("tokenizer_class")).removesuffix("Fast")
    if stated != wanted and any(stated in family.tokenizers.values() for family in FAMILIES.values()):
        raise CheckpointMismatch(
            f"{model.source}: {part} is a {stated}, and {model.family} has a {wanted}",
            f"take {part}/ from the repository that its text encoder is from, or {MODEL_HINT}",
        )


def check_scheduler(config: Config, ask_hub: bool = False) -> None:
    """CheckpointMismatch if the scheduler, with which validation prompts are denoised, is not one of flow matching."""
    model = config.model
    settings = find_json(model, "scheduler", SCHEDULER_CONFIG, ask_hub) if config.validation.prompts else None
    if settings is None:
        return
    name = str(settings.get("_class_name"))
    by_settings = settings.get("use_flow_sigmas") is True and settings.get("prediction_type") == "flow_prediction"
    if not by_settings and not name.startswith("FlowMatch"):
        raise CheckpointMismatch(
            f"{model.source}: scheduler/{SCHEDULER_CONFIG} is of {printable(name)}, and {model.family} is denoised by "
            "flow matching: a FlowMatch...Scheduler, or one with use_flow_sigmas: true and prediction_type: "
            "flow_prediction",
            f"take scheduler/ from the checkpoint's own repository, such as {model.flavour_spec.repo}, or remove "
            "validation.prompts",
        )
