"""Programs that another one runs as processes of their own, one after another, and reads the reports of."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping

from schemas.cli.console import Options
from schemas.cli.interruption import child_environment, signals_blocked
from schemas.cli.starting import hide_line, show_ending, show_starting
from schemas.errors import INCOMPLETE, LatentpressError

LAST_LINE = "}\n"  # of a report in JSON


class StageProcesses:
    """Runs one program at a time, each in its own process; its log is passed through.

    On a terminal it is shown that a program starts, and that it ends, as imports
    and the end of a process with torch take seconds.
    """

    def __init__(self, extra_options: Mapping[str, list[str]]) -> None:
        """extra_options: by program, in addition to those of all."""
        self._extra_options = extra_options
        self._process: subprocess.Popen | None = None
        self._stopped = False

    def run(self, stage: str, options: Options) -> tuple[int, dict]:
        """Exit code and report: with an empty error if the program prints none, empty after `stop`."""
        module = "trainer" if stage == "train" else f"stages.{stage.replace('-', '_')}"
        words = [word for word in options.argv() if word != "--json"]
        command = [sys.executable, "-P", "-m", module, *words, *self._extra_options.get(stage, ()), "--json"]
        if self._stopped:
            return INCOMPLETE, {}
        alone = threading.current_thread() is threading.main_thread()  # of several one would erase another's line
        with signals_blocked(signal.SIGINT):  # until it handles them
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment())
        with process as self._process:
            if alone:
                show_starting(stage)
            if self._stopped:  # since it was checked above
                self._process.terminate()
            lines = list[str]()
            for line in self._process.stdout or ():
                lines.append(line)
                if line == LAST_LINE and alone:
                    show_ending(stage)
        if alone:
            hide_line()
        try:
            return self._process.returncode, json.loads("".join(lines))
        except json.JSONDecodeError:
            return self._process.returncode, {"error": {}}

    def stop(self) -> None:
        """Terminate the running program, which ends in its own way; `run` still waits for it."""
        self._stopped = True
        if self._process is not None:
            self._process.terminate()


class StageFailed(LatentpressError):
    """A stage ended with an error, which it has printed; the JSON report repeats it."""

    def __init__(self, stage: str, code: int, document: dict) -> None:
        error = document.get("error", {})
        super().__init__(f"{stage} ended with exit code {code}; its error is above")
        message = error.get("message", f"it ended with exit code {code}; its output is above")
        self.stage, self.reason, self.advice = stage, message, error.get("next_step", "")
        self.exit_code = error.get("exit_code", document.get("exit_code", INCOMPLETE))  # type: ignore[misc]

    def to_dict(self) -> dict:
        return super().to_dict() | {"message": f"{self.stage}: {self.reason}", "next_step": self.advice}
