"""Both sides of benchmarks/latents.py, in this process: that they do the same work."""

from pathlib import Path

from diffusers import AutoencoderKL

from benchmarks import latents
from cache.shard import done_units, reader
from cache.store import Store


def test_both_sides_encode_every_picture_in_the_same_batches(tmp_path: Path, monkeypatch) -> None:
    model = latents.checkpoint(tmp_path / "model", 8)
    path = latents.project(tmp_path / "all", 3, 64, model)
    shapes: list[tuple[int, ...]] = []
    encode = AutoencoderKL.encode

    def noted(self, pixels, *rest, **more):
        shapes.append(tuple(pixels.shape))
        return encode(self, pixels, *rest, **more)

    monkeypatch.setattr(AutoencoderKL, "encode", noted)
    latents.bare(path)
    alone, shapes[:] = sorted(shapes), []
    latents.stage(path)
    assert sorted(shapes) == alone and sum(shape[0] for shape in alone) == 3
    store = Store(tmp_path / "all" / "work")
    (cache,) = {f"latents/{name.split('/')[0]}" for name in store.names("latents")}
    assert sum(len(reader(store, shard)) for shard in done_units(store, cache).values()) == 3
