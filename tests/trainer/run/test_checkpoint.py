"""Checkpoints: exact, atomic, checked, pruned."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from cache.store import files
from schemas.config.training import Optimizer
from schemas.errors import DAMAGE
from schemas.json_records import format_record, read_record
from trainer.run import checkpoint, resume
from trainer.setup.optimizers import make_optimizer


def newest(folder: Path) -> resume.Checkpoint:
    result, damaged = resume.newest_checkpoint(folder, verify=True)
    assert result is not None and not damaged
    return result


def saved_at(folder: Path, step: int, trainable, optimizer, terms: dict | None = None, **parts) -> Path:
    return checkpoint.save(folder, resume.CheckpointState(step=step, terms=terms or {}), trainable, optimizer, **parts)


def model(seed: int) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (3, 4), "a.bias": (3,), "b.weight": (2, 3)}
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def step(parameters, optimizer, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(5, 4, generator=generator)
    hidden = torch.tanh(x @ parameters["a.weight"].T + parameters["a.bias"])
    loss = ((hidden @ parameters["b.weight"].T - 1) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def trained(steps: int) -> tuple:
    parameters = model(0)
    optimizer = make_optimizer(parameters, Optimizer(lr=0.01))
    losses = [step(parameters, optimizer, number) for number in range(steps)]
    return parameters, optimizer, losses


@pytest.mark.parametrize("moment", ["write_tensors", "replace"])
def test_a_checkpoint_cut_off_never_counts(tmp_path: Path, moment: str, monkeypatch) -> None:
    """A process that ends while it writes: the previous checkpoint stays the newest, and the rest is removed."""
    parameters, optimizer, _ = trained(2)
    saved_at(tmp_path, 2, parameters, optimizer)
    child = os.fork()
    if child == 0:
        try:
            owner = checkpoint if moment == "write_tensors" else files
            monkeypatch.setattr(owner, moment, lambda *_: os._exit(7))
            saved_at(tmp_path, 3, parameters, optimizer)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert [path.name for path in tmp_path.glob(".step-*")], "something was cut off"
    assert newest(tmp_path).step == 2
    checkpoint.prune(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_any_flipped_bit_is_found(tmp_path: Path, often, name: str) -> None:
    """The run resumes from the previous checkpoint. A few flips have no effect: white space of the manifest."""
    parameters, optimizer, _ = trained(2)
    for number in (1, 2):
        last = saved_at(tmp_path, number, parameters, optimizer, {"seed": 0})
    content = (last / name).read_bytes()
    before = resume.read_checkpoint(last, verify=True)
    for bit in range(0, len(content) * 8, often(11, 3)):
        raw = bytearray(content)
        raw[bit // 8] ^= 1 << bit % 8
        (last / name).write_bytes(raw)
        result, _ = resume.newest_checkpoint(tmp_path, verify=True)
        harmless = name == "manifest.json" and content[bit // 8 : bit // 8 + 1].isspace() and result == before
        assert result is not None and (result.step == 1 or harmless), (bit, raw)


def test_a_checkpoint_without_its_manifest_or_of_another_version_is_refused(tmp_path: Path) -> None:
    parameters, optimizer, _ = trained(2)
    last = saved_at(tmp_path, 2, parameters, optimizer, {"seed": 0})
    (last / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"it has no manifest\.json"):
        resume.read_checkpoint(last, verify=False)
    state = read_record(last / "state.json")
    (last / "state.json").write_bytes(format_record(state | {"format_version": 2}))
    resume.write_manifest(last)
    with pytest.raises(resume.ResumeError, match="has format version 2; this release reads 1"):
        resume.read_checkpoint(last, verify=False)


def test_equal_tensors_and_metadata_give_equal_files(tmp_path: Path) -> None:
    metadata = {f"{name}": f'"{name}" \n\x1f\x7f é {{"a": 1}}' for name in "zyxwvutsrqponml"}
    contents = set()
    for number in range(8):
        path = tmp_path / f"{number}.safetensors"
        checkpoint.write_tensors({"w": torch.ones(3)}, path, metadata)
        contents.add(path.read_bytes())
    assert len(contents) == 1
    with safe_open(path, "pt") as file:
        assert file.metadata() == metadata and torch.equal(file.get_tensor("w"), torch.ones(3))


def test_what_is_exported_bit_for_bit_is_written_once(tmp_path: Path) -> None:
    """The export contains one of three weights unchanged, one halved and one in another dtype."""
    parameters, optimizer, _ = trained(2)
    names = {"a.weight": "x", "a.bias": "y", "b.weight": "z"}

    def export(folder: Path) -> dict:
        (folder / "part").mkdir()
        exported = {"x": parameters["a.weight"], "y": parameters["a.bias"] / 2, "z": parameters["b.weight"].bfloat16()}
        checkpoint.write_tensors({key: value.detach() for key, value in exported.items()}, folder / "part/model.st")
        return {"part/model.st": {key: name for name, key in names.items()}}

    saved = saved_at(tmp_path, 2, parameters, optimizer, export=export)
    assert load_file(saved / "trainable.safetensors").keys() == {"a.bias", "b.weight"}
    second = model(9)
    checkpoint.restore(newest(tmp_path), second, make_optimizer(second, Optimizer()))
    assert all(torch.equal(second[name], parameters[name]) for name in names)
    (saved / "part/model.st").unlink()
    with pytest.raises(resume.NoUsableCheckpoint, match=r"it has no part/model\.st"):
        resume.newest_checkpoint(tmp_path)


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    parameters, optimizer, _ = trained(1)
    for number in (1, 2, 30, 999_999, 1_000_000):
        saved_at(tmp_path, number, parameters, optimizer)
    checkpoint.prune(tmp_path, 2, 15, [2])
    names = ["step-000002", "step-000030", "step-1000000", "step-999999"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    checkpoint.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1000000", "step-999999"]
    assert newest(tmp_path).step == 1_000_000
    assert resume.newest_checkpoint(tmp_path / "none") == (None, [])


def test_other_terms_are_refused_and_named_as_settings(tmp_path: Path) -> None:
    """Old and new value of each term; a hash has no value to show. Terms that are not requested are not compared."""
    parameters, optimizer, _ = trained(1)
    saved = {"seed": 1, "transformer": "abc", "betas": (0.9, 0.95), "adapter": {"rank": 8, "alpha": None, "type": "x"}}
    saved |= {"methods": {}}
    data = {"digest": "d1", "set": "a", "samples": 3, "captions": 4}
    saved_at(tmp_path, 1, parameters, optimizer, {**saved, "data": data})
    result = newest(tmp_path)
    resume.check_signature(result, {**saved, "data": {**data, "set": "b"}})
    resume.check_signature(result, {"seed": 1})
    changed = {"seed": 2, "transformer": "xyz", "betas": (0.9, 0.95), "adapter": {"rank": 4, "alpha": 2.0, "type": "x"}}
    changed |= {"methods": {"masked_loss": {"weight": 0.5}}}
    with pytest.raises(resume.ResumeError) as caught:
        resume.check_signature(result, {**changed, "data": {"digest": "d2", "set": "b", "samples": 5, "captions": 6}})
    lines = caught.value.message.splitlines()
    assert lines[0].endswith("can't be continued with this configuration:") and sorted(lines[1:]) == [
        "  the transformer has a different shape",
        "  train.adapter.alpha: default in the checkpoint, 2.0 now",
        "  train.adapter.rank: 8 in the checkpoint, 4 now",
        '  train.methods.masked_loss: not used in the checkpoint, {"weight": 0.5} now',
        "  train.seed: 1 in the checkpoint, 2 now",
        "  training data: set a with 3 samples and 4 captions in the checkpoint, "
        "set b with 5 samples and 6 captions now",
    ]
    assert "train.adapter" in caught.value.next_step and "another train.run" in caught.value.next_step


def cut(path: Path, name: str) -> None:
    path = path / name
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path, name: str) -> None:
    raw = bytearray((path / name).read_bytes())
    raw[-3] ^= 1
    (path / name).write_bytes(raw)


def change_state(path: Path, **values) -> None:
    """Change values, with checksums that match."""
    (path / "state.json").write_bytes(format_record(read_record(path / "state.json") | values))
    resume.write_manifest(path)


DAMAGES = {
    "empty": lambda path: (path / "state.json").write_bytes(b""),
    "cut": lambda path: cut(path, "state.json"),
    "missing": lambda path: (path / "state.json").unlink(),
    "a list": lambda path: (path / "state.json").write_text("[1]"),
    "no UTF-8": lambda path: (path / "state.json").write_bytes(b'{"step": "\xff"}'),
    "nested": lambda path: (path / "state.json").write_text("[" * 10_000),
    "another step": lambda path: change_state(path, step=7),
    "a path": lambda path: change_state(path, weights={"../../secret": {}}),
    "a step of another type": lambda path: change_state(path, bad_total="1"),
    "weights flipped": lambda path: flip(path, "trainable.safetensors"),
    "weights cut": lambda path: cut(path, "optimizer.safetensors"),
    "weights missing": lambda path: (path / "optimizer.safetensors").unlink(),
    "a folder": lambda path: ((path / "state.json").unlink(), (path / "state.json").mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_checkpoint_before_a_damaged_one_is_found(tmp_path: Path, damage: str) -> None:
    """The damaged checkpoint is renamed, so that it is not counted or removed; without a previous checkpoint, the run
    is damaged."""
    parameters, optimizer, _ = trained(2)
    for number in (1, 2):
        last = saved_at(tmp_path, number, parameters, optimizer)
    DAMAGES[damage](last)
    result, damaged = resume.newest_checkpoint(tmp_path, verify=True)
    assert result is not None and result.step == 1
    assert [path for path, _ in damaged] == [last] and damaged[0][1]
    assert "damaged-step-000002.1" in checkpoint.quarantine(*damaged[0], result)
    checkpoint.prune(tmp_path, 1)
    assert newest(tmp_path).step == 1
    assert {path.name for path in tmp_path.iterdir()} == {"step-000001", "damaged-step-000002.1"}
    if damage != "another step":
        DAMAGES[damage](tmp_path / "step-000001")
        with pytest.raises(resume.NoUsableCheckpoint, match=r"step-000001: .*\n.*another train\.run") as caught:
            resume.newest_checkpoint(tmp_path, verify=True)
        assert caught.value.exit_code == DAMAGE


@pytest.mark.parametrize("name", ["step-", "step-x", "step-1.old", "step-²"])
def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path, name: str) -> None:
    parameters, optimizer, _ = trained(1)
    saved_at(tmp_path, 1, parameters, optimizer)
    (tmp_path / name).mkdir()
    (tmp_path / "step-000009").write_text("a file")
    assert newest(tmp_path).step == 1
    checkpoint.prune(tmp_path, 1)
    assert (tmp_path / name).is_dir() and (tmp_path / "step-000009").is_file()


def test_other_weights_are_refused(tmp_path: Path) -> None:
    parameters, optimizer, _ = trained(1)
    saved_at(tmp_path, 1, parameters, optimizer)
    changed = {"c": torch.nn.Parameter(torch.zeros(1))}
    with pytest.raises(resume.ResumeError, match=r"other weights.*a\.bias"):
        checkpoint.restore(newest(tmp_path), changed, make_optimizer(changed, Optimizer()))
    changed = {**model(0), "a.bias": torch.nn.Parameter(torch.zeros(1))}
    with pytest.raises(resume.ResumeError, match=r"a\.bias has the shape \(3,\).*expected \(1,\)"):
        checkpoint.restore(newest(tmp_path), changed, make_optimizer(changed, Optimizer()))
