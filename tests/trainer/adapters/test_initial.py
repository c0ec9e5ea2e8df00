"""Training that starts from an adapter: from its values, rejected if it does not fit, and resumed only with it."""

import json
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file

from schemas.cli.console import OK, USAGE
from schemas.config.training import Adapter
from tests.forms import first, in_turn
from tests.trainer.pipelines import KINDS, exact_output, output, pipeline, random, trained
from tests.trainer.runs import LOADS
from trainer.adapters.header import AdapterError
from trainer.memory.estimate import estimate_memory
from trainer.setup import adapters, export
from trainer.setup.adapters import make_trainable

pytestmark = pytest.mark.usefixtures("one_thread")


SETTINGS = {"rank": 2, "alpha": 3.0, "rank_pattern": {r".*(to_q|to_query)": 4}}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_estimates")
def test_training_starts_from_an_adapter_and_goes_on_with_it(ready, make_config, program, tmp_path) -> None:
    look = {"eval_samples": 2, "eval_sigmas": [0.5], "every": 10, "steps": 1}
    first = ready("t2i", steps=1, validation=look, adapter=SETTINGS)
    code, report, _ = program(first)
    assert code == OK
    run = first.run_folder
    ended = report["details"]["eval_loss"]["last"]
    assert [path.name for path in (run / "adapter").iterdir()] == ["pytorch_lora_weights.safetensors"]
    assert [path.name for path in run.glob("*.safetensors")] == [f"{run.name}-kandinsky5-image.safetensors"]
    # Our adapter by its run, and a file without a header: both begin where the first run ended.
    bare = tmp_path / "bare.safetensors"
    tensors = load_file(run / "adapter" / "pytorch_lora_weights.safetensors")
    # A file without a header does not have the strength, alpha / rank.
    save_file({key: value * (3 / value.shape[1] if "lora_B" in key else 1) for key, value in tensors.items()}, bare)
    for name, init in (("ours", run), ("bare", bare)):
        settings: dict = {"init_from": str(init)}
        config = make_config("t2i", run=name, steps=1, validation=look, adapter=settings)
        code, report, _ = program(config)
        assert code == OK and report["details"]["eval_loss"]["first"] == pytest.approx(ended, rel=1e-5)
        assert "rank" not in YAML(typ="safe").load(run.with_name(name) / "config.yaml")["train"]["adapter"]
    # A dry run counts the ranks of the file.
    shape = json.loads((Path(config.model.source) / "transformer" / "config.json").read_text())
    predicted, expected = (estimate_memory(one, shape, ["64x64"], 8) for one in (config, first))
    assert (predicted.gradients, predicted.optimizer) == (expected.gradients, expected.optimizer)
    # The same file at another path resumes; a different file, or none, does not.
    moved = bare.rename(tmp_path / "moved.safetensors")
    settings |= {"init_from": str(moved)}
    code, report, _ = program(make_config("t2i", run="bare", steps=2, validation=look, adapter=settings))
    assert code == OK and report["done"] == 1 and report["skipped"] == 1
    save_file({key: value * 2 for key, value in tensors.items()}, moved)
    for init in (str(moved), None):
        config = make_config("t2i", run="bare", steps=3, validation=look, adapter={**settings, "init_from": init})
        code, report, log = program(config)
        assert code == USAGE and "train.adapter.init_from" in report["error"]["message"]
        assert "loading the transformer" not in log and "train.adapter.init_from" in report["error"]["next_step"]


@pytest.mark.slow
def test_an_adapter_that_does_not_fit_is_refused(make_config, make_set, program, tmp_path) -> None:
    """Before a model is loaded."""
    make_set(make_config("sana"))
    name, file = "transformer.transformer_blocks.0.attn1.to_q", tmp_path / "a.safetensors"
    tensors = {f"{name}.lora_A.weight": torch.ones(2, 3), f"{name}.lora_B.weight": torch.ones(3, 2)}
    for header, settings, message in (
        ({"latentpress.family": "kandinsky5-image"}, {}, "was trained for kandinsky5-image, and model.family is sana"),
        (
            None,
            {"targets": [".*to_k"]},
            "adapts other modules than this run: only the file has transformer.transformer_bl",
        ),
        (None, {}, "attn1.to_q is 3 x 3"),
    ):
        save_file(tensors, file, header)
        config = make_config("sana", adapter={"init_from": str(file), **settings})
        for dry in (True, False):
            code, report, log = program(config, dry_run=dry)
            assert code == USAGE and message in report["error"]["message"] and LOADS not in log


@pytest.mark.slow
def test_a_file_for_comfyui_that_was_removed_is_written_again_without_a_step(ready, program) -> None:
    config = ready("t2i", steps=1, adapter={"rank": 2})
    assert program(config)[0] == OK
    content = config.comfyui_file.read_bytes()
    config.comfyui_file.unlink()
    code, report, _ = program(config)
    assert code == OK and (report["done"], report["skipped"]) == (0, 1)
    assert config.comfyui_file.read_bytes() == content
    assert "loading" not in program(config)[2]


BY_MODULE = {"rank": 4, "rank_pattern": {r".*(to_q|to_query)": 6}, "alpha_pattern": {r".*\.0\..*": 3.0}}
FEW = r".*blocks\.0\.(attn1|self_attention)\.(to_q|to_query)"


#: Options with which the file was made, and options of the training that starts from it
HOW_MADE: dict[str, tuple[dict, dict]] = {
    "rslora": ({**BY_MODULE, "rslora": True}, {}),
    "few modules": ({"targets": [FEW]}, {}),
    "dora": ({**BY_MODULE, "rslora": True, "dora": True}, {"dora": True}),
    "by module": (BY_MODULE, {}),
    "rslora in both": ({**BY_MODULE, "rslora": True}, {"rslora": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "case"), first(3, in_turn(["kandinsky5-image-t2i", "sana"], HOW_MADE)))
def test_training_starts_where_diffusers_is_with_the_file(tiny, tmp_path, kind, case) -> None:
    """Without targets, rank and alpha, which are from the file; the saved result is the same adapter."""
    helpers, settings = HOW_MADE[case]
    first, model, pipe = trained(kind, tiny(kind), **helpers), load(kind, tiny), pipeline(kind, tiny(kind))
    export.save_lora(first, tmp_path, kind)
    pipe.load_lora_weights(tmp_path)
    theirs, before = output(kind, pipe.transformer), output(kind, model)
    make_trainable(model, *KINDS[kind], Adapter(init_from=str(tmp_path), **settings))
    assert (theirs - before).abs().max() > 1e-3
    atol = 2e-6 if "dora" in helpers else 1e-6
    torch.testing.assert_close(output(kind, model.eval()), theirs, rtol=0, atol=atol)
    export.save_lora(model, tmp_path / "again", kind)
    pipe.unload_lora_weights()
    pipe.load_lora_weights(tmp_path / "again")
    torch.testing.assert_close(output(kind, pipe.transformer), theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", ["kandinsky5-image-t2i", "sana"])
def test_training_starts_from_a_lokr_in_each_format(tiny, tmp_path, kind) -> None:
    lokr: dict = {"type": "lokr", "decompose_factor": 4}
    first, pipe = load(kind, tiny), pipeline(kind, tiny(kind))
    settings = {"rank": 2, "alpha": 3.0, "rank_pattern": {".*(to_q|to_query)": 64}}
    make_trainable(first, *KINDS[kind], Adapter(**lokr, **settings))
    for i, parameter in enumerate(adapters.trainable_parameters(first).values()):
        parameter.data += random(*parameter.shape, seed=i) * 0.1
    path = export.save_lora(first, tmp_path, kind, comfyui_file=tmp_path / "for-comfyui.safetensors")
    pipe.transformer.load_lora_adapter(tmp_path, prefix="transformer", weight_name=path.name)
    theirs = exact_output(kind, pipe.transformer)
    for file in sorted(tmp_path.glob("*.safetensors")):
        model = load(kind, tiny)
        make_trainable(model, *KINDS[kind], Adapter(init_from=str(file), **lokr))
        torch.testing.assert_close(exact_output(kind, model.eval()), theirs, rtol=0, atol=1e-6)
    assert len([*tmp_path.glob("*.safetensors")]) == 3
    with pytest.raises(AdapterError, match="divides matrices differently") as caught:
        make_trainable(load(kind, tiny), *KINDS[kind], Adapter(init_from=str(path), type="lokr", decompose_factor=8))
    assert "decompose_factor and decompose_both" in caught.value.next_step


def load(kind: str, tiny):
    return KINDS[kind][0].load(str(tiny(kind)))
