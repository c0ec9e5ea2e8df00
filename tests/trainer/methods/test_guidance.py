"""The guidance loss, compared with u + s (v - u), computed from the rows of the set."""

import json

import pytest
import torch

from cache.store.store import Store
from schemas.cli.console import Options, run_program
from schemas.errors import USAGE
from tests.forms import long
from tests.trainer.runs import lines, move_adapter, opened, plain_batch, prepared, train, trained_weights, write
from trainer import train as loop
from trainer.__main__ import run as program_run
from trainer.flow import shift_sigma

pytestmark = pytest.mark.slow


def make(make_config, make_set, helpers, kind: str, **settings):
    config = make_config(kind, batch_size=6, caption_dropout=0.4, adapter={"rank": 2}, **settings)
    make_set(config, *helpers.mixed_items(config))
    return config


@pytest.mark.parametrize(
    "kind",
    ["t2i", "i2v", "qwen-image-2.1", *map(long, ("z-image", "sana", "wan-a14b", "krea2", "flux3", "klein-i2i"))],
)
def test_the_target_is_guided_above_a_noise_level_before_the_shift(make_config, make_set, helpers, kind) -> None:
    """The prediction with the null prompt has the adapter, no gradient, and the same noise. The wanted prediction has a
    batch made of single rows of the set."""
    experts = {"experts": "low"} if kind == "wan-a14b" else {}
    guidance = {"scale": 3.0, "below": 0.4}
    run = prepared(make(make_config, make_set, helpers, kind, guidance=guidance, **experts))
    move_adapter(run)
    ids = run.loader.data.tables["index"].column("sample_id").to_pylist()
    [part] = run.loader.step(0).micro_batches
    step = loop.start_step(run, 0, part)
    levels = torch.linspace(0.2, 0.9, len(step.batch))  # before the shift
    step.host_sigma_B = step.sigma_B = shift_sigma(levels, step.shift)
    step.__post_init__()
    plain = step.target_BCTHW.clone()
    [method] = run.methods.values()
    method.prepare(step)
    rows = (levels >= 0.4).nonzero()[:, 0]
    assert 0 < len(rows) < len(levels)
    nulls = plain_batch([run.loader.data.sample(ids.index(step.batch.ids[row]), "null") for row in rows.tolist()])
    rest = step.batch.select(rows)
    nulls.condition_BCTHW = rest.condition_BCTHW
    with torch.no_grad():
        u = run.family.predict(
            run.model.eval(), step.noisy_BCTHW[rows], step.sigma_B[rows], nulls, run.config.model.task
        )
    wanted = plain.clone()
    wanted[rows] = u + 3 * (plain[rows] - u)
    frames = run.skip_frames
    assert (step.target_BCTHW - wanted)[:, :, frames:].abs().max() < 1e-6
    assert (wanted - plain)[rows][:, :, frames:].abs().amax((1, 2, 3, 4)).min() > 1e-3
    assert not step.target_BCTHW.requires_grad


def test_a_scale_of_1_is_the_plain_run_bit_for_bit(make_config, make_set, helpers) -> None:
    runs = [{"name": "plain"}, {"name": "one", "guidance": {"scale": 1.0}}, {"name": "more", "guidance": {}}]
    plain, one, more = (make(make_config, make_set, helpers, "t2i", steps=1, **run) for run in runs)
    for config in (plain, one, more):
        train(config)
    assert lines(one) == lines(plain) != lines(more)
    for name, value in trained_weights(plain).items():
        assert torch.equal(value, trained_weights(one)[name])


def test_a_set_without_null_prompts_is_refused(make_config, make_set, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(loop, "prepare_training", lambda *parts: pytest.fail("a model is loaded"))
    config = make_config("t2i", guidance={})
    make_set(config)
    record = opened(config).meta.model_copy(update={"null_text": None})
    Store(config.root).publish_record("sets/set1/set.json", record)
    assert run_program("train", program_run, Options(write(config, tmp_path))) == USAGE
    printed = " ".join(capsys.readouterr().err.split())
    assert "train.guidance needs null_text, which no sample of set set1 has" in printed
    assert "it makes a set with the null prompt of each sample" in printed


def test_a_changed_scale_does_not_continue_a_run(make_config, make_set, helpers, tmp_path, capsys) -> None:
    config = make(make_config, make_set, helpers, "t2i", steps=1, guidance={})
    train(config)
    for changed, words in (({"scale": 3.0}, "train.guidance.scale: 3.5"), (None, 'train.guidance: {"')):
        other = make_config("t2i", steps=2, batch_size=6, caption_dropout=0.4, adapter={"rank": 2}, guidance=changed)
        assert run_program("train", program_run, Options(write(other, tmp_path))) == USAGE
        assert words in capsys.readouterr().err
    assert json.loads((config.run_folder / "checkpoints/step-000001/state.json").read_text())["terms"]["methods"]
