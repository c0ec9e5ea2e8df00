"""Run stages as separate processes, one at a time, and read their reports. Also list the results of a run, and remove
the temporary files of killed programs."""

import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cache.runs.training_run import CHECKPOINTS, is_running
from cache.store.files import TEMP_SUFFIX, is_temporary
from schemas.cli.console import LOGS, Options
from schemas.cli.starting import hide_line, show_ending, show_starting, start_program
from schemas.errors import INCOMPLETE, INTERRUPTED, RERUN_HINT, LatentpressError
from schemas.interruption import child_environment, end_with_this, signals_blocked
from schemas.text_format import describe_exit

LAST_LINE = "}\n"  # last line of a report in JSON
ABANDONED_S = 3600.0  # a temporary file of a picture, clip or page that has not changed for this time is abandoned

#: Details of a report that are shown after all other details, in this order.
RESULTS = (
    *("adapter", "model", "checkpoints", "scores", "best_steps", "nothing_held_out"),
    *("pictures", "contact_sheet", "report", "numbers", "tensorboard", "wandb", "logs"),
)


class StageProcesses:
    """Runs one program at a time, each in its own process, and passes its log through.

    A terminal shows that a program starts and that it ends, because imports and the end of a process with torch take
    seconds.
    """

    def __init__(self, extra_options: Mapping[str, list[str]], files: Sequence[int] = ()) -> None:
        """extra_options: program -> options in addition to the common options. files: open file descriptors that the
        programs inherit."""
        self._extra_options, self._files = extra_options, files
        self._process: subprocess.Popen | None = None
        self.is_stopped = False

    def run(self, stage: str, options: Options) -> tuple[int, dict]:
        """Run a program and return its exit code and its report. The report is {"error": {}} if the program prints no
        valid report, and empty after `stop`."""
        words = [word for word in options.argv() if word != "--json"]
        words += [*self._extra_options.get(stage, ()), "--json"]
        if self.is_stopped:
            return INCOMPLETE, {}
        alone = threading.current_thread() is threading.main_thread()  # several programs would erase each other's line
        with signals_blocked(signal.SIGINT):  # the program unblocks signals once it handles them
            process = start_program(
                stage, words, stdout=subprocess.PIPE, text=True, env=child_environment(), pass_fds=self._files
            )
        end_with_this(process)
        with process as self._process:
            if alone:
                show_starting(stage)
            if self.is_stopped:  # stopped after the check above
                self._process.terminate()
            lines = list[str]()
            for line in self._process.stdout or ():
                lines.append(line)
                if line == LAST_LINE and alone:
                    show_ending(stage)
        if alone:
            hide_line()
        code = self._process.returncode
        try:
            document = json.loads("".join(lines))
        except json.JSONDecodeError:
            return code, {"error": {}}
        return (code if code >= 0 else document["exit_code"]), document  # a signal at the program's end has no effect

    def stop(self) -> None:
        """Send SIGTERM to the running program. `run` still waits for its end."""
        self.is_stopped = True
        if self._process is not None:
            self._process.terminate()


class StageFailed(LatentpressError):
    """Raised if a stage ended with a signal, or with an error that it has printed. The JSON report repeats the
    error."""

    def __init__(self, stage: str, code: int, document: dict) -> None:
        error, by_signal = document.get("error", {}), code < 0
        note = "" if by_signal else f"; its {'error' if error.get('message') else 'output'} is above"
        super().__init__(f"{stage} {describe_exit(code)}{note}", RERUN_HINT if by_signal else "")
        message = error.get("message", f"it {describe_exit(code)}{note}")
        self.stage, self.reason, self.advice = stage, message, error.get("next_step", self.next_step)
        exit_code = INTERRUPTED if code == -signal.SIGINT else document.get("exit_code", INCOMPLETE)
        self.exit_code = error.get("exit_code", exit_code)  # type: ignore[misc]

    def to_dict(self) -> dict:
        return super().to_dict() | {"message": f"{self.stage}: {self.reason}", "next_step": self.advice}


def sort_results(details: dict[str, Any]) -> dict[str, Any]:
    """The details of a report, with RESULTS last."""
    further = {key: value for key, value in details.items() if key not in RESULTS}
    return further | {key: details[key] for key in RESULTS if key in details}


def find_folders(run_folder: Path) -> dict[str, str]:
    """Name -> path of the folders of a run that are not in a stage's report."""
    folders = {"checkpoints": run_folder / CHECKPOINTS, "logs": run_folder / LOGS}
    return {name: str(folder) for name, folder in folders.items() if folder.is_dir() and any(folder.iterdir())}


def remove_unfinished(run_folder: Path) -> None:
    """Remove the temporary files of programs that were killed while they wrote pictures, clips, pages or notes, if the
    files are older than ABANDONED_S. Does nothing unless it is certain that no trainer is running."""
    if is_running(run_folder) is not False:
        return
    pattern = f".*{TEMP_SUFFIX}"
    for path in [*run_folder.glob(pattern), *(run_folder / "samples").rglob(pattern)]:
        with suppress(OSError):  # another program removed the file
            if is_temporary(path.name) and time.time() - path.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
