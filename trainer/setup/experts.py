"""The expert that is not trained, as validation samples need it.

Of a model with two experts one is trained, and only that one is in memory, but for samples, which the other one takes a
part of. Then it is loaded as the trained one was, in the same precision and offloaded or sharded alike, and the trained
one waits on the host. It has what its own run has saved, where that is finished.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cache.runs.training_run import RESULT_NOTE, ResultNote
from schemas.activities import activity
from schemas.config.pipeline import Config
from schemas.config.training import Adapter
from schemas.text_format import shown_path
from trainer.adapters.header import read_adapter
from trainer.attention import NATIVE, use_backend
from trainer.run.run_state import result_folder
from trainer.run.sharded import is_sharded
from trainer.setup.attach import make_trainable
from trainer.setup.blocks import loading_device, reduce_memory
from trainer.setup.load import explain_checkpoint_errors, load_transformer
from trainer.setup.prepare import TrainState
from trainer.setup.quantize import quantize_base
from trainer.setup.shard import by_turns, gathered_dtype, shard_model


@contextmanager
def other_expert(run: TrainState) -> Iterator[Any]:
    """The other expert in eval mode, on the device in place of the trained one, which is back there at the end. Every
    rank enters it."""
    device, sharded = run.accelerator.device, is_sharded(run.model.parameters())
    moves = not (sharded or run.config.train.offload.blocks)  # else the device has a part of it alone
    [name] = run.config.experts.keys() - {run.config.train.experts}
    config = run.config.changed(train=run.config.train.changed(experts=name))
    found = ResultNote.try_read(config.run_folder / RESULT_NOTE) is not None and result_folder(config).is_dir()
    result = result_folder(config) if run.files.from_main(found) else None
    which = "that of the checkpoint" if result is None else f"with {shown_path(result)}"
    run.log(f"samples: the expert {config.train.experts} is {which}")
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
    """The expert that `config` trains. result: what its run has saved."""
    family, device, settings = run.family, run.accelerator.device, config.train
    home, name = loading_device(settings.offload, sharded, device), f"the expert {settings.experts}"
    run.watch.note(f"loading {name}", alone=True)
    source = config
    if result is not None and settings.adapter.type == "full":
        saved = config.model.changed(path=str(result.parent), revision=None)
        source, result = config.changed(model=saved), None
    with activity(f"loading {name}"), explain_checkpoint_errors(config):
        model, autocast = load_transformer(source, family, home)
        if settings.quantized:
            quantize_base(model, family, settings.base_precision, settings.quantize_via, device, home)
        if result is not None:
            kind = read_adapter(result).kind  # whatever its rank is
            given: dict[str, Any] = {"type": "lokr" if kind == "LoKr" else "lora", "dora": kind == "DoRA"}
            if kind == "LoKr":
                given |= settings.adapter.model_dump(include={"decompose_factor", "decompose_both"})
            make_trainable(model, family, Adapter.model_validate(given | {"init": str(result)}))
        model.requires_grad_(False).eval()
        if settings.attention_backend != NATIVE:
            use_backend(model, family, settings.attention_backend)
        reduce_memory(model, family, settings, device)
        if sharded:
            shard_model(model, family, {}, settings.parallel, device, gathered_dtype(settings, autocast))
        elif not settings.offload.blocks:
            torch.nn.Module.to(model, device)
    if run.stop is not None:
        run.stop.stop_validation(model)
    return model
