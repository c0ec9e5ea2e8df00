"""The tests marked gpu."""

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.parts import PartOptions

ROOT = Path(__file__).resolve().parents[2]
MARK = "pytest.mark.gpu"
SHOWN = re.compile("^(PASSED|FAILED|ERROR|SKIPPED|E  )| (passed|failed|collected)")


def marked_files() -> list[Path]:
    """Files with such tests, by their own mark or a fixture's in conftest.py: the others need not be imported."""
    marked = [path for path in (ROOT / "tests").rglob("*.py") if MARK in path.read_text()]
    folders = {path.parent for path in marked if path.name == "conftest.py"}
    tests = {path for path in marked if path.name.startswith("test_")}
    return sorted(tests | {path for folder in folders for path in folder.rglob("test_*.py")})


def run(options: PartOptions) -> None:
    """Prints pytest's summary of each test; SystemExit where one failed."""
    chosen = ["--collect-only"] if options.tiny else ["-m", "gpu"]
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=short", "-p", "no:cacheprovider", "--timeout=100"]
    command += ["--continue-on-collection-errors", "--show-capture=no", *chosen, *map(str, marked_files())]
    print("```", flush=True)
    done = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert done.stdout is not None
    for line in done.stdout:
        if SHOWN.search(line):
            print(line.rstrip(), flush=True)
    code = done.wait()
    print("```", flush=True)
    if code:
        raise SystemExit(code)
