"""Every program as a shell sees it: help without torch, exit codes, reports that are JSON and nothing else."""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from schemas.cli.command_lines import TABLE, check_words
from schemas.cli.console import Console, Report
from stages import cli
from stages.cli import PROGRAMS, TRAINER_PROGRAMS, program_module
from tests.forms import long

ROOT = Path(__file__).resolve().parent.parent
ABSENT = "root: work\nmodel: {family: sana, path: nowhere}\ndatasets: [{id: a, instance_data_dir: absent}]\n"
HEAVY = ("torch", "diffusers", "transformers", "accelerate", "peft", "av", "decord", "datasets")


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env={"PYTHONPATH": str(ROOT), "PATH": ""}
    )


@pytest.mark.slow
def test_programs_import_nothing_heavy_and_have_the_shared_options() -> None:
    modules = [f"{name}.__main__" if name == "trainer" else name for name in map(program_module, PROGRAMS)]
    code = "from schemas.cli.starting import leave_out_pandas; leave_out_pandas(); "  # as programs start
    code += f"import sys, {', '.join(modules)}; print([name for name in {HEAVY} if name in sys.modules])"
    done = python("-c", code)
    assert done.stdout == "[]\n", done.stderr
    for program, (about, words) in json.loads(TABLE.read_text()).items():
        options = {name for names, *_ in words for name in names}
        assert options >= {"--config", "--json", "--dry-run"} and "Exit codes" in about, program


ANSWERS = """
import atexit, json, os, sys
from stages import cli
import schemas.cli.command_lines
programs, answers = json.loads(sys.argv[1])
for program in programs:
    for code, words in answers:
        if os.fork() == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            said = os.fdopen(os.dup(int(sys.argv[2])), "w")
            ours = lambda: [name for name in sys.modules if name.partition(".")[0] in ("schemas", "cache", "stages")]
            heavy = lambda: [name for name in ("pydantic", "numpy", "pyarrow", "fsspec") if name in sys.modules]
            atexit.register(lambda: print(program, words, len(ours()), heavy(), file=said, flush=True))
            sys.argv = ["latentpress", program, *words]
            cli.main()
        assert os.waitstatus_to_exitcode(os.wait()[1]) == code, (program, words)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_help_and_an_unknown_option_are_answered_before_a_program_is_imported(tmp_path: Path) -> None:
    answers = [(0, ["--help"]), (2, ["--no-such-option"])]
    with (tmp_path / "modules").open("w") as said:
        command = [sys.executable, "-c", ANSWERS, json.dumps([["run", "train"], answers]), str(said.fileno())]
        environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
        done = subprocess.run(command, pass_fds=[said.fileno()], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "modules").read_text().splitlines()
    expected = [f"{program} {words} 6 []" for program in ("run", "train") for _, words in answers]
    assert lines == expected, "modules of ours, and libraries that take long"


@pytest.mark.slow
def test_status_imports_neither_pandas_nor_what_only_an_error_needs(tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    (tmp_path / "pipeline.yaml").write_text(
        "root: work\nmodel: {family: sana}\ndatasets: [{id: a, instance_data_dir: media}]\n"
    )
    code = """
import atexit, sys
from stages import cli
atexit.register(lambda: print([name for name in ("pandas", "stages.importing") if name in sys.modules]))
sys.argv = ["latentpress", "status"]
cli.main()
"""
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 3 and done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_table_answers_as_the_program_does(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    app = import_module("trainer.__main__" if program == "train" else program_module(program)).app

    def answer(words: list[str], call: Callable[..., object]) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            call(words)
        return ended.value.code, *capsys.readouterr()

    for words in (["--help"], ["--conf"], ["--config"], ["--config", "a.yaml", "--bogus=3"]):
        expected = answer(words, lambda words: app(args=words, prog_name=f"latentpress {program}"))
        assert answer(words, lambda words: check_words(program, words)) == expected
    check_words(program, ["--config", "a.yaml", "--json", *(["a"] if program == "import-config" else [])])


@pytest.mark.slow
@pytest.mark.parametrize("program", ["discover", "import-config", long("train")])
def test_wrong_use_ends_with_2(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def code(*words: str) -> object:
        if program in TRAINER_PROGRAMS:  # it takes the place of the process
            done = python("-m", "stages.cli", program, *words)
            sys.stderr.write(done.stderr)
            return done.returncode
        monkeypatch.setattr(sys, "argv", ["latentpress", program, *words])
        monkeypatch.setenv("PYTHONSAFEPATH", "1")  # main sets it: afterwards it is as before
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code

    assert code("--no-such-option") == 2
    option = [] if program == "import-config" else ["--config"]  # it reads another trainer's, and writes this one
    assert code(*option, str(tmp_path / "absent.yaml")) == 2
    assert "absent.yaml" in capfd.readouterr().err


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_number_of_the_command_line_has_both_bounds(program: str) -> None:
    app = import_module("trainer.__main__" if program == "train" else program_module(program)).app
    found = {}
    for name, parameter in inspect.signature(app.registered_commands[0].callback).parameters.items():
        kind, option = get_args(parameter.annotation)
        if {int, float} & {kind, *get_args(kind)} and option.parser is None:
            found[name] = (option.min, option.max)
    assert "workers" in found
    assert [name for name, bounds in found.items() if None in bounds] == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "many"), long("WORLD_SIZE", "0"), long("RANK", "9" * 5000)])
def test_a_launcher_that_says_no_number_is_named(tmp_path: Path, name: str, value: str, forked_programs: None) -> None:
    (tmp_path / "pipeline.yaml").write_text(ABSENT)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", name: value}
    command = [sys.executable, "-m", "trainer"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 2 and f"the environment variable {name} is" in done.stderr


@pytest.mark.parametrize("program", ["status", "bucket", "index", "gc", "report", "notify", "push", "export"])
def test_help_leaves_out_options_without_use(program: str) -> None:
    said = CliRunner().invoke(import_module(program_module(program)).app, ["--help"]).output
    assert "--set" in said and not any(it in said for it in ("--workers", "--device", "--shard "))


@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_pipe_without_a_reader_ends_help_quietly(buffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "PYTHONUNBUFFERED": buffered}
    command = [sys.executable, "-m", "stages.cli", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, env=environment)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_pipe_without_a_reader_ends_a_report_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream, pytest.raises(SystemExit) as ended:
        Console(stdout=stream).print_report(Report(program="status"))
    assert ended.value.code == 141


def test_an_unknown_program_is_answered_with_the_list() -> None:
    done = python("-m", "stages.cli", "encode")
    assert done.returncode == 2
    assert all(program in done.stderr for program in PROGRAMS)
    assert "'trian' (did you mean 'train'?)" in python("-m", "stages.cli", "trian").stderr


STARTED = {
    "latentpress status": (["-c", "from stages.cli import main; main()", "status"], "status", "-e ."),
    "python -m stages.encode_text": (["-m", "stages.encode_text"], "encode-text", "-e '.[encode]'"),
    "python -m trainer": (["-m", "trainer"], "train", "-e '.[train]'"),
}


@pytest.mark.parametrize("started", STARTED)
def test_a_library_that_is_not_installed_is_named(tmp_path: Path, started: str) -> None:
    arguments, program, installed = STARTED[started]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    command = [sys.executable, "-S", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 3 and "Traceback" not in done.stderr
    said = re.match(rf"error: ({program} needs the library '.*', which is not installed)\n", done.stderr)
    report = json.loads(done.stdout)
    assert said and report["error"]["message"] == said[1] and (report["program"], report["exit_code"]) == (program, 3)
    assert report["error"]["next_step"] == f"Install the libraries of this program: pip install {installed}"


def test_a_configuration_without_its_option_is_answered_with_the_command() -> None:
    done = python("-m", "stages.cli", "train", "my photos.yaml", "--dry-run")
    assert done.returncode == 2 and "latentpress train --config 'my photos.yaml' --dry-run" in done.stderr


@pytest.mark.parametrize("program", ["status", "index"])
def test_a_next_step_has_the_configuration_that_was_given(tmp_path: Path, monkeypatch, capsys, program: str) -> None:
    (tmp_path / "mine.yaml").write_text(ABSENT.replace("nowhere", "org/name"))
    monkeypatch.chdir(tmp_path)
    given = "--config mine.yaml --set train.steps=5"
    assert import_module(f"stages.{program}").app(given.split(), standalone_mode=False) == 3
    said = " ".join("".join(capsys.readouterr()).split())
    assert f"`latentpress discover {given}`, then `latentpress bucket {given}`" in said


def test_an_error_is_one_json_document_on_standard_output(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "pipeline.yaml").write_text(ABSENT)
    monkeypatch.chdir(tmp_path)
    assert import_module("stages.discover").app(["--json"], standalone_mode=False) == 3
    assert "does not exist" in json.loads(capsys.readouterr().out)["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("module", [*map(long, ("stages.cli", "stages.bucket", "trainer.export_adapter")), "trainer"])
def test_interrupted_while_it_imports_a_program_ends_without_a_traceback(tmp_path: Path, module: str) -> None:
    """By the signal, as other programs do; a library that comes first on the path interrupts it."""
    (tmp_path / "pydantic.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-P", "-m", module, *(["bucket"] if module == "stages.cli" else [])]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")
