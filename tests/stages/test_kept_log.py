"""`run` in a terminal that is closed."""

import os
import pty
import sys

import pytest

from tests.background import until


@pytest.mark.long
@pytest.mark.slow
def test_run_goes_on_without_its_terminal_and_its_log_has_all(project) -> None:
    home = project()
    home.image("one.png")
    home.settings["stages"]["order"] = ["discover", "bucket"]
    home.config()
    command = [sys.executable, "-m", "stages.cli", "run", "--config", str(home.folder / "pipeline.yaml")]
    child, terminal = pty.fork()  # the leader of a session of its own, which gets SIGHUP
    if child == 0:
        os.execv(sys.executable, command)
    log = home.folder / "output/run/logs/run.log"
    until(log.exists, "the log")
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    text = log.read_text()
    assert os.waitstatus_to_exitcode(status) == 0, text
    for said in ("run: --- discover", "discover: list photos", "run: --- bucket", "run: run: 2 stages done"):
        assert said in text
