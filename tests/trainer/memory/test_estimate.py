"""The memory predicted from shapes equals the memory of a step, as the kernel counts it."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from schemas.cli.console import OK
from schemas.devices import COMFORTABLE, RESERVED
from schemas.geometry import Bucket
from stages.rehearsing.tiny_shapes import KINDS, SHAPES
from tests.devices import set_accelerators
from tests.trainer.peak_memory import MALLOC, skip_without_peaks
from trainer.families.base import module_of
from trainer.memory import card_fit
from trainer.memory.card_fit import find_card
from trainer.memory.estimate import MemoryEstimate, estimate_memory

ROOT = Path(__file__).resolve().parents[3]
#: Sides in multiples of 64, for nf4-bnb, and large enough that a step's allocations stand out from small objects.
MIDDLE = {
    "t2i": SHAPES["tiny"]["image"] | {"model_dim": 128, "ff_dim": 512, "num_visual_blocks": 2, "visual_cond": False},
    "sana": SHAPES["tiny"]["sana"]
    | {"num_attention_heads": 4, "num_cross_attention_heads": 4, "cross_attention_dim": 128, "num_layers": 3},
    "z-image": SHAPES["tiny"]["z_image"] | {"dim": 192, "axes_dims": (32, 32, 32)},
    "qwen-image": SHAPES["tiny"]["qwen_image"] | {"attention_head_dim": 64, "axes_dims_rope": (16, 24, 24)},
}
SIZES = {"t2i": ("256x256", "256x320"), "sana": ("512x640", "512x512"), "z-image": ("256x256", "256x320")}
SIZES["qwen-image"] = SIZES["t2i"]
MIDDLE["edit-plus-i2i"] = MIDDLE["qwen-image"] | {"zero_cond_t": True}
SIZES["edit-plus-i2i"] = ("256x256+256x192", "256x320+192x256+256x256")
MIDDLE["flux3"] = MIDDLE["flux3-i2i"] = SHAPES["tiny"]["flux3"] | {
    "attention_head_dim": 64, "axes_dims_rope": (16, 16, 16, 16), "joint_attention_dim": 64,
}  # fmt: skip
SIZES |= {"flux3": ("512x512", "512x640"), "flux3-i2i": ("512x512+512x384", "512x640+384x512+512x512")}
FULL, ALL = {"adapter": {"type": "full"}}, {"gradient_checkpointing": False}
#: On a CPU, where device and offloaded memory are the same. At least one setting of each kind.
GRID = {
    "t2i": [
        {"batch_size": 2, "offload": {"blocks": True, "activations": True}, "adapter": {"type": "lokr", "rank": 4}},
        {"base_precision": "nf4-bnb", "batch_size": 2, **ALL},
    ],
    "sana": [
        {
            **{"batch_size": 2, "gradient_checkpointing_interval": 2, "accumulate": 2},
            **{"base_precision": "int8-torchao", "adapter": {"rank": 64}, "optimizer": {"name": "optimi-lion"}},
        },
        {**FULL, "precision": "bfloat16", "ema": {}, "offload": {"activations": True}},
    ],
    "z-image": [{"batch_size": 2, **ALL}, {"base_precision": "int8-quanto", "batch_size": 2}],
    "qwen-image": [{"batch_size": 2, **ALL}, {"base_precision": "nf4-bnb", "batch_size": 2}],
    "edit-plus-i2i": [{"batch_size": 2, **ALL}, {"base_precision": "nf4-bnb", "batch_size": 2}],
    "flux3": [{"batch_size": 2, **ALL}, {"base_precision": "nf4-bnb", "batch_size": 2}],
    "flux3-i2i": [{"batch_size": 2, **ALL}, {"batch_size": 2, "offload": {"blocks": True}}],
}


@pytest.mark.slow
def test_a_dry_run_shows_it_and_loads_nothing(ready, program) -> None:
    reports = {}
    for name, options in (("less", {}), ("more", {"gradient_checkpointing": False, "batch_size": 4})):
        config = ready("i2v", name=name, **options)
        code, report, log = program(config, dry_run=True)
        details = report["details"]
        assert code == OK and "loading the transformer" not in log and details["memory_of_bucket"] == "96x64@5"
        reports[name] = {row["part"]: row["mib"] for row in details["memory"]}
        assert [*reports[name]] == [field.name for field in fields(MemoryEstimate)][:-1]
    assert reports["more"]["activations"] > reports["less"]["activations"]


@pytest.mark.long
def test_ranks_that_share_a_model_have_a_part_each(make_config) -> None:
    """With four ranks: a quarter of everything, and two gathered blocks of four with the weights outside of the
    blocks."""
    plain, sharded, hosted, unresharded, half = (
        estimate_memory(
            make_config("t2i", **FULL, **rank_counts, parallel=parallel), MIDDLE["t2i"], ["512x512"], 64, ranks
        )
        for parallel, ranks, rank_counts in (
            ({}, 1, {}),
            ({"strategy": "fsdp2"}, 4, {}),
            ({"strategy": "fsdp2", "cpu_offload": True}, 4, {}),
            ({"strategy": "fsdp2", "reshard_after_forward": False}, 4, {}),
            ({"strategy": "fsdp2", "reshard_after_forward": False}, 4, {"precision": "bfloat16"}),
        )
    )
    assert sharded.optimizer == pytest.approx(plain.optimizer / 4, abs=4)
    assert sharded.gradients == pytest.approx(plain.gradients / 4, abs=4)
    gathered = sharded.weights - plain.weights / 4
    assert 0.5 * plain.weights < gathered < 0.9 * plain.weights
    assert unresharded.weights == pytest.approx(plain.weights * 1.25, abs=4)
    assert 0.5 * plain.weights < half.weights - plain.weights / 4 < 0.7 * plain.weights
    assert hosted.weights == pytest.approx(gathered, abs=4) and hosted.gradients == hosted.optimizer == 0
    assert hosted.offloaded == pytest.approx((plain.weights + plain.gradients + plain.optimizer) / 4, abs=4)


@pytest.mark.long
def test_the_prediction_is_within_15_percent_of_what_training_takes(make_config, make_set, helpers, tmp_path) -> None:
    skip_without_peaks()
    rows = [(kind, settings) for kind in GRID for settings in GRID[kind]]
    shapes, configs = {}, []
    for kind, middle in MIDDLE.items():
        torch.manual_seed(0)
        folder = tmp_path / kind / "transformer"
        module_of(make_config(kind).model.family_spec).untrained(middle).save_pretrained(folder)
        shapes[kind] = json.loads((folder / "config.json").read_text())
    for number, (kind, settings) in enumerate(rows):
        config = make_config(kind, name=str(number), **settings)
        source = config.model.model_copy(update={"path": str(tmp_path / kind)})
        configs.append(config.model_copy(update={"model": source}))
        rng, bucket = np.random.default_rng(0), SIZES[kind][number % 2]
        captions = [helpers.caption(rng, 32, kind == "t2i") for _ in range(5)]
        references = [helpers.latent(rng, config, f"{w}x{h}") for w, h in Bucket.parse(bucket).references]
        items = [
            helpers.Item(bucket, helpers.latent(rng, config, bucket), [caption], references=references)
            for caption in captions[1:]
        ]
        make_set(config, items, captions[0])
    lines = [json.dumps(config.model_dump(mode="json", by_alias=True, exclude_unset=True)) for config in configs]
    command = [sys.executable, "-m", "tests.trainer.peak_memory"]
    environment = {**os.environ, **MALLOC, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, input="\n".join(lines), stdout=subprocess.PIPE, text=True, env=environment)
    assert ended.returncode == 0
    failures = []
    measured = [json.loads(line) for line in ended.stdout.splitlines()]
    for number, ((kind, settings), config, (most, saved)) in enumerate(zip(rows, configs, measured, strict=True)):
        predicted = estimate_memory(config, shapes[kind], [SIZES[kind][number % 2]], 32)
        share, on_disk = (predicted.device + predicted.offloaded) / most, predicted.checkpoint / saved
        print(f"{kind} {settings}: {share:.3f} of {most >> 10} KiB, {on_disk:.3f} of {saved >> 10} KiB on disk")
        failures += [] if 0.85 < share < 1.15 and 0.95 < on_disk < 1.05 else [(kind, settings, share, on_disk)]
    assert len(measured) == len(rows) and not failures, failures


@pytest.mark.slow
def test_a_dry_run_says_what_would_fit_the_card(ready, program, monkeypatch) -> None:
    config = ready("t2i", device="auto", batch_size=4, gradient_checkpointing=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a small card")
    monkeypatch.setattr("trainer.setup.checks.check_optimizer", lambda *_: None)  # takes steps on the card
    estimates: dict[str, MemoryEstimate] = {}  # the dry runs predict the same few settings

    def estimate(changed, *given) -> MemoryEstimate:
        key = changed.model_dump_json()
        if key not in estimates:
            estimates[key] = estimate_memory(changed, *given)
        return estimates[key]

    monkeypatch.setattr(card_fit, "estimate_memory", estimate)

    def log_for(size: int) -> str:
        set_accelerators(monkeypatch, 1, memory=(size, size))
        return " ".join(program(config, dry_run=True)[2].split())

    shape = json.loads((Path(config.model.path) / "transformer" / "config.json").read_text())
    length = config.text.max_length or config.model.template.max_length
    single = estimate_memory(config, shape, ["96x64"], length)
    enough = log_for(single.device + RESERVED - 1)
    assert "on the device, 1 GiB of it for CUDA and its kernels, and a small card has 1.0 GiB" in enough
    assert "with train.gradient_checkpointing true of every block" in enough and "offload" not in enough
    much = log_for(RESERVED)
    assert "and with train.offload.activations true" in much and "smaller buckets" in much
    assert find_card("cuda:1") is find_card("cpu") is None and find_card("auto") == ("a small card", RESERVED)
    barely, comfortable = (
        log_for(single.device + RESERVED),
        log_for(round((single.device + RESERVED) / COMFORTABLE) + 1),
    )
    assert "It fits if" in barely and "checkpointing" in barely and "would need" not in comfortable


@pytest.mark.slow
def test_the_choice_of_sparse_attentions_blocks_is_counted(make_config) -> None:
    """Most of the memory of a long clip in a narrow model: for each head a sort of (blocks of 64 tokens)^2 values and
    indices."""
    shape, bucket = SHAPES["tiny"]["video"] | {"num_visual_blocks": 1}, ["1280x768@961"]
    plain = estimate_memory(make_config("t2v"), shape, bucket, 8)
    result = estimate_memory(make_config("t2v"), shape | KINDS["kandinsky5-video-t2v-nabla"].transformer, bucket, 8)
    heads, blocks = 96 // 32, 241 * 48 * 80 // 64
    assert 16 < result.activations / (heads * blocks**2) < 80
    assert result.activations > 2 * plain.activations
