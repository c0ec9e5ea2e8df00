"""Fixtures shared by all tests."""

import gc
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from stages.encoding import stage
from stages.engines import sandbox
from tests.fork_server import ForkServer
from tests.forms import long
from tests.model_hub import models  # noqa: F401 (fixture)
from tests.processes import ForkedProgram
from tests.project import CHECKPOINTS, Project, make_project
from tests.s3_server import s3, s3_server  # noqa: F401 (fixtures)
from tests.wheels import wheel  # noqa: F401 (fixture)

# Several test processes share the cores; tiny models are no faster on two threads. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# For the same reason the time that an example takes says nothing.
settings.register_profile("patient", deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("patient"), max_examples=500)
settings.load_profile("patient")

# What a shell runs in the background ignores Ctrl-C, and so would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# In memory where there is room: what the tests sync to a disk takes a tenth of their time.
if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 6 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

# A process has an order of units of its own, which is random; tests in one process take the plan's, always the same.
own_order, stage.order_units = stage.order_units, lambda units: list(units)

# Test modules import these libraries, and few tests read media through them.
sandbox.SOURCE_LIBRARIES.clear()

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "tests" / "benchmarks"
#: Where everything is forked, counted in /proc, limited or cut off as only Linux does it.
LINUX = (ROOT / "tests" / "torture", ROOT / "tests" / "accelerator")
BUILDERS = ROOT / "stages" / "rehearsing"
SLOW_S = 0.5  # of processor time; a test that takes more belongs among those that are marked slow


def _cpu_s() -> float:
    """Of this process and of the children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A process for each core: one more would import the libraries, and make what the tests share, once more."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pytest_collection(session: pytest.Session) -> None:
    gc.disable()  # as garbage_collection_paused does for programs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="0/1", help="run each nth of the tests alone, from the ith: i/n, from 0/n")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    """Tests of benchmarks and with a browser are long ones; those marked gpu are skipped without a CUDA device, and
    those marked linux elsewhere."""
    for item in items:
        if BENCHMARKS in item.path.parents or "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.long)
        if {*LINUX} & {*item.path.parents} or "forked_programs" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.linux)
        if sys.platform != "linux" and item.get_closest_marker("linux"):
            item.add_marker(pytest.mark.skip(reason="needs Linux"))
    yield  # after which those of one form alone are left
    part, parts = map(int, config.getoption("part").split("/"))
    config.hook.pytest_deselected(items=[item for number, item in enumerate(items) if number % parts != part])
    items[:] = items[part::parts]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"torch {torch.__version__} finds no CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # nor are the modules' objects examined later, nor copied by forks
    gc.set_threshold(20_000, 20, 20)  # what libraries import later is examined less often: 5 % of the time of the tests
    gc.enable()
    if sys.platform == "linux" and session.items:
        ForkedProgram.server = ForkServer()  # before the first test, so before the first thread


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    before = _cpu_s()
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu_s", _cpu_s() - before))
        if "torch" in sys.modules:  # a program with more threads would leave them to the tests after this one
            sys.modules["torch"].set_num_threads(1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names the tests that `make test-fast` should leave out. By processor time, which other work changes little."""
    took = {
        report.nodeid: dict(report.user_properties)["cpu_s"]
        for report in terminalreporter.stats.get("passed", [])
        if "slow" not in report.keywords
    }
    if slow := sorted((test for test, seconds in took.items() if seconds > SLOW_S), key=took.__getitem__, reverse=True):
        terminalreporter.section(f"more than {SLOW_S:g} s of processor time, not marked slow")
        for test in slow:
            terminalreporter.write_line(f"{took[test]:6.1f} s  {test}")


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path, None, None]:
    """Where programs, also in other processes, keep copies of remote shards: never in the user's own folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache-home")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session", params=[False, long(True)], ids=["short", "long"])
def is_long(request: pytest.FixtureRequest) -> bool:
    """Whether the test, which has both forms, is in its long one."""
    return request.param


@pytest.fixture
def often(is_long: bool) -> Callable[[int, int], int]:
    """often(short, long): how many times, in this form."""
    return lambda short, long: long if is_long else short


@pytest.fixture
def forked_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that are started in this test are forks of this process as it was before the first test, and so are
    those that they start."""
    monkeypatch.setattr(subprocess, "Popen", ForkedProgram)


@pytest.fixture
def wandb_offline(monkeypatch: pytest.MonkeyPatch) -> Generator[None, None, None]:
    """Weights & Biases without a network: it reads the environment once in a process, unless it is told to forget."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.fixture(scope="module")
def one_thread() -> Generator[None, None, None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], Path]:
    """kind -> folder of a tiny random checkpoint, built once and shared by every process and later run."""
    libraries = [f"{name}=={version(name)}" for name in ("torch", "diffusers", "transformers")]
    # Random weights depend on the vector instructions that torch uses.
    libraries.append(os.environ.get("ATEN_CPU_CAPABILITY", ""))
    sources = b"".join(path.read_bytes() for path in sorted(BUILDERS.glob("tiny_*.py")))
    stamp = hashlib.sha256(sources + " ".join(libraries).encode()).hexdigest()[:12]

    @cache
    def folder(kind: str) -> Path:
        target = ROOT / ".tiny" / f"{kind}-{stamp}"
        if not target.exists():
            _build(kind, target)
        return target

    return folder


def _build(kind: str, target: Path) -> None:
    """Beside its place first, then renamed: another process sees a whole checkpoint or none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        from stages.rehearsing.tiny_models import build  # it imports torch

        made = build(kind, Path(temporary) / kind)
        try:
            os.rename(made, target)
        except OSError:
            if not target.exists():  # another process that was faster is the one good reason
                raise
            shutil.rmtree(made)


@pytest.fixture
def project(tmp_path: Path, tiny: Callable[[str], Path]) -> Callable[..., Project]:
    """project(kind="kandinsky5-image-t2i", **settings) -> Project, with one dataset "photos" and no media yet."""

    def make(kind: str = "kandinsky5-image-t2i", **settings: Any) -> Project:
        folder = tmp_path / f"project{len(list(tmp_path.iterdir()))}"
        return make_project(folder, kind, tiny(CHECKPOINTS[kind]), **settings)

    return make


@pytest.fixture(scope="session")
def _built() -> dict[tuple[str, ...], Path]:
    return {}


@pytest.fixture
def built(
    _built: dict[tuple[str, ...], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Project, Callable[[Project], None]], Project]:
    """built(home, make) -> home, as make(home) leaves its folder. The first of equal calls in a process makes it; the
    others get a copy, with the times of its files, as they take it to be their own."""

    def get(home: Project, make: Callable[[Project], None]) -> Project:
        key = (make.__module__, make.__qualname__, json.dumps(home.settings))
        if key in _built:
            shutil.copytree(_built[key], home.folder, dirs_exist_ok=True)
        else:
            make(home)
            kept = tmp_path_factory.mktemp("built") / "project"
            shutil.copytree(home.folder, kept)
            _built[key] = kept
        return home

    return get
