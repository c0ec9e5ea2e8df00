"""The distribution of units to the processes of a pool, and the units of a process that dies; without processes."""

from collections.abc import Iterator
from pathlib import Path

from stages.engines.jobs import UnitResult
from stages.engines.pool import Death, Message, WorkerPool, WorkerProcess
from tests.stages.engines.engine_workers import make_job, make_units


class Scripted(WorkerPool[WorkerProcess]):
    """Processes that send the messages of the test, and that get no unit while they are in `dead`."""

    max_units = 3
    advice = "none"

    def __init__(self, folder: Path, *names: str) -> None:
        self.said, self.counted = list[str](), list[int]()
        super().__init__(make_job(folder, 2), iter(make_units(*names)), self.counted.append, self.said.append)
        self.dead, self.messages = set[WorkerProcess](), list[tuple[WorkerProcess, Message | Death]]()
        self.begin = self.run()

    def _start(self, number: int) -> WorkerProcess:
        return WorkerProcess(number)

    def _send(self, process: WorkerProcess, unit: object) -> bool:
        return process not in self.dead

    def _receive(self) -> Iterator[tuple[WorkerProcess, Message | Death]]:
        yield from self.messages

    def _drop(self, process: WorkerProcess) -> None:
        pass

    def _end_all(self) -> None:
        pass

    def hear(self, number: int, *messages: Message | Death) -> list[UnitResult]:
        """The results after this message of a process."""
        [process] = [process for process in self._processes if process.number == number]
        results = [result for message in messages for result in self._handle(process, message)]
        self._hand_out()
        return results

    def units(self) -> dict[int, list[str]]:
        return {process.number: [unit.unit_id for unit in process.units] for process in self._processes}


def test_a_process_gets_units_when_it_is_ready_and_leaves_one_for_each_that_is_not(tmp_path: Path) -> None:
    pool = Scripted(tmp_path, "u0", "u1", "u2")
    pool._hand_out()
    assert pool.units() == {0: [], 1: []}
    pool.hear(0, 0)
    assert pool.units() == {0: ["u0", "u1"], 1: []}
    pool.hear(1, 0)
    assert pool.units() == {0: ["u0", "u1"], 1: ["u2"]}
    assert [result.unit_id for result in pool.hear(1, 2, UnitResult("u2", "u2"))] == ["u2"]
    assert pool.units() == {0: ["u0", "u1"]}, "one that nothing waits for ends"


def test_units_of_a_process_that_dies_are_tried_alone_and_what_was_counted_is_taken_back(tmp_path: Path) -> None:
    pool = Scripted(tmp_path, "u0", "u1", "u2", "u3", "u4", "u5")
    pool._hand_out()
    pool.hear(0, 0)
    pool.hear(1, 0, 1)
    assert pool.units() == {0: ["u0", "u1", "u2"], 1: ["u3", "u4", "u5"]}
    assert pool.hear(1, Death("exit code -9")) == []
    assert "u3, u4, u5" in pool.said[-1] and sum(pool.counted) == 0
    for tries in range(3):
        pool.hear(1, 0)
        assert pool.units()[1] == ["u3"]
        results = pool.hear(1, Death("exit code -9"))
        assert len(results) == (tries == 2)
    assert results[0].shard_path is None and "3 workers were lost" in results[0].error


def test_a_process_that_is_found_dead_takes_no_unit_with_it(tmp_path: Path) -> None:
    pool = Scripted(tmp_path, "u0", "u1")
    pool._hand_out()
    pool.dead = set(pool._processes[:1])
    pool.hear(0, 0)
    assert pool.units() == {0: [], 1: []}
    pool.hear(0, Death("exit code -9"))
    assert pool.said[-1].endswith(": none") and pool.units() == {0: [], 1: []}
    pool.hear(1, 0)
    assert pool.units() == {1: ["u0"], 0: []}
