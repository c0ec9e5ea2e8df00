"""A full disk, missing permission, too little memory or time: a clear message, nothing half-written, and it goes on."""

import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from cache.store import Store
from schemas.errors import LatentpressError
from stages import bucket, discover, encode_latents, verify
from stages.discover import read_media_table
from stages.discovery.sources import object_store
from stages.encoding import member_reader
from tests.processes import in_child


@pytest.fixture
def planned(project, built):
    return built(project("kandinsky5-image-t2i", cache={"unit_mib": 0.05}), plan_six)


def plan_six(home) -> None:
    for number in range(6):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    home.run(discover.run)
    home.run(bucket.run)


def expect(home, *words: str) -> Callable[[], None]:
    def check() -> None:
        with pytest.raises(LatentpressError) as caught:
            home.run(encode_latents.run)
        message = str(caught.value)
        assert all(word in message for word in words), message
        assert str(home.root) in message

    return check


def test_a_file_size_limit_ends_with_the_path_the_reason_and_the_next_step(planned) -> None:
    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        expect(planned, "file-size limit", "run the same command again")()

    assert in_child(work) == 0
    assert planned.shards("latents") == {}
    assert planned.run(encode_latents.run).done == 6


def test_a_full_disk_ends_with_the_path_the_reason_and_the_next_step(planned) -> None:
    folder = planned.root / "latents"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("no right to mount a tmpfs here")
    try:
        expect(planned, "the disk is full", "free space there")()
        assert planned.run(verify.run).exit_code == 0
        assert not [path for path in folder.rglob("*.tmp")]
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert planned.run(encode_latents.run).done == 6


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_no_write_permission_is_named(planned) -> None:
    planned.config()  # written while it may be

    def work() -> None:
        home = planned.folder
        for path in (home, *home.parents):
            if path.stat().st_mode & 0o005 != 0o005:
                path.chmod(path.stat().st_mode | 0o055)
        os.setuid(65534)
        config = planned.config
        planned.config = lambda *overrides: saved  # type: ignore[method-assign]
        assert config
        expect(planned, "permission denied", "right")()

    saved = planned.config()
    assert in_child(work) == 0
    assert planned.shards("latents") == {}


@pytest.mark.slow
def test_an_item_that_takes_too_much_memory_is_set_aside_and_the_unit_goes_on(project) -> None:
    home = project("kandinsky5-image-t2i", cache={"unit_mib": 0.05})
    home.settings["stages"]["item_memory_mib"] = 256
    home.image("small.png", (64, 64))
    Image.new("RGB", (9000, 9000)).save(home.media / "huge.png")  # 243 MB of pixels, and as much for each step
    (home.media / "huge.txt").write_text("black")
    home.run(discover.run)
    home.run(bucket.run)
    report = home.run(encode_latents.run)
    assert report.done == 1
    assert [row["reason"] for row in report.set_aside] == ["out-of-memory"]
    assert "huge.png" in report.set_aside[0]["message"] and "256 MiB" in report.set_aside[0]["message"]
    assert home.run(encode_latents.run).done == 0  # not tried again by itself
    home.settings["stages"]["item_memory_mib"] = 4096
    assert home.run(encode_latents.run, retry_set_aside=True).set_aside == []


def hanging() -> Callable[[member_reader.ReadRequest], member_reader.MemberPixels]:
    """Reads as ever, but is never done with the slow picture."""

    def read(wanted: member_reader.ReadRequest) -> member_reader.MemberPixels:
        if "slow.png" in str(wanted.files[0][0]):
            time.sleep(600)
        return member_reader.read_member(wanted)

    return read


@pytest.mark.slow
def test_an_item_that_takes_too_long_is_set_aside_and_the_unit_goes_on(project, monkeypatch) -> None:
    home = project("kandinsky5-image-t2i", cache={"unit_mib": 0.05})
    home.image("small.png", (64, 64))
    home.image("slow.png", (64, 64), seed=1)
    home.run(discover.run)
    home.run(bucket.run)
    monkeypatch.setattr(member_reader, "make_member_reader", hanging)  # the reading processes import it by its name
    home.settings["stages"]["item_timeout_s"] = 5.0
    report = home.run(encode_latents.run)
    assert report.done == 1
    assert [row["reason"] for row in report.set_aside] == ["timed-out"]
    assert "slow.png" in report.set_aside[0]["message"] and "5 s" in report.set_aside[0]["message"]


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

    server = ThreadingHTTPServer(("127.0.0.1", 0), Stalling)
    server.daemon_threads, server.block_on_close = True, False
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", tmp_path / "web"
    over.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.slow
def test_a_server_that_never_answers_costs_its_items_alone(project, stalling, monkeypatch: pytest.MonkeyPatch) -> None:
    url, folder = stalling
    home = project()
    names = ["ok/1.png", "stuck/1.png", "ok/2.png", "stuck/2.png", "mute/1.png", "ok/3.png"]
    for number, name in enumerate(names):
        home.image(os.path.relpath(folder / name, home.media), seed=number)
    table = home.folder / "table.csv"
    table.write_text("url,caption\n" + "".join(f"{url}/{name},of {name}\n" for name in names))
    home.settings["datasets"][0] |= {"instance_data_dir": str(table), "caption_strategy": "csv"}
    home.settings["stages"]["item_timeout_s"] = 8.0
    monkeypatch.setattr(object_store, "READ_TIMEOUT_S", 4.0)  # while the listing asks for sizes and versions
    began = time.monotonic()
    report = home.run(discover.run, "stages.max_reject_fraction=1.0")
    assert time.monotonic() - began < 60
    table = read_media_table(Store(home.root), "photos")
    assert table["captions"].to_pylist() == [["of ok/1.png"], ["of ok/2.png"], ["of ok/3.png"]]
    reasons = {row["path"].removeprefix(f"{url}/"): row["reason"] for row in report.set_aside}
    assert reasons == {"stuck/1.png": "timed-out", "stuck/2.png": "timed-out", "mute/1.png": "unreadable"}
