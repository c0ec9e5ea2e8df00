"""This checkout beside another one: a step's time, encode rates and start-up, by turns in one run.

    python -m benchmarks.before_after --before ../other-checkout [--repeat 5] [--only step,start]

Each checkout has a virtual environment of its own in .venv. In every turn both run the same benchmark, each in its own
code, and the order changes from turn to turn. Processor seconds, so that other programs count little; medians, and the
median of the ratios of the pairs: below 1 this checkout is faster.
"""

import re
import statistics
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks.common import cpu_seconds, make_parser, measure_by_turns, print_header, print_row

HERE = Path(__file__).resolve().parents[1]
#: Name -> the benchmark's arguments, the start of the line with the figure, and the figure's column.
TABLES = {
    "step": ("training --repeat 1 --steps 16 --width 512 --layers 4", "step, processor s", 1),
    "step of two micro-batches": (
        "training --repeat 1 --steps 16 --width 512 --layers 4",
        "step of two micro-batches, processor s",
        1,
    ),
    "first step": ("training --repeat 1 --steps 4 --width 256 --layers 2", "start, processor s", 1),
    "latents": ("latents --repeat 1 --images 60 --side 256", "stage", 2),
    "text, s a token": ("text --repeat 1 --captions 32", "encoder |", 1),
}
START = {name: f"-m {module} --help" for name, module in (("help", "stages.cli"), ("train --help", "trainer"))}
START["index --help"] = "-m stages.index --help"


def run(checkout: Path, arguments: str) -> str:
    command = [str(checkout / ".venv/bin/python"), *arguments.split()]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout


def read_figure(name: str, checkout: Path) -> float:
    """The figure of a benchmark's table."""
    arguments, start, column = TABLES[name]
    printed = run(checkout, f"-m benchmarks.{arguments}")
    line = next(line for line in printed.splitlines() if line.startswith(f"| {start}"))
    value = float(re.sub(r"[^\d.e-]", "", line.split(" | ")[column]))
    return 1 / value if "a token" in name else value


def read_start(name: str, checkout: Path) -> float:
    before = cpu_seconds()
    run(checkout, START[name])
    return cpu_seconds() - before


def main() -> None:
    parser = make_parser(__doc__, repeat=5)
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--only", default="", help="names of rows, or their beginnings, with commas between them")
    options = parser.parse_args()
    chosen = [name.strip() for name in options.only.split(",") if name.strip()] or [""]
    ways: Mapping[str, Callable[[str, Path], float]] = {
        **dict.fromkeys(TABLES, read_figure),
        **dict.fromkeys(START, read_start),
    }
    print_header("", "before", "now", "median of the ratios", "their range")
    for name, read in ways.items():
        if not name.startswith(tuple(chosen)):
            continue
        sides = {"before": partial(read, name, options.before.resolve()), "now": partial(read, name, HERE)}
        found = measure_by_turns(sides, options.repeat, uncounted=1)
        ratios = [now / before for before, now in zip(found["before"], found["now"], strict=True)]
        medians = [f"{statistics.median(found[side]):.4g}" for side in sides]
        print_row(name, *medians, f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
