"""Checks of training that need torch but no weights in memory: checks on the device, and on the model without weights.

`latentpress run` makes these checks before its first stage, and `train`, also with --dry-run, before it loads the
transformer. They read the headers of local weights, and adapter files. Only `train` itself detects:

- processes of a run that do not find each other, have different configurations, or do not share a folder: at the checks
  only one process exists;
- problems in the weights of a repository, which only `train` fetches; weights that are damaged, or differ from the
  weights that the checkpoint was trained on, since that requires reading all files;
- problems with samples and shards that a stage of the same `run` makes: whether the run may continue from the
  checkpoint with them, and whether two sections of a remote set fit `train.local_cache.max_gb`;
- too little memory (`--dry-run` predicts the memory), and failures of the kernels that torch.compile makes in the first
  step.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from cache.models.places import locate
from cache.models.weights import check_stored, local_folder
from cache.runs.training_run import RunError
from cache.sets.training_checks import used_methods
from cache.sets.trainset import TrainSet
from schemas.config.encoding import Model
from schemas.config.pipeline import Config
from schemas.config.training import Train
from schemas.devices import device_name
from schemas.family import Expert
from schemas.identity import derive_seed
from schemas.libraries import QUANTIZATION_LIBRARIES, find_library, is_installed
from trainer import flow
from trainer.adapters.header import check_family, read_initial
from trainer.families.base import ModelFamily, on_meta
from trainer.methods import make_methods
from trainer.methods.base import Method
from trainer.run import checkpoint
from trainer.run.run_state import train_shift
from trainer.setup.adapters import (
    add_frozen,
    is_convolution,
    list_adapted_modules,
    make_trainable,
    trainable_parameters,
)
from trainer.setup.blocks import check_compile, check_offload
from trainer.setup.load import choose_dtypes, empty_transformer, explain_checkpoint_errors
from trainer.setup.optimizers import check_optimizer, divide_weights
from trainer.setup.quantize import NF4_COLUMN_MULTIPLE, base_matrices, can_quantize
from trainer.validation import load_scheduler

FP8_CAPABILITY = (8, 9)  # Ada and Hopper
PROBED_TOKENS = 1024  # image tokens for which a scheduler is tried


def check_training(
    config: Config,
    family: ModelFamily,
    device: torch.device,
    warn: Callable[[str], object],
    buckets: Iterable[str],
    data: TrainSet | None = None,
    ranks: int = 1,
    sharded: bool = False,
    is_stored: bool = True,
) -> dict[str, Method]:
    """Make every check of this file; returns the methods after their setup. AdapterError if an adapter, its targets or
    its patterns are invalid, RunError for any other problem. `trainer/attention.py` checks attention backends.

    warn: function that shows the warning that the disk is too small for checkpoints. buckets: names of the set's
    buckets or, before a set exists, of the buckets that it may have. data: the training set; None before it exists.
    sharded: see `check_optimizer`. is_stored: whether the checkpoint's weights are loaded, and so checked.
    """
    check_options(config, device, buckets, ranks, sharded)
    with explain_checkpoint_errors(config.model.source):
        model = empty_transformer(config.model, config.part, choose_dtypes(config.train, config.model)[0])
        family.check(config.model.source, model.config)
        if is_stored and (folder := local_folder(locate(config.model, [config.part]).source)):
            weights = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
            check_stored(folder / config.part, weights, type(model)._keys_to_ignore_on_load_unexpected or ())
    sections = config.train.used_methods if data is None else used_methods(config.train, data)
    methods = make_methods(sections)
    # Without a set, the sizes of the methods' own weights are not known, and 1 takes their place.
    shapes: dict[str, tuple[int, ...]] = {name: (1,) for section in sections.values() for name in section.needs}
    if data is not None and methods:
        shapes = {name: tuple(array.shape) for name, array in data.sample(0).tensors.items()}
    for name, method in methods.items():
        torch.manual_seed(derive_seed(f"{config.train.seed}/{name}", "method"))
        method.setup(model, family, shapes)
    method_modules = {name: module for name, method in methods.items() if (module := method.modules()) is not None}
    added = dict(torch.nn.ModuleDict(method_modules).named_parameters(prefix="methods"))
    trainable = check_trained(config, family, model) | added
    divide_weights(trainable, config.train.optimizer)
    if shortage := checkpoint.find_shortage(config.run_folder, trainable):
        warn(shortage)
    if data.meta.validation if data is not None else config.validation.prompts:
        check_scheduler(config.model, config.validation.shift, family)
    return methods


def check_options(
    config: Config, device: torch.device, buckets: Iterable[str], ranks: int = 1, sharded: bool = False
) -> None:
    """Make the checks that do not need a model; see `check_training`."""
    settings = config.train
    check_offload(settings.offload, settings.parallel, ranks)
    check_compile(settings)
    check_optimizer(settings, device, sharded)
    if config.expert is not None:
        for bucket in buckets:
            check_noise_levels(config.expert, settings, config.model, bucket)
    if initial := read_initial(settings.adapter):
        check_family(initial, config.model.family)
    if settings.quantized:
        check_precision(settings.base_precision, device)


def check_precision(name: str, device: torch.device) -> None:
    """RunError if the library that a base_precision needs is not installed, or the card does not support it."""
    library = QUANTIZATION_LIBRARIES.get(name)
    if library and not is_installed(library):
        step = f"Install it: {find_library(library).command}"
        raise RunError(f"train.base_precision: {name} needs {library}", step)
    if name != "fp8-torchao" or device.type == "cpu":
        return
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is None or capability < FP8_CAPABILITY:
        actual = f"has {'.'.join(map(str, capability))}" if capability else f"is a device of type {device.type}"
        raise RunError(
            "train.base_precision: fp8-torchao needs a card with float8 (CUDA's compute capability 8.9: Ada, "
            f"Hopper or later), and {device_name(device)} {actual}",
            "Set train.base_precision to int8-torchao, int8-quanto or nf4-bnb.",
        )


def check_trained(config: Config, family: ModelFamily, model: Any) -> dict[str, torch.nn.Parameter]:
    """Add the frozen adapters and the trained adapter to a model on the meta device, as `prepare_model` does for the
    loaded model; returns the trained parameters. RunError for a base_precision or init_weights that the model does not
    support, AdapterError for an adapter that does not fit the model."""
    settings, adapter = config.train, config.train.adapter
    name, init = settings.base_precision, adapter.init_weights
    matrices = base_matrices(model, family).values() if settings.quantized else ()
    if matrices and not any(can_quantize(part, name) for part in matrices):
        shapes = sorted({f"{part.out_features}x{part.in_features}" for part in matrices})
        raise RunError(
            f"train.base_precision: {name} can't quantize {config.model.source}: it needs matrices whose input sides "
            f"are multiples of {NF4_COLUMN_MULTIPLE}; the matrices are {', '.join(shapes)}",
            "Set train.base_precision to int8-torchao or int8-quanto.",
        )
    with explain_checkpoint_errors(config.model.source), on_meta():
        dtype, autocast = choose_dtypes(config.train, config.model)
        add_frozen(model, config, autocast or dtype)
        # Other initializations would be computed from weights that are not in memory.
        make_trainable(
            model, family, config.model.task, adapter.changed(init_weights="default"), settings.weight_precision
        )
    adapted = {path: model.get_submodule(path).get_base_layer() for path in list_adapted_modules(model)}
    convolutions = [path for path, part in adapted.items() if is_convolution(part)]
    if init in ("orthogonal", "pissa", "olora") and convolutions:
        raise RunError(
            f"train.adapter.init_weights: {init} only supports linear layers, and {len(convolutions)} targets are "
            f"convolutions: {', '.join(convolutions[:3])} ...",
            "Set train.adapter.init_weights to default or gaussian, or train.adapter.targets to linear layers only.",
        )
    return trainable_parameters(model)


def check_scheduler(model: Model, shift: float | None, family: ModelFamily) -> None:
    """RunError if the checkpoint's scheduler, which denoises validation prompts, is missing, or does not support the
    family's noise levels or validation.shift."""
    try:
        changes = model.flavour_spec.scheduler
        scheduler = load_scheduler(model.source, model.revision, shift, model.family_spec.modular, changes)
        family.set_timesteps(scheduler, model.family_spec.steps, PROBED_TOKENS, torch.device("cpu"))
    except Exception as error:  # a scheduler of another family may raise any error
        raise RunError(
            f"{model.source}/scheduler can't denoise validation prompts as {model.family}'s pipeline does: "
            f"{str(error) or type(error).__name__}",
            f"Take scheduler/ from the checkpoint's own repository, such as {model.flavour_spec.repo}, or correct "
            "validation.shift.",
        ) from error


def check_noise_levels(expert: Expert, settings: Train, model: Model, bucket: str) -> None:
    """RunError if hardly any of the configured noise levels is in the range of the trained expert."""
    shift = train_shift(settings, model, bucket)
    first, last = flow.draws_within(settings.timesteps, shift, expert.range)
    if abs(last - first) < flow.MIN_SHARE:
        raise RunError(
            f"train.timesteps: for {bucket}, almost no noise levels are in the range {expert.lowest:g} to "
            f"{expert.highest:g} of the expert {settings.experts}",
            "Choose another train.timesteps.sampling, or correct its options or train.shift.",
        )
