"""Training options without an effect or that can't be combined are errors with a next step."""

from typing import Any

import pytest

from schemas.config.methods import CREPA, Loss, MaskedLoss, ScheduledSampling, Timesteps, Tread
from schemas.config.section import Section
from schemas.config.training import Adapter, Train

FSDP = {"strategy": "fsdp2"}
REFUSED: list[tuple[type[Section], dict[str, Any], str]] = [
    (Loss, {"huber_c": 0.2}, "option of type huber or smooth_l1, and type is mse"),
    (Loss, {"snr_gamma": 1.0}, "option of weighting min_snr"),
    (Loss, {"type": "huber", "huber_c": 2.0, "huber_schedule": "snr"}, "at most 1"),
    (Timesteps, {"mean": 0.5, "sampling": "uniform"}, "option of sampling logit_normal, and sampling is uniform"),
    (Timesteps, {"values": [0.5]}, "option of sampling list"),
    (Timesteps, {"sampling": "list"}, "at least one sigma"),
    (Timesteps, {"sampling": "list", "values": [0.5], "auto_shift": True}, "not shifted"),
    (Timesteps, {"sampling": "mode", "mode_scale": 1.8}, "less than or equal"),
    (CREPA, {"weight_end": 2.0, "schedule": "linear"}, "weight_end"),
    (CREPA, {"decay_steps": 5}, "schedule linear or cosine or polynomial, and schedule is constant; remove it"),
    (CREPA, {"power": 2.0, "schedule": "cosine"}, "schedule polynomial, and schedule is cosine; remove it"),
    (CREPA, {"threshold_mode": "recoverable"}, "no effect without similarity_threshold; set that, or remove this"),
    (CREPA, {"adjacent_distance": 0, "adjacent_tau": 2.0}, "no effect with adjacent_distance 0, .*raise that, or"),
    (ScheduledSampling, {"ramp_shape": "cosine", "start_step": 9}, "no effect without ramp_steps; set that, or remove"),
    (ScheduledSampling, {"prob_start": 0.1}, "no effect without start_step and ramp_steps, .*set one of them, or"),
    (ScheduledSampling, {"strategy": "biased_late", "max_step_offset": 1}, "no effect with max_step_offset 1, .*raise"),
    (MaskedLoss, {"unmasked_weight": 1.0, "normalize_area": True}, "no effect with unmasked_weight 1: .*lower that"),
    (MaskedLoss, {"unmasked_probability": 1.0, "prior_weight": 1.0}, "no effect with unmasked_probability 1, .*lower"),
    (Tread, {"routes": [{"selection_ratio": 1.0, "start_layer_idx": 0, "end_layer_idx": 1}]}, "less than 1"),
    (
        Tread,
        {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 3, "end_layer_idx": 1}]},
        "1 is before start",
    ),
    (Tread, {"routes": []}, "at least 1 item"),
    (Adapter, {"type": "full", "dora": True}, "it is an option of type lora, and type is full"),
    (Adapter, {"type": "full", "alpha": 8}, "it is an option of type lora or lokr, and type is full"),
    (Adapter, {"decompose_factor": 4}, "it is an option of type lokr"),
    (Adapter, {"init_weights": "pissa", "dora": True}, "which DoRA has no place for"),
    (Adapter, {"init_weights": "orthogonal", "rank": 3}, "orthogonal needs even ranks"),
    (Adapter, {"rank_pattern": {"(": 3}}, "is not a regular expression"),
    (Adapter, {"dora": True, "formats": ["diffusers", "comfyui"]}, "no place for DoRA's magnitudes"),
    (Adapter, {"init": "a", "rank_pattern": {"a": 2}, "init_weights": "pissa"}, "file; remove rank_pattern, init_w"),
    (Adapter, {"init": "a.safetensors", "type": "full"}, "only with type: lora or lokr"),
    (Train, {"offload": {"blocks": True}, "adapter": {"type": "full"}}, "adapter.type full trains all"),
    (Train, {"offload": {"blocks": True}, "gradient_checkpointing": False}, "set gradient_checkpointing to true"),
    (Train, {"gradient_checkpointing": False, "gradient_checkpointing_interval": 2}, "is for gradient_checkpointing"),
    (
        Train,
        {"offload": {"blocks": True}, "gradient_checkpointing_interval": 2},
        "checkpointing_interval to 1",
    ),
    (Train, {"offload": {"blocks": True, "to": "disk"}}, "trained ones would be lost; use host"),
    (Train, {"offload": {"streams": True}}, "streams copy blocks: set blocks to true"),
    (Train, {"offload": {"blocks_per_group": 2}}, "blocks_per_group: is of block offload"),
    (Train, {"base_precision": "nf4-bnb", "adapter": {"type": "full"}}, r"to lora \(LoRA\) or lokr \(LoKr\)"),
    (
        Train,
        {"base_precision": "int8-quanto", "adapter": {"dora": True}},
        "to int8-torchao or nf4-bnb, or adap",
    ),
    (Train, {"base_precision": "fp8-torchao", "adapter": {"init_weights": "pissa"}}, "could not hold the rest"),
    (Train, {"base_precision": "bf16", "adapter": {"type": "full"}}, "full set weight_precision to bfloat16"),
    (Train, {"parallel": FSDP, "offload": {"blocks": True}}, "use parallel.cpu_offload"),
    (Train, {"parallel": FSDP, "base_precision": "nf4-bnb", "adapter": {"dora": True}}, "peft sets base weights"),
    (Train, {"parallel": FSDP | {"gradient_compression": "bfloat16"}}, "it is an option of strategy ddp"),
    (Train, {"attention_backend": "sage"}, "sage: SageAttention's kernels have no backward pass"),
]


@pytest.mark.parametrize(("section", "options", "message"), REFUSED)
def test_options_that_do_not_go_together_are_refused(section: type[Section], options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        section.model_validate(options)
