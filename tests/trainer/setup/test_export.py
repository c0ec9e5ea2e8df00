"""Every checkpoint can be loaded by a pipeline, directly from its folder."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from cache.runs.training_run import checkpoint_step, list_checkpoints
from tests.forms import long
from tests.trainer.pipelines import exact_output, output, pipeline
from tests.trainer.runs import prepared
from trainer import train as loop
from trainer.run import checkpoint, resume

FILE = "pytorch_lora_weights.safetensors"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "adapter"),
    [
        ("t2i", "kandinsky5-image-t2i", {"rank": 4, "alpha": 2.5, "dropout": 0.3}),
        long("sana", "sana", {"type": "full"}),
        ("t2i", "kandinsky5-image-t2i", {"rank": 4, "init_weights": "pissa"}),
        long("t2i", "kandinsky5-image-t2i", {"type": "lokr", "rank": 4, "alpha": 2.5}),
    ],
    ids=["alpha", "full", "converted", "lokr"],
)
def test_a_checkpoint_loads_in_its_pipeline_and_gives_what_training_had(ready, kind, name, adapter) -> None:
    config = ready(kind, steps=1, adapter=adapter, optimizer={"lr": 0.05, "warmup": 0})
    loop.train_loop(prepared(config))
    [path] = list_checkpoints(config.run_folder / "checkpoints")
    pipe, run = pipeline(name, Path(config.model.path)), prepared(config)
    before = output(name, pipe.transformer)
    if adapter.get("type") == "full":
        pipe.register_modules(transformer=type(pipe.transformer).from_pretrained(path / "transformer"))
    else:
        if adapter.get("type") == "lokr":
            pipe.transformer.load_lora_adapter(path, prefix="transformer", weight_name=FILE)
        else:
            pipe.load_lora_weights(path)
        assert config.comfyui_file is not None and config.comfyui_file.exists()
        with safe_open(path / FILE, "pt") as file:
            assert file.metadata()["latentpress.steps"] == str(checkpoint_step(path))
    with safe_open(path / "trainable.safetensors", "pt") as file:
        # Once, except for an adapter that is converted on saving and can't be trained further.
        assert bool(list(file.keys())) == ("init_weights" in adapter)
    checkpoint.restore(resume.read_checkpoint(path, verify=True), run.trainable, run.optimizer)
    measure = exact_output if "init_weights" in adapter else output  # converted values are rounded
    ours, theirs = measure(name, run.model.eval()), measure(name, pipe.transformer)
    assert (ours - before).abs().max() > 1e-3
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)
    if adapter.get("type") == "lokr":
        gap = exact_output(name, pipe.transformer)
        pipe.transformer.fuse_lora()
        merged = exact_output(name, pipe.transformer)
        assert (merged - gap).abs().mean() <= 1e-6 * gap.abs().mean()
