"""FSDP2: two processes that share a model train as one process that has it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from schemas.errors import OK
from tests.trainer.runs import lines, on_ranks, train
from trainer.setup import shard

pytestmark = pytest.mark.slow


def check_result(config, reference) -> None:
    """The adapter or model is that of one process, as far as AdamW lets roundings of small gradients grow."""
    found, expected = result(config), result(reference)
    assert found.keys() == expected.keys()
    differences = torch.cat([(found[name] - value).flatten().abs() for name, value in expected.items()])
    assert differences.mean() < 5e-5, "two steps move a weight by about 2e-3"


def result(config) -> dict[str, torch.Tensor]:
    files = sorted(Path(config.output).glob("run/**/*.safetensors"))
    own = [path for path in files if path.parent.name in ("adapter", "transformer") and "checkpoints" not in path.parts]
    return {name: value for path in own for name, value in load_file(path).items()}


FSDP = {"strategy": "fsdp2"}


@pytest.mark.parametrize(
    ("kind", "adapter", "settings"),
    [
        ("t2i", {"rank": 4, "dropout": 0.0}, {}),
        ("sana", {"type": "full"}, {"cpu_offload": True, "precision": "bfloat16"}),
    ],
)
def test_two_processes_share_a_model(make_config, make_set, tmp_path, monkeypatch, kind, adapter, settings) -> None:
    sharded = tmp_path / "sharded"

    def shard_model(model, *parts, real=shard.shard_model):
        real(model, *parts)
        assert all(isinstance(weight, DTensor) for weight in model.parameters())
        sharded.touch()

    monkeypatch.setattr("trainer.setup.prepare.shard_model", shard_model)
    parallel = FSDP | {key: settings.pop(key) for key in ("cpu_offload",) if key in settings}
    look = {"eval_samples": 2, "eval_sigmas": [0.5], "every": 2}
    common = {"steps": 2, "caption_dropout": 0.3, "adapter": adapter, "batch_size": 2, "validation": look, **settings}
    common |= {"checkpoint_every": 2}
    alone = make_config(kind, name="alone", accumulate=4, **common)
    two = make_config(kind, name="two", accumulate=2, parallel=parallel, **common)
    make_set(alone)
    make_set(two)
    train(alone)
    path = tmp_path / "pipeline.yaml"
    path.write_text(json.dumps(two.model_dump(mode="json", by_alias=True)))
    assert on_ranks(path)["done"] == 2
    assert sharded.exists()
    assert lines(two) == pytest.approx(lines(alone), rel=1e-5)
    assert lines(two, "grad_norm") == pytest.approx(lines(alone, "grad_norm"), rel=1e-4)
    assert lines(two, "eval_loss") == pytest.approx(lines(alone, "eval_loss"), rel=1e-4)
    check_result(two, alone)


@pytest.mark.parametrize("other", [{"base_precision": "nf4-bnb"}, {"offload": {"blocks": True}}, {"compile": "blocks"}])
def test_what_was_not_tried_with_shared_models_is_refused(make_config, other) -> None:
    with pytest.raises(ValueError, match="does not go with parallel"):
        make_config(parallel=FSDP, **other)


@pytest.mark.parametrize(
    ("kind", "adapter", "settings"),
    [
        ("i2v", {"rank": 4}, {}),
        ("sana", {"type": "full"}, {"parallel": FSDP, "ema": {"decay": 0.9}, "gradient_checkpointing_interval": 2}),
    ],
    ids=["ddp", "fsdp2"],
)
def test_a_run_goes_on_with_another_number_of_processes(
    make_config, make_set, tmp_path, kind, adapter, settings
) -> None:
    """4, 2, 1 and 4 again, with the samples and noise of one process."""
    path = tmp_path / "pipeline.yaml"
    common = {"adapter": adapter, "caption_dropout": 0.3, "checkpoint_every": 2, **settings}
    alone = make_config(kind, name="alone", accumulate=4, steps=8, **common)
    make_set(alone)
    make_set(make_config(kind, name="elastic", **common))
    train(alone)
    for steps, ranks in ((2, 4), (4, 2), (6, 1), (8, 4)):
        elastic = make_config(kind, name="elastic", accumulate=4 // ranks, steps=steps, **common)
        path.write_text(json.dumps(elastic.model_dump(mode="json", by_alias=True)))
        report = on_ranks(path, (OK,) * ranks)
        assert (report["done"], report["skipped"]) == (2, steps - 2)
    assert lines(elastic) == pytest.approx(lines(alone), rel=2e-4)
    check_result(elastic, alone)
