"""Runs of the trainer in the test's process, or in two forks of it, and their results."""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path

import torch
from accelerate.test_utils.testing import AccelerateTestCase
from safetensors.torch import load_file

from cache.order.schedule import BatchSchedule
from cache.sets.set_lookup import open_set
from cache.sets.trainset import Sample, TrainSet
from cache.store.store import Store
from schemas.cli.console import OK, Console, Options, run_program
from schemas.json_records import read_record
from tests.processes import free_port, prepare_fork
from tests.trainer.pipelines import pad_text
from trainer import train as loop
from trainer.__main__ import run as program_run
from trainer.batch import ABSENT, TOKENWISE, Batch, make_batch
from trainer.data import to_tensor
from trainer.run import metrics

LOADS = "loading the transformer"  # message of the program before it loads


def quiet() -> Console:
    return Console(stderr=open(os.devnull, "w"))


def opened(config) -> TrainSet:
    return open_set(Store(config.root), config.train.set, config.model.family, config.model.task)


def write(config, path: Path) -> Path:
    """Write the configuration to a file, in the folder `path` as pipeline.yaml."""
    file = path / "pipeline.yaml" if path.is_dir() else path
    file.write_text(json.dumps(config.model_dump(mode="json", by_alias=True, exclude_unset=True)))
    return file


def moved(config, checkpoint: Path):
    """The configuration with the checkpoint at another path."""
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(checkpoint)})})


def train(config) -> dict:
    data = opened(config)
    return loop.train(config, data, plan_batches(config, data), quiet(), config.train.device)


def plan_batches(config, data) -> BatchSchedule:
    """The schedule of one process."""
    return data.make_schedule(config.train)


def prepared(config, console: Console | None = None) -> loop.TrainState:
    """A run of one process with its model loaded."""
    data = opened(config)
    return loop.prepare_training(config, data, plan_batches(config, data), console or quiet(), config.train.device)


def plain_batch(samples: Sequence[Sample], bucket: str = "") -> Batch:
    """A batch of samples that were read one by one."""
    tensors = []
    for sample in samples:
        arrays = sample.tensors | {f"text.{name}": array for name, array in sample.text.items()}
        tensors.append({name: to_tensor(array) for name, array in arrays.items()})
    ids, lengths = [sample.id for sample in samples], [sample.text["embeds"].shape[0] for sample in samples]
    stacked = {}
    for name in {name for rows in tensors for name in rows}:
        first = next(rows[name] for rows in tensors if name in rows)
        parts = [rows[name] if name in rows else torch.full_like(first, ABSENT[name]) for rows in tensors]
        stacked[name] = pad_text(parts)[0] if name in TOKENWISE else torch.stack(parts)
    return make_batch(ids, bucket, stacked, lengths)


def move_adapter(run: loop.TrainState) -> None:
    """Set the trained weights to fixed values, as if they had been trained."""
    for seed, parameter in enumerate(run.trainable.values()):
        generator = torch.Generator().manual_seed(seed)
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)


def lines(config, key: str = "loss") -> dict[int, float]:
    path = config.run_folder / "metrics.jsonl"
    return {line["step"]: line[key] for line in metrics.read_metrics(path) if key in line}


def trained_weights(config) -> dict[str, torch.Tensor]:
    """The weights of the last checkpoint, by the names in its files."""
    folder = config.run_folder / "checkpoints" / f"step-{config.train.steps:06d}"
    files = [*read_record(folder / "state.json")["weights"], "trainable.safetensors"]
    return {name: value for file in files for name, value in load_file(folder / file).items()}


def result(config) -> dict[str, torch.Tensor]:
    """The adapter or model that a run has saved."""
    folders = [config.run_folder / name for name in ("adapter", f"model/{config.part}")]
    files = [path for folder in folders for path in sorted(folder.glob("*.safetensors"))]
    return {name: value for path in files for name, value in load_file(path).items()}


def check_result(config, reference) -> None:
    """Check that the adapter or model equals the result of one process, within AdamW's growth of rounding errors of
    small gradients."""
    actual, expected = result(config), result(reference)
    assert actual.keys() == expected.keys() and actual
    differences = torch.cat([(actual[name] - value).flatten().abs() for name, value in expected.items()])
    assert differences.mean() < 5e-5, "two steps move a weight by about 2e-3"


def check_shown(config, reference, step: int, atol: float = 1e-3) -> None:
    """Check that the latents of the validation prompts after `step` steps equal the latents of the second run."""
    first, second = (Path(each.output) / f"run/validation/step-{step:06d}" for each in (config, reference))
    names = sorted(path.name for path in second.iterdir())
    assert names and sorted(path.name for path in first.iterdir()) == names
    for name in names:
        actual, expected = (load_file(folder / name)["latent"] for folder in (first, second))
        torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def on_ranks(
    path: Path | Sequence[Path],
    codes: Sequence[int] = (OK, OK),
    signalled: Callable[[list[int]], object] | None = None,
) -> dict:
    """The report of ranks in the environment of torchrun, which end with these codes; tests/test_importpath.py uses
    torchrun itself. path: path of the configuration, or one path for each rank. signalled: function called with their
    process ids."""
    count = str(len(codes))
    paths = [path] * len(codes) if isinstance(path, Path) else [*path]
    port = free_port()
    output, children = paths[0].with_name("printed"), []
    output.unlink(missing_ok=True)
    for rank, rank_path in zip(map(str, range(len(codes))), paths, strict=True):
        children.append(os.fork())
        if children[-1]:
            continue
        try:
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            prepare_fork()
            AccelerateTestCase("run").tearDown()  # clears the state of a single process
            sys.stdout = output.open("a")
            ended = run_program("train", program_run, Options(rank_path, json=True))
            sys.stdout.flush()
            os._exit(ended)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    try:
        if signalled is not None:
            signalled(children)
        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    except BaseException:
        for child in children:
            os.kill(child, signal.SIGKILL)
        raise
    assert ended == [*codes]
    printed = output.read_text()
    return json.loads(printed) if printed else {}


def in_two_forks(work: Callable[[int], object]) -> None:
    """Call `work` with the rank in two forks, which may open a process group."""
    ranks = [get_context("fork").Process(target=work, args=(rank,)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]


def on_two_ranks(path: Path, signalled: Callable[[list[int]], object] | None = None, code: int = OK) -> dict:
    return on_ranks(path, (code, code), signalled)
