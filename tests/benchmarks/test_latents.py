"""Both sides of benchmarks/latents.py, in this process: that they do the same work."""

from pathlib import Path

import pytest
from diffusers import AutoencoderKL

from benchmarks import latents
from benchmarks.gpu import latents_stage
from benchmarks.gpu.parts import PartOptions
from cache.shards.shard import find_done_units
from cache.shards.shard_io import open_reader
from cache.store.store import Store


@pytest.mark.slow
def test_both_sides_encode_every_picture_in_the_same_batches(tmp_path: Path, monkeypatch) -> None:
    model = latents.make_checkpoint(tmp_path / "model", 8)
    path = latents.make_project(tmp_path / "all", 3, 64, model)
    shapes: list[tuple[int, ...]] = []
    encode = AutoencoderKL.encode

    def noted(self, pixels, *rest, **more):
        shapes.append(tuple(pixels.shape))
        return encode(self, pixels, *rest, **more)

    monkeypatch.setattr(AutoencoderKL, "encode", noted)
    latents.run_bare(path)
    alone, shapes[:] = sorted(shapes), []
    latents.run_stage(path)
    assert sorted(shapes) == alone and sum(shape[0] for shape in alone) == 3
    store = Store(tmp_path / "all" / "work")
    (cache,) = {f"latents/{name.split('/')[0]}" for name in store.list_names("latents")}
    assert sum(len(open_reader(store, shard)) for shard in find_done_units(store, cache).values()) == 3


@pytest.mark.slow
def test_the_stage_beside_ready_tensors(capsys) -> None:
    """The comparison on a device, as `make gpu` runs it, on a CPU: without the columns that need CUDA."""
    latents_stage.run(PartOptions("cpu", tiny=True))
    first, _, _, *rows = capsys.readouterr().out.splitlines()
    assert first.endswith("torch.float32, cpu")
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == ["bare", "stage"] and [len(row) for row in cells] == [9, 9]
    assert cells[0][4] == "1.00" and float(cells[0][5]) > 0 and cells[0][7:] == ["", ""]


@pytest.mark.slow
def test_the_batches_are_those_of_the_stage(tmp_path: Path, monkeypatch) -> None:
    path = latents.make_project(tmp_path, 3, 64, latents.make_checkpoint(tmp_path / "model", 8))
    seen: list[tuple[int, ...]] = []
    encode = AutoencoderKL.encode
    monkeypatch.setattr(
        AutoencoderKL, "encode", lambda self, x, *a, **k: (seen.append(tuple(x.shape)), encode(self, x))[1]
    )
    latents.run_stage(path)
    assert sorted(seen) == sorted((b, 3, h, w) for b, _, h, w in latents.batch_shapes(path))
