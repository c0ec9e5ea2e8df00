"""Two hosts that share nothing but an object store: each has a network of its own, which reaches the store alone, and
does not see the other's files. Their media lie at different places."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cache.store.store import Store
from stages import bucket, discover, encode_latents, encode_text, index
from tests.network_hosts import Host, hosts_of
from tests.project import Project
from tests.s3_server import BUCKET, serve_s3

pytestmark = pytest.mark.long


@pytest.fixture
def hosts(project: Callable[..., Project], tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    home = project(
        root=f"s3://{BUCKET}/work",
        train={"device": "cpu", "steps": 2, "batch_size": 2, "threads": 1, "shuffle_shards": 2},
    )
    home.settings["cache"]["unit_mib"] = 0.02
    home.settings["validation"] = {"eval_samples": 0}
    for number in range(8):
        home.image(f"{number}.png", (64, 48) if number % 2 else (48, 64), f"picture {number}", number)
    with ExitStack() as stack:
        made = stack.enter_context(hosts_of({name: tmp_path / name for name in ("host1", "host2")}))
        for number, (host, here) in enumerate(made, 1):
            server = stack.enter_context(serve_s3(here))
            shutil.copytree(home.media, host.folder / f"media-of-{number}")
            settings = json.loads(json.dumps(home.settings))
            if number == 2:
                settings["datasets"][0]["media_root"] = "media-of-2"
            settings["datasets"][0]["instance_data_dir"] = "media-of-1"
            (host.folder / "pipeline.yaml").write_text(json.dumps(settings))
            host.store = server.url
            host.hidden.append(home.folder)
        server.make_bucket(BUCKET)
        stack.callback(server.clear)
        yield made[0][0], made[1][0]


def test_two_hosts_share_only_the_store(hosts: tuple[Host, Host], monkeypatch) -> None:
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
    monkeypatch.setenv("AWS_ENDPOINT_URL", first.store)
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
