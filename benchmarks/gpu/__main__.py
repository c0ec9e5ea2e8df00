"""Tests and benchmarks that need a card, in 10 minutes: the tests marked gpu, and the parts of PARTS.

    make gpu [ONLY=part,part] [MINUTES=9.5] [RESULTS=FOLDER]
    python -m benchmarks.gpu [--only PART,PART] [--minutes 9.5] [--results FOLDER]
    python -m benchmarks.gpu --tiny --device cpu --results FOLDER       the same code without a card

Each part runs in a separate process, which is ended after its share of the remaining time; the output of a part that
fails is kept, with the reason. After each part, results are written to benchmarks/results/gpu-<card>.md, and replace
only the section of this part. A part is not started if too little time remains; its section then has the reason, unless
it has earlier results. Random weights are drawn on the card: nothing is downloaded, and little is written to the disk.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu import results, summary
from benchmarks.gpu.parts import CARD, CARD_SECONDS, PARTS, Part, PartOptions
from benchmarks.gpu.processes import Outcome, PartProcess

RESULTS = Path(__file__).resolve().parents[1] / "results"
#: Module that the parts import -> its package.
NEEDED = {
    "accelerate": "accelerate", "diffusers": "diffusers", "ftfy": "ftfy", "peft": "peft", "pyarrow": "pyarrow",
    "pydantic": "pydantic", "rich": "rich", "ruamel.yaml": "ruamel.yaml", "safetensors": "safetensors",
    "torch": "torch", "transformers": "transformers", "typer": "typer", "xxhash": "xxhash",
}  # fmt: skip


def missing_packages() -> list[str]:
    def is_installed(module: str) -> bool:
        return find_spec(module.partition(".")[0]) is not None and find_spec(module) is not None

    return [package for module, package in NEEDED.items() if not is_installed(module)]


def write_section(part: Part, facts: Mapping[str, str], outcome: Outcome) -> str:
    lines = [f"## {part.title}", "", f"{date.today()}, {facts['versions']}; {outcome.seconds:.0f} s.", ""]
    if outcome.printed.strip():
        fence = "\n```" * (outcome.printed.count("```") % 2)  # closes a code block of a part that was ended
        lines += [outcome.printed.strip() + fence, ""]
    if outcome.problem:
        lines += [f"{summary.NOT_WHOLE}: {outcome.problem}", ""]
    return "\n".join(lines)


def write_head(facts: Mapping[str, str], sections: Mapping[str, str]) -> str:
    gap_text = "only a card shows it" if facts["card"] == "CPU" else "not measured"
    return "\n".join(
        [
            f"# {facts['card']}",
            "",
            *summary.summarize(sections, PARTS, gap_text),
            "",
            "Written by `make gpu` (`python -m benchmarks.gpu --help`). Weights are random, of the published shapes.",
            "",
            facts["details"],
            "",
            "For a step: peak GiB is `torch.cuda.max_memory_allocated`, reserved is the memory of torch's allocator, "
            "predicted is from `latentpress train --dry-run`. Of the first's: seconds per sample, as a ratio to "
            "the first measured row of the same bucket. Of the peak: arithmetic of the forward and the backward pass, "
            "without recomputation, in relation to a product of large bfloat16 matrices. Idle: share of the time in "
            "which no kernel and no copy ran.",
        ]
    )


def share_time(waiting: Sequence[Part], remaining_s: float) -> float:
    """Seconds for the first of the waiting parts, so that time remains for the parts after it."""
    return max(waiting[0].least, remaining_s * waiting[0].share / sum(part.share for part in waiting))


def run_parts(parts: Mapping[str, Part], options: PartOptions, folder: Path, card: Part = CARD) -> int:
    """Run parts one after the other within `options.seconds`. Returns the exit status: 0 if no part failed."""
    deadline = time.monotonic() + options.seconds

    outcome = PartProcess(card).run(PartOptions(options.device, options.tiny, min(CARD_SECONDS, options.seconds)))
    if outcome.problem is not None:
        print(f"{card.title}: {outcome.problem}", file=sys.stderr)
        return 2
    facts = json.loads(outcome.printed.splitlines()[-1])
    path, failed, names = folder / results.file_name(facts["card"]), [], [*parts]
    sections = results.read_sections(path)
    following: PartProcess | None = None
    try:
        for number, name in enumerate(names):
            part, remaining_s = parts[name], deadline - time.monotonic()
            seconds = share_time([*parts.values()][number:], remaining_s)
            process = following or PartProcess(part)
            following = PartProcess(parts[names[number + 1]]) if number + 1 < len(names) else None
            if remaining_s < part.least:
                process.end()
                outcome = Outcome(
                    "", 0.0, f"not started: {max(0.0, remaining_s):.0f} s remained; `make gpu ONLY={name}`"
                )
                sections.setdefault(name, write_section(part, facts, outcome))
            else:
                print(f"{name}: {part.title} ...", file=sys.stderr, flush=True)
                outcome = process.run(PartOptions(options.device, options.tiny, seconds, facts["peak_flops"]))
                sections[name] = write_section(part, facts, outcome)
            failed += [name] if outcome.problem else []
            print(f"{name}: {outcome.problem or 'done'} ({outcome.seconds:.0f} s)", file=sys.stderr, flush=True)
            results.write_sections(path, write_head(facts, sections), sections, [*PARTS])
    finally:
        if following is not None:
            following.end()
    print(path)
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"parts, separated by commas: {', '.join(PARTS)}")
    parser.add_argument("--minutes", type=float, default=9.5, help="time of all parts together")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, whose speed has no meaning")
    parsed = parser.parse_args(arguments)
    names = [name.strip() for name in parsed.only.split(",") if name.strip()] or [*PARTS]
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"unknown part {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    if parsed.device == "cpu" and not parsed.tiny:
        parser.error("--device cpu takes hours without --tiny")
    if packages := missing_packages():
        parser.error(
            f"{sys.executable} lacks {', '.join(packages)}; install them, or use another Python by GPU_PYTHON=..."
        )
    options = PartOptions(parsed.device, parsed.tiny, 60 * parsed.minutes)
    return run_parts({name: PARTS[name] for name in names}, options, parsed.results)


if __name__ == "__main__":
    sys.exit(main())
