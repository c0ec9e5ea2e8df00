"""`--shard auto`: the variables of schedulers, as Slurm 22.05, Kubernetes and AWS Batch set them."""

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from schemas.cli.options import Partition, find_task, parse_partition


def slurm_array(task: int, first: int, last: int, step: int = 1, **more: object) -> dict[str, str]:
    values = {"ID": task, "MIN": first, "MAX": last, "STEP": step, "COUNT": (last - first) // step + 1}
    array = {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}
    # Variables of a batch script, which is not a task of a step.
    return array | {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"} | {name: str(value) for name, value in more.items()}


@given(st.integers(0, 50), st.integers(1, 40), st.integers(1, 5))
def test_the_tasks_of_an_array_are_all_its_parts(first, count, step):
    ids = range(first, first + count * step, step)
    tasks = [find_task(slurm_array(id, ids[0], ids[-1], step)) for id in ids]
    assert [(task.number, task.total) for task in tasks] == [(number, count) for number in range(count)]


def test_a_step_of_several_tasks_divides_each_task_of_its_array():
    step = {"SLURM_STEP_NUM_TASKS": "3"}
    tasks = [
        find_task(slurm_array(task, 0, 1) | step | {"SLURM_PROCID": str(rank)})
        for task in range(2)
        for rank in range(3)
    ]
    assert [(task.number, task.total) for task in tasks] == [(number, 6) for number in range(6)]
    task = find_task({"SLURM_PROCID": "1", **step})
    assert (task.number, task.total) == (1, 3)


def test_some_tasks_of_an_array_are_started_again_by_their_numbers():
    variables = {"SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_MAX": "11", "SLURM_ARRAY_TASK_COUNT": "2"}
    task = find_task(variables | {"SLURM_ARRAY_TASK_ID": "11"}, 16)
    assert (task.number, task.total) == (11, 16)
    with pytest.raises(typer.BadParameter, match=r"evenly spaced.*auto/N"):
        find_task(variables | {"SLURM_ARRAY_TASK_ID": "11"})


def test_kubernetes_and_aws_batch():
    pod = {"JOB_COMPLETION_INDEX": "2"}
    assert find_task(pod, 4).number == 2
    with pytest.raises(typer.BadParameter, match="auto/N"):
        find_task(pod)
    with pytest.raises(typer.BadParameter, match=r"task number 2 .* 2;"):
        find_task(pod, 2)
    task = find_task({"AWS_BATCH_JOB_ARRAY_INDEX": "5", "AWS_BATCH_JOB_ARRAY_SIZE": "7"})
    assert (task.number, task.total) == (5, 7)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "no job array"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "no job array"),  # a batch script of several tasks
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID is ''"),
        (slurm_array(1, 0, 3, SLURM_ARRAY_TASK_ID="x"), "'x'"),
        (slurm_array(1, 0, 3, SLURM_ARRAY_TASK_COUNT="9"), "evenly spaced"),
        ({"AWS_BATCH_JOB_ARRAY_INDEX": "5"}, "AWS_BATCH_JOB_ARRAY_SIZE"),
        ({"JOB_COMPLETION_INDEX": "-1"}, "'-1'"),
    ],
)
def test_missing_and_inconsistent_variables_are_refused(environment, message):
    with pytest.raises(typer.BadParameter, match=message):
        find_task(environment)


def test_shard_auto_reads_the_environment(monkeypatch):
    monkeypatch.setenv("AWS_BATCH_JOB_ARRAY_INDEX", "1")
    monkeypatch.setenv("AWS_BATCH_JOB_ARRAY_SIZE", "3")
    assert parse_partition("auto")[:2] == (1, 3)
    assert parse_partition("auto/5") == Partition(1, 5, is_found=True)
    with pytest.raises(typer.BadParameter):
        parse_partition("auto/")
