"""A program that another one runs: on a terminal its start and its end are shown, elsewhere nothing but its log."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.cli.console import Options
from stages.engines import stage_processes
from stages.engines.stage_processes import StageProcesses
from tests.terminal import run_in_terminal, screen_lines

ROOT = Path(__file__).resolve().parents[3]
YAML = "root: w\nmodel: {family: sana}\ndatasets: [{id: a, instance_data_dir: x}]\n"
PROBE = """\
from pathlib import Path

from schemas.cli.console import Options
from stages.engines.stage_processes import StageProcesses

code, report = StageProcesses({}).run("report", Options(Path("pipeline.yaml"), dry_run=True))
print(report["program"], code)
"""


def test_a_signal_while_a_program_ends_does_not_change_its_report(tmp_path, monkeypatch) -> None:
    """As Ctrl-C in the seconds that a process with torch takes to end."""
    program = tmp_path / "stages" / "late.py"
    program.parent.mkdir()
    lines = ("import os", "print('{')", 'print(\'"done": 3, "exit_code": 3\')', "print('}', flush=True)")
    program.write_text("\n".join((*lines, "os.kill(os.getpid(), 9)")))
    start = subprocess.Popen

    def popen(command, **options):
        return start([sys.executable, str(program)], **options)

    monkeypatch.setattr(stage_processes.subprocess, "Popen", popen)
    assert StageProcesses({}).run("late", Options(Path("pipeline.yaml"))) == (3, {"done": 3, "exit_code": 3})


@pytest.mark.long
@pytest.mark.slow
def test_start_and_end_are_shown_on_a_terminal_alone(tmp_path) -> None:
    (tmp_path / "pipeline.yaml").write_text(YAML)
    (tmp_path / "probe.py").write_text(PROBE)
    code, output = run_in_terminal([sys.executable, "probe.py"], 100, tmp_path, {"PYTHONPATH": str(ROOT)})
    lines = screen_lines(output)
    assert code == 0 and lines[0] == "starting report ..." and lines[-2:] == ["ending report ...", "report 0"], output
    assert output.rpartition("ending report ...")[2].startswith("\r\x1b[2K"), "the line is gone at the end"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "probe.py"], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert (process.stdout, process.stderr) == ("report 0\n", "")
