"""The options that every program takes, as typer types and as one value."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar, overload

import typer

from schemas.config.encoding import Encoding, StageWorkers
from schemas.config.pipeline import Config
from schemas.config.section import MOST_PROCESSES
from schemas.devices import ACCELERATORS, DESCRIPTION, NAME_OF_DEVICE

#: Schedulers and their variables, as listed in messages.
SCHEDULERS = "Slurm (SLURM_ARRAY_TASK_ID, SLURM_PROCID), Kubernetes (JOB_COMPLETION_INDEX) and AWS Batch"


T = TypeVar("T")


class Partition(NamedTuple):
    """This process's share of the work: number `number` (from 0) of `total`. is_found: whether `auto` found it."""

    number: int = 0
    total: int = 1
    is_found: bool = False

    def select(self, items: Sequence[T]) -> list[T]:
        """Every total-th item, starting with item `number`."""
        return list(items[self.number :: self.total])

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


def find_task(environment: Mapping[str, str], total: int | None = None) -> Partition:
    """This process's task of a job array. total: the number of tasks, if the user specified it; then the array index is
    used unchanged as the task number, so that some tasks of an array can be started again by their numbers.

    typer.BadParameter if the variables are missing, contradict each other, or leave out tasks.
    Sources: man sbatch and man srun ("OUTPUT ENVIRONMENT VARIABLES"), Kubernetes' "Indexed Job", AWS Batch's "Array
    jobs".
    """
    if "SLURM_ARRAY_TASK_ID" in environment or "SLURM_STEP_NUM_TASKS" in environment:
        number, tasks = _slurm_task(environment, total)
    elif "JOB_COMPLETION_INDEX" in environment:
        number, tasks = _number(environment, "JOB_COMPLETION_INDEX"), 0
        if total is None:
            raise typer.BadParameter(
                "Kubernetes does not report the number of completions of a job; write it as --shard auto/N"
            )
    elif "AWS_BATCH_JOB_ARRAY_INDEX" in environment:
        number = _number(environment, "AWS_BATCH_JOB_ARRAY_INDEX")
        tasks = _number(environment, "AWS_BATCH_JOB_ARRAY_SIZE")
    else:
        raise typer.BadParameter(
            f"the environment has no job array for 'auto' (supported: {SCHEDULERS}); write --shard I/N"
        )
    tasks = tasks if total is None else total
    if number >= tasks:
        raise typer.BadParameter(f"task number {number} is not below the number of tasks, {tasks}; count from 0")
    return Partition(number, tasks, is_found=True)


def _slurm_task(environment: Mapping[str, str], total: int | None) -> tuple[int, int]:
    """Number and total of a task: of an array, or of a step that srun started with several tasks. If each task of an
    array runs such a step, the total is the product of both numbers of tasks. SLURM_PROCID alone does not show a step,
    because a batch script has it too; a step also has SLURM_STEP_NUM_TASKS."""
    number, tasks = 0, 1
    if "SLURM_ARRAY_TASK_ID" in environment:
        number = _number(environment, "SLURM_ARRAY_TASK_ID")
        if total is None:
            first, last, tasks = (_number(environment, f"SLURM_ARRAY_TASK_{name}") for name in ("MIN", "MAX", "COUNT"))
            step = _number(environment, "SLURM_ARRAY_TASK_STEP", 1)
            if step < 1 or (last - first) // step + 1 != tasks:
                raise typer.BadParameter(
                    f"the task numbers of this array are not evenly spaced ({first} to {last}, {tasks} tasks); write "
                    "--shard auto/N with the number of parts"
                )
            number = (number - first) // step
    if (parts := _number(environment, "SLURM_STEP_NUM_TASKS", 1)) > 1 or "SLURM_ARRAY_TASK_ID" not in environment:
        number, tasks = number * parts + _number(environment, "SLURM_PROCID"), tasks * parts
    return number, tasks


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit()):
        raise typer.BadParameter(f"{name} is {text!r}, not an integer; write --shard I/N")
    return int(text)


#: "latentpress PROGRAM" at the beginning of a text, after a backtick, or after a colon if only options follow.
_COMMAND_PATTERN = re.compile(r"((^|(?<=`))latentpress [a-z][a-z-]*|(?<=: )latentpress [a-z][a-z-]*(?=$| --|   #))")


NOT_PARTITIONED = Partition()


def parse_partition(text: str | Partition) -> Partition:
    """Read "i/n" with 0 <= i < n, or "auto" or "auto/n" by the job array's variables. typer.BadParameter for anything
    else. A Partition, which is the default, is returned unchanged."""
    if isinstance(text, Partition):
        return text
    if automatic := re.fullmatch(r"auto(?:/([0-9]{1,9}))?", text):
        return find_task(os.environ, int(automatic[1]) if automatic[1] else None)
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise typer.BadParameter(f"{text!r} is not I/N with 0 <= I < N; the parts of three are 0/3, 1/3 and 2/3")
    return Partition(int(match[1]), int(match[2]))


def parse_device(text: str) -> str:
    if not re.fullmatch(NAME_OF_DEVICE, text):
        raise typer.BadParameter(f"{text!r} is not a device; valid: {DESCRIPTION} ({', '.join(ACCELERATORS)})")
    return text


ConfigOption = Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="Configuration file.")]
ConfigsOption = Annotated[
    list[Path] | None,
    typer.Option("--config", "-c", metavar="FILE", help="Configuration file. Repeatable.  [default: pipeline.yaml]"),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key: train.optimizer.lr=1e-4. Repeatable."),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show the work to do, without doing it.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the report as one JSON document.")]
PartitionOption = Annotated[
    Partition,
    typer.Option(
        "--shard",
        parser=parse_partition,
        show_default=False,
        metavar="I/N",
        help="Do part I (from 0) of N. auto, auto/N: part of this task of a job array (Slurm, Kubernetes, AWS Batch).",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", parser=parse_device, metavar="NAME", help=f"{DESCRIPTION}.  [default: as configured]"),
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
    """The common options of the command line. device, workers: None if the configuration decides."""

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
        options = {"device": self.device, "workers": self.workers}
        update = {key: value for key, value in options.items() if value is not None}
        return config.stages.resources(stage).changed(**update)

    def complete_commands(self, text: str) -> str:
        """Add this program's --config and --set to the latentpress commands in a text, unless the text has any."""
        argv = self._argv_of_config() if self.config != Options.config else self._argv_of_config()[2:]
        if not argv or " --config " in text or " --set " in text:
            return text
        words = " ".join(map(shlex.quote, argv))
        return _COMMAND_PATTERN.sub(lambda match: f"{match[0]} {words}", text)

    def argv(self) -> list[str]:
        """These options as arguments of another program."""
        out = self._argv_of_config()
        out += [flag for flag, on in (("--dry-run", self.dry_run), ("--json", self.json)) if on]
        out += ["--shard", str(self.partition)] if self.partition.total > 1 else []
        out += ["--device", self.device] if self.device else []
        return out + (["--workers", str(self.workers)] if self.workers else [])

    def _argv_of_config(self) -> list[str]:
        return ["--config", str(self.config), *(word for override in self.overrides for word in ("--set", override))]
