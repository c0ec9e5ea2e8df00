"""Programs of the page: started once, stopped, killed, restarted, found by another page. A script replaces them."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from schemas.cli.process_record import find_process_start
from schemas.errors import LatentpressError
from stages.pages.ui.child_programs import JOBS, KEPT_LOGS, ChildPrograms, Refused, Start
from stages.pages.ui.job_cards import build_job_card
from tests.background import until

WAITS = "#!/bin/sh\necho began $*\nexec sleep 600\n"
OBSTINATE = "#!/bin/sh\ntrap '' TERM\necho began\nwhile true; do sleep 0.05; done\n"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ChildPrograms]]:
    """page(script) -> the programs of another page with the same output. Running programs are killed at the end."""

    def make(script: str = WAITS) -> ChildPrograms:
        path = tmp_path / "program"
        path.write_text(script)
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))
        return ChildPrograms(tmp_path / "output", ["--config", "pipeline.yaml"])

    yield make
    for name in JOBS:
        last = make().last_start(name)
        if last is not None and last.is_running:
            os.killpg(last.process, signal.SIGKILL)


def read_log(programs: ChildPrograms, start: Start) -> str:
    log = next(path for path in programs.logs(start.program) if path.name == start.log)
    until(lambda: log.read_text(), "a first line")
    return log.read_text()


def ended(programs: ChildPrograms, name: str) -> Start:
    until(lambda: not programs.last_start(name).is_running, f"the end of {name}")
    return programs.last_start(name)


def test_of_many_that_start_it_at_once_one_does(page: Callable[..., ChildPrograms]) -> None:
    pages, started, refused = [page() for _ in range(4)], [], []

    def start(programs: ChildPrograms) -> None:
        try:
            started.append(programs.start("discover"))
        except Refused as error:
            refused.append(error.message)

    threads = [threading.Thread(target=start, args=(programs,)) for programs in pages * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(started) == 1 and len(refused) == 11
    assert set(refused) == {f"discover is already running: it was started at {at_time(started[0])}"}
    assert read_log(pages[0], started[0]) == "began -P -m stages.discover --config pipeline.yaml\n"
    with pytest.raises(Refused, match="run can't start while discover is running"):
        pages[1].start("run")
    pages[2].start("bucket")  # stages may run at the same time


def at_time(start: Start) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(start.began))}, process {start.process}"


def test_a_program_continues_when_its_page_is_killed(page: Callable[..., ChildPrograms]) -> None:
    programs = page()
    child = os.fork()
    if child == 0:
        programs.start("preview-plan")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    second_page = page()
    start = second_page.last_start("preview-plan")
    assert start is not None and start.is_running and os.getsid(start.process) == start.process
    with pytest.raises(Refused, match="preview-plan is already running"):
        second_page.start("preview-plan")
    assert build_job_card("preview-plan", "", second_page).actions == ["stop", "restart"]
    assert read_log(second_page, start).startswith("began -P -m stages.preview --config pipeline.yaml --plan")
    second_page.stop("preview-plan")
    assert ended(second_page, "preview-plan").exit_code is None, "only the parent process gets the exit code"
    assert build_job_card("preview-plan", "", second_page).remark == "stopped"


def test_stop_kill_and_their_messages(page: Callable[..., ChildPrograms]) -> None:
    programs = page()
    for verb in (programs.stop, programs.kill):
        with pytest.raises(Refused, match="train is not running"):
            verb("train")
    programs.start("train")
    with pytest.raises(Refused, match="train can only be killed after"):
        programs.kill("train")
    programs.stop("train")
    assert ended(programs, "train").exit_code == -signal.SIGTERM
    assert build_job_card("train", "", programs).remark.startswith("stopped, ")

    programs = page(OBSTINATE)
    read_log(programs, programs.start("train"))
    programs.stop("train")
    card = build_job_card("train", "", programs)
    assert (card.state, card.actions) == ("stopping", ["kill"])
    with pytest.raises(Refused, match="train is already stopping"):
        programs.stop("train")
    programs.kill("train")
    assert ended(programs, "train").exit_code == -signal.SIGKILL


def test_a_restart_waits_for_the_end(page: Callable[..., ChildPrograms]) -> None:
    programs = page(OBSTINATE)
    first = programs.start("decode")
    read_log(programs, first)
    programs.restart("decode")
    assert build_job_card("decode", "", programs).state == "restarting"
    with pytest.raises(Refused, match="decode is already being restarted"):
        programs.restart("decode")
    assert programs.last_start("decode").process == first.process, "the first start has not ended yet"
    programs.kill("decode")
    until(lambda: programs.last_start("decode").process != first.process, "the second start")
    assert programs.last_start("decode").is_running and len(programs.logs("decode")) == 2
    until(lambda: not programs.is_restarting("decode"), "the restart")


def test_another_process_with_its_id_is_left_alone(page: Callable[..., ChildPrograms]) -> None:
    programs = page()
    before = programs.start("report")
    mine = before.model_copy(update={"process": os.getpid()})
    mine.write(programs._path("report"))
    assert not programs.last_start("report").is_running
    with pytest.raises(Refused, match="report is not running"):
        programs.stop("report")
    before.write(programs._path("report"))


def test_a_program_on_another_machine_is_named(page: Callable[..., ChildPrograms]) -> None:
    programs = page()
    start = Start(
        program="train",
        process_start=find_process_start(os.getpid()),
        host=f"not-{socket.gethostname()}",
        log="train-0.log",
    )
    start.write(programs._path("train"))
    for verb in (programs.start, programs.stop):
        with pytest.raises(LatentpressError) as refused:
            verb("train")
        assert start.host in str(refused.value) or verb == programs.stop
    assert build_job_card("train", "", programs).remark == f"runs on {start.host}"


def test_old_logs_are_removed(page: Callable[..., ChildPrograms], tmp_path: Path) -> None:
    programs = page("#!/bin/sh\n")
    folder = tmp_path / "output/.ui/logs"
    folder.mkdir(parents=True)
    for number in range(KEPT_LOGS + 5):
        (folder / f"preview-20200101-{number:06d}-0000.log").touch()
        (folder / f"preview-plan-20200101-{number:06d}-0000.log").touch()
    start = programs.start("preview")
    assert [path.name for path in programs.logs("preview")][:2] == [start.log, "preview-20200101-000024-0000.log"]
    assert len(programs.logs("preview")) == KEPT_LOGS and len(programs.logs("preview-plan")) == KEPT_LOGS + 5
    ended(programs, "preview")
