"""Reading items while media tables are made: one that is never answered is set aside, and the others are read."""

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from cache.store.store import Store
from stages import discover
from stages.discovery.media_table import read_media_table
from stages.discovery.sources import object_store
from tests.background import answered


@pytest.fixture
def stalling(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """(URL, folder) of a web server that never answers for names in "mute", nor sends what is in "stuck"."""
    over = threading.Event()

    class Stalling(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            path = tmp_path / "web" / self.path.lstrip("/")
            if path.parent.name == "mute":
                over.wait()
                return
            self.send_response(200)
            self.send_header("Content-Length", str(path.stat().st_size))
            self.end_headers()
            if self.command == "GET" and path.parent.name == "stuck":
                over.wait()
            elif self.command == "GET":
                self.wfile.write(path.read_bytes())

        do_GET = do_HEAD

        def log_message(self, *args: object) -> None:
            pass

    with answered(Stalling) as url:
        yield url, tmp_path / "web"
        over.set()


@pytest.mark.slow
def test_a_server_that_never_answers_costs_its_items_alone(project, stalling, monkeypatch: pytest.MonkeyPatch) -> None:
    url, folder = stalling
    home = project()
    names = ["ok/1.png", "stuck/1.png", "ok/2.png", "mute/1.png", "ok/3.png"]
    for number, name in enumerate(names):
        home.image(os.path.relpath(folder / name, home.media), seed=number)
    table = home.folder / "table.csv"
    table.write_text("url,caption\n" + "".join(f"{url}/{name},of {name}\n" for name in names))
    home.settings["datasets"][0] |= {"instance_data_dir": str(table), "caption_strategy": "csv"}
    home.settings["stages"]["item_timeout_s"] = 4.0
    monkeypatch.setattr(object_store, "READ_TIMEOUT_S", 2.0)  # while the listing asks for sizes and versions
    report = home.run(discover.run, "stages.max_reject_fraction=1.0")
    table = read_media_table(Store(home.root), "photos")
    assert table["captions"].to_pylist() == [["of ok/1.png"], ["of ok/2.png"], ["of ok/3.png"]]
    reasons = {row["path"].removeprefix(f"{url}/"): row["reason"] for row in report.set_aside}
    assert reasons == {"stuck/1.png": "timed-out", "mute/1.png": "unreadable"}
