"""Probing media; reading items while media tables are made: an item without an answer is rejected, and the remaining
items are read."""

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from PIL import Image

from cache.store.store import Store
from stages import discover
from stages.discovery.item_reader import probe_companion, probe_media
from stages.discovery.media_table import read_media_table
from stages.discovery.sources import urls
from stages.media.files import Blob, MediaError
from tests.background import answered
from tests.stages.media_files import clip, video


@pytest.fixture
def stalling(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """(URL, folder) of a web server that never answers for names in "mute", and sends no content for names in
    "stuck"."""
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


@pytest.mark.long
def test_a_server_that_never_answers_costs_its_items_alone(project, stalling, monkeypatch: pytest.MonkeyPatch) -> None:
    url, folder = stalling
    home = project()
    names = ["ok/1.png", "stuck/1.png", "ok/2.png", "mute/1.png", "ok/3.png"]
    for number, name in enumerate(names):
        home.image(os.path.relpath(folder / name, home.media), seed=number)
    table = home.folder / "table.csv"
    table.write_text("url,caption\n" + "".join(f"{url}/{name},of {name}\n" for name in names))
    home.settings["datasets"][0] |= {"instance_data_dir": str(table), "caption_strategy": "csv"}
    home.settings["stages"]["item_timeout_s"] = 12.0
    monkeypatch.setattr(urls, "READ_TIMEOUT_S", 6.0)  # while the listing requests sizes and versions
    report = home.run(discover.run, "stages.max_reject_fraction=1.0")
    table = read_media_table(Store(home.root), "photos")
    assert table["captions"].to_pylist() == [["of ok/1.png"], ["of ok/2.png"], ["of ok/3.png"]]
    reasons = {row["path"].removeprefix(f"{url}/"): row["reason"] for row in report.rejects}
    assert reasons == {"stuck/1.png": "timed-out", "mute/1.png": "unreadable"}


def write_video(path):
    return video(path, clip(20, size=(64, 32)), rate=25)


class Stored(Blob):
    """A file in a store that vouches for an id."""

    def __init__(self, path, given):
        self.name, self.path, self.given = f"s3://bucket/{path.name}", path, given

    def open(self):
        return self.path.open("rb")

    def size(self):
        return self.path.stat().st_size

    def media_id(self):
        return self.given


def test_the_store_may_vouch_for_the_id(tmp_path):
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    path = write_video(tmp_path / "a.mp4")
    assert probe_media(Stored(path, "f" * 32), "video")["media_id"] == "f" * 32
    assert probe_media(Stored(path, None), "video") == probe_media(path, "video")
    assert probe_companion(Stored(tmp_path / "a.png", "f" * 32), "image")["id"] == "f" * 32


def test_the_same_bytes_are_the_same_media_and_extensions_do_not_tell(tmp_path):
    Image.new("RGB", (30, 20)).save(tmp_path / "one.png")
    (tmp_path / "two.png").write_bytes((tmp_path / "one.png").read_bytes())
    Image.new("RGB", (30, 20)).save(tmp_path / "one.jpg")
    ids = [probe_media(tmp_path / name, "image")["media_id"] for name in ("one.png", "two.png", "one.jpg")]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize("kind", ["image", "video"])
def test_what_can_not_be_used_is_a_media_error(tmp_path, kind):
    (tmp_path / "text").write_text("neither")
    with pytest.raises(MediaError) as caught:
        probe_media(tmp_path / "text", kind)
    assert caught.value.reason in ("not-an-image", "not-a-video")
    with pytest.raises(MediaError):
        probe_media(tmp_path / "none", kind)
