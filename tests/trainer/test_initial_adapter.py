"""Training that starts from an adapter: from its numbers, refused where it does not fit, and resumed with it alone."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cache.schedule import BatchSchedule
from cache.set_lookup import open_set
from cache.store import Store
from schemas.cli.console import OK, USAGE
from tests.trainer.runs import program, quiet
from trainer import train as loop
from trainer.adapter_header import AdapterError


def prepared(config):
    data = open_set(Store(config.root), config.train.set, config.model.family, config.model.task)
    return loop.prepare_training(config, data, BatchSchedule(data.spans, 0, 1, 1), quiet(), "cpu")


SETTINGS = {"rank": 2, "alpha": 3.0}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t2i", "sana"])
def test_training_starts_from_an_adapter_and_goes_on_with_it(make_config, make_set, tmp_path, capsys, kind) -> None:
    look = {"eval_samples": 2, "eval_sigmas": [0.5], "every": 10}
    formats = ["diffusers", "comfyui"]
    first = make_config(kind, steps=3, validation=look, adapter={**SETTINGS, "formats": formats})
    make_set(first)
    code, report, _ = program(first, tmp_path, capsys)
    assert code == OK
    run = Path(first.output) / "run"
    ended = report["details"]["eval_loss"]["last"]
    assert {path.name for path in (run / "adapter").iterdir()} == {
        "pytorch_lora_weights.safetensors",
        "comfyui_lora.safetensors",
    }
    # Ours by its run, ComfyUI's, and one without any header: all begin where the first run ended.
    bare = tmp_path / "bare.safetensors"
    strength = SETTINGS["alpha"] / SETTINGS["rank"]  # which a file without a header does not have
    held = load_file(run / "adapter" / "pytorch_lora_weights.safetensors")
    save_file({key: value * (strength if "lora_B" in key else 1) for key, value in held.items()}, bare)
    for name, init, alpha in (
        ("ours", run, 3.0),
        ("comfyui", run / "adapter" / "comfyui_lora.safetensors", 3.0),
        ("bare", bare, None),
    ):
        settings = {"rank": 2, "alpha": alpha, "init": str(init)}
        config = make_config(kind, run=name, steps=1, validation=look, adapter=settings)
        code, report, _ = program(config, tmp_path, capsys)
        assert code == OK and report["details"]["eval_loss"]["first"] == pytest.approx(ended, rel=1e-5)
    # The same file elsewhere goes on; another one, or none, does not.
    moved = bare.rename(tmp_path / "moved.safetensors")
    settings |= {"init": str(moved)}
    code, report, _ = program(
        make_config(kind, run="bare", steps=2, validation=look, adapter=settings), tmp_path, capsys
    )
    assert code == OK and report["done"] == 1 and report["skipped"] == 1
    save_file({key: value * 2 for key, value in held.items()}, moved)
    for init in (str(moved), None):
        config = make_config(kind, run="bare", steps=3, validation=look, adapter={**settings, "init": init})
        code, report, said = program(config, tmp_path, capsys)
        assert code == USAGE and "train.adapter.init is another adapter, or none" in report["error"]["message"]
        assert "loading the transformer" not in said and "Set train.adapter.init back" in report["error"]["next_step"]


@pytest.mark.slow
def test_an_adapter_that_does_not_fit_is_refused(make_config, make_set, tmp_path, capsys) -> None:
    """Rank, alpha, family and absence before a model is loaded; modules and sizes when it is."""
    make_set(make_config("sana"))
    name, file = "transformer.transformer_blocks.0.attn1.to_q", tmp_path / "a.safetensors"
    held = {f"{name}.lora_A.weight": torch.ones(2, 3), f"{name}.lora_B.weight": torch.ones(3, 2)}
    save_file(held, file, {"latentpress.family": "kandinsky5-image"})
    for settings, said in (
        ({"rank": 4}, "has rank 2 and alpha 2; the configuration has rank 4 and alpha 4"),
        ({"rank": 2}, "was trained for kandinsky5-image, and model.family is sana"),
        ({"init": str(tmp_path / "absent")}, "absent is not there"),
    ):
        config = make_config("sana", adapter={"init": str(file), **settings})
        code, report, log = program(config, tmp_path, capsys, dry_run=True)
        assert code == USAGE and said in report["error"]["message"] and "loading" not in log
    save_file(held, file)
    with pytest.raises(AdapterError, match=r"only train\.adapter\.targets has .* in all\)"):
        prepared(make_config("sana", adapter={"init": str(file), "rank": 2}))
    targets = [r"transformer_blocks\.0\.attn1\.to_q"]
    with pytest.raises(AdapterError, match=r"attn1\.to_q is 3 x 3, and in the transformer"):
        prepared(make_config("sana", adapter={"init": str(file), "rank": 2, "targets": targets}))


@pytest.mark.slow
def test_a_format_that_is_added_later_is_written_without_a_step(make_config, make_set, tmp_path, capsys) -> None:
    config = make_config("t2i", steps=1, adapter={"rank": 2})
    make_set(config)
    assert program(config, tmp_path, capsys)[0] == OK
    both = make_config("t2i", steps=1, adapter={"rank": 2, "formats": ["diffusers", "comfyui"]})
    code, report, _ = program(both, tmp_path, capsys)
    assert code == OK and (report["done"], report["skipped"]) == (0, 1)
    assert (Path(config.output) / "run" / "adapter" / "comfyui_lora.safetensors").exists()
    assert "loading" not in program(both, tmp_path, capsys)[2]
