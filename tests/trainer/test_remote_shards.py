"""Training on a set in an S3 store, through copies of its shards: as on a disk, killed, damaged, by two ranks."""

import io
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cache.shards.shard_io import SupplyError
from cache.store.store import Store
from schemas.cli.console import OK, Console, Options
from schemas.config.pipeline import Config
from schemas.errors import USAGE
from tests.forms import long
from tests.s3_server import BUCKET, Request, S3Server
from tests.trainer.runs import lines, write
from trainer import checks
from trainer.run.metrics import read_metrics

pytestmark = pytest.mark.slow

PARTS = 4  # shards of each kind
VALIDATION: dict[str, Any] = {"eval_samples": 3, "every": 4}


class Remote:
    """A set in the bucket and the same set on a disk, and configurations that train on them."""

    def __init__(
        self, folder: Path, make_config: Callable[..., Config], make_set: Callable, form: str, parts: int
    ) -> None:
        self.folder, self._make, self._root = folder, make_config, make_config("t2i", name="local").root
        self.local = self.config("local", far=False)
        make_set(self.local, form=form, parts=parts)
        store, local = Store(f"s3://{BUCKET}/work"), Store(self.local.root)
        for name in local.list_names():
            store.publish_bytes(name, local.read_bytes(name))
        self.shards = [name for name in local.list_names() if name.startswith(("text/", "latents/"))]

    def config(self, name: str, far: bool = True, **train: Any) -> Config:
        """The configuration of a separate run, with the remote root or the local root."""
        settings = {"steps": 8, "batch_size": 2, "caption_dropout": 0.3, "trackers": (), "shuffle_shards": 4}
        config = self._make("t2i", name=name, validation=VALIDATION, **(settings | train))
        return config.model_copy(update={"root": f"s3://{BUCKET}/work" if far else self._root})

    @property
    def copies(self) -> list[Path]:
        result = (self.folder / "cache/latentpress/shards").glob("*/*/*/*")
        return sorted(path for path in result if path.suffix in (".arrow", ".tar"))


@pytest.fixture
def remote(s3: S3Server, tmp_path: Path, make_config, make_set, request: pytest.FixtureRequest) -> Remote:
    return Remote(tmp_path, make_config, make_set, *getattr(request, "param", ("arrow", PARTS)))


def count_fetched(config: Config) -> float:
    lines = read_metrics(config.run_folder / "metrics.jsonl")
    return sum(line.get("shards_fetched", 0) for line in lines)


def gets(s3: S3Server) -> list[str]:
    """Shards and descriptions of tars that were read, one entry per request."""
    result = [request.key.removeprefix("work/") for request in s3.requests if request.operation == "GetObject"]
    return sorted(name for name in result if name.startswith(("text/", "latents/")))


@pytest.mark.long
@pytest.mark.parametrize("remote", [("arrow", PARTS), long(("webdataset", PARTS))], indirect=True)
def test_losses_are_those_of_a_local_set_and_each_shard_is_fetched_once(remote, s3, program) -> None:
    """Eval losses and validation prompts are read from the store itself, before and while the shards are fetched."""
    assert program(remote.local)[0] == OK
    expected = lines(remote.local), lines(remote.local, "eval_loss")
    assert len(expected[0]) == 8 and len(expected[1]) == 3
    far = remote.config("far")
    s3.reset()
    assert program(far)[0] == OK
    assert (lines(far), lines(far, "eval_loss")) == expected
    assert count_fetched(far) == 2 * PARTS and set(gets(s3)) == set(remote.shards)
    assert remote.copies == [], "the copies end with the run"


@pytest.mark.long
def test_killed_in_a_fetch_and_resumed(remote, s3, program) -> None:
    assert program(remote.local)[0] == OK
    arrived = threading.Semaphore(0)
    config = remote.config("killed", checkpoint_every=1, local_cache={"downloads": 1})

    def notice(request: Request) -> str:
        is_late = killing and request.operation == "GetObject" and len(remote.copies) == 2
        if is_late:
            arrived.release()
        return "cut" if is_late else ""

    killing, s3.answer = True, notice
    # Not a fork: the library of the store can't be used in a fork of a process that has used it.
    process = subprocess.Popen([sys.executable, "-m", "trainer", "--config", str(write(config, remote.folder))])
    assert arrived.acquire(timeout=120)
    process.kill()
    process.wait()
    killing = False
    last_step = len(lines(config))
    code, report, _ = program(config)
    assert code == OK and report["done"] >= 8 - last_step - 1
    assert lines(config) == lines(remote.local) and remote.copies == []


@pytest.mark.long
@pytest.mark.parametrize("remote", [("arrow", 12)], indirect=True)
def test_epochs_within_a_limit(remote, s3, program) -> None:
    """Four epochs with room for two thirds of the set, and with the same order on a disk. The folder is observed all
    the time; each shard is fetched about once per epoch."""
    order = {"shuffle_shards": 2, "batch_size": 1, "steps": 48, "reading": {"threads": 1}}
    total = sum((Path(remote.local.root) / name).stat().st_size for name in remote.shards)
    local = remote.config("local-order", far=False, **order)
    assert program(local)[0] == OK
    config = remote.config("order", local_cache={"max_gb": 0.7 * total / 1e9}, **order)
    most, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.002):
            with suppress(FileNotFoundError):
                most = max(most, sum(path.stat().st_size for path in remote.copies))

    watcher = threading.Thread(target=watch)
    watcher.start()
    code, _, _ = program(config)
    ended.set()
    watcher.join()
    assert code == OK and len(lines(config)) == 48 and lines(config) == lines(local)
    assert 0 < most <= 0.7 * total and len(remote.shards) < count_fetched(config) <= 5 * len(remote.shards)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shuffle_shards": None}, "train.shuffle_shards is not set"),
        ({"local_cache": {"max_gb": 1e6}}, "free space"),
        ({"local_cache": {"max_gb": 1e-5}}, "train.local_cache.max_gb"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_what_does_not_fit_is_refused_before_a_model_is_loaded(remote, program, settings, message, dry_run) -> None:
    code, report, log = program(remote.config("small", **settings), dry_run=dry_run)
    assert code == USAGE and "loading the transformer" not in log and message in report["error"]["message"]


def test_a_named_set_that_does_not_fit_is_refused_before_the_first_stage(remote, tmp_path) -> None:
    config = remote.config("small", set=f"s3://{BUCKET}/work", local_cache={"max_gb": 1e-5})
    with pytest.raises(SupplyError, match=r"train\.local_cache\.max_gb"):
        checks.run(config, Options(tmp_path / "none.yaml"), Console(stderr=io.StringIO()))
