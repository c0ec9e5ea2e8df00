"""The tests marked gpu."""

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from benchmarks.gpu.parts import PartOptions

ROOT = Path(__file__).resolve().parents[2]
MARK, SELECTION = "mark.gpu", ["-m", "gpu"]
SHOWN_LINE = re.compile(
    "^(FAILED|ERROR|SKIPPED|E  )|::.* (PASSED|FAILED|ERROR|SKIPPED)|KeyboardInterrupt| (passed|failed|collected)"
)
SUMMARY_S = 5  # seconds before the part's end at which pytest is interrupted, so that it prints its summary


def marked_files() -> list[Path]:
    """Files with tests marked gpu, by a mark in the file or in a conftest.py. Only these files are imported."""
    marked = [path for path in (ROOT / "tests").rglob("*.py") if MARK in path.read_text()]
    folders = {path.parent for path in marked if path.name == "conftest.py"}
    tests = {path for path in marked if path.name.startswith("test_")}
    return sorted(tests | {path for folder in folders for path in folder.rglob("test_*.py")})


def run(options: PartOptions) -> None:
    """Print a line for each test when it ends, and the reasons of failures. Raises SystemExit if a test failed."""
    selection = [*SELECTION, "--collect-only"] if options.tiny else SELECTION
    command = [sys.executable, "-m", "pytest", "-v", "-rfEs", "--tb=short", "-p", "no:cacheprovider", "--timeout=100"]
    command += ["--continue-on-collection-errors", "--show-capture=no", *selection, *map(str, marked_files())]
    print("```", flush=True)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    timer = threading.Timer(max(1.0, options.seconds - SUMMARY_S), process.send_signal, [signal.SIGINT])
    timer.start()
    for line in process.stdout:
        if SHOWN_LINE.search(line):
            print(line.rstrip(), flush=True)
    code = process.wait()
    timer.cancel()
    print("```", flush=True)
    if code:
        raise SystemExit(code)
