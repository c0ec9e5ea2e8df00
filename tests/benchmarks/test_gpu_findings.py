"""What `make gpu` finds beside speed: waits, equality, kernels, failed tests, and the first lines of its results."""

import re
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.device_usage import trace_kernels
from benchmarks.gpu import equality, flavours, kernels, marked_tests, summary, training, waits
from benchmarks.gpu.parts import PARTS, PartOptions
from trainer import flow

ROOT = Path(__file__).resolve().parents[2]
TINY = PartOptions("cpu", tiny=True, seconds=300, peak_flops=1e10)
CPU = torch.device("cpu")
WARNING = "called a synchronizing CUDA operation (Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:120.)"


def call_from(path: Path, line: int, work) -> None:
    """Call `work` from this line of a file that need not be there."""
    scope = {"work": work}
    exec(compile("\n" * (line - 1) + "work()", str(path), "exec"), scope)


def warn() -> None:
    warnings.warn(WARNING, stacklevel=1)


def test_waits_are_counted_by_the_innermost_line_of_the_project() -> None:
    library = ROOT / ".venv/lib/python3/site-packages/diffusers/made_up.py"
    with warnings.catch_warnings(record=True) as others, waits.counting(CPU) as counts:
        for _ in range(2):  # each is counted, though it is from one line
            call_from(ROOT / "trainer/made_up.py", 7, warn)
        call_from(ROOT / "stages/outer.py", 3, lambda: call_from(ROOT / "cache/inner.py", 5, warn))
        call_from(ROOT / "schemas/made_up.py", 4, lambda: call_from(library, 9, warn))
        call_from(library, 9, lambda: warnings.warn_explicit(WARNING, UserWarning, str(library), 9))
        call_from(ROOT / "trainer/made_up.py", 8, lambda: warnings.warn("something else", stacklevel=1))
    lines = {"trainer/made_up.py:7": 2, "cache/inner.py:5": 1, "schemas/made_up.py:4": 1, "diffusers/made_up.py:9": 1}
    assert counts == lines and [str(each.message) for each in others] == ["something else"]


def test_waits_are_those_between_the_first_mark_and_the_last() -> None:
    marks = [Counter(a=5), Counter(a=6), Counter(a=7, b=1)]
    assert waits.average(marks) == {"a": 1, "b": 0.5}
    with pytest.raises(AssertionError, match="nothing was counted"):
        waits.average(marks[:1])


def rows(printed: str) -> list[dict[str, str]]:
    return summary.read_rows(printed)


@pytest.mark.slow
def test_every_flavour_has_its_work_counted(capsys, monkeypatch) -> None:
    """With a wait in each step's loss."""

    def wait(*arguments, real=flow.loss_per_sample):
        warn()
        return real(*arguments)

    monkeypatch.setattr(flow, "loss_per_sample", wait)
    waits.run(TINY)
    printed = capsys.readouterr().out
    assert "nothing is counted" in printed
    found = [(row["flavour"], row["work"]) for row in rows(printed)]
    works = ["training step", "denoising step", "text batch", "latents batch"]
    expected = [(kind, work) for kind in flavours.CHECKPOINTS for work in [*works, "vision batch"]]
    assert found == [pair for pair in expected if pair[1] in works or pair[0] == "t2v"]
    for row in rows(printed):
        planted = r"trainer/train\.py:\d+ \(1\)" if row["work"] == "training step" else ""
        assert re.fullmatch(planted, row["where"]), row


@pytest.mark.slow
def test_losses_that_differ_are_a_failure_and_the_others_are_compared(capsys, monkeypatch) -> None:
    def measure(kind: str, device: str, real=equality.measure) -> dict[str, list[float]]:
        calls.append(kind)
        if kind == "i2i":
            raise RuntimeError("no kernel")
        found = real(kind, device)
        if (kind, calls.count(kind)) == ("t2v", 2):
            found["loss"][3] *= 1.002
        return found

    calls: list[str] = []
    monkeypatch.setattr(equality, "measure", measure)
    with pytest.raises(SystemExit, match=r"not equal within 0.001: i2i, t2v$"):
        equality.run(TINY)
    found = {row["flavour"]: row for row in rows(capsys.readouterr().out)}
    assert [*found] == [*flavours.CHECKPOINTS] and "no kernel" in found["i2i"]["loss on the CPU, first"]
    differences = {kind: float(row[summary.DIFFERENCE]) for kind, row in found.items() if kind != "i2i"}
    assert differences == {"t2i": 0, "t2v": pytest.approx(2e-3), "i2v": 0, "sana": 0}
    assert all(row["last"] != row["loss on the CPU, first"] for row in found.values()), "it was trained"
    nan = equality.largest_difference([1.0, float("nan"), 3.0], [1.0, 2.0, 3.0])
    assert nan != nan and equality.largest_difference([1.0, 3.0], [1.0, 2.0]) == 0.5


@pytest.mark.slow
def test_a_profile_names_what_takes_longest(capsys, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "ORDER", ("sana", "i2v"))
    kernels.run(TINY)
    found = rows(capsys.readouterr().out)
    assert [row["flavour"] for row in found] == ["sana", "i2v"] and "%" in found[0]["kernel 5"]
    ran = [("a", 0.0, 2.0), ("b", 1.0, 2.0), ("a", 3.0, 4.0), ("c" * 99, 5.0, 5.5)]
    assert kernels.list_longest(ran) == ["a 67%", "b 22%", "c" * kernels.NAME + " 11%", "", ""]
    names = [name for name, start, end in trace_kernels(lambda: torch.ones(3).sum(), CPU) if start <= end]
    assert "aten::sum" in names
    monkeypatch.setattr(kernels, "measure", lambda *others: 1 / 0)
    with pytest.raises(SystemExit, match="failed: sana, i2v"):
        kernels.run(TINY)


@pytest.mark.slow
def test_tests_that_fail_or_hang_are_named(capfd, monkeypatch) -> None:
    file = ROOT / "tests" / "benchmarks" / "gpu_parts.py"
    monkeypatch.setattr(marked_tests, "marked_files", lambda: [file])
    monkeypatch.setattr(marked_tests, "CHOSEN", ["-m", ""])
    with pytest.raises(SystemExit, match="2"):
        marked_tests.run(PartOptions())
    printed = capfd.readouterr().out
    assert "a number differs" in printed and "KeyboardInterrupt" in printed and printed.count("```") == 2
    assert summary.count_tests(printed) == "1 passed, 1 failed, 0 skipped (test_that_fails)"
    assert re.search(r"gpu_parts\.py:\d+: KeyboardInterrupt", printed), "where it was"


def table(*lines: tuple[object, ...]) -> str:
    head, *others = ["| " + " | ".join(map(str, line)) + " |" for line in lines]
    return "\n".join([head, "|---" * len(lines[0]) + "|", *others])


def case(name: str, ratio: str, rate: str) -> tuple[str, ...]:
    return name, "9.0", "9.5", "9.9", ratio, "1.5", "1.00", rate, "4%"


def test_the_first_lines_say_what_was_found() -> None:
    equal = table(
        equality.COLUMNS, ("t2i", 1, 2, "2e-06", 0), ("sana", 1, 2, "3e-05", 0), ("i2v", "broken", "", "", "")
    )
    counted = [("t2i", "training step", 0, ""), ("t2i", "denoising step", "0.33", "a:1"), ("t2i", "text batch", 2, "")]
    profile = ("t2i", "0.5", "7%", "gemm 50%", *[""] * 4)
    sections = {
        "tests": "tests/a.py::test_one[cuda] PASSED [ 1%]\ntests/a.py::test_two SKIPPED (no) [ 2%]\n"
        "tests/a.py::test_three FAILED [ 3%]\nFAILED tests/a.py::test_three - E",
        "equality": equal,
        "waits": table(waits.COLUMNS, *counted),
        "kernels": table(kernels.COLUMNS, profile),
        "sana": table(training.COLUMNS, case("LoRA", "1.04", "30%"), case("full", "0.90", "55%"))
        + "\n\n**Not whole**: a",
        "pro": table(training.COLUMNS, case("all", "", ""), ("lost", "out of memory", *[""] * 7)),
    }
    parts = {name: PARTS[name] for name in (*sections, "nabla")}
    assert summary.summarize(sections, parts) == [
        "- Parts: 5 of 7 passed; failed: sana; not run: nabla",
        "- Tests: 1 passed, 1 failed, 1 skipped (test_three)",
        "- Losses beside the CPU's: differ by 3e-05 at most (sana; 2 flavours), bound 0.001",
        "- Waits of a training step: t2i 0",
        "- Waits of a denoising step: t2i 0.33",
        "- Waits of a batch, by encoder: text t2i 2",
        "- Predicted memory / peak: 0.90 at worst (sana, full), of 2 cases",
        "- FLOP/s, of a matrix product's: 55% at best (sana, full), 30% at worst (sana, LoRA)",
        "- Idle in a training step: t2i 7%",
    ]
    alone = summary.summarize({"equality": f"the CPU with itself\n{equal}"}, PARTS, "only a card shows it")
    assert alone[2] == "- Losses beside the CPU's: only a card shows it"
    nothing = summary.summarize({}, PARTS)
    assert len(nothing) <= 10 and all(line.endswith("not measured") for line in nothing[1:])
