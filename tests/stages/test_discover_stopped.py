"""Discovery after a stop or a kill: files that were read are not read again."""

import signal
import subprocess
import sys
import time

import pytest

from schemas.errors import LatentpressError
from stages import discover
from tests.stages.test_discover import MANY, read, rows_of


@pytest.mark.slow
def test_what_was_read_before_a_stop_is_not_read_again(project) -> None:
    home = project()
    for number in range(4):
        home.image(f"good{number}.png", seed=number)
        home.image(f"bad{number}.png").write_bytes(b"no picture")
    with pytest.raises(LatentpressError, match="max_reject_fraction"):
        home.run(discover.run)
    with pytest.raises(LatentpressError, match="is not discovered"):
        rows_of(home)  # a part is no table
    report = home.run(discover.run, MANY)
    assert (read(report), report.done, report.skipped) == (4, 0, 4)
    assert report.details["datasets"][0]["new"] == 4
    assert [row["path"] for row in rows_of(home)] == [f"good{number}.png" for number in range(4)]
    assert not (home.root / "media/photos/partial").exists() or not list((home.root / "media/photos/partial").iterdir())


BLOCKING_READER = """
import time
from pathlib import Path
from stages.discovery import item_reader

class Held(item_reader.ItemReader):
    def __call__(self, task):
        while "9.png" in str(task.path) and Path(__file__).exists():
            time.sleep(0.02)
        return super().__call__(task)
"""


KILLED = """
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # also that of the readers
import held
from schemas.cli.console import Console, Options
from schemas.config.loading import load_config
from stages import discover
from stages.discovery import item_reader

discover.SAVE_EVERY_S, discover.MAX_PENDING_ROWS = 0.0, 1  # each row is saved once it is read
item_reader.ItemReader = held.Held
if __name__ == "__main__":  # the server of readers imports this module, too
    discover.run(load_config(Path(sys.argv[1]), ()), Options(), Console())
"""


@pytest.mark.slow
def test_a_kill_costs_what_was_read_last(project, forked_programs) -> None:
    home = project()
    for number in range(12):
        home.image(f"{number}.png", seed=number)
    home.config()
    (home.folder / "held.py").write_text(BLOCKING_READER)
    (home.folder / "killed.py").write_text(KILLED)
    command = [sys.executable, str(home.folder / "killed.py"), str(home.folder / "pipeline.yaml")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    saved = home.root / "media/photos/partial"
    while not list(saved.glob("0*.arrow")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (home.folder / "held.py").unlink()
    report = home.run(discover.run)
    assert 0 < read(report) < 12
    assert report.done + report.skipped == len(rows_of(home)) == 12
