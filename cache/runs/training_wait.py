"""What a program that follows a training run waits for, and how long, by the files of the run's folder."""

from datetime import timedelta
from functools import lru_cache
from pathlib import Path

from cache.runs.training_run import METRICS_FILE, is_running, parse_metrics
from schemas.config.loading import ConfigError, load_config

TAIL_BYTES = 1 << 14  # of the metrics that are read: some 20 steps


def describe_wait(folder: Path) -> tuple[str, str]:
    """What is waited for, such as "waiting for the validation of step 200", and how far it is, such as "step 120 of
    1000, about 0:04:00 left"; "" where that is not known."""
    if is_running(folder) is False:
        return "waiting for training to begin", ""
    lines = _read_tail(folder / METRICS_FILE)
    trained = [line for line in lines if "loss" in line]
    steps, every = _read_intervals(folder / "config.yaml")
    if not trained or not steps:
        return "waiting for the first step of training", ""
    step, left = trained[-1]["step"], trained[-1].get("seconds_left")
    if every and step % every == 0 and lines[-1] is trained[-1]:
        return f"waiting for the validation of step {step}, which has begun", f"step {step} of {steps}"
    if step >= steps:
        return "waiting for training to end", f"step {step} of {steps}"
    then = min(steps, (step // every + 1) * every) if every else steps
    state = f"step {step} of {steps}"
    if isinstance(left, int | float):
        state += f", about {timedelta(seconds=round(left * (then - step) / (steps - step)))} left"
    return f"waiting for the validation of step {then}", state


def _read_tail(path: Path) -> list[dict]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return parse_metrics(file.read())
    except OSError:
        return []


def _read_intervals(path: Path) -> tuple[int, int | None]:
    """Steps of the run, and after how many there is a validation; 0 where that can't be read."""
    try:
        return _parse_intervals(path, path.stat().st_mtime_ns)
    except (OSError, ConfigError):
        return 0, None


@lru_cache(maxsize=16)
def _parse_intervals(path: Path, changed_ns: int) -> tuple[int, int | None]:
    config = load_config(path)
    return config.train.steps, config.validation.every
