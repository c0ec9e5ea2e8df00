"""Training refuses settings before a set exists: in `run`, and in the dry run of each stage."""

import io
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from cache.runs.training_run import RunError
from schemas.cli.console import Console, Options
from schemas.config.loading import ConfigError
from schemas.config.methods import InputPerturbation, Methods
from schemas.config.pipeline import Config
from schemas.errors import INCOMPLETE, OK, USAGE, LatentpressError
from stages import bucket, discover, encode_latents, encode_text, index
from tests.forms import long
from tests.project import Project
from tests.trainer.runs import moved, train
from trainer import checks
from trainer.run.resume import ResumeError

REFUSED = [
    (("train.methods.crepa.block_index=99", "vision.model=dinov2_vits14"), "block_index: 99"),
    (
        ("train.methods.tread.routes=[{selection_ratio: 0.5, start_layer_idx: 0, end_layer_idx: 50}]",),
        "end_layer_idx: 50",
    ),
    (("train.methods.crepa.block_index=0",), "crepa needs vision, which no dataset has"),
    (("train.methods.masked_loss.unmasked_weight=0.1",), "masked_loss needs mask, which no dataset has"),
    (("model.precision=float16",), "model.precision: float16"),
    (("train.weight_precision=bfloat16", "train.adapter.type=full"), "transformer computes in float32"),
]
WITH_TORCH = [
    (("train.adapter.targets=[nothing]",), "'nothing' matches no"),
    (("train.optimizer.arguments={wrong: 1}",), "adamw does not work on cpu with these settings"),
    (("train.compile=blocks", "train.compile_backend=nothing"), "has no backend 'nothing'"),
    (("train.adapter.init_from=nowhere",), "nowhere does not exist"),
    (("train.optimizer.groups=[{match: nothing, lr: 1e-3}]",), "'nothing' matches no trained parameter"),
    (
        (
            "train.optimizer.groups=[{match: 'methods.crepa.+', lr: 1e-3}, {match: 'methods.+', lr: 1e-3}]",
            *("train.methods.crepa.block_index=0", "vision.model=dinov2_vits14"),
        ),
        "'methods.+' matches only parameters of an earlier group",
    ),
    (("root=memory://nothing", "train.shuffle_shards=2", "train.local_cache.max_gb=1e6"), "free space"),
]


class NoKey(Exception):
    pass


@pytest.fixture
def home(project) -> Project:
    home = project(train={"device": "cpu"})
    home.image("0.png", (64, 64), "a colour", 0)
    return home


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "message"), [*REFUSED, *WITH_TORCH])
def test_what_run_checks_before_its_first_stage(home: Project, overrides, message) -> None:
    with pytest.raises(LatentpressError) as caught:
        home.run(checks.run, *overrides)
    assert message in caught.value.message and caught.value.next_step


def run_checks(config: Config, folder: Path) -> None:
    checks.run(config, Options(folder / "none.yaml"), Console(stderr=io.StringIO()))


@pytest.mark.slow
@pytest.mark.parametrize("change", ["missing", long("surplus"), "larger", long("cut"), long("renamed")])
def test_weights_that_are_not_the_models_are_found_by_their_headers(ready, program, tmp_path, change) -> None:
    config = ready("t2i")
    folder = shutil.copytree(config.model.path, tmp_path / "model")
    [file] = (folder / "transformer").glob("*.safetensors")
    weights = load_file(file)
    name = next(iter(weights))
    if change == "missing":
        del weights[name]
    elif change == "surplus":
        weights["blocks.99.weight"] = weights[name].clone()
    else:
        weights[name] = weights[name].repeat(2, *[1] * (weights[name].dim() - 1))
    save_file(weights, file, {"format": "pt"})
    if change == "cut":
        os.truncate(file, file.stat().st_size - 1)
    elif change == "renamed":
        file.rename(file.with_suffix(".txt"))
    text = {"missing": "lacks", "surplus": "has weights that", "larger": "shape", "cut": "deserializing"}
    text = text.get(change, r"has no \*.safetensors")
    with pytest.raises(LatentpressError, match=text):
        run_checks(moved(config, folder), tmp_path)
    code, report, _ = program(moved(config, folder), dry_run=True)
    assert code in (INCOMPLETE, USAGE) and re.search(text, report["error"]["message"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": {"masked_loss": {}}}, "masked_loss needs mask"),
        ({}, "texts of set set1"),
        ({"set": "set2"}, "no training set 'set2'"),
    ],
)
def test_a_named_set_is_checked_by_run_and_by_dry_runs(
    make_config, make_set, helpers, tmp_path, options, message
) -> None:
    """Its tensors, and the width of its texts."""
    config = make_config("t2i", **{"set": "set1", **options})
    items, null, _ = helpers.mixed_items(config)
    for text in (null, *(text for item in items for text in item.texts)):
        text["embeds"] = text["embeds"][:, :48]
    make_set(config, items, null, [])
    with pytest.raises(LatentpressError, match=re.escape(message)):
        run_checks(config, tmp_path)
    with pytest.raises(LatentpressError, match=re.escape(message)):
        discover.run(config, Options(tmp_path / "none.yaml", dry_run=True), Console(stderr=io.StringIO()))


@pytest.mark.slow
@pytest.mark.parametrize("auto_shift", [False, True])
def test_noise_levels_that_an_expert_does_not_have(ready, program, tmp_path, auto_shift) -> None:
    """The shifts are for the buckets that the datasets allow, as long as no set exists."""
    levels = {"sampling": "logit_normal", "mean": -9.0, "std": 0.1, "auto_shift": auto_shift}
    config, message = ready("wan-a14b", timesteps=levels), "almost no noise levels are in the range 0.875 to 1"
    with pytest.raises(RunError, match=message):
        run_checks(config, tmp_path)
    code, report, _ = program(config, dry_run=True)
    assert code == USAGE and message in report["error"]["message"]


def test_weights_and_biases_without_a_key_is_refused(home: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def login() -> None:
        raise NoKey("no key")

    settings, errors = SimpleNamespace(settings=SimpleNamespace(mode="online")), SimpleNamespace(Error=NoKey)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(setup=lambda: settings, login=login, errors=errors))
    with pytest.raises(LatentpressError, match=r"Weights \& Biases"):
        home.run(checks.run, "train.trackers=[wandb]")


@pytest.mark.slow
def test_what_can_be_trained_passes(home: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert home.run(checks.run).exit_code == 0
    home.run(checks.run, "model.path=owner/name")
    assert "the model is not checked before training" in home.said


@pytest.mark.parametrize("program", [discover, bucket, index, encode_text, encode_latents])
@pytest.mark.parametrize(("overrides", "message"), REFUSED[1:2])
def test_every_dry_run_checks_what_needs_no_torch(home: Project, program, overrides, message) -> None:
    with pytest.raises(LatentpressError) as caught:
        home.run(program.run, *overrides, dry_run=True)
    assert message in caught.value.message


def test_regularization_of_a_model_that_is_trained_whole_is_refused_with_the_configuration(home: Project) -> None:
    home.settings["datasets"][0]["is_regularization_data"] = True
    with pytest.raises(ConfigError, match=r"train\.methods\.regularization: .*train\.adapter\.type: full"):
        home.config("train.adapter.type=full")
    home.config("train.adapter.type=full", "train.methods.regularization.target=data")


@pytest.mark.slow
def test_a_folder_that_is_absent_or_damaged_ends_a_run_and_no_dry_run_of_discover(home: Project, tmp_path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(home.config().model.source, broken)
    (broken / "transformer" / "config.json").write_text("{")
    for path, message in ((broken, "can't be read"), (tmp_path / "absent", "is neither a directory nor a repository")):
        with pytest.raises(LatentpressError, match=message):
            home.run(checks.run, f"model.path={path}")
        assert home.run(discover.run, f"model.path={path}", dry_run=True).exit_code in (OK, INCOMPLETE)
        assert "the model is not checked before training" in home.said and message in home.said


@pytest.mark.slow
def test_a_checkpoint_of_other_settings_ends_a_run_before_its_first_stage(ready, tmp_path) -> None:
    """Also batch size, seed and methods; regularization is from the set's data."""
    config = ready("t2i", steps=1)
    train(config)

    def check(**options) -> None:
        run_checks(config.changed(train=config.train.changed(**options)), tmp_path)

    check(steps=2)
    for options, message in (
        ({"batch_size": 2}, "train.batch_size: 1 in the checkpoint, 2 now"),
        ({"seed": 5}, "train.seed: 0 in the checkpoint, 5 now"),
        (
            {"methods": Methods(input_perturbation=InputPerturbation())},
            "input_perturbation: not used in the checkpoint",
        ),
    ):
        with pytest.raises(ResumeError, match=message):
            check(**options)
