"""Checks before weights are loaded, which refuse settings that the model or the device can't have."""

import torch

from cache.order.schedule import BatchSchedule
from cache.runs.training_checks import RunError
from cache.sets.trainset import TrainSet
from schemas.config.pipeline import Config
from schemas.devices import device_name
from trainer import flow
from trainer.adapters.header import read_assistant, read_initial
from trainer.families.base import ModelFamily
from trainer.run.run_state import train_shift
from trainer.setup.adapters import choose_scales, choose_targets, is_convolution
from trainer.setup.attach import fit_initial, match_modules, unfreeze
from trainer.setup.blocks import check_compile, check_offload
from trainer.setup.load import empty_transformer, explain_checkpoint_errors
from trainer.setup.optimizers import check_optimizer
from trainer.setup.quantize import NF4_COLUMN_MULTIPLE, base_matrices, can_quantize
from trainer.validation import load_scheduler

FP8_CAPABILITY = (8, 9)  # Ada and Hopper
PROBED_TOKENS = 1024  # of an image for which a scheduler is tried


def check_start(
    config: Config, family: ModelFamily, device: torch.device, ranks: int = 1, sharded: bool = False
) -> None:
    """Every check that needs torch, and neither weights nor a set, except for attention backends. sharded: see
    `check_optimizer`."""
    check_offload(config.train.offload, ranks)
    check_compile(config.train)
    check_optimizer(config, device, sharded)
    check_setup(config, family, device)


def check_setup(config: Config, family: ModelFamily, device: torch.device) -> None:
    """RunError for a base_precision or init_weights that model or device can't have; AdapterError for targets and
    patterns that match nothing, and an initial adapter of another model."""
    name, adapter = config.train.base_precision, config.train.adapter
    init, patterns = adapter.init_weights, adapter.targets or adapter.rank_pattern or adapter.alpha_pattern
    file, assistant = read_initial(adapter), read_assistant(config.model)
    if name == "fp8-torchao" and device.type != "cpu":
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        if capability is None or capability < FP8_CAPABILITY:
            have = f"has {'.'.join(map(str, capability))}" if capability else f"is a device of type {device.type}"
            raise RunError(
                "train.base_precision: fp8-torchao needs a card with float8 (CUDA's compute capability 8.9: Ada, "
                f"Hopper or later), and {device_name(device)} {have}",
                "Set train.base_precision to int8-torchao, int8-quanto or nf4-bnb.",
            )
    special = init in ("orthogonal", "pissa", "olora")
    if not (config.train.quantized or special or patterns or file or assistant):
        return
    with explain_checkpoint_errors(config):
        model = empty_transformer(config)
        if assistant:
            match_modules(model, assistant)
        if adapter.type == "full":
            return unfreeze(model, adapter.targets, family)
        if file:
            fit_initial(model, family, file, adapter)
        targets = choose_targets(model, adapter.targets or [family.LORA_TARGETS], family.without_gradient(model))
        choose_scales(targets, adapter.rank, adapter.alpha, adapter.rank_pattern, adapter.alpha_pattern)
    if config.train.quantized and not any(can_quantize(part, name) for part in base_matrices(model, family).values()):
        shapes = sorted({f"{part.out_features}x{part.in_features}" for part in base_matrices(model, family).values()})
        raise RunError(
            f"train.base_precision: {name} can quantize no matrix of {config.model.source}: it needs input sides in "
            f"multiples of {NF4_COLUMN_MULTIPLE}, and they are {', '.join(shapes)}",
            "Set train.base_precision to int8-torchao or int8-quanto.",
        )
    convolutions = [target for target in targets if is_convolution(model.get_submodule(target))]
    if special and convolutions:
        raise RunError(
            f"train.adapter.init_weights: {init} is for linear layers, and {len(convolutions)} of the targets are "
            f"convolutions: {', '.join(convolutions[:3])} ...",
            "Set train.adapter.init_weights to default or gaussian, or train.adapter.targets to linear layers only.",
        )


def check_scheduler(config: Config, family: ModelFamily, data: TrainSet) -> None:
    """RunError if the checkpoint's scheduler, by which validation prompts are denoised, is missing, or can't have the
    family's noise levels or validation.shift."""
    if not data.meta["validation"]:
        return
    model, steps = config.model, config.model.family_spec.steps
    try:
        scheduler = load_scheduler(model.source, model.revision, config.validation.shift)
        family.set_timesteps(scheduler, steps, PROBED_TOKENS, torch.device("cpu"))
    except Exception as error:  # whatever a scheduler of another family raises
        raise RunError(
            f"{model.source}/scheduler can't denoise validation prompts as {model.family}'s pipeline does: "
            f"{str(error) or type(error).__name__}",
            f"Take scheduler/ from the checkpoint's own repository, such as {model.flavour_spec.repo}, or correct "
            "validation.shift.",
        ) from error


def check_noise_levels(config: Config, schedule: BatchSchedule) -> None:
    """RunError where hardly any of the configured noise levels is one of the expert that is trained."""
    expert, settings = config.expert, config.train.timesteps
    if expert is None:
        return
    for bucket in schedule.buckets:
        first, last = flow.draws_within(settings, train_shift(config, bucket.name), expert.range)
        if abs(last - first) < flow.LEAST_SHARE:
            raise RunError(
                f"train.timesteps: almost none of its noise levels is in {expert.lowest:g} to {expert.highest:g}, with "
                f"which the expert {config.train.experts} is trained",
                "Choose another train.timesteps.sampling, or correct its options or train.shift.",
            )
