"""The ranks of a run: the folder that every rank must see, small values that they tell each other as JSON, and the
comparison of their settings; also the settings that changed since a run was last started."""

import json
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from accelerate import Accelerator

from cache.runs.training_checks import RunError
from cache.sets.trainset import TrainSet
from schemas.config.pipeline import PACKAGES, Config
from schemas.errors import USAGE, LatentpressError
from schemas.identity import hash_json
from schemas.text_format import escape_unprintable, shorten
from trainer.run import resume
from trainer.run.new_data import held_out_digest
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
        "validation prompts": hash_json(data.meta["validation"]),
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
