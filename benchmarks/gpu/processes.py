"""Processes of parts: started ahead, ended at their limit with everything that they started."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu.parts import Part, PartOptions

ROOT = Path(__file__).resolve().parents[2]
LAST_LINES = 12  # of what a failed part said


@dataclass(frozen=True)
class Outcome:
    """printed: all that the part printed on standard output before it ended. problem: why it did not end well."""

    printed: str
    seconds: float
    problem: str | None


class PartProcess:
    """Imports at once, and works from `run` on."""

    def __init__(self, part: Part) -> None:
        self.printed, self.said = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.child", part.module],
            stdin=subprocess.PIPE,
            stdout=self.printed,
            stderr=self.said,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # so that its own children can be ended with it
        )

    def run(self, options: PartOptions) -> Outcome:
        """Have it work, and wait for its end, for `options.seconds` at most."""
        start, problem = time.monotonic(), None
        try:
            self.process.communicate(json.dumps(asdict(options)) + "\n", timeout=options.seconds)
            code = self.process.returncode
            if code:
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
                problem = f"ended by {how}" + self.last_lines()
        except subprocess.TimeoutExpired:
            problem = f"ended after its limit of {options.seconds:.0f} s" + self.last_lines()
        finally:
            self.end()
        self.printed.seek(0)
        return Outcome(self.printed.read(), time.monotonic() - start, problem)

    def last_lines(self) -> str:
        self.said.seek(0)
        lines = self.said.read().strip().splitlines()[-LAST_LINES:]
        return "; its last lines:\n\n" + "".join(f"    {line}\n" for line in lines) if lines else ""

    def end(self) -> None:
        """With all processes of its group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
