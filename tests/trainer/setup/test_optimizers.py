"""Every named optimizer, and optimizers by dotted path: created as configured, resumed bit for bit, refused with a
reason."""

import contextlib
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cache.runs.training_run import RunError
from schemas.config.training import OPTIMIZERS, Optimizer
from tests.trainer.run.test_checkpoint import saved_at
from trainer.run import checkpoint, optimizer_state, resume
from trainer.setup.optimizers import check_optimizer, find_class, inference_weights, make_optimizer, set_learning_rate

CPU = torch.device("cpu")
OTHERS: dict[str, dict[str, Any]] = {
    "optimi.StableAdamW": {},
    "torch.optim.Adafactor": {"weight_decay": 0.01},
    "pytorch_optimizer.CAME": {},
    "pytorch_optimizer.SOAP": {"precondition_frequency": 2},
    "pytorch_optimizer.ScheduleFreeRAdam": {},
}
NAMES = [*OPTIMIZERS, *OTHERS]
STEPS = 9


def settings(name: str) -> Optimizer:
    """Settings with weight decay, two groups and a warm-up, if the optimizer supports them."""
    groups = [{"match": "small.*", "weight_decay": 0.0}]
    rate = {"lr": 1.0 if name == "prodigy" else 1e-3, "warmup": 2, "weight_decay": 0.01, "groups": groups}
    return Optimizer.model_validate({"name": name, "arguments": OTHERS.get(name, {}), **rate})


class Run:
    """Training of a small network whose largest weight bitsandbytes keeps in 8 bits."""

    def __init__(self, config: Optimizer, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        shapes = {"large": (64, 80), "small.weight": (3, 64), "small.bias": (3,)}
        draws = {name: torch.nn.Parameter(torch.randn(shape) / 8) for name, shape in shapes.items()}
        self.weights = {name: torch.nn.Parameter(weight.detach().to(dtype)) for name, weight in draws.items()}
        self.config, self.optimizer = config, make_optimizer(self.weights, config)

    def steps(self, first: int, last: int) -> None:
        for number in range(first, last):
            set_learning_rate(self.optimizer, self.config, number, STEPS)
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(6, 80, generator=generator).to(self.weights["large"].dtype)
            hidden = torch.tanh(x @ self.weights["large"].T) @ self.weights["small.weight"].T
            (hidden + self.weights["small.bias"] - 1).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def bits(self) -> tuple[dict[str, Any], str]:
        tensors, description = optimizer_state.collect(self.weights, self.optimizer)
        values = {**self.weights, **tensors}
        return {name: value.detach().clone() for name, value in values.items()}, json.dumps(description, sort_keys=True)


def assert_equal(one: Run, second: Run) -> None:
    (ours, description), (theirs, other_rest) = one.bits(), second.bits()
    assert description == other_rest and ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype and torch.equal(value, theirs[name]), name


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in NAMES), ("optimi-adamw", torch.bfloat16), ("optimi-lion", torch.bfloat16)],
)
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Weights and all state are equal, and reading the averaged weights in between changes nothing."""
    if name.startswith("pytorch_optimizer"):
        pytest.importorskip("pytorch_optimizer")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
        full_run, cut = Run(settings(name), dtype), Run(settings(name), dtype)
        start = {key: weight.detach().clone() for key, weight in full_run.weights.items()}
        full_run.steps(0, STEPS)
        assert all(not torch.equal(start[key], weight) for key, weight in full_run.weights.items())
        cut.steps(0, 5)
        with inference_weights(cut.weights, cut.optimizer, None) as weights_name:
            averaged = weights_name == "schedule-free average"
            assert averaged == ("schedulefree" in name.lower())
        saved_at(tmp_path, 5, cut.weights, cut.optimizer)
        second = Run(settings(name), dtype)
        second.steps(0, 1)  # its existing state is replaced
        newest, _ = resume.newest_checkpoint(tmp_path, verify=True)
        checkpoint.restore(newest, second.weights, second.optimizer)
        assert_equal(second, cut)
        second.steps(5, STEPS)
        assert_equal(second, full_run)
    assert {path.suffix for path in (tmp_path / "step-000005").iterdir()} == {".json", ".safetensors"}


def test_settings_of_the_configuration_are_in_force_after_a_resume(tmp_path: Path) -> None:
    """State is restored, arguments are not: a lower weight decay or another beta applies from the next step on."""
    for name in ("adamw", "optimi-adamw", "prodigy", "adamw-schedulefree"):
        first = Run(settings(name), torch.float32)
        first.steps(0, 3)
        saved_at(tmp_path / name, 3, first.weights, first.optimizer)
        changed = settings(name).model_copy(update={"weight_decay": 0.5, "betas": (0.5, 0.6)})
        second = Run(changed, torch.float32)
        newest, _ = resume.newest_checkpoint(tmp_path / name)
        checkpoint.restore(newest, second.weights, second.optimizer)
        groups = {len(group["params"]): group for group in second.optimizer.param_groups}
        assert groups[1]["weight_decay"] == 0.5 and groups[2]["weight_decay"] == 0.0
        assert groups[1].get("betas", (groups[1].get("beta1"), groups[1].get("beta2"))) == (0.5, 0.6)
    assert groups[1]["k"] == 3 and groups[1]["weight_sum"] > 0


def test_schedule_free_weights_are_the_average_only_within() -> None:
    """x = y + (1 - 1 / beta1) (z - y), as in its paper; y is restored bit for bit."""
    run = Run(settings("adamw-schedulefree"), torch.float32)
    run.steps(0, 4)
    before = run.bits()
    y, z = (value["large"] for value in (before[0], {"large": run.optimizer.state[run.weights["large"]]["z"]}))
    beta = run.optimizer.param_groups[0]["betas"][0]
    with inference_weights(run.weights, run.optimizer, None):
        assert torch.allclose(run.weights["large"], y + (1 - 1 / beta) * (z - y), atol=1e-7)
        assert not torch.equal(run.weights["large"], y)
    assert_equal(run, SimpleNamespace(bits=lambda: before))


def test_arguments_reach_the_class() -> None:
    weights = {"a": torch.nn.Parameter(torch.zeros(2))}
    config = Optimizer(lr=0.5, betas=(0.7, 0.8), eps=1e-3, weight_decay=0.3, arguments={"amsgrad": True})
    optimizer = make_optimizer(weights, config)
    assert type(optimizer) is torch.optim.AdamW
    expected = {"lr": 0.5, "betas": (0.7, 0.8), "eps": 1e-3, "weight_decay": 0.3, "amsgrad": True}
    assert {key: optimizer.param_groups[0][key] for key in expected} == expected
    usual = make_optimizer(weights, Optimizer()).param_groups[0]
    assert (usual["betas"], usual["eps"], usual["weight_decay"], usual["fused"]) == ((0.9, 0.95), 1e-8, 0.01, None)
    assert make_optimizer(weights, Optimizer(name="adamw-fused")).param_groups[0]["fused"] is True
    assert make_optimizer(weights, Optimizer(name="adamw-foreach")).param_groups[0]["foreach"] is True
    assert make_optimizer(weights, Optimizer(name="optimi-lion")).param_groups[0]["beta2"] == 0.99, "its own default"
    assert Optimizer(name="prodigy").lr == 1.0 and Optimizer(name="optimi.Adan").lr == 1e-4


def test_groups_by_regular_expression() -> None:
    names = ["a.lora_A", "a.lora_B", "b.lora_A", "b.lora_B", "c.bias"]
    weights = {name: torch.nn.Parameter(torch.zeros(1)) for name in names}
    groups = [{"match": r".*lora_B", "lr": 0.4}, {"match": r"[bc]\..*", "weight_decay": 0.0}]
    optimizer = make_optimizer(weights, Optimizer.model_validate({"lr": 0.1, "weight_decay": 0.5, "groups": groups}))
    by_id = {id(weight): name for name, weight in weights.items()}
    result = [
        ([by_id[id(weight)] for weight in group["params"]], group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
    ]
    assert result == [
        (["a.lora_B", "b.lora_B"], 0.4, 0.5),
        (["b.lora_A", "c.bias"], 0.1, 0.0),
        (["a.lora_A"], 0.1, 0.5),
    ]
    for match, reason in (("lora_B", "no trained parameter"), ("a.lora_B", "an earlier group")):
        config = Optimizer.model_validate({"groups": [*groups, {"match": match}]})
        with pytest.raises(RunError, match=rf"groups: '{match}' matches .*{reason}.*a\.lora_A.*5 in all"):
            make_optimizer(weights, config)


def test_other_groups_than_those_of_a_checkpoint_are_refused(tmp_path: Path) -> None:
    run = Run(settings("prodigy"), torch.float32)
    run.steps(0, 2)
    saved_at(tmp_path, 2, run.weights, run.optimizer)
    newest, _ = resume.newest_checkpoint(tmp_path)
    second = Run(settings("prodigy").model_copy(update={"groups": ()}), torch.float32)
    with pytest.raises(resume.ResumeError, match="2 parameter groups, and the optimizer has 1") as caught:
        checkpoint.restore(newest, second.weights, second.optimizer)
    assert "train.optimizer.groups" in caught.value.next_step


def configured(make_config, **train):
    return make_config("sana", **{"precision": "bfloat16", **train})


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_passes_its_trial_before_a_model_is_loaded(make_config, name: str, capsys) -> None:
    pytest.importorskip(find_class(name).__module__.partition(".")[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
        check_optimizer(configured(make_config, optimizer={"name": name, "arguments": OTHERS.get(name, {})}).train, CPU)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            {"optimizer": {"name": "nosuchpackage.Adam"}},
            "needs nosuchpackage, which can't be imported.*pip install nosuch",
        ),
        ({"optimizer": {"name": "torch.optim.AdamX"}}, "torch.optim has no optimizer 'AdamX'"),
        ({"optimizer": {"name": "torch.nn.Linear"}}, "torch.nn has no optimizer 'Linear'"),
        ({"optimizer": {"arguments": {"beta": 1}}}, "adamw does not work on cpu.*unexpected keyword argument 'beta'"),
        ({"optimizer": {"name": "optimi-lion", "eps": 1e-8}}, "optimi-lion does not work.*'eps'"),
        (
            {"optimizer": {"name": "optimi-adamw", "arguments": {"triton": True}}},
            "optimi-adamw does not work.*no kernels for a CPU",
        ),
        ({"optimizer": {"name": "torch.optim.LBFGS"}}, "LBFGS does not work.*closure"),
        ({"optimizer": {"name": "prodigy", "groups": [{"match": "a", "lr": 0.5}]}}, "different lr values"),
        ({"optimizer": {"name": "adamw-schedulefree"}, "ema": {}}, "average them twice"),
        ({"weight_precision": "bfloat16", "adapter": {"type": "full"}}, "needs Kahan summation, which adamw lacks"),
        (
            {
                "weight_precision": "bfloat16",
                "adapter": {"type": "full"},
                "optimizer": {"name": "optimi-adamw", "arguments": {"kahan_sum": False}},
            },
            "needs Kahan summation",
        ),
    ],
)
def test_what_does_not_work_is_refused_with_reason_and_next_step(make_config, train, message) -> None:
    with pytest.raises(RunError, match=f"(?s){message}") as caught:
        check_optimizer(configured(make_config, **train).train, CPU)
    assert caught.value.next_step


def test_state_that_json_and_safetensors_can_hold_is_saved_and_other_state_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    values = torch.arange(6.0)
    state = {"a": values, "b": [values, (values[2:], None)], "c": {"d": float("inf"), "e": True, "f": 3, "g": "text"}}
    optimizer.state[weight] = state
    optimizer.param_groups[0]["best"] = float("-inf")
    tensors, description = optimizer_state.collect({"w": weight}, optimizer)
    assert sorted(tensors) == ["w/a", "w/b/1/0"], "a shared tensor is stored once"
    second = torch.optim.SGD([weight], lr=1.0)
    optimizer_state.restore({"w": weight}, second, tensors, json.loads(json.dumps(description)))
    result = second.state[weight]
    assert (
        result["c"] == state["c"] and type(result["c"]["e"]) is bool and second.param_groups[0]["best"] == float("-inf")
    )
    assert result["a"] is result["b"][0] and result["b"][1][1] is None and isinstance(result["b"][1], tuple)
    assert torch.equal(result["b"][1][0], values[2:])
    optimizer.state[weight] = {"a": object()}
    with pytest.raises(optimizer_state.OptimizerStateError, match="object at 'w/a'"):
        optimizer_state.collect({"w": weight}, optimizer)
    with contextlib.suppress(KeyError):
        optimizer.state.pop(weight)
