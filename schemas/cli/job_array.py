"""`--shard auto`: which part of the work this task of a job array does, by the variables that its scheduler sets."""

from collections.abc import Mapping
from dataclasses import dataclass

import typer

#: What is read, as a message lists it.
SCHEDULERS = "Slurm (SLURM_ARRAY_TASK_ID, SLURM_PROCID), Kubernetes (JOB_COMPLETION_INDEX) and AWS Batch"


@dataclass(frozen=True)
class ArrayTask:
    """Task `number` (from 0) of `total`; None where the scheduler does not say how many there are. source: the
    variables that were read, with their values."""

    number: int
    total: int | None
    source: str


def find_task(environment: Mapping[str, str], total: int | None = None) -> ArrayTask:
    """This process' task of a job array. total: the number of tasks where the user gave it; the array's own index is
    then the number as it is, so that some tasks of an array can be started again by their numbers.

    typer.BadParameter where the variables are missing, contradict each other, or leave out tasks.
    Sources: man sbatch and man srun ("OUTPUT ENVIRONMENT VARIABLES"), Kubernetes' "Indexed Job", AWS Batch's "Array
    jobs".
    """
    if "SLURM_ARRAY_TASK_ID" in environment or "SLURM_STEP_NUM_TASKS" in environment:
        task = _slurm_task(environment, total)
    elif "JOB_COMPLETION_INDEX" in environment:
        task = _read(environment, "JOB_COMPLETION_INDEX", None)
        if total is None:
            raise typer.BadParameter(
                "Kubernetes does not tell a pod how many completions its job has: give their number, --shard auto/N"
            )
    elif "AWS_BATCH_JOB_ARRAY_INDEX" in environment:
        task = _read(environment, "AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ARRAY_SIZE")
    else:
        raise typer.BadParameter(
            f"auto finds no job array in the environment; it reads the variables of {SCHEDULERS}. Give i/n instead"
        )
    found = ArrayTask(task.number, total if total is not None else task.total, task.source)
    if found.total is None or not 0 <= found.number < found.total:
        raise typer.BadParameter(f"task {found.number} of {found.total} can't be ({found.source}); number them from 0")
    return found


def _slurm_task(environment: Mapping[str, str], total: int | None) -> ArrayTask:
    """Tasks of an array, of a step that srun started with several tasks, or of both: each task of the array is then as
    many parts as its step has tasks. A batch script has SLURM_PROCID without being one of several: only a step counts,
    which has SLURM_STEP_NUM_TASKS."""
    tasks = [ArrayTask(0, 1, "")]
    if "SLURM_ARRAY_TASK_ID" in environment:
        if total is None:
            first, last, step, count = (
                _number(environment, f"SLURM_ARRAY_TASK_{name}", default)
                for name, default in (("MIN", None), ("MAX", None), ("STEP", 1), ("COUNT", None))
            )
            if step < 1 or (last - first) // step + 1 != count:
                raise typer.BadParameter(
                    f"the tasks of this array are no even range ({first} to {last}, {count} of them), so their numbers "
                    "don't say which parts they do: give the number of parts, --shard auto/N"
                )
            number = (_number(environment, "SLURM_ARRAY_TASK_ID") - first) // step
            source = f"SLURM_ARRAY_TASK_ID={environment['SLURM_ARRAY_TASK_ID']} of {first}-{last}"
            tasks.append(ArrayTask(number, count, source + (f":{step}" if step > 1 else "")))
        else:
            tasks.append(_read(environment, "SLURM_ARRAY_TASK_ID", None))
    if _number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1 or "SLURM_ARRAY_TASK_ID" not in environment:
        tasks.append(_read(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
    number, parts = 0, 1
    for task in tasks:
        number, parts = number * (task.total or 1) + task.number, parts * (task.total or 1)
    return ArrayTask(number, parts, ", ".join(task.source for task in tasks if task.source))


def _read(environment: Mapping[str, str], number: str, total: str | None) -> ArrayTask:
    names = [name for name in (number, total) if name is not None]
    source = ", ".join(f"{name}={environment.get(name)}" for name in names)
    return ArrayTask(_number(environment, number), _number(environment, total) if total else None, source)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit()):
        raise typer.BadParameter(f"{name} is {text!r}, and --shard auto needs a whole number there")
    return int(text)
