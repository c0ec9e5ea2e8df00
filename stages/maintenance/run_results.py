"""The results of a run: where they are, a line each, and what killed programs left of them."""

import shutil
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from cache.runs.training_run import CHECKPOINTS, is_running
from cache.runs.validations import BEST_KEYS
from cache.store.files import TEMP_SUFFIX, is_temporary
from schemas.cli.kept_log import LOGS

ABANDONED_S = 3600.0  # after which nobody writes to a temporary file of a picture, clip or page any more

#: Details of a report, in the order in which they are shown, after all others.
RESULTS = (
    *("adapter", "model", "checkpoints", *chain(*BEST_KEYS.values()), "scores", "best_steps"),
    *("pictures", "contact_sheet", "report", "numbers", "tensorboard", "wandb", "logs"),
)


def put_results_last(details: dict[str, Any]) -> dict[str, Any]:
    others = {key: value for key, value in details.items() if key not in RESULTS}
    return others | {key: details[key] for key in RESULTS if key in details}


def find_folders(run_folder: Path) -> dict[str, str]:
    """Find the folders of a run that no stage reports."""
    folders = {"checkpoints": run_folder / CHECKPOINTS, "logs": run_folder / LOGS}
    return {name: str(folder) for name, folder in folders.items() if folder.is_dir() and any(folder.iterdir())}


def remove_unfinished(run_folder: Path) -> None:
    """Remove the temporary files of programs that were killed while they wrote pictures, clips, pages or notes: those
    that are older than ABANDONED_S, and only where no trainer is at work."""
    if is_running(run_folder) is not False:
        return
    pattern = f".*{TEMP_SUFFIX}"
    for path in [*run_folder.glob(pattern), *(run_folder / "samples").rglob(pattern)]:
        with suppress(OSError):  # removed meanwhile
            if is_temporary(path.name) and time.time() - path.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
