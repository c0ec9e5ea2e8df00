"""Programs that another one runs as processes of their own, one after another, and reads the reports of."""

import json
import subprocess
import sys
from collections.abc import Mapping

from schemas.cli.console import Options
from schemas.cli.interruption import child_environment
from schemas.errors import INCOMPLETE


class StageProcesses:
    """Runs one program at a time, each in its own process; its log is passed through."""

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
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment()) as self._process:
            if self._stopped:  # since it was checked above
                self._process.terminate()
            output, _ = self._process.communicate()
        try:
            return self._process.returncode, json.loads(output)
        except json.JSONDecodeError:
            return self._process.returncode, {"error": {}}

    def stop(self) -> None:
        """Terminate the running program, which ends in its own way; `run` still waits for it."""
        self._stopped = True
        if self._process is not None:
            self._process.terminate()
