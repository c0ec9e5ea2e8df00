"""The training loop: the same numbers for any division of the work, errors for damage, complete results."""

import io
import json
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from cache.order.schedule import BatchSchedule
from cache.store.damage import DamageError
from schemas.cli.console import DAMAGE, INCOMPLETE, OK, USAGE, Console
from schemas.config.validation import Validation
from tests.trainer.runs import (
    check_result,
    check_shown,
    lines,
    move_adapter,
    on_ranks,
    on_two_ranks,
    opened,
    prepared,
    train,
    trained_weights,
    write,
)
from trainer import flow, validation
from trainer import train as loop
from trainer.data import BatchReader
from trainer.run import metrics
from trainer.setup import prepare
from trainer.setup.optimizers import DivergedError


@pytest.mark.slow
def test_a_run_without_validation(ready) -> None:
    config = ready("sana", validation={"eval_samples": 2, "every": 0}, steps=2)
    assert train(config)["done"] == 2 and lines(config, "eval_loss") == {}
    assert not (config.run_folder / "validation").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t2i", "sana"])
def test_a_run_leaves_what_it_promises(ready, kind) -> None:
    look = {"eval_samples": 2, "eval_sigmas": [0.5], "every": 2}
    adapter = {"type": "full"} if kind == "sana" else {"rank": 2}
    config = ready(kind, validation=look, steps=3, checkpoint_every=2, adapter=adapter)
    result = train(config)
    folder = config.run_folder
    assert result["done"] == 3 and result["non_finite_steps"] == 0
    assert list(lines(config)) == [1, 2, 3] and list(lines(config, "eval_loss")) == [0, 2, 3]
    saved = folder / ("model/transformer/config.json" if kind == "sana" else "adapter/pytorch_lora_weights.safetensors")
    assert saved.is_file()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    assert not [path for path in folder.rglob("*.bin")] + [path for path in folder.rglob("*.pt")]
    assert "set: set1" in (folder / "config.yaml").read_text()
    assert list((folder / "tensorboard").glob("events.*"))
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.glob("validation/*/*"))
    assert paths == [f"validation/step-{step:06d}/one.safetensors" for step in (0, 2, 3)]
    with safe_open(folder / paths[-1], framework="pt") as file:
        about = json.loads(file.metadata()["latentpress"])
        latent = file.get_tensor("latent")
    assert about["family"] == config.model.family and about["prompt"] == "one"
    length = 2 if config.model.family_spec.video else 1
    side = 64 // config.model.family_spec.spatial_stride
    assert latent.shape == (config.model.family_spec.latent_channels, length, side, side) and latent.isfinite().all()
    assert not torch.equal(latent, load_file(folder / paths[0])["latent"])


@pytest.mark.slow
def test_accumulation_equals_one_large_batch(ready, is_long) -> None:
    """The same loss within 1e-5 and the same gradient norm within 1e-3, for any division of the global batch."""
    runs = []
    for name, batch, accumulate in (
        (("one", 4, 1), ("two", 2, 2), ("four", 1, 4)) if is_long else (("one", 4, 1), ("two", 2, 2))
    ):
        config = ready("t2i", name=name, batch_size=batch, accumulate=accumulate, steps=2)
        train(config)
        runs.append((lines(config), lines(config, "grad_norm")))
    for losses, norms in runs[1:]:
        assert losses == pytest.approx(runs[0][0], rel=1e-5)
        assert norms == pytest.approx(runs[0][1], rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "adapter"), [("t2i", {"rank": 4}), ("sana", {"type": "full"})])
def test_bfloat16_trains_near_float32(ready, kind, adapter) -> None:
    result = []
    for precision in ("float32", "bfloat16"):
        config = ready(kind, name=precision, precision=precision, adapter=adapter, steps=3, batch_size=2)
        train(config)
        assert {value.dtype for value in trained_weights(config).values()} == {torch.float32}
        sample = load_file(config.run_folder / "validation" / "step-000000" / "one.safetensors")["latent"]
        result.append((lines(config), sample))
    (losses, latent), (half_losses, half_latent) = result
    assert losses != half_losses and losses == pytest.approx(half_losses, rel=0.05)
    assert 0 < (latent - half_latent).abs().mean() < 0.1 * latent.abs().mean(), "it looks as it trains"


@pytest.mark.slow
def test_two_processes_train_as_one(make_config, make_set, helpers, tmp_path, monkeypatch) -> None:
    """The same global batches over two ranks (gloo): losses within 1e-5; then resumed by one process. Both validate,
    each every second prompt, with the moving average, which is saved."""
    entered = tmp_path / "entered"
    entered.mkdir()

    def compute_eval_loss(*parts, real=validation.compute_eval_loss):
        (entered / str(os.getpid())).touch()
        return real(*parts)

    monkeypatch.setattr(validation, "compute_eval_loss", compute_eval_loss)
    look = {"eval_samples": 2, "eval_sigmas": [0.5], "every": 2, "steps": 1}
    common = {"steps": 2, "caption_dropout": 0.3, "adapter": {"rank": 4}, "batch_size": 2, "validation": look}
    common |= {"ema": {"decay": 0.5, "warmup": "none", "validate": True}}
    alone = make_config("t2i", name="alone", accumulate=4, **common | {"steps": 3})
    two = make_config("t2i", name="two", accumulate=2, **common)
    items, null, (prompt,) = helpers.mixed_items(alone)
    prompts = [replace(prompt, name=name) for name in ("one", "two", "three")]
    make_set(alone, items, null, prompts)
    make_set(two, items, null, prompts)
    train(alone)
    assert on_two_ranks(write(two, tmp_path))["done"] == 2, "one report, from rank 0"
    assert list(lines(two)) == [1, 2] and lines(two) == pytest.approx(first_lines(alone, 2), rel=1e-5)
    assert len(list(entered.iterdir())) == 3, "this process and both ranks"
    rows = metrics.read_metrics(two.run_folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval_loss" in row] == [0, 2]
    for step, losses in first_lines(alone, 2, "loss_by_sigma").items():
        assert lines(two, "loss_by_sigma")[step] == pytest.approx(losses, rel=1e-5)
        assert lines(two, "loss_by_bucket")[step] == pytest.approx(lines(alone, "loss_by_bucket")[step], rel=1e-5)
    assert lines(two, "eval_loss") == pytest.approx(first_lines(alone, 2, "eval_loss"), rel=1e-4)
    check_shown(two, alone, 2)
    train(make_config("t2i", name="two", accumulate=4, **common | {"steps": 3}))
    assert lines(two) == pytest.approx(lines(alone), rel=1e-4)
    check_result(two, alone)


def first_lines(config, steps: int, key: str = "loss") -> dict:
    return {step: value for step, value in lines(config, key).items() if step <= steps}


@pytest.mark.slow
def test_ranks_with_other_settings_do_not_train(make_config, make_set, tmp_path) -> None:
    """Options of a machine may differ: here the number of threads."""
    paths = [tmp_path / "first.yaml", tmp_path / "second.yaml"]
    for path, settings in zip(paths, ({}, {"threads": 1, "seed": 5}), strict=True):
        config = make_config("t2i", steps=1, **settings)
        write(config, path)
    make_set(config)
    message = on_ranks(paths, (USAGE, USAGE))["error"]["message"]
    log = f"  rank 1 on {socket.gethostname()}: train.seed: 0 on rank 0, 5 on rank 1"
    assert message.splitlines() == ["the ranks differ:", log]


@pytest.mark.slow
def test_ranks_with_other_held_out_samples_do_not_train(make_config, make_set, helpers, tmp_path) -> None:
    """Their sets have the same training samples, and the second set one more sample for the eval loss."""
    paths = [tmp_path / "first.yaml", tmp_path / "second.yaml"]
    for path, held_out in zip(paths, (1, 2), strict=True):
        config = make_config("t2i", name=path.stem, steps=1)
        config = config.model_copy(update={"output": str(tmp_path / "output")})
        items, null, _ = helpers.mixed_items(config)
        items += [replace(item, role="eval") for item in items[:held_out]]
        make_set(config, items, null, [])
        write(config, path)
    message = on_ranks(paths, (USAGE, USAGE))["error"]["message"]
    assert message.splitlines()[1:] == [f"  rank 1 on {socket.gethostname()}: held-out samples: differ"]


@pytest.mark.long
def test_ranks_with_other_base_weights_do_not_train(ready, tmp_path) -> None:
    """One bit of the second rank's copy differs; with a complete copy at another path both ranks train."""
    config = ready("t2i", steps=1)
    copy = shutil.copytree(Path(config.model.path), tmp_path / "copy")
    paths = [tmp_path / "first.yaml", tmp_path / "second.yaml"]
    for path, model in zip(paths, (Path(config.model.path), copy), strict=True):
        values = config.model_dump(mode="json", by_alias=True, exclude_unset=True)
        values["model"]["path"] = str(model)
        path.write_text(json.dumps(values))
    assert on_ranks(paths)["done"] == 1
    shutil.rmtree(Path(config.output))
    weights = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 1]))
    assert "base weights: differ" in on_ranks(paths, (USAGE, USAGE))["error"]["message"]


@pytest.mark.slow
def test_the_optimizer_has_the_rate_of_its_step(ready, make_config) -> None:
    """A LoRA's B begins at 0, and AdamW's first step moves every number by the rate: half of 1e-2 in the warm-up."""
    config = ready("t2i", steps=1, optimizer={"lr": 1e-2, "warmup": 2}, checkpoint_every=1)
    train(config)
    assert lines(config, "lr") == {1: 5e-3}
    assert furthest(config) == pytest.approx(5e-3, rel=1e-2)
    falling = make_config("t2i", steps=4, optimizer={"lr": 1e-2, "warmup": 2, "schedule": "cosine"})
    train(falling)
    assert lines(falling, "lr") == pytest.approx({1: 5e-3, 2: 1e-2, 3: 1e-2, 4: 5e-3}), "half a cosine of 4 steps"


def furthest(config) -> float:
    return max(value.abs().max().item() for name, value in trained_weights(config).items() if "lora_B" in name)


@pytest.mark.slow
def test_gradients_are_clipped(ready) -> None:
    """Clipped to far below AdamW's eps, they move next to nothing; the recorded norm is the norm before clipping."""
    norms = []
    for name, norm in (("free", 1.0), ("clipped", 1e-10)):
        optimizer = {"lr": 1e-2, "warmup": 0, "max_grad_norm": norm}
        config = ready("t2i", name=name, steps=1, optimizer=optimizer, checkpoint_every=1)
        train(config)
        norms.append(lines(config, "grad_norm")[1])
        assert (furthest(config) < 1e-3) == (name == "clipped")
    assert norms[0] == norms[1] > 1e-3


@pytest.mark.slow
def test_looking_leaves_dropout_off(ready) -> None:
    """The eval loss and the validation latents have no dropout."""
    result = []
    for dropout in (0.0, 0.9):
        look = {"eval_samples": 2, "eval_sigmas": [0.5], "every": 2}
        config = ready("t2i", name=f"p{dropout}", validation=look, adapter={"dropout": dropout}, steps=2)
        run = prepared(config)
        move_adapter(run)
        calls: list[dict] = []
        run.denoiser.train()
        loop.validate(run, lambda numbers, latent=True, calls=calls: calls.append(numbers), 1)
        latent = load_file(run.folder / "validation" / "step-000001" / "one.safetensors")["latent"]
        result.append((calls[0]["eval_loss"], latent))
    assert result[0][0] == result[1][0] and torch.equal(result[0][1], result[1][1])


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [0, 3])
def test_the_eval_loss_is_of_held_out_samples_where_there_are_any(make_config, make_set, helpers, held_out) -> None:
    """The run logs it."""
    look = {"eval_samples": 5, "eval_sigmas": [0.5]}
    config = make_config("t2i", validation=look, steps=1)
    items, null, _ = helpers.mixed_items(config)
    for item in items[:held_out]:
        item.role = "eval"
    make_set(config, items, null, [])
    data = opened(config)
    heard = io.StringIO()
    result = loop.train(config, data, BatchSchedule(data.spans, 0, 1, 1), Console(stderr=heard), "cpu")
    source = "held-out samples" if held_out else "training samples"
    assert result["eval_loss"]["on"] == source and set(lines(config, "eval_on").values()) == {source}
    assert f"eval loss on {held_out or 5} {source}" in heard.getvalue()
    rows = data.eval_rows if held_out else range(12)
    read: list[int] = []
    reader = BatchReader(data)
    real = reader.read
    reader.read = lambda rows, *arguments: (read.extend(rows.tolist()), real(rows, *arguments))[1]  # type: ignore[method-assign]
    settings = Validation(eval_samples=5, eval_sigmas=(0.5,))
    validation.compute_eval_loss(lambda noisy, sigma, batch: noisy, reader, settings, 1, torch.device("cpu"))
    assert len(read) == (held_out or 5) and set(read) <= set(rows)


def flip(config) -> None:
    """Flip one bit in the middle of every latent shard."""
    for path in Path(config.root).glob("latents/*/*.arrow"):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)


@pytest.mark.slow
def test_damage_stops_training_before_a_gradient(ready, program, monkeypatch) -> None:
    config = ready("t2i", steps=12, checkpoint_every=1)
    flip(config)
    calls: list[str] = []
    monkeypatch.setattr(
        loop,
        "backward",
        lambda run, number, part, share, real=loop.backward: (
            calls.extend(part.batch.ids),
            real(run, number, part, share),
        )[1],
    )
    with pytest.raises(DamageError) as caught:
        train(config)
    assert caught.value.id is not None and caught.value.id not in calls
    code, report, _ = program(config)
    assert code == DAMAGE
    damage = report["damage"][0]
    assert damage["item"] == caught.value.id and f"row {caught.value.row}" in damage["message"]
    (step,) = report["next_steps"]
    assert step.startswith("latentpress verify ") and "--repair" in step and "encode-latents" in step


@pytest.mark.slow
def test_steps_that_are_not_finite_are_skipped_then_end_the_run(ready, make_config, monkeypatch) -> None:
    config = ready("t2i", steps=5, max_non_finite_steps=2)
    bad_steps = {1, 3}
    real = flow.loss_per_sample
    calls = iter(range(100))
    monkeypatch.setattr(
        flow, "loss_per_sample", lambda *parts: real(*parts) * (float("nan") if next(calls) in bad_steps else 1.0)
    )
    assert train(config)["non_finite_steps"] == 2
    losses = lines(config)
    assert losses[2] is None and losses[4] is None and losses[5] is not None
    assert all(value.isfinite().all() for value in trained_weights(config).values())
    assert train(make_config("t2i", steps=6, max_non_finite_steps=2))["non_finite_steps"] == 2, (
        "counted before, and kept"
    )
    second = ready("t2i", name="other", steps=8, max_non_finite_steps=2)
    bad_steps |= set(range(100))
    with pytest.raises(DivergedError, match=r"max_non_finite_steps is 2"):
        train(second)


def spoil(batch, is_wrong: bool):
    return replace(batch, latents_BCTHW=batch.latents_BCTHW * torch.nan) if is_wrong else batch


@pytest.mark.long
def test_every_rank_checks_its_local_cache_for_the_steps_that_remain(ready, make_config, tmp_path, monkeypatch) -> None:
    calls = tmp_path / "seen"

    def note(settings, data, schedule, steps, ranks) -> None:
        with calls.open("a") as file:
            file.write(f"{ranks.local} of {ranks.world}: {steps}\n")

    monkeypatch.setattr(prepare, "open_window", note)
    on_two_ranks(write(ready("t2i", steps=1), tmp_path))
    on_two_ranks(write(make_config("t2i", steps=2), tmp_path))
    expected = [f"{rank} of 2: {steps}" for rank in (0, 1) for steps in (range(1), range(1, 2))]
    assert sorted(calls.read_text().splitlines()) == sorted(expected)


def test_dry_run_says_what_would_be_trained_and_what_may_not_be_meant(ready, program, quick_estimates) -> None:
    validation = {"prompts": [{"name": "new", "prompt": "x"}]}
    config = ready("t2i", steps=40, batch_size=5, timesteps={"auto_shift": True}, validation=validation)
    code, report, log = program(config, dry_run=True)
    assert code == OK and report["remaining"] == 40 and report["details"]["samples"] == 12
    assert report["details"]["steps_per_epoch"] == 3
    buckets = {row["bucket"]: row for row in report["details"]["buckets"]}
    attention = {"option": "train.attention", "kernels": "sdpa", "device": "cpu", "usable": True}
    assert report["details"]["attention"] == [attention]
    assert buckets["64x64"] == {"bucket": "64x64", "samples": 8, "draws": 8, "fill": 2, "shift": 1.649}
    assert not (config.run_folder).exists()
    assert "96x64 (4)" in log and "train.batch_size: 4;" in log
    assert "validation prompts new are not in set set1" in log and "latentpress run" in log


@pytest.mark.slow
def test_the_program_trains_and_reports(ready, make_config, program) -> None:
    config = ready("t2i", steps=2)
    code, report, _ = program(config)
    assert code == OK and report["done"] == 2 and report["details"]["trainable_parameters"] > 0
    assert program(config)[1]["skipped"] == 2
    config_without_model = make_config("sana", name="work")
    code, report, _ = program(config_without_model)
    assert code == INCOMPLETE and "no training set for sana t2i" in report["error"]["message"]
