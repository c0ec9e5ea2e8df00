"""Checks of training without torch: of the configuration, the checkpoint's small files, and an existing set.

`latentpress run` runs them before its first stage, each stage's dry run before its own work, and `train` before it
imports torch. `trainer/setup/checks.py` adds the checks that need torch.
"""

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from cache.models import compatibility, weights
from cache.models.places import is_local, read_part_config
from cache.runs.training_run import RunError
from cache.sets.set_lookup import open_configured_set
from cache.sets.trainset import SetNotFound, TrainSet
from cache.sets.window import cache_folder, cache_limit, needs_sections, open_window
from cache.shards.tensor_checks import kind_of
from cache.store.files import StoreError
from schemas.config.encoding import Model
from schemas.config.methods import Method, Regularization, method_option
from schemas.config.pipeline import Config
from schemas.config.training import Train


def check_before_stages(config: Config, warn: Callable[[str], object], is_run: bool = False) -> bool:
    """Run all checks of this file if `train` is one of the stages. Returns whether the model could be checked.

    is_run: whether training follows on this machine. If so, files of a repository are fetched, and a missing folder or
    set is an error; planning needs neither."""
    if "train" not in config.stage_order:
        return False
    check_prepared(config)
    check_settings(config)
    shape = check_model(config, warn, is_run)
    if config.train.set == "current":
        if is_run and "://" in config.root:
            cache_limit(config.train.local_cache, cache_folder(config.train.local_cache))
        return shape is not None
    try:
        with closing(open_configured_set(config, warn)) as data:
            check_methods(config.train, data)
            check_text_width(config.model, data, shape or {})
            if is_run:  # whether the window's shards fit the disk
                open_window(config.train, data, data.make_schedule(config.train), range(config.train.steps))
    except (SetNotFound, StoreError) as error:
        if is_run:
            raise
        warn(f"the training set is not checked before training: {error}")
    return shape is not None


def check_settings(config: Config) -> None:
    """Raise RunError for problems that the configuration alone reveals."""
    if train_precision(config.train, config.model) != "bfloat16" and config.train.weight_precision == "bfloat16":
        raise RunError(
            "train.weight_precision is bfloat16, but the transformer computes in float32",
            "Set train.precision to bfloat16, or train.weight_precision to float32.",
        )
    place = config.train.set if "/" in config.train.set else config.root
    if "://" in place and config.train.shuffle_shards is None:
        raise needs_sections(place)


def check_model(config: Config, warn: Callable[[str], object], is_run: bool = True) -> dict[str, Any] | None:
    """Check the small files of a checkpoint and return the transformer's config.json. Raises RunError or
    CheckpointMismatch. Returns None without reading a repository if `is_run` is false; warns and returns None if
    a repository can't be reached or, if `is_run` is false, if a folder's files can't be read."""
    model, part = config.model, config.part
    try:
        compatibility.check_task(model)
        guidance = config.train.guidance
        compatibility.check_distilled(model, warn, is_guided=guidance is not None and guidance.scale > 1)
        if not (is_run or is_local(model, part)):
            return None
        # One small file: if the hub can't be reached, no further files are requested.
        compatibility.check_transformer(model)
        shape = read_part_config(model, part)
        count = model.family_spec.count_layers(shape)
        for name, method in config.train.used_methods.items():
            for key, problem in method.layer_problems(count) if count is not None else ():  # blocks that do not exist
                option = ".".join(map(str, (method_option(name), *key)))
                raise RunError(f"{option}: {problem}", f"{model.source} has {count} blocks; correct {option}.")
        compatibility.check_parts(config, ask_hub=is_run)
        return shape
    except weights.WeightsError as error:
        if isinstance(error, compatibility.CheckpointMismatch) or (is_run and not isinstance(error, weights.HubError)):
            raise
        warn(f"the model is not checked before training: {error}")
        return None


def check_prepared(config: Config) -> None:
    """Raise RunError if a method needs tensors that the configuration does not prepare. A set in `train.set`
    has its own tensors."""
    if config.train.set != "current":
        return
    active = [dataset for dataset in config.datasets if not dataset.disabled]
    prepared = {
        "mask": any(dataset.mask_data or dataset.mask_column or dataset.makes_masks for dataset in active),
        "vision": bool(config.vision.model),
        "regularization": any(dataset.is_regularization_data for dataset in active),
    }
    for name, method in config.train.used_methods.items():
        for tensor, advice in method.needs.items():
            if not prepared.get(tensor, True):
                raise RunError(f"{method_option(name)} needs {tensor}, which no dataset has", advice)


def used_methods(settings: Train, data: TrainSet) -> dict[str, Method]:
    """Return the active sections of methods: the configured sections and, if the set has regularization data, the
    section for this data."""
    configured = settings.used_methods
    return {"regularization": Regularization(), **configured} if data.regularization else configured


def check_methods(settings: Train, data: TrainSet) -> None:
    """Raise RunError if a method lacks its data or can't be combined with another setting."""
    for name, method in used_methods(settings, data).items():
        for tensor, advice in method.needs.items():
            if not data.has_tensor(tensor):
                raise RunError(f"{method_option(name)} needs {tensor}, which no sample of set {data.id} has", advice)
        for reason in method.find_conflicts(settings):
            problem, _, step = reason.partition("; ")
            raise RunError(f"{method_option(name)}: {problem}", f"{step[:1].upper()}{step[1:]}.")


def check_text_width(model: Model, data: TrainSet, shape: Mapping[str, Any]) -> None:
    """Raise RunError if a transformer with this config.json reads texts of a different width than the set's first text.
    For a set whose shards are encoded during training, the encoding stages check the width."""
    names = [name for name in data.part_locations(0) if kind_of(name) == "text"][:1]
    family = model.family_spec
    for tensor, expected in family.read_text_widths(shape).items():
        for row in data.part_rows(0, names).values():
            width = row.tensors[tensor].shape[-1] if tensor in row.tensors and row.tensors[tensor].shape else None
            if width not in (None, expected):
                keys = " * ".join(family.text_widths[tensor])
                raise RunError(
                    f"the texts of set {data.id} have width {width} ({tensor}), but the transformer of {model.source} "
                    f"reads width {expected} ({keys}): the set is for another model",
                    "Correct model.path or model.flavour, or set train.set to a set for this model.",
                )


def train_precision(settings: Train, model: Model) -> str:
    """Return the transformer's compute dtype: bfloat16 if the base weights are bfloat16, else train.precision, else
    model.precision. Raises RunError for float16."""
    if settings.base_precision == "bf16":
        return "bfloat16"
    name = settings.precision or model.precision
    if name == "float16":
        raise RunError(
            "training does not support model.precision: float16, which needs loss scaling",
            "Set train.precision to bfloat16 or float32.",
        )
    return name


def require_trackers(settings: Train) -> None:
    """Raise RunError if wandb is enabled but is not installed or does not have an account to write to."""
    if "wandb" not in settings.trackers:
        return
    try:
        import wandb
    except ModuleNotFoundError as error:
        message = "train.trackers has wandb, which is not installed"
        raise RunError(message, "Run `pip install -e '.[wandb]'`, or remove wandb from train.trackers.") from error
    if wandb.setup().settings.mode not in ("offline", "disabled"):
        try:
            wandb.login()
        except wandb.errors.Error as error:
            raise RunError(
                f"Weights & Biases login failed: {error}",
                "Run `wandb login`, set WANDB_MODE=offline (`wandb sync` uploads the run later), or remove wandb from "
                "train.trackers.",
            ) from error
