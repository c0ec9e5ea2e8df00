"""How many workers an encoding stage has, and why: where no number is given, one for each card of this machine."""

from schemas.cli.console import Console, Options
from schemas.cli.progress import activity
from schemas.config.encoding import CACHE_LIMIT, Encoding
from schemas.config.pipeline import Config


def choose_resources(
    config: Config, options: Options, stage: str, overrides: dict[str, int], console: Console
) -> tuple[Encoding, str]:
    """The stage's resources with a number of workers, and a line about that number. It is said at once where it was
    chosen here. overrides: of the configured resources, by option."""
    resources = options.resources(config, stage).model_copy(update=overrides)
    assert isinstance(resources, Encoding)
    workers, reason = choose_workers(config, resources)
    line = f"{workers}, {reason}"
    if resources.workers is None:
        console.log(f"workers: {line}")
    return resources.model_copy(update={"workers": workers}), line


def choose_workers(config: Config, resources: Encoding) -> tuple[int, str]:
    """A number of workers and the reason for it. Each of several workers has a card of its own:
    `model_loading.select_device`."""
    if resources.workers is not None:
        return resources.workers, "as given"
    if config.stages.engine == "ray":
        return 1, "as --workers says how many of the cluster"
    if config.cache.limit is not None:
        return 1, f"as {CACHE_LIMIT} shares the cards with training"
    if resources.device not in ("auto", "cuda"):
        return 1, f"as the device is {resources.device}"
    cards = count_cards()
    if cards == 0:
        return 1, "as there is no CUDA device"
    return cards, "one for each CUDA device"


def count_cards() -> int:
    """CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES says. torch asks NVML, so that this process makes
    no CUDA context, which would take memory of a card beside the workers'."""
    with activity("loading torch, which knows the cards", at_once=True):
        import torch

    return torch.cuda.device_count()
