"""The process of one part: python -m benchmarks.gpu.child MODULE[:FUNCTION]

Waits for a line of JSON, the options, before it uses the device: libraries are imported while the part before runs.
"""

import importlib
import json
import sys

from benchmarks.gpu.parts import PartOptions


def main() -> None:
    name, _, function = sys.argv[1].partition(":")
    run = getattr(importlib.import_module(name), function or "run")
    if line := sys.stdin.readline():  # else the parent is gone
        run(PartOptions(**json.loads(line)))


if __name__ == "__main__":
    main()
