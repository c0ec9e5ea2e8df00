"""Checkpoints whose checksums match and that training can't go on with: each is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from schemas.config.training import Optimizer
from tests.trainer.run.test_checkpoint import model, newest, trained
from trainer.run import checkpoint, resume
from trainer.setup.optimizers import make_optimizer


def rewrite(path: Path, change) -> None:
    """Change the tensors and the header of a safetensors file."""
    with safe_open(path, "pt") as file:
        tensors, header = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    header = change(tensors, header) or header
    checkpoint.write_tensors(tensors, path, None if header == "none" else header)


def overlap(path: Path) -> None:
    """Two tensors of a safetensors file at the same bytes."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    first, second = [name for name in header if name != "__metadata__"][:2]
    header[second] = header[first]
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + raw[8 + size :])


def described(change) -> dict[str, str]:
    return {"latentpress.optimizer": json.dumps(change)}


def change_state(values):
    """Other values of the optimizer's state of a weight, in the header; None removes one."""

    def change(_, header: dict[str, str]) -> dict[str, str]:
        description = json.loads(header["latentpress.optimizer"])
        state = {**description["parameters"]["a.bias"], **values}
        description["parameters"]["a.bias"] = {key: value for key, value in state.items() if value is not None}
        return described(description)

    return change


ONE = {"a.bias": torch.ones(1)}
CRAFTED = {
    "broadcast": ("trainable", lambda tensors, _: tensors.update(ONE), r"a\.bias is of shape \(1,\).*of shape \(3,\)"),
    "transposed": ("trainable", lambda t, _: t.update({"b.weight": t["b.weight"].T.contiguous()}), "b.weight is of"),
    "moment": ("optimizer", lambda t, _: t.update({"a.bias/exp_avg": torch.ones(1)}), "a.bias/exp_avg is of shape"),
    "moment lost": ("optimizer", lambda t, _: t.__delitem__("a.bias/exp_avg"), "a.bias/exp_avg"),
    "converted": (
        "trainable",
        lambda t, _: t.update({"a.bias": t["a.bias"].to(torch.complex64)}),
        r"a\.bias is of .* in torch\.complex64, and should be",
    ),
    "not a number": (
        "trainable",
        lambda t, _: t.update({"a.bias": t["a.bias"] * float("nan")}),
        "a.bias has numbers that are not finite",
    ),
    "average infinite": (
        "optimizer",
        lambda t, _: t.update({"ema/a.bias": t["ema/a.bias"] + float("inf")}),
        "the moving average of a.bias has numbers",
    ),
    "moment of integers": (
        "optimizer",
        lambda t, _: t.update({"a.bias/exp_avg": t["a.bias/exp_avg"].to(torch.int32)}),
        r"a\.bias/exp_avg is of shape \(3,\) in torch\.int32",
    ),
    "steps": (
        "optimizer",
        lambda t, _: t.update({"a.bias/step": torch.ones(3)}),
        r"a.bias/step is of shape \(3,\) .*of shape \(\)",
    ),
    "steps are a text": ("optimizer", change_state({"step": "3"}), r"a.bias/step is of shape \(\) in str"),
    "no steps": ("optimizer", change_state({"step": None}), "a.bias/step is of shape .* in NoneType"),
    "no moment": ("optimizer", change_state({"exp_avg": None}), "a.bias/exp_avg is of shape .* in NoneType"),
    "negative steps": (
        "optimizer",
        lambda t, _: t.update({"a.bias/step": torch.tensor(-4.0)}),
        "a.bias/step has negative",
    ),
    "moment not a number": (
        "optimizer",
        lambda t, _: t.update({"a.bias/exp_avg": t["a.bias/exp_avg"] * float("nan")}),
        "a.bias/exp_avg has numbers that are not finite",
    ),
    "negative squares": (
        "optimizer",
        lambda t, _: t.update({"a.bias/exp_avg_sq": t["a.bias/exp_avg_sq"] - 1}),
        "a.bias/exp_avg_sq has negative",
    ),
    "average": (
        "optimizer",
        lambda t, _: t.update({"ema/a.bias": torch.ones(1)}),
        "the moving average of a.bias is of",
    ),
    "average lost": ("optimizer", lambda t, _: t.__delitem__("ema/a.bias"), "the moving average of a.bias is missing"),
    "no header": ("optimizer", lambda *_: "none", "the header of optimizer.safetensors lacks latentpress.optimizer"),
    "header cut": (
        "optimizer",
        lambda _, header: {key: value[:-1] for key, value in header.items()},
        "latentpress.optimizer in the header of optimizer.safetensors: ",
    ),
    "header a list": ("optimizer", lambda *_: described([]), "description is no object"),
    "no groups": ("optimizer", lambda *_: described({"parameters": {}}), "groups is no list"),
    "another weight": (
        "optimizer",
        lambda *_: described({"parameters": {"x": {}}, "groups": [{}]}),
        "state of x, which is not trained",
    ),
    "no value": (
        "optimizer",
        lambda *_: described({"parameters": {"a.bias": {"step": {"float": "much"}}}, "groups": [{}]}),
        "a.bias/step is no value",
    ),
    "overlap": ("trainable", overlap, "trainable.safetensors: .*[oO]ffset"),
    "overlap of moments": ("optimizer", overlap, "optimizer.safetensors: .*[oO]ffset"),
}


@pytest.mark.parametrize("craft", CRAFTED)
def test_what_was_made_with_matching_checksums_is_refused_by_name(tmp_path: Path, craft: str) -> None:
    part, change, said = CRAFTED[craft]
    parameters, optimizer, _ = trained(2)
    averages = {name: weight.detach().clone() for name, weight in parameters.items()}
    last = checkpoint.save(tmp_path, 2, parameters, optimizer, {}, {}, averages)
    path = last / f"{part}.safetensors"
    change(path) if change is overlap else rewrite(path, change)
    resume.write_manifest(last)
    again = model(9)
    with pytest.raises(resume.ResumeError, match=f"step-000002 can't be restored, .*{said}"):
        checkpoint.restore(newest(tmp_path), again, make_optimizer(again, Optimizer(lr=0.01)), averages)


def remove_state(key: str):
    return lambda state: state.pop(key)


CRAFTED_STATES = {
    "no steps of the average": (remove_state("ema updates"), "ema updates is no count"),
    "no terms": (remove_state("terms"), "terms is no object"),
    "a later change": (lambda state: state.update({"data changes": [{"step": 9, "set": "a"}]}), "of a later step"),
    "a negative number": (lambda state: state.update({"bad total": -1}), "bad total is no count"),
    "a number as text": (lambda state: state.update({"epoch": "1"}), "epoch is no count"),
    "methods a list": (lambda state: state.update({"methods": []}), "methods is no object"),
}


@pytest.mark.parametrize("craft", CRAFTED_STATES)
def test_a_crafted_state_is_no_checkpoint(tmp_path: Path, craft: str) -> None:
    """The one before is used."""
    change, said = CRAFTED_STATES[craft]
    parameters, optimizer, _ = trained(2)
    for number in (1, 2):
        last = checkpoint.save(
            tmp_path, number, parameters, optimizer, {"ema": {"decay": 0.5}}, {"ema updates": number}, {}
        )
    state = json.loads((last / "state.json").read_text())
    change(state)
    (last / "state.json").write_text(json.dumps(state))
    resume.write_manifest(last)
    found, ((path, reason),) = resume.newest_checkpoint(tmp_path, verify=True)
    assert found is not None and found.step == 1 and path == last and said in reason
