"""The process of one part: python -m benchmarks.gpu.child MODULE[:FUNCTION]

Waits for the options, a line of JSON, before it uses the device, because libraries are imported while the previous part
runs.
"""

import importlib
import json
import sys

from benchmarks.gpu.parts import PartOptions


def main() -> None:
    name, _, function = sys.argv[1].partition(":")
    run = getattr(importlib.import_module(name), function or "run")
    if line := sys.stdin.readline():  # empty if the parent has ended
        run(PartOptions(**json.loads(line)))


if __name__ == "__main__":
    main()
