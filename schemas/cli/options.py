"""The options that every program takes, as typer types and as one value."""

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar, overload

import typer

from schemas.cli.job_array import find_task
from schemas.config.encoding import Encoding, StageWorkers
from schemas.config.pipeline import Config
from schemas.config.section import DEVICE, MOST_PROCESSES

T = TypeVar("T")
#: "latentpress PROGRAM" at the beginning of a text, after a backtick, or after a colon if only options follow.
_COMMAND_PATTERN = re.compile(r"((^|(?<=`))latentpress [a-z][a-z-]*|(?<=: )latentpress [a-z][a-z-]*(?=$| --|   #))")


class Partition(NamedTuple):
    """This process's share of the work: number `number` (from 0) of `total`. source: what `auto` read."""

    number: int = 0
    total: int = 1
    source: str = ""

    def select(self, items: Sequence[T]) -> list[T]:
        """Every total-th item, from `number` on."""
        return list(items[self.number :: self.total])

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


NOT_PARTITIONED = Partition()  # where --shard is not given; 0/1 that is given is another object


def parse_partition(text: str | Partition) -> Partition:
    """Read "i/n" with 0 <= i < n, or "auto" or "auto/n" by the job array's variables; anything else is wrong usage. A
    Partition, which is the default, is kept."""
    if isinstance(text, Partition):
        return text
    if automatic := re.fullmatch(r"auto(?:/([0-9]{1,9}))?", text):
        task = find_task(os.environ, int(automatic[1]) if automatic[1] else None)
        return Partition(task.number, task.total or 1, task.source)
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise typer.BadParameter(f"{text!r} is not i/n with 0 <= i < n; three parts are 0/3, 1/3 and 2/3")
    return Partition(int(match[1]), int(match[2]))


def parse_device(text: str) -> str:
    if not re.fullmatch(DEVICE, text):
        raise typer.BadParameter(f"{text!r} is not one of auto, cpu, cuda, cuda:N")
    return text


ConfigOption = Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="The configuration.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key: train.optimizer.lr=1e-4. Repeatable."),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be done; do nothing.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the report as one JSON document.")]
PartitionOption = Annotated[
    Partition,
    typer.Option(
        "--shard",
        parser=parse_partition,
        show_default=False,
        metavar="I/N",
        help="Do only part I (from 0) of N. auto, auto/N: as this task of a job array (Slurm, Kubernetes, AWS Batch).",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device", parser=parse_device, metavar="NAME", help="auto, cpu, cuda or cuda:N.  [default: as configured]"
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        max=MOST_PROCESSES,
        metavar="N",
        help="Processes on this machine, or actors on Ray.  [default: as configured, else one for each card]",
    ),
]


@dataclass(frozen=True)
class Options:
    """The command line. `device` and `workers` are None where the configuration decides."""

    config: Path = Path("pipeline.yaml")
    overrides: tuple[str, ...] = ()
    dry_run: bool = False
    json: bool = False
    partition: Partition = NOT_PARTITIONED
    device: str | None = None
    workers: int | None = None

    @overload
    def resources(self, config: Config, stage: Literal["discover", "decode", "preview", "score"]) -> StageWorkers: ...
    @overload
    def resources(self, config: Config, stage: str) -> StageWorkers | Encoding: ...
    def resources(self, config: Config, stage: str) -> StageWorkers | Encoding:
        """The stage's resources as configured, overridden by --device and --workers."""
        given = {"device": self.device, "workers": self.workers}
        update = {key: value for key, value in given.items() if value is not None}
        return config.stages.resources(stage).model_copy(update=update)

    def add_given_options(self, text: str) -> str:
        """Add this program's --config and --set to the latentpress commands in a text that has none of them."""
        given = self._argv_of_config() if self.config != Options.config else self._argv_of_config()[2:]
        if not given or " --config " in text or " --set " in text:
            return text
        words = " ".join(map(shlex.quote, given))
        return _COMMAND_PATTERN.sub(lambda found: f"{found[0]} {words}", text)

    def argv(self) -> list[str]:
        """These options as arguments of another program."""
        out = self._argv_of_config()
        out += [flag for flag, on in (("--dry-run", self.dry_run), ("--json", self.json)) if on]
        out += ["--shard", str(self.partition)] if self.partition.total > 1 else []
        out += ["--device", self.device] if self.device else []
        return out + (["--workers", str(self.workers)] if self.workers else [])

    def _argv_of_config(self) -> list[str]:
        return ["--config", str(self.config), *(word for override in self.overrides for word in ("--set", override))]
