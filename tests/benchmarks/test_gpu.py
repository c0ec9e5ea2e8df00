"""`make gpu` without a card: parts that end in every way, and each part's own code on tiny shapes."""

import dataclasses
import json
import os
import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
from accelerate.test_utils.testing import AccelerateTestCase

from benchmarks import device_usage
from benchmarks.gpu import __main__ as program
from benchmarks.gpu import (
    attention,
    image_lite,
    marked_tests,
    methods,
    optimizers,
    pro,
    ranks,
    results,
    sana,
    training,
    video_lite,
)
from benchmarks.gpu.parts import CARD, CARD_SECONDS, PARTS, Part, PartOptions

ROOT = Path(__file__).resolve().parents[2]
TINY = PartOptions("cpu", tiny=True, seconds=300, peak_flops=1e10)


def part(function: str, share: float = 30, least: float = 0) -> Part:
    return Part(f"The part {function}", f"tests.benchmarks.gpu_parts:{function}", share, least)


def section(path: Path, name: str) -> str:
    return results.read_sections(path)[name]


def test_each_part_ends_alone_and_replaces_its_own_section(tmp_path: Path) -> None:
    options, card = PartOptions(seconds=120), part("card")
    parts = {
        "hangs": part("hangs", share=1.6),
        "fails": part("fails"),
        "crashes": part("crashes"),
        "fine": part("fine"),
    }
    assert program.run_parts(parts, options, tmp_path, card) == 1
    path = tmp_path / "gpu-a-card-80gb.md"
    assert path.read_text().startswith("# A Card 80GB\n") and "80 GiB." in path.read_text()
    assert "| fine | cuda | False | 5e+14 |" in section(path, "fine") and "Not whole" not in section(path, "fine")
    assert "| before it failed | 1 |" in section(path, "fails")
    assert "ended by exit status 1" in section(path, "fails") and "a kernel is not there" in section(path, "fails")
    assert "ended by signal SIGSEGV" in section(path, "crashes")
    assert "ended after its limit of 2 s" in section(path, "hangs")
    started = re.search(r"^\d+$", section(path, "hangs"), re.MULTILINE)
    assert started and is_gone(int(started[0])), "what the part started ended with it"
    before = path.read_text()
    assert program.run_parts({"fails": part("fine"), "new": part("fine")}, options, tmp_path, card) == 0
    after = results.read_sections(path)
    assert "| fine |" in after["fails"] and "| fine |" in after["new"] and "Not whole" not in after["fails"]
    assert after["crashes"] == section_of(before, "crashes") and [*after] == [
        "hangs",
        "fails",
        "crashes",
        "fine",
        "new",
    ]


def section_of(text: str, name: str) -> str:
    found = results.MARK.split(text)
    return found[found.index(name) + 1]


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


def test_what_no_time_is_left_for_is_said_and_keeps_its_figures(tmp_path: Path) -> None:
    options, card = PartOptions(seconds=60), part("card")
    late = {"late": part("fine", least=1000)}
    assert program.run_parts(late, options, tmp_path, card) == 1
    path = tmp_path / "gpu-a-card-80gb.md"
    assert re.search(r"not begun, as \d+ s were left; `make gpu ONLY=late`", section(path, "late"))
    assert program.run_parts({"late": part("fine")}, options, tmp_path, card) == 0
    measured = section(path, "late")
    assert program.run_parts(late, options, tmp_path, card) == 1
    assert section(path, "late") == measured


def test_every_part_begins_where_all_take_what_they_may() -> None:
    left, waiting = 9.5 * 60 - CARD_SECONDS, [*PARTS.values()]
    while waiting:
        assert left >= waiting[0].least
        left -= program.share_time(waiting, left)
        waiting.pop(0)
    assert left == pytest.approx(0, abs=1e-6)
    assert program.share_time([PARTS["nabla"]], 300) == 300


def test_without_a_card_it_says_so(tmp_path: Path, capsys) -> None:
    assert program.run_parts({}, PartOptions(seconds=30), tmp_path, part("no_card")) == 2
    assert "torch 9 finds no CUDA device" in capsys.readouterr().err and not [*tmp_path.iterdir()]
    for words, said in (
        (["--only", "tets"], "no part tets; choose from tests, equality"),
        (["--device", "cpu"], "takes hours without --tiny"),
    ):
        with pytest.raises(SystemExit):
            program.main(words)
        assert said in capsys.readouterr().err


def test_make_takes_the_environment_that_is_there(tmp_path: Path) -> None:
    """In a folder without a virtual environment, a Python from outside."""
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-n", "gpu", "ONLY=nabla,vae", "MINUTES=5", "PYTHON=/usr/bin/its-python"]

    def words_of_make() -> list[str]:
        said = subprocess.run(command, cwd=tmp_path, env=ours, text=True, capture_output=True, check=True).stdout
        return said.replace("\\\n", "").split()

    words = ["-m", "benchmarks.gpu", "--only", "nabla,vae", "--minutes", "5"]
    assert words_of_make() == ["/usr/bin/its-python", *words]
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    assert words_of_make() == [".venv/bin/python", *words]


def test_every_part_is_there() -> None:
    for name in (*PARTS.values(), CARD):
        assert (ROOT / f"{name.module.replace('.', '/')}.py").is_file()
    names = {path.relative_to(ROOT / "tests").as_posix() for path in marked_tests.marked_files()}
    assert {"trainer/gpu/test_runs.py", "trainer/setup/test_quantize.py"} <= names


@pytest.mark.slow
def test_its_tests_are_found(capsys, monkeypatch) -> None:
    monkeypatch.setattr(marked_tests, "marked_files", lambda: [ROOT / "tests" / "trainer" / "gpu" / "test_runs.py"])
    marked_tests.run(TINY)
    assert re.search(r"\d+ tests collected", capsys.readouterr().out)


def rows(printed: str) -> list[list[str]]:
    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def no_streams(case: training.Case) -> training.Case:
    """As a CPU has none."""
    offload = {key: value for key, value in case.settings.get("offload", {}).items() if key != "streams"}
    return dataclasses.replace(case, settings={**case.settings, "offload": offload})


@pytest.fixture
def few_predictions(monkeypatch) -> None:
    """Of a step's memory, which takes as long as the step: one for each model instead of one for each case."""
    predict, known = training.predict, {}

    def once(model, case):
        key = model.flavour, case.bucket or model.bucket
        if key not in known:
            known[key] = predict(model, case)
        return known[key]

    monkeypatch.setattr(training, "predict", once)


@pytest.mark.slow
@pytest.mark.usefixtures("few_predictions")
def test_training_on_tiny_shapes(capsys, monkeypatch, tmp_path) -> None:
    """One case of each sort; all are valid configurations."""
    for name in ("video-lite", "image-lite", "sana", "pro", "methods", "attention"):
        module = import_module(PARTS[name].module)
        model = getattr(module, "model", video_lite.model)
        for tiny in (False, True):
            for case in module.CASES:
                assert training.make_config(model(tiny), case, tmp_path, "cuda").train.device == "cuda"
    names = ("LoRA", "base nf4-bnb", "compiled blocks")
    chosen = [case for case in video_lite.CASES if case.name in names]
    broken = training.Case("refused", {"offload": {"blocks": True, "streams": True}})
    monkeypatch.setattr(video_lite, "CASES", [*chosen, broken])
    video_lite.run(TINY)
    heads, *found = rows(capsys.readouterr().out)
    assert heads == list(training.COLUMNS) and [row[0] for row in found] == [case.name for case in video_lite.CASES]
    assert all(float(row[5]) > 0 and row[7].endswith("%") for row in found[:-1]), found
    assert "cpu has no streams to copy on" in found[-1][1] and found[-1][3]
    ratios = [float(row[6]) * float(found[0][5]) / float(row[5]) for row in found[:-1]]
    assert ratios == pytest.approx([1] * len(ratios), rel=0.05), "of the first's"
    for module, names in (
        (pro, ["checkpointing interval 2", "block and activation offload"]),
        (image_lite, ["LoRA"]),
        (sana, ["bfloat16 weights, checkpointing interval 2", "bfloat16 weights, activation offload", "LoRA"]),
    ):
        cases = [next(case for case in module.CASES if case.name == name) for name in names]
        monkeypatch.setattr(module, "CASES", [no_streams(case) for case in cases])
        module.run(TINY)
        _, *found = rows(capsys.readouterr().out)
        names = [case.name + (", 128x128@9" if case.bucket else "") for case in cases]
        assert [row[0] for row in found] == names
        assert all(float(row[5]) > 0 and row[7].endswith("%") for row in found), found


@pytest.mark.slow
def test_a_case_that_fails_leaves_the_others(capsys, monkeypatch) -> None:
    """And one for which no time is left says so."""
    step, calls = training.train_step, []

    def failing(run, batches):
        calls.append(run)
        if len(calls) == 1:
            raise RuntimeError("CUDA error: an illegal | access")
        return step(run, batches)

    monkeypatch.setattr(training, "train_step", failing)
    cases = [training.Case(str(number), sana.full("adamw-fused")) for number in range(2)]
    with pytest.raises(SystemExit, match="failed: 0"):
        training.measure_cases(TINY, sana.model(tiny=True), cases)
    _, first, second = rows(capsys.readouterr().out)
    assert first[1] == "RuntimeError: CUDA error: an illegal / access" and float(second[5]) > 0
    monkeypatch.setattr(training, "train_step", step)
    training.measure_cases(PartOptions("cpu", True, 0.5), sana.model(tiny=True), cases)
    assert rows(capsys.readouterr().out)[2][1].startswith("not begun: ")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nabla", "vae", "text", "noise", "data"])
def test_other_parts_on_tiny_shapes(capsys, name) -> None:
    import_module(PARTS[name].module).run(TINY)
    assert len(rows(capsys.readouterr().out)) >= 2


@pytest.mark.slow
@pytest.mark.usefixtures("few_predictions")
def test_methods_and_attention_backends_on_tiny_shapes(capsys, monkeypatch) -> None:
    monkeypatch.setattr(methods, "CASES", [*methods.CASES[:3], *methods.CASES[4:]])
    methods.run(TINY)
    _, *found = rows(capsys.readouterr().out)
    names = ["no method", "tread, half of the tokens", "crepa, dinov2_vits14"]
    assert [row[0] for row in found] == [*names, "regularization data", "input perturbation"]
    assert all(float(row[5]) > 0 for row in found)
    monkeypatch.setattr(attention, "CASES", attention.CASES[:2])
    attention.run(TINY)
    found = {row[0]: row for row in rows(capsys.readouterr().out)}
    assert "install `flash-attn" in found["flash"][1] and "install `sageattention" in found["sage"][1]
    assert float(found["native"][4]) > 0 and 0 < float(found["_native_math"][6]) < 0.02
    assert float(found["attention _native_flash"][6]) > 0


@pytest.mark.slow
def test_updates_and_two_ranks_on_tiny_shapes(capsys, monkeypatch) -> None:
    monkeypatch.setattr(optimizers, "OPTIMIZERS", ("adamw", "adamw-fused", "optimi.NoSuch"))
    optimizers.run(TINY)
    _, *found = rows(capsys.readouterr().out)
    assert [row[1] for row in found] == 2 * ["adamw", "adamw-fused", "optimi.NoSuch"]
    assert all(float(row[3]) > 0 for row in found if row[1] != "optimi.NoSuch") and "no optimizer" in found[2][2]
    monkeypatch.setattr(ranks, "WORK", {"LoRA": (sana.model, ranks.LORA)})
    monkeypatch.setattr(ranks, "STRATEGIES", {name: ranks.STRATEGIES[name] for name in ("one process", "fsdp2")})
    AccelerateTestCase("run").tearDown()  # forgets that this process trained alone
    ranks.run(TINY)
    _, *found = rows(capsys.readouterr().out)
    assert [row[1] for row in found] == ["one process", "fsdp2"] and all(float(row[3]) > 0 for row in found)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    ranks.run(PartOptions())
    assert "NCCL refuses two ranks on one" in capsys.readouterr().out


@pytest.mark.slow
def test_the_card_describes_itself(capsys, monkeypatch) -> None:
    monkeypatch.setitem(device_usage.MATRIX_SIDE, "cpu", 32)
    import_module(CARD.module).run(TINY)
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["card"] == "CPU" and facts["peak_flops"] > 0 and "bfloat16" in facts["details"]
    if not os.environ.get("CUDA_VISIBLE_DEVICES"):
        import torch

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit, match="finds no CUDA device; install"):
            import_module(CARD.module).run(PartOptions())
