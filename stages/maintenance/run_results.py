"""What `run` says at its end of where the results are, a line each."""

from pathlib import Path
from typing import Any

from cache.training_run import CHECKPOINTS, COMPANION_LOGS

#: Details of a report, in the order in which they are shown, after all others.
RESULTS = (
    *("adapter", "model", "checkpoints", "best_step", "best_checkpoint", "scores", "best_steps"),
    *("pictures", "contact_sheet", "report", "numbers", "tensorboard", "wandb", "logs"),
)


def put_results_last(details: dict[str, Any]) -> dict[str, Any]:
    others = {key: value for key, value in details.items() if key not in RESULTS}
    return others | {key: details[key] for key in RESULTS if key in details}


def find_folders(run_folder: Path) -> dict[str, str]:
    """Those of a run that no stage reports."""
    folders = {"checkpoints": run_folder / CHECKPOINTS, "logs": run_folder / COMPANION_LOGS}
    return {name: str(folder) for name, folder in folders.items() if folder.is_dir() and any(folder.iterdir())}
