import numpy as np
import pytest

from cache.shards import shard_io
from cache.shards.shard import ShardMeta, ShardRow
from cache.shards.tensors import NUMPY_DTYPES, Array
from cache.shards.wds import (
    ShardWriter,
    add_checksum,
    from_safetensors,
    parse_with_checksum,
    to_safetensors,
)
from cache.store.damage import DamageError
from cache.store.store import Store

COLUMNS = {"latent": "float16", "condition": "float16"}


def latent_row(number: int) -> ShardRow:
    rng = np.random.default_rng(number)
    tensors = {"latent": Array.from_numpy(rng.standard_normal((2, 1, 3, number + 1)).astype("f2"))}
    if number % 2:
        tensors["condition"] = Array.from_numpy(rng.standard_normal((2, 1, 1, 1)).astype("f2"))
    return ShardRow(f"{number:032x}", tensors, {"start": number / 3})


def latents_meta(**changes) -> ShardMeta:
    values = {"kind": "latents", "fingerprint": "beef", "unit": "u", "bucket": "64x64@1"}
    return ShardMeta(**(values | changes))


def write(store: Store, rows: int = 3, first: int = 0) -> str:
    with ShardWriter(store, "latents/beef/u", latents_meta(), COLUMNS) as out:
        for number in range(first, first + rows):
            out.add(latent_row(number))
        return out.finish()


def test_safetensors_opens_what_we_write_and_we_what_it_writes():
    numpy_format = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.integers(0, 100, (number, 3)).astype(dtype)
        for number, (name, dtype) in enumerate(NUMPY_DTYPES.items())
        if name != "bfloat16"
    }
    tensors = {name: Array.from_numpy(array) for name, array in arrays.items()}
    theirs = numpy_format.load(b"".join(to_safetensors(tensors)))
    assert all(np.array_equal(theirs[name], array) for name, array in arrays.items())
    assert from_safetensors(memoryview(numpy_format.save(arrays))) == tensors


def test_bfloat16_through_torch():
    torch = pytest.importorskip("torch")
    from safetensors.torch import load

    value = torch.randn(3, 5).to(torch.bfloat16)
    array = Array.from_numpy(value.view(torch.uint16).numpy(), "bfloat16")
    ours = b"".join(to_safetensors({"x": array, "scalar": Array("float32", (), np.float32(2).tobytes())}))
    loaded = load(ours)
    assert loaded["x"].dtype == torch.bfloat16 and torch.equal(loaded["x"], value)
    assert loaded["scalar"].item() == 2


@pytest.mark.parametrize("data", [b"", b"\xff" * 7, b"\xff" * 8, (2).to_bytes(8, "little") + b"{"])
def test_no_safetensors(data):
    with pytest.raises(ValueError):
        from_safetensors(memoryview(data))


def test_webdataset_alone_reads_it(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    from safetensors.numpy import load

    rel = write(Store(tmp_path))
    samples = list(webdataset.WebDataset(str(tmp_path / rel), shardshuffle=False).decode())
    assert [sample["__key__"] for sample in samples] == [latent_row(number).id for number in range(3)]
    for number, sample in enumerate(samples):
        expected = latent_row(number)
        assert sample["json"] == expected.info
        loaded = load(sample["safetensors"])
        assert loaded.keys() == expected.tensors.keys()
        assert np.array_equal(loaded["latent"], expected.tensors["latent"].numpy())


def test_seal_finds_every_flipped_bit():
    sealed = add_checksum({"b": 1, "a": ["ü", 0.5]})
    assert parse_with_checksum(sealed)["a"] == ["ü", 0.5]
    for place in range(len(sealed)):
        for bit in range(8):
            changed = bytearray(sealed)
            changed[place] ^= 1 << bit
            with pytest.raises(ValueError):
                parse_with_checksum(bytes(changed))


def test_without_its_sidecar_it_is_damaged(tmp_path):
    store = Store(tmp_path)
    rel = write(store)
    store.remove("latents/beef/u.tar.json")
    with pytest.raises(DamageError, match=r"u\.tar\.json is missing"):
        shard_io.open_reader(store, rel)


def test_the_sidecar_is_published_before_the_tar(tmp_path, monkeypatch):
    import cache.store.files as module

    published, original = [], module.replace

    def replace(source: str, target: str) -> None:
        published.append(target.rpartition("/")[2])
        original(source, target)

    monkeypatch.setattr(module, "replace", replace)
    write(Store(tmp_path))
    assert published == ["u.tar.json", "u.tar"]


@pytest.mark.parametrize("last", [0, 1])
def test_two_writers_of_one_unit_end_with_one_whole_shard(tmp_path, monkeypatch, last):
    """Sidecars and tars of two workers with unlike bytes interleave; the tar that comes last is whole."""
    import cache.store.files as module

    store = Store(tmp_path)
    original = module.replace
    writers = [ShardWriter(store, "latents/beef/u", latents_meta(), COLUMNS) for _ in range(2)]
    for number, out in enumerate(writers):
        out.add(latent_row(number))
    first, second = writers[1 - last], writers[last]

    def replace(source: str, target: str) -> None:
        if target.endswith("u.tar") and not started:
            started.append(True)
            first.finish()  # the other worker does its whole publishing between our sidecar and our tar
        original(source, target)

    started: list[bool] = []
    monkeypatch.setattr(module, "replace", replace)
    second.finish()
    assert shard_io.verify(store, "latents/beef/u.tar") == []
    with shard_io.open_reader(store, "latents/beef/u.tar") as reader:
        assert reader.read(0) == latent_row(last)
