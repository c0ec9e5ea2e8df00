"""What a method may do in a step: hold weights, span both passes, draw at random, weigh and add losses."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from schemas.config.methods import Methods
from tests.trainer.runs import prepared
from trainer import train as loop
from trainer.methods.base import Method, MethodStep
from trainer.methods.selection import METHODS
from trainer.run.metrics import read_metrics
from trainer.setup import prepare


class Tapping(Method):
    """Reads the output of the last block through weights of its own, and notes what happens in which order."""

    def __init__(self) -> None:
        self.head = torch.nn.Linear(96, 1)  # the width of the tiny transformer
        self.noted: list[str] = []
        self.drawn: list[torch.Tensor] = []

    def modules(self) -> torch.nn.Module:
        return self.head

    @contextmanager
    def around(self, step: MethodStep) -> Iterator[None]:
        assert step.prediction_BCTHW is None
        self.drawn.append(step.uniform("own"))
        block = step.family.blocks(step.model)[-1]
        handles = [
            block.register_forward_pre_hook(lambda *_: self.noted.append("block")),
            block.register_forward_hook(self._keep),
        ]
        yield
        for handle in handles:
            handle.remove()
        self.noted.append("left")

    def _keep(self, block: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        self.features = output

    def loss(self, step: MethodStep) -> torch.Tensor:
        self.noted.append("loss")
        assert step.prediction_BCTHW is not None
        return self.head(self.features.flatten(1, -2)).square().mean((1, 2))


@pytest.fixture
def tapping(monkeypatch: pytest.MonkeyPatch) -> Tapping:
    method = Tapping()
    monkeypatch.setattr(prepare, "make_methods", lambda settings: {"tapping": method})
    return method


def test_every_method_has_a_section_of_its_own() -> None:
    assert [*Methods.model_fields] == [*METHODS], "in the same order"


def test_the_loop_names_no_method_and_stays_short() -> None:
    text = Path(loop.__file__).read_text()
    assert len(text.splitlines()) < 350
    assert not [name for name in METHODS if name in text.lower()]


def test_the_documents_say_of_each_method_which_others_it_goes_with() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "methods.md").read_text()
    table = text[text.index("\n| | ") :].split("\n\n", 1)[0].strip().splitlines()
    (_, *columns), _, *rows = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in table)
    assert [title for title, *_ in rows][: len(columns)] == columns
    for name in (field.alias or name for name, field in Methods.model_fields.items()):
        assert name in {title.lower().replace(" ", "_").removesuffix("_data") for title in columns}, name
        assert f"train.methods.{name}" in text, name
    for title, *cells in rows:
        empty = [column for column, cell in zip(columns, cells, strict=True) if not cell]
        assert empty == [title] * (title in columns)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_method_spans_both_passes_and_its_weights_are_trained_and_kept(
    ready, make_config, tapping: Tapping, checkpointing: bool
) -> None:
    config = ready("t2i", steps=2, accumulate=2, gradient_checkpointing=checkpointing)
    run = prepared(config)
    before = tapping.head.weight.detach().clone()
    loop.train_loop(run)
    passes = ["block", "loss", "block", "left"] if checkpointing else ["block", "loss", "left"]
    assert tapping.noted == passes * 4, "a checkpointed block is computed again within the context"
    kept = load_file(config.run_folder / "checkpoints/step-000002/trainable.safetensors")
    assert torch.equal(kept["methods.tapping.weight"], tapping.head.weight) and "methods.tapping.bias" in kept
    assert not torch.equal(before, tapping.head.weight)
    again = prepared(make_config("t2i", steps=2, accumulate=2))
    with torch.no_grad():
        tapping.head.weight.zero_()
    resumed = loop.resume_run(again)
    assert resumed is not None and resumed.step == 2
    noise = [again.gradient_noise.noise, again.gradient_noise.signal]
    assert noise == resumed.state["gradient noise"] and all(noise), "what a measurement is averaged with is kept"
    assert torch.equal(kept["methods.tapping.weight"], tapping.head.weight)


@pytest.mark.slow
def test_random_numbers_depend_on_the_position_alone(ready, tapping: Tapping) -> None:
    drawn = []
    for batch_size, accumulate in ((2, 2), (4, 1)):
        tapping.drawn.clear()
        config = ready("t2i", name=f"by{batch_size}", steps=2, batch_size=batch_size, accumulate=accumulate)
        loop.train_loop(prepared(config))
        drawn.append(torch.cat(tapping.drawn))
    assert torch.equal(drawn[0], drawn[1]) and len(set(drawn[0].tolist())) == 8


class Replacing(Method):
    """Trains on other noise towards the base model's own prediction plus one."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def prepare(self, step: MethodStep) -> None:
        self.seen.append((step.number, step.steps))
        before = torch.get_rng_state()
        step.noisy_BCTHW = step.noisy_BCTHW.flip(-1)
        adapted, base = (step.predict(step.noisy_BCTHW, step.sigma_B, step.batch, base=base) for base in (False, True))
        assert not adapted.requires_grad and torch.equal(adapted, base) == (step.number == 0), "a new LoRA does nothing"
        assert torch.equal(before, torch.get_rng_state()) and step.model.training, "dropout was off"
        step.target_BCTHW = base + 1


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [{"dropout": 0.5, "dora": True}, {"type": "lokr"}])
def test_a_method_replaces_input_and_target(ready, monkeypatch, adapter) -> None:
    """A difference of 1 everywhere is a loss of 1, until the adapter changes the model."""
    method = Replacing()
    monkeypatch.setattr(prepare, "make_methods", lambda settings: {"replacing": method})
    config = ready("t2i", steps=2, batch_size=2, adapter={"rank": 2, **adapter})
    run = prepared(config)
    trainable = {name: id(parameter) for name, parameter in run.denoiser.trainable().items()}
    loop.train_loop(run)
    assert method.seen == [(0, 2), (1, 2)]
    assert {name: id(parameter) for name, parameter in run.denoiser.trainable().items()} == trainable
    first, second = (line["loss"] for line in read_metrics(run.folder / "metrics.jsonl") if "loss" in line)
    assert first == pytest.approx(1, rel=1e-5) and second != pytest.approx(1, rel=1e-5)
