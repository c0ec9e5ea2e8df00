"""Tests on the emulated device, each in a process of its own."""

from pathlib import Path

import pytest

from tests.accelerator import own_process
from tests.trainer.conftest import checkpoints, helpers, make_config, make_set, one_thread, ready  # noqa: F401 (fixtures)

HERE = Path(__file__).parent


def pytest_collection_modifyitems(session: pytest.Session) -> None:
    own_process.WITH_DEVICE.session = session  # before the server begins


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if HERE not in item.path.parents:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in own_process.run_alone(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
