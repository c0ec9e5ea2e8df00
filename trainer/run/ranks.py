"""The ranks of a run: the folder that every rank must see, small JSON values that ranks exchange, the comparison of the
ranks' settings, and ranks that die or hang; also the settings that changed since a run was last started.

If a rank dies or hangs, the other ranks detect and name it in bounded time. The watch begins right after the process
group is created, so it covers loading as well as training. Each rank has a thread that writes a record to a TCPStore
about every second: how often its main thread has made progress, and the activity of the main thread. Rank 0 reads all
records, and each other rank reads rank 0's record and its own. If a rank has written no record, or made no progress,
for train.parallel.timeout seconds, the run ends on every rank. If several ranks wait, the error names the rank that is
behind. A rank that fails writes the reason, so that the other ranks can report more than a closed connection.

The functions of torch are not enough: a collective operation ends after its group's timeout without naming a rank, and
torch.distributed.monitored_barrier, which names the rank, works with gloo only.
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
NOT_COMPARED = ("train.set",)  # config.yaml has the id of the set; the resume signature compares the data
#: Options of a machine, in which ranks may differ. Training sets and initial adapters are compared by content.
MACHINE_OPTIONS = frozenset(
    ("train.set", "train.adapter.init_from", "train.device", "train.threads", "train.reading", "train.local_cache")
) | {"train.parallel.timeout", "validation.preview_autoencoder", "validation.scores"}
HASHES = ("code", "training data", "held-out samples", "validation prompts", "initial adapter", "base weights")
#: Options whose keys are not defined by the schema. Each of these options is compared as one value.
FREE_KEYS = frozenset(("train.adapter.rank_pattern", "train.adapter.alpha_pattern", "train.optimizer.arguments")) | {
    "validation.placeholders"
}


class OutputMismatch(LatentpressError):
    """Raised if the machines have different output folders."""

    exit_code = USAGE


class RunFiles:
    """Files and values that the ranks of a run share. Every rank creates an object and calls its methods in the same
    order. hosts: name of each rank's machine."""

    def __init__(self, accelerator: Accelerator, folder: Path) -> None:
        self.folder, self._accelerator = folder, accelerator
        self.is_main, self.hosts = accelerator.is_main_process, self.gathered(socket.gethostname())

    def require_shared(self) -> None:
        """OutputMismatch if a rank does not see the folder of rank 0, which writes checkpoints and the result."""
        if self._accelerator.num_processes == 1:
            return
        self.folder.mkdir(parents=True, exist_ok=True)  # also refreshes NFS's cache of the folder
        token = self.folder / self.from_main(f".shared-{uuid.uuid4().hex}")
        if self.is_main:
            token.touch()
        self._accelerator.wait_for_everyone()
        visibility = self.gathered(token.exists())
        token.unlink(missing_ok=True)
        if blind := sorted({host for host, sees in zip(self.hosts, visibility, strict=True) if not sees}):
            raise OutputMismatch(
                f"{', '.join(blind)} can't access {self.folder} of rank 0 on {self.hosts[0]}; all ranks need the same "
                "`output` folder",
                "Mount one folder on all machines at that path, and set `output` to it.",
            )

    def checkpoint(self, newest: resume.Checkpoint | None) -> resume.Checkpoint | None:
        """The checkpoint that rank 0 has found, on every rank. newest: ignored on other ranks."""
        name = self.from_main(None if newest is None else newest.path.name)
        if name is None or self.is_main:
            return newest
        return resume.read_checkpoint(self.folder / "checkpoints" / name, verify=False)

    def from_main(self, value: Any) -> Any:
        """Rank 0's value, on every rank. value: a value that JSON can represent; ignored on other ranks."""
        if self._accelerator.num_processes == 1:
            return value
        return broadcast_json(value, self._accelerator.device)

    def gathered(self, value: Any) -> list[Any]:
        """The values of all ranks, ordered by rank. value: this rank's value, which JSON can represent."""
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
    """A text like `train.optimizer.lr: 0.0001, now 0.0005` for each setting that changed; none if `file`, the run's
    config.yaml, can't be read."""
    from ruamel.yaml import YAML, YAMLError

    try:
        before = YAML(typ="safe").load(file)
    except (OSError, ValueError, YAMLError):
        return []
    if not isinstance(before, Mapping):
        return []
    current = config.model_dump(mode="json", by_alias=True)
    changes = (change for section in SECTIONS for change in _compare(section, before.get(section), current[section]))
    return [f"{key}: {_format(first)}, now {_format(last)}" for key, first, last in changes if key not in NOT_COMPARED]


def describe_rank(config: Config, data: TrainSet, signature: Mapping[str, Any]) -> dict[str, Any]:
    """The values that must be equal on all ranks before the base weights are read: settings, code, training set."""
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
    """RunError with each rank, key and both values if a rank has other values than rank 0."""
    lines = []
    for rank, values in enumerate(ranks):
        for key, main_value, value in _compare("", ranks[0], values):
            texts = f"{_format(main_value)} on rank 0, {_format(value)} on rank {rank}"
            if not any(f"{key}.".startswith(f"{option}.") for option in MACHINE_OPTIONS):
                lines.append(f"  rank {rank} on {hosts[rank]}: {key}: {'differ' if key in HASHES else texts}")
    if lines:
        raise RunError(
            "\n".join(["the ranks differ:", *lines]),
            "Start all ranks with the same configuration, code, training set and checkpoint.",
        )


def _compare(key: str, before: Any, current: Any) -> Iterator[tuple[str, Any, Any]]:
    """(option, value before, value now) for each option that differs."""
    if isinstance(before, Mapping) and isinstance(current, Mapping) and key not in FREE_KEYS:
        for name in current:
            if name in before:  # another release has other options
                yield from _compare(f"{key}.{name}".lstrip("."), before[name], current[name])
    elif before != current:
        yield key, before, current


def _format(value: Any) -> str:
    return "null" if value is None else escape_unprintable(shorten(str(value)))


ROOT = PACKAGES[0].parent
#: Seconds that a rank which lost a connection waits for the rank that caused the loss to be found, and seconds that
#: other ranks continue after a rank has failed: they may fail for the same reason, and report it in more detail.
ANSWER_S = 15.0
STORE_TIMEOUT = timedelta(seconds=30)
STORE = "rank 0, or the launcher's store at MASTER_ADDR,"
HINT = "Start training again: it resumes from the last checkpoint."


class RankLostError(LatentpressError):
    """Raised if a rank ended or stopped answering."""


class RankWatch:
    """One rank's part of the watch, with its threads. The main thread of the rank calls `note`. A single process has no
    threads and no store."""

    def __init__(self, accelerator: Accelerator, console: Console, timeout: float, store: Store | None = None) -> None:
        self.rank, self.ranks = accelerator.process_index, accelerator.num_processes
        self._console, self._timeout = console, timeout
        self._interval = min(1.0, timeout / 10)
        self._main, self._ended = threading.get_ident(), threading.Event()
        self._count, self._activity, self._moved = 0, "preparing", time.monotonic()
        self._records: dict[int, tuple[dict[str, Any], float]] = {}  # rank -> last record, time when it was first read
        if self.ranks > 1:
            assert store is not None
            self._shared_store = store  # rank 0 may serve the store, for as long as this object exists
            # The watch has its own connection, because a connection that waits blocks other requests.
            self._store = PrefixStore("watch", store.clone())  # type: ignore[attr-defined]
            self._store.set_timeout(STORE_TIMEOUT)
            self._write()
            accelerator.wait_for_everyone()
            self._heard = time.monotonic()  # when the store last answered
            for work in (self._run, self._watch_store):
                threading.Thread(target=work, name="rank-watch", daemon=True).start()

    def note(self, activity: str | None = None, *, in_turns: bool = False) -> None:
        """Record that the main thread has made progress. All ranks call it equally often.

        activity: the activity that begins. in_turns: whether the progress is in work that ranks do in turns or at
        different speeds. It is not counted then, because it does not put a rank ahead of the rest.
        """
        self._count, self._moved = self._count + (not in_turns), time.monotonic()
        self._activity = activity or self._activity

    @contextmanager
    def sharing_errors(self, is_last: bool = False) -> Iterator[None]:
        """Context that reports an error of its body to all ranks. An error that another rank has caused is replaced by
        RankLostError. is_last: whether other ranks may end after the body."""
        try:
            try:
                yield
            except CheckpointException as error:  # raised on all ranks, with the errors of some ranks
                rank, (cause, _) = min(error.failures.items(), key=lambda item: (item[0] != self.rank, item[0]))
                if rank == self.rank:
                    raise cause from error
                raise RankLostError(f"{self._name(rank)} failed: {describe_error(cause)}", HINT) from error
        except BaseException as error:
            if self.ranks > 1 and not isinstance(error, RankLostError):
                self._fail(error)
            self._ended.set()
            raise
        if is_last:
            self._ended.set()

    def _fail(self, error: BaseException) -> None:
        """Write the reason why this rank fails. If a connection broke, find the rank that broke it and raise
        RankLostError."""
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
        # Rank 0 watches all ranks; every other rank watches rank 0 and itself.
        watched = range(self.ranks) if self.rank == 0 else (0, self.rank)
        while not self._ended.wait(self._interval):
            cause = self._find_cause(watched, self._timeout)
            if cause is None and self.rank == 0:
                cause = self._find_hanging()
            if cause is not None:
                self._end(cause)

    def _watch_store(self) -> None:
        """End the process if the store does not answer. A machine without power or network does not even report a
        broken connection, and a request to it takes a quarter of an hour to fail."""
        while not self._ended.wait(self._interval):
            if time.monotonic() - self._heard > self._timeout:
                self._end(f"{STORE} has not answered for {self._timeout:g} s", is_shared=False)

    def _end(self, message: str, is_shared: bool = True) -> None:
        """End this process, because its main thread may wait forever. First give the process up to ANSWER_S to end by
        itself, since it may fail for the same reason and report it in more detail. is_shared: whether to write
        `message` for the other ranks."""
        if self._ended.wait(min(ANSWER_S, self._timeout / 2)):
            return
        if is_shared:
            with suppress(RuntimeError):
                self._store.set("ended", message)
        if self.rank == 0:
            self._console.print_error("train", RankLostError(message, HINT))
            self._console.stdout.flush()
        else:  # the console of other ranks is silent
            print(f"rank {self.rank}: {message}", file=sys.stderr, flush=True)
        os._exit(INCOMPLETE)

    def _write(self) -> None:
        frame, line = sys._current_frames().get(self._main), ""
        while frame is not None and not line:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
                line = f"{path.relative_to(ROOT)}:{frame.f_lineno}"
            frame = frame.f_back
        record = {"written": time.monotonic(), "count": self._count, "doing": self._activity, "place": line}
        record |= {"still": time.monotonic() - self._moved, "host": socket.gethostname(), "process": os.getpid()}
        self._store.set(f"rank/{self.rank}", json.dumps(record))

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _read_record(self, rank: int) -> float:
        """Read a rank's record; returns the seconds since the record last changed."""
        record, previous = json.loads(self._store.get(f"rank/{rank}")), self._records.get(rank)
        if previous is None or previous[0] != record:
            self._records[rank] = record, time.monotonic()
        return time.monotonic() - self._records[rank][1]

    def _name(self, rank: int) -> str:
        if rank not in self._records:
            self._read_record(rank)
        record = self._records[rank][0]
        return f"rank {rank} (process {record['process']} on {record['host']})"

    def _find_cause(self, ranks: Iterable[int], patience: float) -> str | None:
        """Write this rank's record. Returns a message with the rank among `ranks` that failed, or that has written no
        new record for `patience` seconds; None if there is none. A rank that fails because a connection broke is not
        the cause."""
        try:
            self._write()
            if message := self._read("ended"):
                return message
            for rank in ranks:
                reason, silent = self._read(f"failed/{rank}"), self._read_record(rank)
                if reason and rank != self.rank:
                    return f"{self._name(rank)} failed: {reason}"
                if reason is None and silent > patience:
                    doing = self._records[rank][0]["doing"]
                    return f"{self._name(rank)} has not answered for {patience:g} s, last at {doing}"
            self._heard = time.monotonic()
        except RuntimeError:  # the store ends with rank 0, or with the launcher on the store's machine
            return f"{STORE} can't be reached"
        return None

    def _find_hanging(self) -> str | None:
        """A message with the ranks that are behind if no rank makes progress; else None."""
        records = {rank: record for rank, (record, _) in self._records.items()}
        if min(record["still"] for record in records.values()) < self._timeout:
            return None
        lowest_count = min(record["count"] for record in records.values())
        return "; ".join(
            f"{self._name(rank)} has made no progress for {self._timeout:g} s (train.parallel.timeout) at "
            f"{record['doing']}, in {record['place']}"
            for rank, record in records.items()
            if record["count"] == lowest_count
        )


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
