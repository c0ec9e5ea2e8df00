"""What encoders and training make of the same data, compared with what golden.json recorded (see test_golden.py).

Compared exactly: names, ids, layout, shapes, dtypes, counts of tokens, terms of a checkpoint. Numbers that a model
computed, whose last bits depend on the CPU, are compared within a tolerance, and what names the tiny checkpoints, whose
random weights do too, or a library's version, is left out.
"""

import hashlib
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import safetensors.numpy

from schemas.json_records import read_record
from stages import encode_latents, encode_text, index
from tests.forms import long
from tests.golden import FLAVOURS, Home, Json, compare, put_shards
from trainer.__main__ import app as train


@pytest.fixture
def planned(request: pytest.FixtureRequest, tmp_path: Path) -> Home:
    made = Home(tmp_path, request.param)
    made.plan()
    return made


def flavours(*short: str) -> pytest.MarkDecorator:
    """Those of the short form; the others are of the long one."""
    cases = [name if name in short else long(name) for name in FLAVOURS]
    return pytest.mark.parametrize("planned", cases, indirect=True)


@pytest.mark.slow
@flavours("i2v", "sana")
def test_encoded_shards(planned: Home, tiny: Callable[[str], Path]) -> None:
    for stage in (encode_text, encode_latents):
        planned.run(stage.app, f"model.path={tiny(planned.kind)}")
    found = {}
    for path in sorted(path for kind in ("text", "latents") for path in (planned.root / kind).rglob("*")):
        if path.suffix in (".arrow", ".tar"):
            said, rows = (of_arrow if path.suffix == ".arrow" else of_tar)(path)
            assert said.pop("fingerprint") == path.parent.name
            said["provenance"] = sorted(said["provenance"])
            found[f"{path.parent.parent.name}/{path.name}"] = {"description": said, "rows": list(rows)}
    compare(f"encoded {planned.name}", found)


def of_arrow(path: Path) -> tuple[Json, Iterator[Json]]:
    """The description of a shard and its rows, read as docs/internals.md says."""
    table = pa.ipc.open_file(pa.OSFile(str(path))).read_all()
    dtypes = {field.name: field.metadata[b"dtype"] for field in table.schema if field.metadata}
    assert set(dtypes.values()) == {b"float32"}, dtypes
    rows = (
        row(
            one["id"],
            one["info"],
            {name: (np.frombuffer(one[name], "<f4"), one[f"{name}_shape"]) for name in dtypes if one[name]},
        )
        for one in table.to_pylist()
    )
    return json.loads(table.schema.metadata[b"latentpress"]), rows


def of_tar(path: Path) -> tuple[Json, Iterator[Json]]:
    said = json.loads(path.with_name(f"{path.name}.json").read_bytes())
    for key in ("checksum", "xxh3_128", "rows"):
        del said[key]
    with tarfile.open(path) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    names = [name.removesuffix(".json") for name in files if name.endswith(".json")]
    tensors = {name: safetensors.numpy.load(files[f"{name}.safetensors"]) for name in names}
    return said, (
        row(
            name,
            files[f"{name}.json"].decode(),
            {key: (value, list(value.shape)) for key, value in tensors[name].items()},
        )
        for name in names
    )


def row(id: str, info: str, tensors: dict[str, tuple[np.ndarray, list[int]]]) -> Json:
    """A row, of each tensor some numbers."""
    found: Json = {"id": id, "info": info}
    for name, (values, shape) in sorted(tensors.items()):
        flat = values.astype("float64").reshape(-1)
        numbers = [flat.mean(), flat.std(), *flat[np.linspace(0, len(flat) - 1, 4).astype(int)]]
        found[name] = {"shape": str(shape), "mean, deviation, and four of them": [round(float(n), 5) for n in numbers]}
    return found


@pytest.mark.slow
@flavours("t2i", "sana")
def test_training(planned: Home, tiny: Callable[[str], Path]) -> None:
    """Two steps on a set of fixed rows: a checkpoint's terms, losses, and the names of what is saved."""
    put_shards(planned)
    planned.run(index.app)
    (name,) = {path.parent.name for path in planned.root.glob("sets/*/set.json")}
    planned.run(train, f"model.path={tiny(planned.kind)}", f"train.set={name}")
    run = planned.folder / "output/golden"
    (state,) = run.glob("checkpoints/*/state.json")
    made = read_record(state)
    made["files"] = sorted(read_record(state.with_name("manifest.json"))["files"])
    made["terms"]["base weights"] = "not compared"
    made["weights"] = {file: len(names) for file, names in made["weights"].items()}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    numbers = [{key: line[key] for key in ("step", "loss", "eval_loss") if key in line} for line in lines]
    files = {
        path.relative_to(run).as_posix(): tensors_in(path)
        for path in run.rglob("*")
        if path.is_file() and path.suffix != ".log"
    }
    files = {path: names for path, names in files.items() if not path.startswith("tensorboard/")}
    compare(f"trained {planned.name}", {"state": made, "metrics": numbers, "files": files})


def tensors_in(path: Path) -> Any:
    """Of a safetensors file, how many tensors it holds, one of them, and a hash of all names and shapes."""
    if path.suffix != ".safetensors":
        return None
    with safetensors.safe_open(path, "np") as file:
        shapes = [f"{key} {file.get_slice(key).get_shape()}" for key in sorted(file.keys())]
    return [len(shapes), next(iter(shapes), None), hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:32]]
