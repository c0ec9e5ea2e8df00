"""Work that dies, hangs or eats memory in processes of its own."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from pebble.pool.process import PoolManager

from stages.engines.sandbox import MAX_ITEMS_PER_TASK, MAX_QUEUED_PER_PROCESS, SandboxPool, WorkerFailure
from stages.media.files import MediaError
from tests.stages.engines.sandboxed_functions import broken, noting, working


def sandbox(workers: int = 2, timeout_s: float = 30, memory_mib: int = 256) -> SandboxPool:
    return SandboxPool(working, workers=workers, timeout_s=timeout_s, memory_mib=memory_mib)


@pytest.mark.slow
def test_results_come_in_the_order_of_the_items() -> None:
    with sandbox() as pool:
        assert list(pool.map(range(1000))) == [(number, number) for number in range(1000)]
        assert pool("pid") != os.getpid()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("item", "reason", "words"),
    [
        ("crash", "decoder-died", "SIGSEGV"),
        ("leave", "decoder-died", "exit code 3"),
        ("eat", "out-of-memory", "256 MiB"),
    ],
)
def test_a_process_that_dies_costs_its_item_alone(item: str, reason: str, words: str) -> None:
    with sandbox() as pool:
        failure = pool(item)
        assert isinstance(failure, WorkerFailure)
        assert (failure.reason, words in failure.problem) == (reason, True)
        assert str(failure.error("clip.mp4")).startswith(f"clip.mp4: {failure.problem}; ")
        assert pool("fine") == "fine"


@pytest.mark.slow
def test_an_item_that_hangs_is_given_up_and_the_others_go_on() -> None:
    with sandbox(timeout_s=3) as pool:  # even a busy machine does not take seconds for the remaining items
        results = dict(pool.map(["a", "hang", *range(50)]))
    assert isinstance(results["hang"], WorkerFailure) and results["hang"].reason == "timed-out"
    assert [item for item, result in results.items() if item != result] == ["hang"]


@pytest.mark.slow
def test_of_several_items_of_a_task_only_the_current_one_is_lost() -> None:
    items: list[object] = list(range(400))
    for place in (90, 91, 200, 399):
        items[place] = "crash"
    items[300] = "eat"
    with sandbox() as pool:
        results = list(pool.map(items))
    assert [item for item, _ in results] == items
    assert [place for place, (item, result) in enumerate(results) if item != result] == [90, 91, 200, 300, 399]


@pytest.mark.slow
def test_a_process_may_die_before_what_it_said_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = PoolManager.process_next_message

    def read_late(manager: PoolManager, timeout: float) -> None:
        time.sleep(0.2)
        read(manager, timeout)

    monkeypatch.setattr(PoolManager, "process_next_message", read_late)
    with sandbox() as pool:
        for _ in range(2):
            failure = pool("crash")
            assert isinstance(failure, WorkerFailure) and failure.reason == "decoder-died"
            assert pool("a") == "a"


@pytest.mark.slow
def test_media_errors_are_results() -> None:
    with sandbox() as pool:
        error = pool("refuse")
    assert isinstance(error, MediaError)
    assert (error.reason, error.path, error.problem, error.advice) == ("bad", "one.png", "is bad", "mend it")


@pytest.mark.slow
def test_a_bug_is_raised_here_with_its_traceback() -> None:
    with sandbox() as pool:
        with pytest.raises(ZeroDivisionError, match="a bug of ours") as caught:
            list(pool.map([1, "fail", 2]))
        assert "in work" in str(caught.value.__cause__)
        assert pool("fine") == "fine"


def test_what_can_not_be_made_is_raised_here() -> None:
    with (
        SandboxPool(broken, workers=1, timeout_s=5, memory_mib=256) as pool,
        pytest.raises(ValueError, match="be made"),
    ):
        pool(1)


@pytest.mark.slow
def test_large_arrays_come_back_whole_and_can_be_written_to() -> None:
    shape = (9, 480, 640, 3)
    with sandbox() as pool:
        array = pool(shape)
    assert array["note"] == "large"
    assert np.array_equal(array["frames"], np.full(shape, 7, np.uint8))
    array["frames"][0] = 1


@pytest.mark.slow
def test_items_are_taken_a_bounded_number_ahead() -> None:
    items_read: list[int] = []
    most = 0

    def items() -> Iterator[int]:
        for number in range(5000):
            items_read.append(number)
            yield number

    with sandbox() as pool:
        for count, _ in enumerate(pool.map(items())):
            most = max(most, len(items_read) - count)
    assert most <= (MAX_QUEUED_PER_PROCESS * 2 + 2) * MAX_ITEMS_PER_TASK


@pytest.mark.slow
def test_a_map_that_is_left_early_leaves_nothing_in_the_way() -> None:
    with sandbox() as pool:
        assert next(pool.map(["a", *["hang"] * 3])) == ("a", "a")
        gc.collect()
        assert list(pool.map([1, 2])) == [(1, 1), (2, 2)]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter: gone between opening and reading
        return False


def wait_until_gone(*processes: int) -> None:
    """Without a limit: if a process stays, the test times out."""
    while any(map(alive, processes)):
        time.sleep(0.02)


@pytest.mark.slow
def test_closing_or_forgetting_it_ends_its_processes() -> None:
    with sandbox() as pool:
        closed = pool("pid")
    second = sandbox()
    forgotten = second("pid")
    del second
    gc.collect()
    wait_until_gone(closed, forgotten)


def test_one_that_a_thread_of_its_own_collects_ends_its_processes_too(tmp_path: Path) -> None:
    """Garbage is collected in the thread that happens to make some."""
    pool = sandbox(workers=1)
    first, second = pool.begin(tmp_path / "go"), pool.begin("hang")
    first.add_done_callback(lambda _: gc.collect())  # in the thread that receives the pool's results
    vars(pool)["itself"] = pool
    gc.disable()
    try:
        del pool
        (tmp_path / "go").touch()
        with pytest.raises((CancelledError, BrokenProcessPool)):
            second.result(timeout=60)
    finally:
        gc.enable()


OWNER = """
import sys
from functools import partial
from pathlib import Path
from tests.stages.engines.sandboxed_functions import noting
from stages.engines import sandbox
if __name__ == "__main__":
    sandbox.PRELOADED_MODULES.clear()  # as nothing is decoded
    with sandbox.SandboxPool(partial(noting, Path({folder!r})), workers=2, timeout_s=2, memory_mib=512) as pool:
        list(pool.map(range(1000)))
"""


@pytest.mark.slow
@pytest.mark.linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.usefixtures("forked_programs")
def test_nothing_outlives_its_owner(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, number: signal.Signals
) -> None:
    program = tmp_path_factory.mktemp("owner") / "owner.py"
    program.write_text(OWNER.format(folder=str(tmp_path)))
    owner = subprocess.Popen([sys.executable, str(program)], stderr=subprocess.DEVNULL)
    # Of the two processes and their parent the alarm may have ended one by then, which is replaced: how many there
    # are, and which are alive, says nothing.
    while len(list(tmp_path.iterdir())) < 3:
        assert owner.poll() is None
        time.sleep(0.02)
    owner.send_signal(number)
    owner.wait()
    process_ids: set[int] = set()
    while process_ids != (process_ids := {int(path.name) for path in tmp_path.iterdir()}):  # one may have been starting
        wait_until_gone(*process_ids)
    assert len(process_ids) >= 3


@pytest.mark.long
@pytest.mark.slow
def test_a_function_with_arguments_is_made_in_each_process(tmp_path: Path) -> None:
    with SandboxPool(partial(noting, tmp_path), workers=3, timeout_s=2, memory_mib=256) as pool:
        assert [result.reason for _, result in pool.map(range(3))] == ["timed-out"] * 3
    assert len(list(tmp_path.iterdir())) == 4  # and their parent
