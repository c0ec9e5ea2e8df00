"""The ranks of a run: the folder that every rank must see, small values that they tell each other as JSON, the
comparison of their settings, and ranks that die or hang; also the settings that changed since a run was last started.

A rank that dies or hangs is found by the others in bounded time, and named. The watch begins right after the process
group, so loading is watched as training is. Each rank has a thread that writes to a TCPStore, every second or so, how
often its main thread has moved on and what it is doing. Rank 0 reads all of them, the others rank 0's. A rank that has
written nothing, or not moved on, for train.parallel.timeout seconds ends the run on every rank; of several that wait,
the one that is behind is named. A rank that fails writes why, so that the others can say more than that a connection
was closed.

torch's own means are not enough: a collective operation ends after its group's timeout without naming a rank, and
torch.distributed.monitored_barrier, which does, works with gloo only.
"""

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from accelerate import Accelerator
from torch.distributed import DistError, PrefixStore, Store
from torch.distributed.checkpoint.api import CheckpointException

from cache.runs.training_run import RunError
from cache.sets.trainset import TrainSet
from schemas.cli.console import Console
from schemas.config.pipeline import PACKAGES, Config
from schemas.errors import INCOMPLETE, USAGE, LatentpressError
from schemas.identity import hash_json
from schemas.text_format import escape_unprintable, shorten
from trainer.run import resume
from trainer.run.resume import held_out_digest
from trainer.run.sharded import broadcast_json

SECTIONS = ("train", "validation")
NOT_COMPARED = ("train.set",)  # config.yaml has the id of the set; other data can't be gone on with
#: What belongs to a machine, so that ranks may differ in it. Their sets and initial adapters are compared by content.
MACHINE_OPTIONS = frozenset(
    ("train.set", "train.adapter.init", "train.device", "train.threads", "train.reading", "train.local_cache")
) | {"train.parallel.timeout", "validation.preview_autoencoder", "validation.scores"}
HASHES = ("code", "training data", "held-out samples", "validation prompts", "initial adapter", "base weights")
#: Options whose keys are not those of the schema: each is compared as one value.
FREE_KEYS = frozenset(("train.adapter.rank_pattern", "train.adapter.alpha_pattern", "train.optimizer.arguments")) | {
    "validation.placeholders"
}


class OutputMismatch(LatentpressError):
    """The machines have different output folders."""

    exit_code = USAGE


class RunFiles:
    """Every rank makes one and calls its methods in the same order. hosts: name of each rank's machine."""

    def __init__(self, accelerator: Accelerator, folder: Path) -> None:
        self.folder, self._accelerator = folder, accelerator
        self.main, self.hosts = accelerator.is_main_process, self.gathered(socket.gethostname())

    def require_shared(self) -> None:
        """OutputMismatch if a rank does not see the folder of rank 0, which writes checkpoints and the result."""
        if self._accelerator.num_processes == 1:
            return
        self.folder.mkdir(parents=True, exist_ok=True)  # which also refreshes NFS's cache of it
        token = self.folder / self.from_main(f".shared-{uuid.uuid4().hex}")
        if self.main:
            token.touch()
        self._accelerator.wait_for_everyone()
        seen = self.gathered(token.exists())
        token.unlink(missing_ok=True)
        if blind := sorted({host for host, sees in zip(self.hosts, seen, strict=True) if not sees}):
            raise OutputMismatch(
                f"{', '.join(blind)} can't see {self.folder} of rank 0 on {self.hosts[0]}; ranks need one `output` "
                "folder that all machines see",
                "Mount one folder on all machines at that path, and set `output` to it.",
            )

    def checkpoint(self, found: resume.Checkpoint | None) -> resume.Checkpoint | None:
        """The checkpoint that rank 0 has found, on every rank; `found` of other ranks has no effect."""
        name = self.from_main(None if found is None else found.path.name)
        if name is None or self.main:
            return found
        return resume.read_checkpoint(self.folder / "checkpoints" / name, verify=False)

    def from_main(self, value: Any) -> Any:
        """Rank 0's value, which JSON can hold; values of other ranks have no effect."""
        if self._accelerator.num_processes == 1:
            return value
        return broadcast_json(value, self._accelerator.device)

    def gathered(self, value: Any) -> list[Any]:
        """The value of every rank, by rank."""
        if self._accelerator.num_processes == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self._accelerator.device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=data.device) for _ in range(self._accelerator.num_processes)]
        dist.all_gather(sizes, torch.tensor([len(data)], device=data.device))
        longest = max(map(int, sizes))
        parts = [torch.empty(longest, dtype=torch.uint8, device=data.device) for _ in sizes]
        dist.all_gather(parts, torch.nn.functional.pad(data, (0, longest - len(data))))
        return [json.loads(part[:size].cpu().numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]


def find_changed_settings(file: Path, config: Config) -> list[str]:
    """`train.optimizer.lr: 0.0001, now 0.0005` for each; none where the run's config.yaml, `file`, can't be read."""
    from ruamel.yaml import YAML, YAMLError

    try:
        before = YAML(typ="safe").load(file)
    except (OSError, ValueError, YAMLError):
        return []
    if not isinstance(before, Mapping):
        return []
    now = config.model_dump(mode="json", by_alias=True)
    differences = (change for section in SECTIONS for change in _compare(section, before.get(section), now[section]))
    return [f"{key}: {_format(old)}, now {_format(new)}" for key, old, new in differences if key not in NOT_COMPARED]


def describe_rank(config: Config, data: TrainSet, signature: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that must be equal on all ranks before the base weights are read: settings, code, training set."""
    values = config.model_dump(mode="json", by_alias=True, exclude={"validation": {"prompts": {"__all__": {"image"}}}})
    code = xxhash.xxh3_64()
    packages = (package for package in PACKAGES if package.name != "stages")
    for path in sorted(path for package in packages for path in package.rglob("*.py")):
        code.update(path.read_bytes())
    return {
        "code": code.hexdigest(),
        "training data": signature["data"]["digest"],
        "held-out samples": held_out_digest(data),
        "validation prompts": hash_json([prompt.values() for prompt in data.meta.validation]),
        "initial adapter": signature["initial adapter"],
        "model": {key: values["model"][key] for key in ("family", "flavour", "precision")},
        **{section: values[section] for section in SECTIONS},
    }


def refuse_differences(ranks: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> None:
    """RunError with each rank, key and both values where the ranks have other values than rank 0 has."""
    lines = []
    for rank, values in enumerate(ranks):
        for key, first, other in _compare("", ranks[0], values):
            both = "differ" if key in HASHES else f"{_format(first)} on rank 0, {_format(other)} on rank {rank}"
            if not any(f"{key}.".startswith(f"{option}.") for option in MACHINE_OPTIONS):
                lines.append(f"  rank {rank} on {hosts[rank]}: {key}: {both}")
    if lines:
        raise RunError(
            "\n".join(["the ranks do not train the same:", *lines]),
            "Start all of them with one configuration, the same code, training set and checkpoint.",
        )


def _compare(key: str, before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """(option, value before, value now) of each that differs."""
    if isinstance(before, Mapping) and isinstance(now, Mapping) and key not in FREE_KEYS:
        for name in now:
            if name in before:  # others are of another release
                yield from _compare(f"{key}.{name}".lstrip("."), before[name], now[name])
    elif before != now:
        yield key, before, now


def _format(value: Any) -> str:
    return "null" if value is None else escape_unprintable(shorten(str(value)))


ROOT = PACKAGES[0].parent
#: How long a rank that lost a connection waits to learn which other one was the cause, and how long one that did not
#: goes on after another has failed: it may fail for the same reason, and says more of it.
ANSWER_S = 15.0
STORE_TIMEOUT = timedelta(seconds=30)
STORE = "rank 0, or the launcher's store at MASTER_ADDR, by which the ranks know of each other,"
HINT = "Start training again: it goes on from the last checkpoint."


class RankLostError(LatentpressError):
    """A rank ended or stopped answering."""


class RankWatch:
    """One rank's part. `note` is called by its main thread; without other ranks nothing else happens."""

    def __init__(self, accelerator: Accelerator, console: Console, timeout: float, store: Store | None = None) -> None:
        self.rank, self.ranks = accelerator.process_index, accelerator.num_processes
        self._console, self._timeout = console, timeout
        self._interval = min(1.0, timeout / 10)
        self._main, self._ended = threading.get_ident(), threading.Event()
        self._count, self._doing, self._moved = 0, "preparing", time.monotonic()
        self._seen: dict[int, tuple[dict[str, Any], float]] = {}  # rank -> its last record, and when that was new here
        if self.ranks > 1:
            assert store is not None
            self._shared_store = store  # rank 0 may serve it, as long as it exists
            # With a connection of its own: one that waits lets nobody else ask.
            self._store = PrefixStore("watch", store.clone())  # type: ignore[attr-defined]
            self._store.set_timeout(STORE_TIMEOUT)
            self._write()
            accelerator.wait_for_everyone()
            self._heard = time.monotonic()  # when the store last answered
            for work in (self._run, self._watch_store):
                threading.Thread(target=work, name="rank-watch", daemon=True).start()

    def note(self, doing: str | None = None, *, alone: bool = False) -> None:
        """The main thread has moved on, to `doing` if that is given. All ranks call it equally often. alone: in work
        that ranks do in turns or at different speeds: it is not counted, as it puts none ahead of the others."""
        self._count, self._moved = self._count + (not alone), time.monotonic()
        self._doing = doing or self._doing

    @contextmanager
    def sharing_errors(self, last: bool = False) -> Iterator[None]:
        """The other ranks learn of an error of the body. RankLostError in place of one that another rank has caused.
        last: after the body other ranks may end."""
        try:
            try:
                yield
            except CheckpointException as error:  # torch.distributed.checkpoint: the errors of some ranks, on all
                rank, (cause, _) = min(error.failures.items(), key=lambda item: (item[0] != self.rank, item[0]))
                if rank == self.rank:
                    raise cause from error
                raise RankLostError(f"{self._name(rank)} failed: {describe_error(cause)}", HINT) from error
        except BaseException as error:
            if self.ranks > 1 and not isinstance(error, RankLostError):
                self._fail(error)
            self._ended.set()
            raise
        if last:
            self._ended.set()

    def _fail(self, error: BaseException) -> None:
        """Write why this rank fails; if a connection broke, find the rank that broke it and raise RankLostError."""
        broken = isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
        with suppress(RuntimeError):
            self._store.set(f"failed/{self.rank}", "" if broken else describe_error(error))
        start, cause = time.monotonic(), None
        while broken and cause is None and time.monotonic() - start < ANSWER_S:
            cause = self._find_cause(range(self.ranks), 5 * self._interval)
            time.sleep(self._interval / 4)
        if cause is not None:
            raise RankLostError(cause, HINT) from error

    # --- the threads ---

    def _run(self) -> None:
        # Rank 0 looks at all, the others at rank 0.
        watched = range(self.ranks) if self.rank == 0 else (0, self.rank)
        while not self._ended.wait(self._interval):
            cause = self._find_cause(watched, self._timeout)
            if cause is None and self.rank == 0:
                cause = self._find_hanging()
            if cause is not None:
                self._end(cause)

    def _watch_store(self) -> None:
        """From a machine without power or network nothing comes, not even that a connection is broken: a request to it
        lasts for a quarter of an hour."""
        while not self._ended.wait(self._interval):
            if time.monotonic() - self._heard > self._timeout:
                self._end(f"{STORE} has not answered for {self._timeout:g} s", tell=False)

    def _end(self, message: str, tell: bool = True) -> None:
        """End this process, as its main thread may wait for ever, unless it ends by itself: it may fail for the same
        reason, and says more of it. tell: the other ranks."""
        if self._ended.wait(min(ANSWER_S, self._timeout / 2)):
            return
        if tell:
            with suppress(RuntimeError):
                self._store.set("ended", message)
        if self.rank == 0:
            self._console.print_error("train", RankLostError(message, HINT))
            self._console.stdout.flush()
        else:  # its console is silent
            print(f"rank {self.rank}: {message}", file=sys.stderr, flush=True)
        os._exit(INCOMPLETE)

    def _write(self) -> None:
        frame, line = sys._current_frames().get(self._main), ""
        while frame is not None and not line:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
                line = f"{path.relative_to(ROOT)}:{frame.f_lineno}"
            frame = frame.f_back
        record = {"written": time.monotonic(), "count": self._count, "doing": self._doing, "place": line}
        record |= {"still": time.monotonic() - self._moved, "host": socket.gethostname(), "process": os.getpid()}
        self._store.set(f"rank/{self.rank}", json.dumps(record))

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _look_at(self, rank: int) -> float:
        """Read a rank's record; returns the seconds since it had a new one."""
        record, known = json.loads(self._store.get(f"rank/{rank}")), self._seen.get(rank)
        if known is None or known[0] != record:
            self._seen[rank] = record, time.monotonic()
        return time.monotonic() - self._seen[rank][1]

    def _name(self, rank: int) -> str:
        if rank not in self._seen:
            self._look_at(rank)
        record = self._seen[rank][0]
        return f"rank {rank} (process {record['process']} on {record['host']})"

    def _find_cause(self, ranks: Iterable[int], patience: float) -> str | None:
        """Write this rank's record, and tell which of these ranks failed or has had no new one for `patience` seconds.
        What fails as a connection broke is not the cause."""
        try:
            self._write()
            if message := self._read("ended"):
                return message
            for rank in ranks:
                reason, silent = self._read(f"failed/{rank}"), self._look_at(rank)
                if reason and rank != self.rank:
                    return f"{self._name(rank)} failed: {reason}"
                if reason is None and silent > patience:
                    doing = self._seen[rank][0]["doing"]
                    return f"{self._name(rank)} has not answered for {patience:g} s, last at {doing}"
            self._heard = time.monotonic()
        except RuntimeError:  # it ends with rank 0, or with the launcher on its machine
            return f"{STORE} can't be reached"
        return None

    def _find_hanging(self) -> str | None:
        """If no rank moves on, tell which are behind."""
        records = {rank: record for rank, (record, _) in self._seen.items()}
        if min(record["still"] for record in records.values()) < self._timeout:
            return None
        behind = min(record["count"] for record in records.values())
        return "; ".join(
            f"{self._name(rank)} has made no progress for {self._timeout:g} s (train.parallel.timeout) at "
            f"{record['doing']}, in {record['place']}"
            for rank, record in records.items()
            if record["count"] == behind
        )


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
