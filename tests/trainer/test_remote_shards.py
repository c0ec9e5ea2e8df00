"""Training on a set in an S3 store, through copies of its shards: as on a disk, killed, damaged, by two ranks."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cache.shards.shard_supply import SupplyError
from cache.store.store import Store
from schemas.cli.console import OK
from schemas.config.pipeline import Config
from schemas.errors import USAGE
from tests.forms import long
from tests.processes import kill_when
from tests.s3_server import BUCKET, S3Server
from tests.store_requests import Request
from tests.trainer.runs import lines
from trainer.run.metrics import read_metrics

pytestmark = pytest.mark.slow

PARTS = 4  # shards of each kind
#: Requests of a run that do not depend on the number of shards or samples.
FIXED = 40
VALIDATION: dict[str, Any] = {"eval_samples": 3, "every": 4}


class Remote:
    """A set in the bucket and the same on a disk, and configurations that train on them."""

    def __init__(
        self, folder: Path, make_config: Callable[..., Config], make_set: Callable, form: str, parts: int
    ) -> None:
        self.folder, self._make, self._root = folder, make_config, make_config("t2i", name="local").root
        self.here = self.config("local", far=False)
        make_set(self.here, form=form, parts=parts)
        store, local = Store(f"s3://{BUCKET}/work"), Store(self.here.root)
        for name in local.list_names():
            store.publish_bytes(name, local.read_bytes(name))
        self.shards = [name for name in local.list_names() if name.startswith(("text/", "latents/"))]

    def config(self, name: str, far: bool = True, **train: Any) -> Config:
        """A run of its own, with the remote root or the local one."""
        settings = {"steps": 8, "batch_size": 2, "caption_dropout": 0.3, "trackers": ()}
        made = self._make("t2i", name=name, validation=VALIDATION, **(settings | train))
        return made.model_copy(update={"root": f"s3://{BUCKET}/work" if far else self._root})

    @property
    def copies(self) -> list[Path]:
        return sorted(path for path in (self.folder / "cache/latentpress/shards").glob("*") if path.is_file())


@pytest.fixture
def remote(s3: S3Server, tmp_path: Path, make_config, make_set, request: pytest.FixtureRequest) -> Remote:
    return Remote(tmp_path, make_config, make_set, *getattr(request, "param", ("arrow", PARTS)))


def fetched(config: Config) -> float:
    lines = read_metrics(config.run_folder / "metrics.jsonl")
    return sum(line.get("shards_fetched", 0) for line in lines)


def gets(s3: S3Server) -> list[str]:
    """Shards and descriptions of tars that were read, one for each request."""
    found = [request.key.removeprefix("work/") for request in s3.requests if request.operation == "GetObject"]
    return sorted(name for name in found if name.startswith(("text/", "latents/")))


@pytest.mark.long
@pytest.mark.parametrize("remote", [("arrow", PARTS), long(("webdataset", PARTS))], indirect=True)
def test_losses_are_those_of_a_local_set_and_each_shard_is_fetched_once(remote, s3, program) -> None:
    """A second run finds the copies, one of which is damaged; eval losses and validation prompts read them too."""
    assert program(remote.here)[0] == OK
    wanted = lines(remote.here), lines(remote.here, "eval_loss")
    assert len(wanted[0]) == 8 and len(wanted[1]) == 3
    first = remote.config("first")
    s3.reset()
    assert program(first)[0] == OK
    assert (lines(first), lines(first, "eval_loss")) == wanted
    assert gets(s3) == sorted(remote.shards), "whole shards, each once, and no rows"
    assert len(s3.requests) <= FIXED + len(remote.shards)
    assert {path.suffix for path in remote.copies} <= {".arrow", ".tar", ".json", ""}
    damaged = next(path for path in remote.copies if path.suffix in (".arrow", ".tar"))
    whole = bytearray(damaged.read_bytes())
    whole[len(whole) // 2] ^= 1
    damaged.write_bytes(whole)
    second = remote.config("second")
    s3.reset()
    assert program(second)[0] == OK
    assert (lines(second), lines(second, "eval_loss")) == wanted
    assert len({name.partition(".")[0] for name in gets(s3)}) == 1 and fetched(second) <= 1


@pytest.mark.long
def test_killed_in_a_fetch_and_resumed(remote, s3, program) -> None:
    assert program(remote.here)[0] == OK
    arrived = threading.Semaphore(0)
    config = remote.config("killed", checkpoint_every=1, local_cache={"downloads": 1})
    seen = set[str]()

    def notice(request: Request) -> str:
        is_shard = request.operation == "GetObject" and request.key.endswith(".arrow") and "/sets/" not in request.key
        if is_shard:
            seen.add(request.key)
        late = is_shard and killing and len(seen) == 2 * PARTS
        if late:
            arrived.release()
        return "cut" if late else ""

    killing, s3.answer = True, notice
    kill_when(arrived, lambda: program(config))
    killing = False
    done = len(lines(config))
    assert [path.suffix for path in remote.copies].count(".arrow") == 2 * PARTS - 1
    code, report, _ = program(config)
    assert code == OK and report["done"] >= 8 - done - 1
    assert lines(config) == lines(remote.here)
    assert [path for path in remote.copies if path.suffix == ".tmp"] == []


@pytest.mark.long
@pytest.mark.parametrize("remote", [("arrow", 12)], indirect=True)
def test_epochs_in_the_order_of_shards_within_a_limit(remote, s3, program) -> None:
    """Four epochs with room for two thirds of the set, and with the same order on a disk. The folder is looked at all
    the while; each shard is fetched about once in an epoch at most."""
    order = {"shuffle_shards": 2, "batch_size": 1, "steps": 48, "reading": {"threads": 1}}
    total = sum((Path(remote.here.root) / name).stat().st_size for name in remote.shards)
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
    s3.reset()
    code, _, said = program(config)
    ended.set()
    watcher.join()
    assert code == OK and "In an order over the whole set" not in said
    assert len(lines(config)) == 48 and lines(config) == lines(local)
    assert 0 < most <= 0.7 * total and len(remote.shards) < len(gets(s3)) <= 5 * len(remote.shards)


def test_what_does_not_fit_is_said_before_a_model_is_loaded(remote, program) -> None:
    sizes = {name: (Path(remote.here.root) / name).stat().st_size for name in remote.shards}
    config = remote.config("small", local_cache={"max_gb": max(sizes.values()) / 1e9})
    code, report, said = program(config)
    assert code == USAGE and "loading the transformer" not in said
    assert "train.local_cache.max_gb" in report["error"]["message"] and "read at a time" in str(report)
    config = remote.config("large", local_cache={"max_gb": 1e6})
    code, report, _ = program(config)
    assert code == USAGE and "has room for" in report["error"]["message"]
    # Less than the set, and enough for the steps: a warning with the rate that the order needs.
    total = sum(sizes.values())
    config = remote.config(
        "warned", batch_size=1, reading={"threads": 1}, local_cache={"max_gb": 0.99 * total / 1e9}, steps=2
    )
    code, report, said = program(config)
    assert code == OK and "In an order over the whole set" in said and "MB a step" in said
    assert "Set train.shuffle_shards: 2, or raise max_gb" in said
    assert sum(path.stat().st_size for path in remote.copies) <= 0.99 * total
    assert issubclass(SupplyError, Exception)
