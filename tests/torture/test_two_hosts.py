"""Two hosts that share nothing but an object store: each has a network of its own, which reaches the store alone, and
does not see the other's files. Their media lie at different places."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from cache.store import Store
from stages import bucket, discover, encode_latents, encode_text, index
from tests.project import Project
from tests.s3_server import BUCKET, serve_s3
from tests.torture.conftest import LONG

pytestmark = pytest.mark.skipif(not LONG, reason="seven programs start, each in a process; TORTURE=long")
ROOT = Path(__file__).parents[2]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass
class Host:
    """A network namespace, a folder and a scratch folder; `hidden` is the other's."""

    name: str
    address: str
    folder: Path
    scratch: str
    hidden: list[Path]

    def run(self, program: str, *arguments: str) -> dict:
        """A command of latentpress; its report."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        environment |= {"AWS_ENDPOINT_URL": self.address, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
        environment |= {"AWS_DEFAULT_REGION": "us-east-1", "TMPDIR": self.scratch, "NO_PROXY": "*"}
        environment |= {"HOME": str(self.folder), "OMP_NUM_THREADS": "1"}
        hide = "; ".join(f"mount -t tmpfs tmpfs {path}" for path in self.hidden)
        command = ["ip", "netns", "exec", self.name, "unshare", "-m", "sh", "-ec", f'{hide}; exec "$@"', "sh"]
        command += [sys.executable, "-m", "stages.cli", program, "--config", str(self.folder / "pipeline.yaml")]
        done = subprocess.run(
            [*command, "--json", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)


@contextmanager
def network(name: str, number: int) -> Iterator[str]:
    """A namespace with one cable to here; the address of this end."""
    here, there = f"10.213.{number}.1", f"10.213.{number}.2"
    try:
        ip("netns", "add", name)
        ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
        ip("addr", "add", f"{here}/30", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        for arguments in (("addr", "add", f"{there}/30", "dev", f"{name}b"), ("link", "set", f"{name}b", "up")):
            ip("-n", name, *arguments)
        ip("-n", name, "link", "set", "lo", "up")
        yield here
    finally:
        with suppress(subprocess.CalledProcessError):
            ip("netns", "del", name)  # and with it both ends


@pytest.fixture
def hosts(project: Callable[..., Project], tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    home = project(root=f"s3://{BUCKET}/work", train={"device": "cpu", "steps": 2, "batch_size": 2, "threads": 1})
    home.settings["cache"]["unit_mib"] = 0.02
    home.settings["validation"] = {"eval_samples": 0}
    for number in range(8):
        home.image(f"{number}.png", (64, 48) if number % 2 else (48, 64), f"picture {number}", number)
    with ExitStack() as stack:
        made = []
        for number in (1, 2):
            name = f"lp{os.getpid() % 100_000}{number}"
            try:
                here = stack.enter_context(network(name, number))
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no network namespaces: {error}")
            server = stack.enter_context(serve_s3(here))
            folder = tmp_path / f"host{number}"
            shutil.copytree(home.media, folder / f"media-of-{number}")
            settings = json.loads(json.dumps(home.settings))
            if number == 2:
                settings["datasets"][0]["media_root"] = "media-of-2"
            settings["datasets"][0]["instance_data_dir"] = "media-of-1"
            (folder / "pipeline.yaml").write_text(json.dumps(settings))
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="lp"))  # short: it has a socket
            made.append(Host(name, server.url, folder, scratch, [home.folder]))
        s3fs = pytest.importorskip("s3fs")
        fs = s3fs.S3FileSystem(endpoint_url=server.url, key="x", secret="y")
        fs.mkdir(BUCKET)
        stack.callback(fs.rm, BUCKET, recursive=True)
        made[0].hidden.append(made[1].folder)
        made[1].hidden.append(made[0].folder)
        yield made[0], made[1]


def test_two_hosts_share_only_the_store(hosts: tuple[Host, Host], monkeypatch, tmp_path: Path) -> None:
    first, second = hosts
    for path in first.hidden:  # a host sees neither the files nor the network of the other
        assert path.exists()
    first.run("discover")
    first.run("bucket")
    second.run("encode-text")
    parts = [first.run("encode-latents", "--shard", "0/2"), second.run("encode-latents", "--shard", "1/2")]
    assert all(part["done"] for part in parts) and sum(part["done"] for part in parts) == 8
    assert first.run("index")["done"] == 8
    assert first.run("train")["done"] == 2
    assert second.run("verify")["damage"] == []
    # The same shards as those of one host with a root on its disk.
    monkeypatch.setenv("AWS_ENDPOINT_URL", first.address)
    for name, value in {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}.items():
        monkeypatch.setenv(name, value)
    remote = Store(f"s3://{BUCKET}/work")
    made = {name: remote.read_bytes(name) for name in remote.list_names() if name.startswith(("text/", "latents/"))}
    local = Project(first.folder, json.loads((first.folder / "pipeline.yaml").read_text()) | {"root": "work"})
    for program in (discover, bucket, encode_text, encode_latents, index):
        local.run(program.run)
    store = Store(first.folder / "work")
    assert made == {
        name: store.read_bytes(name) for name in store.list_names() if name.startswith(("text/", "latents/"))
    }
