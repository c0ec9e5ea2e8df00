"""Files of sharded checkpoints that were made with matching checksums: each is refused by name."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from schemas.config.training import Optimizer
from tests.processes import prepare_fork
from tests.trainer.runs import in_two_forks
from trainer.run import checkpoint, resume
from trainer.setup.optimizers import make_optimizer

SHAPES = {"a.weight": (4, 3), "a.bias": (4,)}
Header = dict[str, Any]


def weights() -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.full(shape, 0.5)) for name, shape in SHAPES.items()}


def save(folder: Path, rank: int) -> None:
    prepare_fork()
    options = {"rank": rank, "world_size": 2, "init_method": f"file://{folder}/store"}
    torch.distributed.init_process_group("gloo", **options)
    mesh = init_device_mesh("cpu", (2,))
    sharded = {n: torch.nn.Parameter(distribute_tensor(w.data, mesh, [Shard(0)])) for n, w in weights().items()}
    optimizer = make_optimizer(sharded, Optimizer(lr=0.01))
    for weight in sharded.values():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    averages = {name: weight.detach().clone() for name, weight in sharded.items()}
    checkpoint.save(folder, 2, sharded, optimizer, {}, {}, averages, main=rank == 0)
    torch.distributed.barrier()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, bytes]:
    """File -> content of a checkpoint of two processes."""
    folder = tmp_path_factory.mktemp("sharded")
    in_two_forks(partial(save, folder))
    path = folder / "step-000002"
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def rewrite(raw: bytes, change: Callable[[Header], None]) -> bytes:
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    change(header)
    changed = json.dumps(header).encode()
    return len(changed).to_bytes(8, "little") + changed + raw[8 + size :]


def move(rows: int) -> Callable[[Header], None]:
    """Another place of each tensor of a file in the whole one."""

    def change(header: Header) -> None:
        places = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        for place in places.values():
            place["saved_offsets"][0] = rows
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(places)

    return change


def set_tensor(**values: Any) -> Callable[[Header], None]:
    return lambda header: header["weights/a.bias"].update(values)


def move_and_turn(header: Header) -> None:
    """As many values as before, of which some overlap the first file's and some leave a gap."""
    places = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    for name, tensor in header.items():
        if tensor.get("shape") == [2, 3]:
            tensor["shape"], places[name]["saved_offsets"] = [3, 2], [1, 1]
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(places)


CRAFTED: dict[str, tuple[Callable[[Header], None], str]] = {
    "a shape": (set_tensor(shape=[1]), "shape"),
    "transposed": (lambda header: header["weights/a.weight"].update(shape=[3, 2]), "a.weight"),
    "overlapping bytes": (set_tensor(data_offsets=[0, 8]), "offset"),
    "beyond the file": (set_tensor(data_offsets=[10**6, 10**6 + 8]), "offset"),
    "a type": (set_tensor(dtype="F99"), "F99"),
    "no tensor": (lambda header: header.update({"weights/a.bias": "x"}), "header"),
    "no header": (lambda header: header.pop("__metadata__") and None, "overlap"),
    "header no JSON": (lambda header: header["__metadata__"].update(DCP_SHARDING_INFO="[["), ""),
    "overlapping parts": (move(0), "the parts of .* overlap"),
    "a gap": (move(3), "one is missing"),
    "a negative place": (move(-1), "overlap"),
    "as many values": (move_and_turn, "overlap"),
}


@pytest.mark.parametrize("craft", ["", "a part is gone", *CRAFTED])
def test_crafted_shards_are_refused_by_name(saved: dict[str, bytes], tmp_path: Path, craft: str) -> None:
    last = tmp_path / "step-000002"
    *_, second = sorted(name for name in saved if name.startswith("shards/"))
    change, said = CRAFTED.get(craft, (None, "should be of shape"))
    for name, content in saved.items():
        (last / name).parent.mkdir(parents=True, exist_ok=True)
        (last / name).write_bytes(rewrite(content, change) if change and name == second else content)
    if craft == "a part is gone":
        (last / second).unlink()
        state = json.loads(saved["state.json"])
        state["shards"].remove(second)
        (last / "state.json").write_text(json.dumps(state))
    resume.write_manifest(last)
    found, damaged = resume.newest_checkpoint(tmp_path, verify=True)
    assert found is not None and not damaged
    again = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    averages = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    optimizer = make_optimizer(again, Optimizer(lr=0.01))
    if not craft:
        checkpoint.restore(found, again, optimizer, averages)
        assert all(0 < weight.min() == weight.max() < 0.5 for weight in [*again.values(), *averages.values()])
        return
    with pytest.raises(resume.ResumeError, match=f"step-000002 can't be restored, .*{said}"):
        checkpoint.restore(found, again, optimizer, averages)
