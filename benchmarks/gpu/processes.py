"""Processes of parts. They are started early, and ended at their limit with their child processes."""

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
LAST_LINES = 12  # lines of a failed part's standard error


@dataclass(frozen=True)
class Outcome:
    """printed: standard output of the part. problem: reason of a failure, None without one."""

    printed: str
    seconds: float
    problem: str | None


class PartProcess:
    """The process of a part. It imports its libraries at once, and starts its work in `run`."""

    def __init__(self, part: Part) -> None:
        self.printed, self.errors = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.child", part.module],
            stdin=subprocess.PIPE,
            stdout=self.printed,
            stderr=self.errors,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # so that its own children can be ended with it
        )

    def run(self, options: PartOptions) -> Outcome:
        """Start the work, and wait for its end, at most `options.seconds`."""
        start, problem = time.monotonic(), None
        try:
            self.process.communicate(json.dumps(asdict(options)) + "\n", timeout=options.seconds)
            code = self.process.returncode
            if code:
                reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
                problem = f"ended by {reason}" + self.last_lines()
        except subprocess.TimeoutExpired:
            problem = f"ended after its limit of {options.seconds:.0f} s" + self.last_lines()
        finally:
            self.end()
        self.printed.seek(0)
        return Outcome(self.printed.read(), time.monotonic() - start, problem)

    def last_lines(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()[-LAST_LINES:]
        return "; its last lines:\n\n" + "".join(f"    {line}\n" for line in lines) if lines else ""

    def end(self) -> None:
        """Kill all processes of the group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
