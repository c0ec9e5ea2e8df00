"""Steps that prepare a model for training, in order: checks, load, quantize, attach, blocks, wrap, optimizers. Also
resumes a run from its newest checkpoint, and loads the expert that is not trained.

For a model with two experts, one expert is trained, and only that expert is in memory, except while samples are
generated, because the other expert computes a part of their steps. The other expert is then loaded in the same
precision, with the same offloading or sharding, while the trained expert waits on the host. If the other expert's own
run is finished, its result is loaded.
"""

import gc
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from cache.order.schedule import BatchSchedule
from cache.runs.training_run import RESULT_NOTE, ResultNote
from cache.sets.training_checks import train_precision
from cache.sets.trainset import TrainSet
from cache.sets.window import Ranks, open_window
from schemas.activities import activity
from schemas.cli.console import Console
from schemas.config.pipeline import Config
from schemas.config.training import Adapter
from schemas.devices import pins_memory
from schemas.identity import derive_seed, hash_json
from schemas.text_format import shown_path
from trainer.adapters.header import read_adapter
from trainer.attention import choose_attention, use_kernels
from trainer.data import BatchLoader
from trainer.families.base import ModelFamily, module_of
from trainer.methods.base import Method, Predict
from trainer.run import checkpoint, resume, run_state
from trainer.run.interruption import StopRequest
from trainer.run.ranks import RankWatch, RunFiles, describe_rank, find_changed_settings, refuse_differences
from trainer.run.resume import first_step, list_changes
from trainer.run.sharded import is_sharded
from trainer.setup.adapters import add_frozen, make_trainable
from trainer.setup.blocks import compile_blocks, loading_device, reduce_memory
from trainer.setup.checks import check_training
from trainer.setup.load import choose_dtypes, explain_checkpoint_errors, fingerprint_base, load_transformer, model_shape
from trainer.setup.optimizers import BadStepCounter, MovingAverage, make_optimizer
from trainer.setup.quantize import count_numbers, quantize_base
from trainer.setup.wrap import (
    Denoiser,
    by_turns,
    connect_ranks,
    gathered_dtype,
    make_accelerator,
    shard_model,
    uses_sharding,
    wrap_for_ranks,
)


@dataclass
class TrainState:
    """The objects of one training run. `prepare_run` sets the fields that have no value at first."""

    config: Config
    console: Console
    accelerator: Accelerator
    watch: RankWatch
    files: RunFiles
    loader: BatchLoader
    family: ModelFamily
    attention: str  # the name of the kernels for training
    methods: dict[str, Method]
    signature: dict[str, Any]  # the terms that a checkpoint and a run that resumes from it must share
    bad_steps: BadStepCounter
    model: Any = field(init=False)  # the family's transformer, a diffusers ModelMixin
    denoiser: torch.nn.Module = field(init=False)  # a Denoiser, wrapped for several processes
    predict: Predict = field(init=False)  # method of the unwrapped denoiser
    trainable: dict[str, torch.nn.Parameter] = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    average: MovingAverage | None = field(init=False)
    reads_late: bool = field(init=False)  # see `can_read_late`
    stop: StopRequest | None = None
    data_changes: list[resume.DataChange] = field(default_factory=list)
    new_set: str | None = None  # id of the training set, if it differs from the set of the previous step

    @property
    def folder(self) -> Path:
        return self.config.run_folder

    @property
    def skip_frames(self) -> int:
        """Number of leading latent frames that are conditions and do not count in the loss."""
        return self.family.clean_frames(self.config.model.task)

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def validation_share(self) -> tuple[int, int]:
        """(i, n): this rank denoises part i of n of the validation samples; (0, 1), all samples, if the model is
        sharded."""
        if is_sharded(self.model.parameters()):
            return 0, 1
        return self.accelerator.process_index, self.accelerator.num_processes

    def most_passes(self, count: int) -> int:
        """The largest `count` of all ranks if the model is sharded; else `count`."""
        if not is_sharded(self.trainable.values()):
            return count
        counts = self.accelerator.gather(torch.tensor([count], device=self.accelerator.device))
        return int(counts.max())

    def log(self, message: str) -> None:
        if self.is_main:
            self.console.log(message)


@contextmanager
def unwrap_at_end(run: TrainState) -> Iterator[None]:
    """Context that frees DistributedDataParallel at its end, before the process group is destroyed.

    If it is freed later, it holds the last reference to the group and waits for the group's threads without releasing
    the GIL, while a thread of gloo that frees the tensors of the last barrier waits for the GIL (seen with torch 2.13).
    """
    try:
        yield
    finally:
        if run.accelerator.num_processes > 1:
            run.denoiser = run.accelerator.unwrap_model(run.denoiser)
            run.accelerator.free_memory()
            gc.collect()


def prepare_training(
    config: Config,
    data: TrainSet,
    schedule: BatchSchedule,
    console: Console,
    device: str,
    load: Callable[..., Any] | None = None,
) -> TrainState:
    """Connect the ranks and start watching them, then call `prepare_run`."""
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    parallel = config.train.parallel
    store = connect_ranks(device, parallel)
    accelerator = make_accelerator(device)
    watch = RankWatch(accelerator, console, parallel.timeout, store)
    with watch.sharing_errors():
        files = RunFiles(accelerator, config.run_folder)
        if store is not None:
            signature = run_state.resume_signature(config, data, schedule)
            refuse_differences(files.gathered(describe_rank(config, data, signature)), files.hosts)
            files.require_shared()
        state = run_state.find_resume_state(config, data, schedule) if files.is_main else None
        if store is not None:
            progress = (state.step, first_step(state.data_changes)) if state else (0, 0)
            at_main = run_state.is_finished(config, state), *progress, secrets.token_hex(8)
            finished, step, schedule.first_step, token = files.from_main(at_main)
            if finished:
                raise run_state.RunFinished
            # Machines may share the folder of caches, and a machine may have two groups of torchrun or Ray.
            node = f"{socket.gethostname()}-{os.environ.get('GROUP_RANK', '0')}"
            ranks = Ranks(accelerator.num_processes, accelerator.local_process_index, f"{token}-{node}")
            open_window(config.train, data, schedule, range(step, config.train.steps), ranks)
        return prepare_run(config, data, schedule, console, accelerator, watch, files, load)


def prepare_run(
    config: Config,
    data: TrainSet,
    schedule: BatchSchedule,
    console: Console,
    accelerator: Accelerator,
    watch: RankWatch,
    files: RunFiles,
    load: Callable[..., Any] | None = None,
) -> TrainState:
    """Load the transformer, add the adapter and the methods' modules, and move them to the device.

    load: function that replaces the family's `load`; the benchmarks use it to make random weights.
    """
    settings, device = config.train, accelerator.device
    rank, ranks = accelerator.process_index, accelerator.num_processes
    assert schedule.global_batch == settings.batch_size * settings.accumulate * ranks, "planned for other ranks"
    sharded = uses_sharding(settings.parallel, ranks)
    if settings.parallel.strategy == "fsdp2" and not sharded:
        console.log("train.parallel.strategy fsdp2: with a single process, the model is not sharded")
    draws = {"low_discrepancy": settings.timesteps.low_discrepancy, "draw_noise": device.type == "cpu"}
    memory: dict[str, Any] = {"reading": settings.reading, "is_pinned": pins_memory(device)}
    memory["reads_null_text"] = settings.reads_null_text
    loader = BatchLoader(data, schedule, settings.caption_dropout, rank, ranks, **draws, **memory)
    with activity("loading diffusers", at_once=True):
        family = module_of(config.model.family_spec)
    buckets = (bucket.name for bucket in schedule.buckets)
    methods = check_training(config, family, device, console.warn, buckets, data, ranks, sharded, load is None)
    attention = choose_attention(config, family, device)
    signature = run_state.resume_signature(config, data, schedule)
    bad_steps = BadStepCounter(settings.max_non_finite_steps)
    run = TrainState(
        config, console, accelerator, watch, files, loader, family, attention, methods, signature, bad_steps
    )
    torch.manual_seed(derive_seed(str(settings.seed), "adapter"))
    with by_turns(accelerator, sharded, watch.note):
        denoiser = prepare_model(run, sharded, load)
    refuse_differences(files.gathered({"base weights": signature["base weights"]}), files.hosts)
    watch.note("synchronizing the ranks' models")
    run.model, run.predict, run.trainable = denoiser.model, denoiser.predict, denoiser.trainable()
    with activity("moving the model to the device"):
        run.denoiser = denoiser if sharded else wrap_for_ranks(denoiser, accelerator, settings)
    run.optimizer = make_optimizer(run.trainable, settings.optimizer)
    run.average = None if settings.ema is None else MovingAverage(run.trainable, settings.ema)
    run.reads_late = can_read_late(run)
    return run


def can_read_late(run: TrainState) -> bool:
    """Whether a step's metrics may be read after the next step is queued, so that the device never waits for the host.

    This requires an optimizer that skips a non-finite step without synchronizing with the host (torch's fused AdamW),
    unsharded parameters and moving averages that are all on the device, a device that supports pinned host memory, and
    no method that reads the step's metrics.
    """
    optimizer, averages = run.optimizer, run.average.averages if run.average is not None else {}
    fused = type(optimizer) is torch.optim.AdamW and all(group["fused"] for group in optimizer.param_groups)
    kind = run.accelerator.device.type
    is_local = all(tensor.device.type == kind for tensor in (*run.trainable.values(), *averages.values()))
    free = not any(method.reads_numbers for method in run.methods.values())
    is_pinned = pins_memory(run.accelerator.device)
    return fused and is_local and free and is_pinned and not is_sharded(run.trainable.values())


def prepare_model(run: TrainState, sharded: bool, load: Callable[..., Any] | None) -> Denoiser:
    """The transformer with the trained adapter and the methods' modules, on the device or sharded over devices. Adds
    "base weights" and "transformer" to the run's signature."""
    config, console, family, device = run.config, run.console, run.family, run.accelerator.device
    settings, task = config.train, config.model.task
    home = loading_device(settings.offload, sharded, device)
    run.watch.note("loading the transformer", in_turns=True)
    target = f"on {device}, computing in {train_precision(config.train, config.model)}"
    with console.activity(f"loading the transformer of {config.model.source} {target}", keep=True):
        model, autocast = load_transformer(config, family, home, load)
    with explain_checkpoint_errors(config.model.source):
        run.loader.data.text_widths = config.model.family_spec.read_text_widths(model.config)
        run.signature["base weights"] = (
            fingerprint_base(config.model, config.part, config.root) if load is None else None
        )
        if settings.quantized:
            run.watch.note("quantizing the base", in_turns=True)
            with console.activity(f"quantizing the base to {settings.base_precision}", keep=True):
                remark = quantize_base(model, family, settings.base_precision, settings.quantize_via, device, home)
            run.log(remark)
        frozen = add_frozen(model, config, autocast or choose_dtypes(config.train, config.model)[0])
        for option, file in frozen.items():
            use = "except for samples" if option == "model.assistant" else "for samples only"
            run.log(f"using the adapter {shown_path(file.path)} of {option}, {use}")
        run.watch.note("adding the trained weights", in_turns=True)
        with activity("adding the trained weights"):
            make_trainable(model, family, task, settings.adapter, settings.weight_precision)
    run.signature["transformer"] = hash_json(json.loads(json.dumps(model_shape(model))))
    use_kernels(model, family, run.attention)
    if settings.compile == "blocks":
        compile_blocks(family.blocks(model, task), settings.compile_backend, console.log)
    reduce_memory(model, family, task, settings, device)
    added = {name: weights for name, method in run.methods.items() if (weights := method.modules()) is not None}
    denoiser = Denoiser(model, family, task, autocast, added, settings.offload)
    numbers = count_numbers(denoiser.trainable().values()), count_numbers(model.parameters())
    run.log("training {:,} of {:,} parameters".format(*numbers))
    if sharded:
        shard_model(model, family, task, added, settings.parallel, device, gathered_dtype(settings, autocast))
    denoiser.methods.to(device)
    return denoiser


def resume_run(run: TrainState) -> resume.Checkpoint | None:
    """Restore the newest intact checkpoint and return it; None if the run has no checkpoint. Writes config.yaml."""
    folder, newest = run.folder / "checkpoints", None
    run.watch.note("looking for a checkpoint")
    if run.is_main:
        with activity(f"checking the checkpoints in {shown_path(folder)}"):
            newest, damaged = resume.newest_checkpoint(folder, verify=True)
        for path, reason in damaged:
            assert newest is not None
            run.console.warn(checkpoint.quarantine(path, reason, newest))
    run.watch.note("resuming")
    newest = run.files.checkpoint(newest)
    if newest is not None:
        resume.check_signature(newest, run.signature, run.config.train.on_new_data == "continue")
        run.data_changes = list_changes(newest, run.signature["data"]["digest"])
        run.loader.schedule.first_step = first = first_step(run.data_changes)
        run.new_set = run.loader.data.id if run.data_changes and first == newest.step else None
        with activity(f"reading {newest.path.name}"):
            averages = None if run.average is None else run.average.averages
            checkpoint.restore(newest, run.trainable, run.optimizer, averages, run.methods)
        if run.average is not None:
            run.average.updates = newest.state.ema_updates
        run.bad_steps.steps, run.bad_steps.total = newest.state.bad_steps, newest.state.bad_total
        run.log(f"continuing from {shown_path(newest.path)}, {newest.step} steps done")
        if run.new_set is not None:
            run.log(f"continuing on new data: set {run.new_set}, in a new order")
    if run.is_main:
        if newest is not None and (changed := find_changed_settings(run.folder / "config.yaml", run.config)):
            run.log(f"settings changed since the last start: {'; '.join(changed)}")
        run_state.write_config(run.config, run.loader.data)
    run.accelerator.wait_for_everyone()
    return newest


def log_start(run: TrainState) -> None:
    """Log the source of the eval loss before the first step."""
    data, settings = run.loader.data, run.config.validation
    if settings.every and settings.eval_samples and run.config.eval_sigmas:
        rows, source = data.choose_eval_rows(settings.eval_samples)
        run.log(f"eval loss on {len(rows)} {source}")


@contextmanager
def other_expert(run: TrainState) -> Iterator[Any]:
    """Context with the untrained expert in eval mode on the device. The trained expert waits on the CPU and returns to
    the device at the end. Every rank must enter the context."""
    device, sharded = run.accelerator.device, is_sharded(run.model.parameters())
    moves = not (sharded or run.config.train.offload.blocks)  # else only a part of it is on the device
    [name] = run.config.experts.keys() - {run.config.train.experts}
    # The noise levels of the eval loss are in the range of the trained expert only.
    validation = run.config.validation.changed(eval_sigmas=(run.config.experts[name].lowest,))
    config = run.config.changed(train=run.config.train.changed(experts=name), validation=validation)
    has_result = ResultNote.try_read(config.run_folder / RESULT_NOTE) is not None and config.result_folder.is_dir()
    result = config.result_folder if run.files.from_main(has_result) else None
    origin = "the checkpoint" if result is None else shown_path(result)
    run.log(f"samples: using the expert {config.train.experts} of {origin}")
    try:
        if moves:
            torch.nn.Module.to(run.model, torch.device("cpu"))
        with by_turns(run.accelerator, sharded, run.watch.note):
            model = load_other(run, config, result, sharded)
        yield model
        del model
    finally:
        gc.collect()
        if moves:
            torch.nn.Module.to(run.model, device)


def load_other(run: TrainState, config: Config, result: Path | None, sharded: bool) -> Any:
    """Load the expert that `config` trains. result: the result saved by its run; None if the run is not finished."""
    family, task, device, settings = run.family, config.model.task, run.accelerator.device, config.train
    home, name = loading_device(settings.offload, sharded, device), f"the expert {settings.experts}"
    run.watch.note(f"loading {name}", in_turns=True)
    source = config
    if result is not None and settings.adapter.type == "full":
        saved = config.model.changed(path=str(result.parent), revision=None)
        source, result = config.changed(model=saved), None
    with activity(f"loading {name}"), explain_checkpoint_errors(config.model.source):
        model, autocast = load_transformer(source, family, home)
        if settings.quantized:
            quantize_base(model, family, settings.base_precision, settings.quantize_via, device, home)
        if result is not None:
            kind = read_adapter(result).kind  # the rank may be different
            adapter_values: dict[str, Any] = {"type": "lokr" if kind == "LoKr" else "lora", "dora": kind == "DoRA"}
            if kind == "LoKr":
                adapter_values |= settings.adapter.model_dump(include={"decompose_factor", "decompose_both"})
            make_trainable(model, family, task, Adapter.model_validate(adapter_values | {"init_from": str(result)}))
        model.requires_grad_(False).eval()
        use_kernels(model, family, run.attention)
        reduce_memory(model, family, task, settings, device)
        if sharded:
            shard_model(model, family, task, {}, settings.parallel, device, gathered_dtype(settings, autocast))
        elif not settings.offload.blocks:
            torch.nn.Module.to(model, device)
    if run.stop is not None:
        run.stop.stop_validation(model)
    return model
