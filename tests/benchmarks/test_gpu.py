"""`make gpu` without a card: every way in which a part ends, and the code of each part on tiny shapes."""

import json
import re
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch
from accelerate.test_utils.testing import AccelerateTestCase

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import equality, marked_tests, ranks, results, sana, summary, training, video_lite, waits
from benchmarks.gpu.parts import CARD, PARTS, Part, PartOptions

ROOT = Path(__file__).resolve().parents[2]
TINY = PartOptions("cpu", tiny=True, seconds=300, peak_flops=1e10)
WARNING = "called a synchronizing CUDA operation (Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:120.)"


def part(function: str, share: float = 30, least: float = 0) -> Part:
    return Part(f"The part {function}", f"tests.benchmarks.gpu_parts:{function}", share, least)


def rows(printed: str) -> list[dict[str, str]]:
    return summary.read_rows(printed)


def test_each_part_ends_alone_and_replaces_its_own_section(tmp_path: Path) -> None:
    options, card = PartOptions(seconds=120), part("card")
    parts = {name: part(name, share=1.6 if name == "hangs" else 30) for name in ("hangs", "fails", "crashes", "fine")}
    assert program.run_parts(parts, options, tmp_path, card) == 1
    path = tmp_path / "gpu-a-card-80gb.md"
    before = results.read_sections(path)
    assert path.read_text().startswith("# A Card 80GB\n") and "80 GiB." in path.read_text()
    assert "| fine | cuda | False | 5e+14 |" in before["fine"] and "Not whole" not in before["fine"]
    assert "| before it failed | 1 |" in before["fails"] and "a kernel is not there" in before["fails"]
    assert "ended by signal SIGSEGV" in before["crashes"] and "ended after its limit of 2 s" in before["hangs"]
    started = re.search(r"^\d+$", before["hangs"], re.MULTILINE)
    assert started and is_gone(int(started[0])), "the processes of a part end with it"
    second_parts = {"fails": part("fine"), "late": part("fine", least=1000)}
    assert program.run_parts(second_parts, options, tmp_path, card) == 1
    after = results.read_sections(path)
    assert "| fine |" in after["fails"] and after["crashes"] == before["crashes"]
    assert re.search(r"\d+ s remained; `make gpu ONLY=late`", after["late"])


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


def test_without_a_card_it_says_so(tmp_path: Path, capsys) -> None:
    assert program.run_parts({}, PartOptions(seconds=30), tmp_path, part("no_card")) == 2
    assert "torch 9 finds no CUDA device" in capsys.readouterr().err and not [*tmp_path.iterdir()]
    for words, message in (
        (["--only", "tets"], "unknown part tets; choose from tests, equality"),
        (["--device", "cpu"], "takes hours without --tiny"),
    ):
        with pytest.raises(SystemExit):
            program.main(words)
        assert message in capsys.readouterr().err


def test_every_part_is_there() -> None:
    for name in (*PARTS.values(), CARD):
        assert (ROOT / f"{name.module.replace('.', '/')}.py").is_file()
    names = {path.relative_to(ROOT / "tests").as_posix() for path in marked_tests.marked_files()}
    assert {"trainer/gpu/test_runs.py", "trainer/setup/test_quantize.py"} <= names


@pytest.mark.long
def test_training_on_tiny_shapes(capsys, monkeypatch, tmp_path) -> None:
    """A failing case does not stop the other cases, and all cases of all parts are valid configurations."""
    for name in ("video-lite", "image-lite", "sana", "pro", "methods", "attention"):
        module = import_module(PARTS[name].module)
        model = getattr(module, "model", video_lite.model)
        for tiny in (False, True):
            for case in module.CASES:
                assert training.make_config(model(tiny), case, tmp_path, "cuda").train.device == "cuda"
    broken = training.Case("refused", {"adapter": {"targets": ["nothing"]}})
    cases = [case for case in video_lite.CASES if case.name in ("LoRA", "base nf4-bnb", "compiled blocks")]
    monkeypatch.setattr(video_lite, "CASES", [*cases, broken])
    video_lite.run(TINY)
    measurements = rows(capsys.readouterr().out)
    assert [*measurements[0]] == list(training.COLUMNS) and len(measurements) == 4
    assert all(float([*row.values()][5]) > 0 for row in measurements[:-1]), measurements
    assert "matches no" in str(measurements[-1])


@pytest.mark.long
@pytest.mark.parametrize("name", ["nabla", "vae", "text", "noise", "data", "latents", "kernels"])
def test_other_parts_on_tiny_shapes(capsys, name) -> None:
    import_module(PARTS[name].module).run(TINY)
    assert len(rows(capsys.readouterr().out)) >= 1


@pytest.mark.long
def test_two_ranks_on_tiny_shapes(capsys, monkeypatch) -> None:
    monkeypatch.setattr(ranks, "WORK", {"LoRA": (sana.model, ranks.LORA)})
    monkeypatch.setattr(ranks, "STRATEGIES", {name: ranks.STRATEGIES[name] for name in ("one process", "fsdp2")})
    AccelerateTestCase("run").tearDown()  # resets the state of accelerate, which has trained in one process
    ranks.run(TINY)
    assert [[*row.values()][1] for row in rows(capsys.readouterr().out)] == ["one process", "fsdp2"]


def call_from(path: Path, line: int, work) -> None:
    """Call `work` from this line of a file, which does not have to exist."""
    exec(compile("\n" * (line - 1) + "work()", str(path), "exec"), {"work": work})


def test_waits_are_counted_by_the_innermost_line_of_the_project() -> None:
    def warn() -> None:
        warnings.warn(WARNING, stacklevel=1)

    library = ROOT / ".venv/lib/python3/site-packages/diffusers/made_up.py"
    with warnings.catch_warnings(record=True) as caught_warnings, waits.counting(torch.device("cpu")) as counts:
        for _ in range(2):  # both are counted, although they are from the same line
            call_from(ROOT / "trainer/made_up.py", 7, warn)
        call_from(ROOT / "stages/outer.py", 3, lambda: call_from(ROOT / "cache/inner.py", 5, warn))
        call_from(ROOT / "schemas/made_up.py", 4, lambda: call_from(library, 9, warn))
        call_from(ROOT / "trainer/made_up.py", 8, lambda: warnings.warn("something else", stacklevel=1))
    assert counts == {"trainer/made_up.py:7": 2, "cache/inner.py:5": 1, "schemas/made_up.py:4": 1}
    assert [str(each.message) for each in caught_warnings] == ["something else"]


@pytest.mark.long
def test_losses_that_differ_are_a_failure_and_the_others_are_compared(capsys, monkeypatch) -> None:
    calls: list[str] = []

    def measure(kind: str, device: str, real=equality.measure) -> dict[str, list[float]]:
        calls.append(kind)
        if kind == "i2i":
            raise RuntimeError("no kernel")
        measurements = real(kind, device)
        if (kind, calls.count(kind)) == ("t2v", 2):
            measurements["loss"][3] *= 1.002
        return measurements

    monkeypatch.setattr(equality, "measure", measure)
    with pytest.raises(SystemExit, match=r"not equal within 0.001: i2i, t2v$"):
        equality.run(TINY)
    measurements = {row["flavour"]: row for row in rows(capsys.readouterr().out)}
    assert (
        "no kernel" in measurements["i2i"]["loss on the CPU, first"]
        and float(measurements["sana"][summary.DIFFERENCE]) == 0
    )


@pytest.mark.slow
def test_tests_that_fail_or_hang_are_named(capfd, monkeypatch) -> None:
    file = ROOT / "tests" / "benchmarks" / "gpu_parts.py"
    monkeypatch.setattr(marked_tests, "marked_files", lambda: [file])
    monkeypatch.setattr(marked_tests, "SELECTION", ["-m", ""])
    with pytest.raises(SystemExit, match="2"):
        marked_tests.run(PartOptions())
    printed = capfd.readouterr().out
    assert "a number differs" in printed and "KeyboardInterrupt" in printed and printed.count("```") == 2
    assert summary.count_tests(printed) == "1 passed, 1 failed, 0 skipped (test_that_fails)"


@pytest.mark.slow
def test_the_card_describes_itself(capsys) -> None:
    import_module(CARD.module).run(TINY)
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["card"] == "CPU" and facts["peak_flops"] > 0 and "bfloat16" in facts["details"]
