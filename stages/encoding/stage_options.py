"""Options of an encoding stage that must fit each other and the configuration, and the number of its workers: where
none is given, one for each card of this machine."""

from pydantic import ValidationError

from schemas.activities import activity
from schemas.cli.console import Console
from schemas.cli.options import Options
from schemas.config.encoding import Encoding, EngineName, Stages
from schemas.config.loading import explain_error
from schemas.config.pipeline import Config
from schemas.errors import USAGE, LatentpressError


class UsageError(LatentpressError):
    """The options do not fit the program."""

    exit_code = USAGE


def choose_engine(config: Config, engine: EngineName | None, address: str | None) -> Config:
    """The configuration with what --engine and --address say. UsageError where they are not valid together."""
    if address is not None and engine == "local":
        raise UsageError("--address is of a Ray cluster, and --engine is local", "leave one of them out")
    if engine is None and address is None:
        return config
    chosen = config.stages.model_dump(by_alias=True)
    chosen["engine"] = engine or "ray"
    if address is not None:
        chosen["ray"]["address"] = address
    try:
        return config.changed(stages=Stages.model_validate(chosen))
    except ValidationError as error:
        problems = [
            problem for problem_found in error.errors(include_url=False) for problem in explain_error(problem_found)
        ]
        wrong = "; ".join(f"{'.'.join(map(str, ('stages', *path)))}: {message}" for path, message in problems)
        raise UsageError(f"--engine {chosen['engine']}: {wrong}", "docs/cluster.md has examples") from error


def choose_resources(
    config: Config, options: Options, stage: str, console: Console, readers: int | None, prefetch: int | None
) -> tuple[Encoding, str]:
    """The stage's resources with a number of workers, and a line about that number, which is logged if it was chosen
    here. readers, prefetch: the values of these options, in place of the configured ones."""
    given = {key: value for key, value in (("readers", readers), ("prefetch", prefetch)) if value}
    resources = options.resources(config, stage).changed(**given)
    assert isinstance(resources, Encoding)
    workers, reason = choose_workers(config, resources)
    line = f"{workers}, {reason}"
    if resources.workers is None:
        console.log(f"workers: {line}")
    return resources.changed(workers=workers), line


def choose_workers(config: Config, resources: Encoding) -> tuple[int, str]:
    """A number of workers and the reason for it. Each of several workers has a card of its own:
    `model_loading.select_device`."""
    if resources.workers is not None:
        return resources.workers, "as given"
    if config.stages.engine == "ray":
        return 1, "as --workers says how many of the cluster"
    if resources.device == "cpu" or ":" in resources.device:
        return 1, f"as the device is {resources.device}"
    cards = count_cards()
    if cards == 0:
        return 1, "as torch sees no accelerator"
    return cards, "one for each accelerator"


def count_cards() -> int:
    """Accelerators that this process may use, as CUDA_VISIBLE_DEVICES and its like say. torch asks NVML of NVIDIA's, so
    that this process makes no CUDA context, which would take memory of a card beside the workers'."""
    with activity("loading torch, which knows the cards", at_once=True):
        import torch

    return torch.accelerator.device_count()
