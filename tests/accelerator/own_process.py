"""Runs a test in a fork of a process without threads, which has the emulated device, and brings its reports back.

The server of forks (`tests/fork_server.py`) begins when all tests are collected and none has run: it knows the tests,
and its torch has started no threads, which a fork of a process that has trained would lack.
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from _pytest.capture import CaptureManager
from _pytest.runner import runtestprotocol

from tests.processes import ForkedProgram, prepare_fork

WITH_DEVICE = SimpleNamespace(session=None)  # in the server: the session whose tests are known by their ids


class OneTest:
    """The work of the fork. folder: for its temporary files."""

    def __init__(self, item: str, folder: str) -> None:
        self.item, self.folder = item, folder

    def __call__(self, files: list[int]) -> None:
        from tests.accelerator import emulated

        session = WITH_DEVICE.session
        (item,) = (item for item in session.items if item.nodeid == self.item)
        prepare_fork()
        capture_anew(session.config)
        session.config._tmp_path_factory._basetemp = Path(self.folder)
        emulated.install()
        reports = runtestprotocol(item, nextitem=None, log=False)
        to_data = session.config.hook.pytest_report_to_serializable
        data = [to_data(config=session.config, report=report) for report in reports]
        with os.fdopen(files[0], "w") as pipe:
            json.dump(data, pipe)
        os._exit(0)  # without what pytest and multiprocessing do at the end


def capture_anew(config: pytest.Config) -> None:
    """The server has closed the files of pytest's capturing."""
    config.pluginmanager.unregister(name="capturemanager")
    manager = CaptureManager("sys")
    manager.start_global_capturing()
    config.pluginmanager.register(manager, "capturemanager")


def run_alone(item: pytest.Item) -> list[pytest.TestReport]:
    """The reports of a test that has run in a fork."""
    folder = item.config._tmp_path_factory.mktemp("emulated")
    reading, writing = os.pipe()
    began = time.time()
    child = ForkedProgram.server.fork(OneTest(item.nodeid, str(folder)), [writing])
    os.close(writing)
    try:
        with os.fdopen(reading) as pipe:
            text = pipe.read()
    except BaseException:
        os.kill(child, 9)
        raise
    finally:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if text:
        from_data = item.config.hook.pytest_report_from_serializable
        return [from_data(config=item.config, data=data) for data in json.loads(text)]
    error = f"the process of the test ended with {status} and brought no report"
    took = time.time() - began
    return [pytest.TestReport(item.nodeid, item.location, {}, "failed", error, "call", [], took, began, began + took)]
