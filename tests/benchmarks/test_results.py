"""benchmarks/results/index.md names every file of results once, with the command that stands in it."""

import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
ROW = re.compile(r"^\| \[(\w+\.md)\]\((\w+\.md)\) \| .+ \| `python -m benchmarks\.(\w+)` \| .+ \|$", re.MULTILINE)


def test_the_index_has_every_file_and_its_command() -> None:
    rows = ROW.findall((RESULTS / "index.md").read_text())
    there = {path.name for path in RESULTS.glob("*.md") if not path.name.startswith("gpu-")} - {"index.md"}
    assert sorted(name for name, _, _ in rows) == sorted(there)
    for name, target, module in rows:
        assert name == target and (RESULTS.parent / f"{module}.py").is_file()
        assert f"python -m benchmarks.{module}" in (RESULTS / name).read_text(), name
