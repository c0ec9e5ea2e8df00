"""The tests marked gpu."""

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from benchmarks.gpu.parts import PartOptions

ROOT = Path(__file__).resolve().parents[2]
MARK, CHOSEN = "mark.gpu", ["-m", "gpu"]
SHOWN = re.compile(
    "^(FAILED|ERROR|SKIPPED|E  )|::.* (PASSED|FAILED|ERROR|SKIPPED)|KeyboardInterrupt| (passed|failed|collected)"
)
SUMMING_UP = 5  # seconds before the part's end, at which pytest is interrupted so that it says where it was


def marked_files() -> list[Path]:
    """Files with such tests, by their own mark or a fixture's in conftest.py: the others need not be imported."""
    marked = [path for path in (ROOT / "tests").rglob("*.py") if MARK in path.read_text()]
    folders = {path.parent for path in marked if path.name == "conftest.py"}
    tests = {path for path in marked if path.name.startswith("test_")}
    return sorted(tests | {path for folder in folders for path in folder.rglob("test_*.py")})


def run(options: PartOptions) -> None:
    """Prints a line for each test when it ends, and the failures' reasons; SystemExit where one failed."""
    chosen = [*CHOSEN, "--collect-only"] if options.tiny else CHOSEN
    command = [sys.executable, "-m", "pytest", "-v", "-rfEs", "--tb=short", "-p", "no:cacheprovider", "--timeout=100"]
    command += ["--continue-on-collection-errors", "--show-capture=no", *chosen, *map(str, marked_files())]
    print("```", flush=True)
    done = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert done.stdout is not None
    timer = threading.Timer(max(1.0, options.seconds - SUMMING_UP), done.send_signal, [signal.SIGINT])
    timer.start()
    for line in done.stdout:
        if SHOWN.search(line):
            print(line.rstrip(), flush=True)
    code = done.wait()
    timer.cancel()
    print("```", flush=True)
    if code:
        raise SystemExit(code)
