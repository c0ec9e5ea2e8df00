"""Training options without an effect or that can't be combined are errors with a next step."""

from typing import Any

import pytest
from pydantic import ValidationError

from schemas.config.loading import dotted_path, explain_error
from schemas.config.methods import CREPA, Loss, MaskedLoss, ScheduledSampling, Timesteps, Tread
from schemas.config.section import Section
from schemas.config.training import Adapter, Train

FSDP = {"strategy": "fsdp2"}
FULL = {"type": "full"}
ROUTE = {"selection_ratio": 0.5, "start_layer_idx": 3, "end_layer_idx": 1}
#: Section, values, refused option, and the words that its message must contain: options and values.
REFUSED: list[tuple[type[Section], dict[str, Any], str, tuple[str, ...]]] = [
    (Loss, {"huber_c": 0.2}, "huber_c", ("type", "huber", "smooth_l1", "mse")),
    (Loss, {"snr_gamma": 1.0}, "snr_gamma", ("weighting", "min_snr")),
    (Loss, {"type": "huber", "huber_c": 2.0, "huber_schedule": "snr"}, "huber_c", ("huber_schedule", "1")),
    (Timesteps, {"mean": 0.5, "sampling": "uniform"}, "mean", ("sampling", "logit_normal", "uniform")),
    (Timesteps, {"values": [0.5]}, "values", ("sampling", "list")),
    (Timesteps, {"sampling": "list"}, "values", ("sampling", "list")),
    (Timesteps, {"sampling": "list", "values": [0.5], "auto_shift": True}, "auto_shift", ("sampling", "list")),
    (Timesteps, {"sampling": "mode", "mode_scale": 1.8}, "mode_scale", ("1.8", "1.75")),
    (CREPA, {"weight_end": 2.0, "schedule": "linear"}, "weight_end", ("weight (0.5)",)),
    (CREPA, {"decay_steps": 5}, "decay_steps", ("schedule", "linear", "cosine", "polynomial", "constant")),
    (CREPA, {"power": 2.0, "schedule": "cosine"}, "power", ("schedule", "polynomial", "cosine")),
    (CREPA, {"threshold_mode": "recoverable"}, "threshold_mode", ("similarity_threshold",)),
    (CREPA, {"adjacent_distance": 0, "adjacent_tau": 2.0}, "adjacent_tau", ("adjacent_distance",)),
    (ScheduledSampling, {"ramp_shape": "cosine", "start_step": 9}, "ramp_shape", ("ramp_steps",)),
    (ScheduledSampling, {"prob_start": 0.1}, "prob_start", ("start_step", "ramp_steps")),
    (ScheduledSampling, {"strategy": "biased_late", "max_step_offset": 1}, "strategy", ("max_step_offset",)),
    (MaskedLoss, {"unmasked_weight": 1.0, "normalize_area": True}, "normalize_area", ("unmasked_weight",)),
    (MaskedLoss, {"unmasked_probability": 1.0, "prior_weight": 1.0}, "prior_weight", ("unmasked_probability",)),
    (Tread, {"routes": [ROUTE | {"selection_ratio": 1.0, "end_layer_idx": 3}]}, "routes.0.selection_ratio", ("1",)),
    (Tread, {"routes": [ROUTE]}, "routes.0.end_layer_idx", ("1", "start_layer_idx (3)")),
    (Tread, {"routes": []}, "routes", ()),
    (Adapter, {"type": "full", "dora": True}, "dora", ("type", "lora", "full")),
    (Adapter, {"type": "full", "alpha": 8}, "alpha", ("type", "lora", "lokr", "full")),
    (Adapter, {"decompose_factor": 4}, "decompose_factor", ("type", "lokr")),
    (Adapter, {"init_weights": "pissa", "dora": True}, "init_weights", ("pissa", "gaussian", "dora")),
    (Adapter, {"init_weights": "orthogonal", "rank": 3}, "init_weights", ("rank", "rank_pattern")),
    (Adapter, {"rank_pattern": {"(": 3}}, "rank_pattern", ("'('",)),
    (
        Adapter,
        {"init_from": "a", "rank_pattern": {"a": 2}, "init_weights": "pissa"},
        "init_from",
        ("rank_pattern", "init_weights"),
    ),
    (Adapter, {"init_from": "a.safetensors", "type": "full"}, "init_from", ("type", "lora", "lokr")),
    (Train, {"offload": {"blocks": True}, "adapter": FULL}, "offload.blocks", ("adapter.type", "offload.activations")),
    (Train, {"offload": {"blocks": True}, "gradient_checkpointing": False}, "offload.blocks", ("checkpointing: true",)),
    (
        Train,
        {"gradient_checkpointing": False, "gradient_checkpointing_interval": 2},
        "gradient_checkpointing_interval",
        ("gradient_checkpointing",),
    ),
    (Train, {"offload": {"blocks": True}, "gradient_checkpointing_interval": 2}, "offload.blocks", ("interval: 1",)),
    (Train, {"offload": {"blocks": True, "to": "disk"}}, "offload.to", ("use host",)),
    (Train, {"offload": {"streams": True}}, "offload.streams", ("blocks",)),
    (Train, {"offload": {"blocks_per_group": 2}}, "offload.blocks_per_group", ("blocks",)),
    (Train, {"base_precision": "nf4-bnb", "adapter": FULL}, "base_precision", ("lora", "lokr", "no_change")),
    (
        Train,
        {"base_precision": "int8-quanto", "adapter": {"dora": True}},
        "base_precision",
        ("adapter.dora", "int8-torchao", "nf4-bnb"),
    ),
    (
        Train,
        {"base_precision": "fp8-torchao", "adapter": {"init_weights": "pissa"}},
        "base_precision",
        ("adapter.init_weights: pissa", "no_change", "bf16"),
    ),
    (Train, {"base_precision": "bf16", "adapter": FULL}, "base_precision", ("weight_precision", "bfloat16")),
    (Train, {"parallel": FSDP, "offload": {"blocks": True}}, "offload.blocks", ("fsdp2", "parallel.cpu_offload")),
    (
        Train,
        {"parallel": FSDP, "base_precision": "nf4-bnb", "adapter": {"dora": True}},
        "base_precision",
        ("adapter.dora", "fsdp2", "int8-torchao"),
    ),
    (
        Train,
        {"parallel": FSDP | {"gradient_compression": "bfloat16"}},
        "parallel.gradient_compression",
        ("strategy", "ddp"),
    ),
    (Train, {"attention": "sage"}, "attention", ("sage", "validation.attention")),
]


@pytest.mark.parametrize(("section", "values", "option", "words"), REFUSED)
def test_inconsistent_options_are_refused(section: type[Section], values: dict, option: str, words: tuple) -> None:
    with pytest.raises(ValidationError) as caught:
        section.model_validate(values)
    problems = dict(problem for error in caught.value.errors() for problem in explain_error(error))
    message = {dotted_path(path): text for path, text in problems.items()}[option]
    assert all(word in message for word in words)
