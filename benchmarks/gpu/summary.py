"""The first lines of a card's results: a summary of its sections in at most ten lines. Does not import torch."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.gpu.parts import LOSS_BOUND, Part

NOT_WHOLE = "**Not whole**"
TEST = re.compile(r"^\S+::(.*) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
MAX_NAMED = 4  # failed tests that are named
#: Names of columns of training.py, equality.py and waits.py.
PREDICTED, PEAK, DIFFERENCE, WAITS = "predicted / peak", "of the peak", "largest relative difference", "waits"


def read_rows(text: str, *needed: str) -> list[dict[str, str]]:
    """Rows of the tables of a section, as column -> cell, without rows in which a cell of `needed` is empty."""
    rows: list[dict[str, str]] = []
    names: list[str] = []
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        if line.startswith("| "):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if following.startswith("|---"):
                names = cells
            else:
                rows.append(dict(zip(names, cells, strict=False)))
    return [row for row in rows if all(row.get(name) for name in needed)]


def summarize(sections: Mapping[str, str], parts: Mapping[str, Part], gap_text: str = "not measured") -> list[str]:
    """Make a line for each topic. gap_text: text of topics without results."""
    failed = [name for name in parts if NOT_WHOLE in sections.get(name, "")]
    absent = [name for name in parts if name not in sections]
    lines = {
        "Parts": f"{len(parts) - len(failed) - len(absent)} of {len(parts)} passed"
        + (f"; failed: {', '.join(failed)}" if failed else "")
        + (f"; not run: {', '.join(absent)}" if absent else ""),
        "Tests": count_tests(sections.get("tests", "")),
        "Losses compared with the CPU": describe_equality(sections.get("equality", "")),
        **describe_waits(sections.get("waits", "")),
        "Predicted memory / peak": describe_memory(sections),
        "FLOP/s, of a matrix product's": describe_rates(sections),
        "Idle in a training step": describe_idle(sections.get("kernels", "")),
    }
    return [f"- {name}: {words or gap_text}" for name, words in lines.items()]


def count_tests(text: str) -> str:
    """Count the tests in the output of pytest -v, which may be incomplete."""
    ended = TEST.findall(text)
    counts = Counter("FAILED" if result == "ERROR" else result for _, result in ended)
    names = [name for name, result in ended if result in ("FAILED", "ERROR")]
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    counts_text = ", ".join(f"{counts[result]} {result.lower()}" for result in ("PASSED", "FAILED", "SKIPPED"))
    return counts_text + (f" ({', '.join(names[:MAX_NAMED])}{more})" if names else "") if ended else ""


def describe_equality(text: str) -> str:
    rows = [(float(row[DIFFERENCE]), row["flavour"]) for row in read_rows(text, DIFFERENCE)]
    if not rows or "the CPU with itself" in text:  # a run without a card
        return ""
    worst = max(rows, key=lambda row: (math.isnan(row[0]), row[0]))
    return f"differ by {worst[0]:.2g} at most ({worst[1]}; {len(rows)} flavours), bound {LOSS_BOUND:g}"


def describe_waits(text: str) -> dict[str, str]:
    """Lines about the waits in training, denoising and encoding."""
    by_work: dict[str, list[str]] = {"training step": [], "denoising step": [], "batch": []}
    for row in read_rows(text, "work", WAITS):
        words = [row["flavour"], row[WAITS]]
        work = row["work"] if row["work"] in by_work else "batch"
        by_work[work].append(" ".join(words if work == row["work"] else [row["work"].split()[0], *words]))
    nothing = "not counted" in text
    return {
        f"Waits of a {work}, by encoder" if work == "batch" else f"Waits of a {work}": ""
        if nothing
        else ", ".join(words_by_row)
        for work, words_by_row in by_work.items()
    }


def collect(sections: Mapping[str, str], column: str) -> list[tuple[float, str]]:
    """Numbers in a column of all training cases: (number, name of part and case)."""
    rows = [(part, row) for part, text in sections.items() for row in read_rows(text, column)]
    return [(float(row[column].rstrip("%")), f"{part}, {next(iter(row.values()))}") for part, row in rows]


def describe_memory(sections: Mapping[str, str]) -> str:
    ratios = [(ratio, name) for ratio, name in collect(sections, PREDICTED) if ratio > 0]
    if not ratios:
        return ""
    ratio, name = max(ratios, key=lambda pair: abs(math.log(pair[0])))
    return f"{ratio:.2f} at worst ({name}), of {len(ratios)} cases"


def describe_rates(sections: Mapping[str, str]) -> str:
    shares: Sequence[tuple[float, str]] = sorted(collect(sections, PEAK))
    if not shares:
        return ""
    (low, slow), (high, fast) = shares[0], shares[-1]
    return f"{high:.0f}% at best ({fast}), {low:.0f}% at worst ({slow})"


def describe_idle(text: str) -> str:
    return ", ".join(f"{row['flavour']} {row['idle']}" for row in read_rows(text, "idle"))
