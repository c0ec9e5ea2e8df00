"""Compares this checkout with another one: a step's time, encode rates and start-up, in turns.

    python -m benchmarks.before_after --before ../other-checkout [--repeat 5] [--only training,latents]

Each checkout has a separate virtual environment in .venv. In every turn, both run the same benchmark with their own
code; the order changes from turn to turn. Figures are processor seconds, so that other programs have little effect, and
the rate of texts per processor second: medians, and the median of the ratios of pairs.
"""

import re
import statistics
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks.common import cpu_seconds, make_parser, measure_by_turns, print_header, print_row

ROOT = Path(__file__).resolve().parents[1]
#: Arguments of a benchmark -> figure -> the start of its line, and the figure's column.
TABLES = {
    "training --repeat 1 --steps 16 --width 512 --layers 4": {
        "step": ("step, processor s", 1),
        "step of two micro-batches": ("step of two micro-batches, processor s", 1),
        "start of training": ("start, processor s", 1),
    },
    "latents --repeat 1 --images 60 --side 256": {"latents": ("stage", 2)},
    "text --repeat 1 --captions 32": {"text, tokens/s": ("encoder |", 1)},
}
START = {name: f"-m {module} --help" for name, module in (("help", "stages.cli"), ("train --help", "trainer"))}
START["index --help"] = "-m stages.index --help"


def run(checkout: Path, arguments: str) -> str:
    command = [str(checkout / ".venv/bin/python"), *arguments.split()]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout


def read_figures(arguments: str, checkout: Path) -> dict[str, float]:
    """Run a benchmark, and read the figures of its tables."""
    lines, figures = run(checkout, f"-m benchmarks.{arguments}").splitlines(), {}
    for name, (start, column) in TABLES[arguments].items():
        line = next(line for line in lines if line.startswith(f"| {start}"))
        figures[name] = float(re.sub(r"[^\d.e-]", "", line.split(" | ")[column]))
    return figures


def read_start(name: str, checkout: Path) -> dict[str, float]:
    before = cpu_seconds()
    run(checkout, START[name])
    return {name: cpu_seconds() - before}


def main() -> None:
    parser = make_parser(__doc__, repeat=5)
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--only", default="", help="prefixes of benchmarks or figures to run, separated by commas")
    options = parser.parse_args()
    ways: Mapping[str, Callable[[str, Path], dict[str, float]]] = {
        **dict.fromkeys(TABLES, read_figures),
        **dict.fromkeys(START, read_start),
    }
    print_header("", "before", "now", "median of the ratios", "range of the ratios")
    for figure, read in ways.items():
        if not figure.startswith(tuple(options.only.split(","))):
            continue
        sides = {"before": partial(read, figure, options.before.resolve()), "now": partial(read, figure, ROOT)}
        results = measure_by_turns(sides, options.repeat, uncounted=1)
        for name in results["now"][0]:
            before, current = ([turn[name] for turn in results[side]] for side in sides)
            ratios = [second / one for one, second in zip(before, current, strict=True)]
            cells = [f"{statistics.median(values):.4g}" for values in (before, current, ratios)]
            print_row(name, *cells, f"{min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
