"""Checks of training that need neither weights nor a set nor torch. They are made by `run` before its first stage, by
`train`, and by the dry run of each stage before `train`. `trainer/checks.py` adds the checks that need torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cache.models import compatibility, weights
from schemas.config.pipeline import Config
from schemas.config.training import Train
from schemas.errors import USAGE, LatentpressError


class RunError(LatentpressError):
    """Training can't be started with these options or this configuration."""

    exit_code = USAGE


def needs_sections(place: str) -> RunError:
    """The error of training on a set of an object store in an order that needs shards from everywhere."""
    return RunError(
        f"{place} is on an object store, and train.shuffle_shards is not set: each step would need shards from "
        "everywhere",
        "Set train.shuffle_shards, for example to 100: twice as many shards have to fit in train.local_cache.max_gb. A "
        "value as large as the number of shards mixes the whole set.",
    )


class OutputLocked(LatentpressError):
    """Another trainer is running in this folder."""

    def __init__(self, folder: Path) -> None:
        step = "Wait until it has ended, stop it, or choose another train.run."
        super().__init__(f"another trainer is at work in {folder}", step)


def check_before_stages(config: Config, warn: Callable[[str], object], is_run: bool = False) -> None:
    """Every check of this file that needs no set, if `train` is one of the stages. is_run: whether training follows, so
    that a repository is asked, and a folder has to be there and sound. Planning alone needs neither."""
    if "train" not in config.stage_order:
        return
    check_prepared(config)
    try:
        check_settings(config, warn)
        is_folder = weights.local_folder(config.model.source) is not None
    except weights.CheckpointNotFound as error:
        if is_run:
            raise
        warn(f"the model is not checked before training: {error}")
        return
    if is_folder and is_run:
        check_model(config)
        compatibility.check_parts(config, ask_hub=False)
    elif is_folder or is_run:
        check_readable_model(config, warn)


def check_settings(config: Config, warn: Callable[[str], object]) -> None:
    """RunError or CheckpointMismatch for what training refuses by the configuration alone, and model_index.json."""
    if train_precision(config) != "bfloat16" and config.train.weight_precision == "bfloat16":
        raise RunError(
            "train.weight_precision is bfloat16 and the transformer computes in float32",
            "Set train.precision to bfloat16, or train.weight_precision to float32.",
        )
    place = config.train.set if "/" in config.train.set else config.root
    if "://" in place and config.train.shuffle_shards is None:
        raise needs_sections(place)
    compatibility.check_task(config.model)
    compatibility.check_distilled(config.model, warn)


def check_readable_model(config: Config, warn: Callable[[str], object]) -> None:
    """`check_model`; a warning if the model's small files can't be read, as on a machine that only discovers."""
    try:
        check_model(config)  # one file: if the hub can't be reached, it is not asked for the others
        compatibility.check_parts(config, ask_hub=True)
    except compatibility.CheckpointMismatch:
        raise
    except weights.WeightsError as error:
        warn(f"the model is not checked before training: {error}")


def check_model(config: Config) -> None:
    """RunError or CheckpointMismatch for what training refuses by the small files of transformer and scheduler."""
    compatibility.check_transformer(config.model)
    compatibility.check_scheduler(config)
    check_layers(config, read_shape(config))


def check_prepared(config: Config) -> None:
    """RunError if a method needs tensors that the configuration does not prepare. A set that is named has its own."""
    if config.train.set != "current":
        return
    used = [dataset for dataset in config.datasets if not dataset.disabled]
    prepared = {
        "mask": any(dataset.mask_data or dataset.mask_column or dataset.makes_masks for dataset in used),
        "vision": bool(config.vision.model),
        "regularization": any(dataset.is_regularization_data for dataset in used),
    }
    for name, method in config.train.methods.used.items():
        for tensor, advice in method.needs.items():
            if not prepared.get(tensor, True):
                raise RunError(f"train.methods.{name} needs {tensor}, which no dataset has", advice)


def read_shape(config: Config) -> dict[str, Any]:
    """config.json of the transformer."""
    model = config.model
    return weights.read_component_config(model.source, model.revision, config.part)


def check_layers(config: Config, shape: Mapping[str, Any]) -> None:
    """RunError where a method names blocks that a transformer with this config.json does not have."""
    count = config.model.family_spec.count_layers(shape)
    if count is None:
        return
    for name, method in config.train.methods.used.items():
        for key, problem in method.layer_problems(count):
            option = ".".join(map(str, ("train.methods", name, *key)))
            raise RunError(f"{option}: {problem}", f"{config.model.source} has {count} blocks; correct {option}.")


def train_precision(config: Config) -> str:
    """The transformer's compute dtype: train.precision, else model.precision; bfloat16 with bfloat16 base weights.
    RunError for float16."""
    if config.train.base_precision == "bf16":
        return "bfloat16"
    name = config.train.precision or config.model.precision
    if name == "float16":
        raise RunError(
            "training does not support the float16 of model.precision: it needs loss scaling",
            "Set train.precision to bfloat16 or float32.",
        )
    return name


def require_trackers(settings: Train) -> None:
    """RunError where wandb is asked for and not installed, or has no account to write to."""
    if "wandb" not in settings.trackers:
        return
    try:
        import wandb
    except ModuleNotFoundError as error:
        message = "train.trackers names wandb, which is not installed"
        raise RunError(message, "pip install -e '.[wandb]', or leave it out of train.trackers.") from error
    if wandb.setup().settings.mode not in ("offline", "disabled"):
        try:
            wandb.login()
        except wandb.errors.Error as error:
            raise RunError(
                f"Weights & Biases refuses: {error}",
                "Run `wandb login`, set WANDB_MODE=offline (`wandb sync` sends the run later), or leave wandb out of "
                "train.trackers.",
            ) from error
