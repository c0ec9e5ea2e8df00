"""What training refuses is refused before a set is there: by `run`, and by the dry run of each stage."""

import io
import shutil
import sys
from types import SimpleNamespace

import pytest

from schemas.cli.console import Console, Options
from schemas.config.loading import ConfigError
from schemas.config.methods import InputPerturbation, Methods
from schemas.errors import INCOMPLETE, OK, LatentpressError
from stages import bucket, discover, encode_latents, encode_text, index
from tests.project import Project
from tests.trainer.runs import train
from trainer import checks
from trainer.run.resume import ResumeError

REFUSED = [
    (("train.methods.crepa.block_index=99", "vision.model=dinov2_vits14"), "block_index: 99 is outside of the transf"),
    (
        ("train.methods.tread.routes=[{selection_ratio: 0.5, start_layer_idx: 0, end_layer_idx: 50}]",),
        "end_layer_idx: 50 is outside of the transformer's blocks",
    ),
    (("train.methods.crepa.block_index=0",), "crepa needs vision, which no dataset has"),
    (("train.methods.masked_loss.unmasked_weight=0.1",), "masked_loss needs mask, which no dataset has"),
    (("model.precision=float16",), "training does not support the float16"),
    (("train.weight_precision=bfloat16", "train.adapter.type=full"), "transformer computes in float32"),
]
WITH_TORCH = [
    (("train.adapter.targets=[nothing]",), "'nothing' matches no"),
    (("train.optimizer.arguments={wrong: 1}",), "adamw does not work on cpu with these settings"),
    (("train.compile=blocks", "train.compile_backend=nothing"), "has no backend 'nothing'"),
    (("train.adapter.init=nowhere",), "nowhere is not there"),
]


class NoKey(Exception):
    pass


@pytest.fixture
def home(project) -> Project:
    made = project(train={"device": "cpu"})
    made.image("0.png", (64, 64), "a colour", 0)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "said"), [*REFUSED, *WITH_TORCH])
def test_what_run_checks_before_its_first_stage(home: Project, overrides, said) -> None:
    with pytest.raises(LatentpressError) as caught:
        home.run(checks.run, *overrides)
    assert said in caught.value.message and caught.value.next_step


def test_weights_and_biases_without_a_key_is_refused(home: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def login() -> None:
        raise NoKey("no key")

    settings, errors = SimpleNamespace(settings=SimpleNamespace(mode="online")), SimpleNamespace(Error=NoKey)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(setup=lambda: settings, login=login, errors=errors))
    with pytest.raises(LatentpressError, match="Weights & Biases refuses: no key"):
        home.run(checks.run, "train.trackers=[wandb]")


@pytest.mark.slow
def test_what_can_be_trained_passes(home: Project) -> None:
    assert home.run(checks.run).exit_code == 0
    home.run(checks.run, "model.path=owner/name")
    assert "the model is not checked before training" in home.said


@pytest.mark.parametrize("program", [discover, bucket, index, encode_text, encode_latents])
@pytest.mark.parametrize(("overrides", "said"), REFUSED[1:2])
def test_every_dry_run_checks_what_needs_no_torch(home: Project, program, overrides, said) -> None:
    with pytest.raises(LatentpressError) as caught:
        home.run(program.run, *overrides, dry_run=True)
    assert said in caught.value.message


def test_regularization_of_a_model_that_is_trained_whole_is_refused_with_the_configuration(home: Project) -> None:
    home.settings["datasets"][0]["is_regularization_data"] = True
    with pytest.raises(
        ConfigError, match=r"train\.methods\.regularization: .*train\.adapter\.type full changes the model"
    ):
        home.config("train.adapter.type=full")
    home.config("train.adapter.type=full", "train.methods.regularization.target=data")


@pytest.mark.slow
def test_a_folder_that_is_absent_or_damaged_ends_a_run_and_no_dry_run_of_discover(home: Project, tmp_path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(home.config().model.source, broken)
    (broken / "transformer" / "config.json").write_text("{")
    for path, said in ((broken, "can't be read"), (tmp_path / "absent", "is neither a directory nor a repository")):
        with pytest.raises(LatentpressError, match=said):
            home.run(checks.run, f"model.path={path}")
        assert home.run(discover.run, f"model.path={path}", dry_run=True).exit_code in (OK, INCOMPLETE)
        assert "the model is not checked before training" in home.said and said in home.said


@pytest.mark.slow
def test_a_checkpoint_of_other_settings_ends_a_run_before_its_first_stage(ready, tmp_path) -> None:
    """Also batch size, seed and methods; those of regularization data are the set's."""
    config = ready("t2i", steps=1)
    train(config)

    def check(**options) -> None:
        changed = config.changed(train=config.train.changed(**options))
        checks.run(changed, Options(tmp_path / "none.yaml"), Console(stderr=io.StringIO()))

    check(steps=2)
    for options, said in (
        ({"batch_size": 2}, "train.batch_size: 1 in the checkpoint, 2 now"),
        ({"seed": 5}, "train.seed: 0 in the checkpoint, 5 now"),
        (
            {"methods": Methods(input_perturbation=InputPerturbation())},
            "input_perturbation: not used in the checkpoint",
        ),
    ):
        with pytest.raises(ResumeError, match=said):
            check(**options)
