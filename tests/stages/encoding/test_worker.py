"""The common part of the workers: batches, out of memory, numbers that are not finite, reading ahead."""

import io

import pytest
import torch

import cache.shards.arrow
from cache.shards.shard_io import open_reader
from cache.store.store import Store
from schemas.cli.console import Console, Options
from schemas.config.encoding import Resources
from schemas.errors import LatentpressError
from stages import bucket, discover, encode_latents
from stages.encoding import model_loading
from stages.encoding.vae import flux
from stages.encoding.vae.worker import LatentsWorker
from tests.devices import set_accelerators
from tests.forms import long

PIXELS = 64 * 64


@pytest.fixture
def home(project, built):
    return built(project(cache={"unit_mib": 0.3}), plan_nine)


def plan_nine(home) -> None:
    for number in range(9):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    home.run(discover.run)
    home.run(bucket.run)


def recorded(home) -> list[int]:
    """The batch that each shard records."""
    return [
        open_reader(Store(home.root), f"latents/{name}").meta.provenance["batch"] for name in home.shards("latents")
    ]


@pytest.fixture
def batches(monkeypatch) -> list[int]:
    """Members of each forward pass."""
    result: list[int] = []
    encode = LatentsWorker.encode

    def count_members(self, names, batch, limit):
        result.append(len(batch))
        return encode(self, names, batch, limit)

    monkeypatch.setattr(LatentsWorker, "encode", count_members)
    return result


@pytest.mark.slow
def test_batches_are_filled_to_the_budget_of_pixels(home, batches) -> None:
    assert home.run(encode_latents.run, f"latents.batch_pixels={4 * PIXELS + 1}").done == 9
    assert batches == [4, 4, 1]
    assert recorded(home) == [4 * PIXELS + 1]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("20 MiB"),
        RuntimeError("DefaultCPUAllocator: not enough"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        MemoryError("Unable to allocate 20 MiB"),
    ],
)
def test_each_way_to_run_out_of_memory_is_known(error) -> None:
    assert model_loading.is_out_of_memory(error)
    assert not model_loading.is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.mark.long
def test_out_of_memory_starts_the_whole_unit_again_at_half_the_batch(home, batches, monkeypatch) -> None:
    encode = flux.Autoencoder.encode

    def fits_two(self, pixels_BCTHW, *arguments):
        if len(pixels_BCTHW) > 2:
            raise torch.OutOfMemoryError("20 MiB")
        return encode(self, pixels_BCTHW, *arguments)

    monkeypatch.setattr(flux.Autoencoder, "encode", fits_two)
    report = home.run(encode_latents.run, f"latents.batch_pixels={8 * PIXELS}")
    assert (report.done, report.remaining) == (9, 0)
    assert batches == [8, 4, 2, 2, 2, 2, 1]
    assert recorded(home) == [2 * PIXELS]
    assert report.details["units_in_smaller_batches"] == 1
    assert f"it fits with latents.batch_pixels: {2 * PIXELS} instead of {8 * PIXELS}" in " ".join(home.said.split())
    with_room = home.shards("latents")
    for name in with_room:
        (home.root / "latents" / name).unlink()
    monkeypatch.undo()
    home.run(encode_latents.run, f"latents.batch_pixels={2 * PIXELS}")
    assert home.shards("latents") == with_room


@pytest.mark.long
def test_out_of_memory_where_rows_are_taken_is_of_their_batch(home, batches, monkeypatch) -> None:
    """The next batch, of one member, is already queued."""
    take = LatentsWorker._rows

    def fits_four(self, names, *arguments):
        if len(names) > 4:
            raise torch.OutOfMemoryError("20 MiB")
        yield from take(self, names, *arguments)

    monkeypatch.setattr(LatentsWorker, "_rows", fits_four)
    assert home.run(encode_latents.run, f"latents.batch_pixels={8 * PIXELS}").done == 9
    assert batches == [8, 1, 4, 4, 1] and recorded(home) == [4 * PIXELS]


@pytest.mark.long
@pytest.mark.slow
def test_where_one_sample_does_not_fit_the_message_names_the_options(home, monkeypatch) -> None:
    def never(*_):
        raise torch.OutOfMemoryError("Tried to allocate 20 GiB")

    monkeypatch.setattr(flux.Autoencoder, "encode", never)
    with pytest.raises(LatentpressError, match="20 GiB") as caught:
        home.run(encode_latents.run)
    assert "latents.chunk_frames" in caught.value.next_step
    assert home.shards("latents") == {}


def test_processes_share_the_cards(monkeypatch) -> None:
    set_accelerators(monkeypatch, 2)
    for name in ("auto", "cuda"):
        devices = [model_loading.select_device(Resources(device=name, threads=1), process) for process in range(3)]
        assert devices == [torch.device(f"cuda:{card}") for card in (0, 1, 0)]
    assert model_loading.select_device(Resources(device="cuda:1", threads=1), 2) == torch.device("cuda:1")
    set_accelerators(monkeypatch, 1)
    assert model_loading.select_device(Resources(device="cuda", threads=1), 1) == torch.device("cuda")


@pytest.mark.slow
def test_a_sample_whose_numbers_are_not_finite_is_rejected_alone(home, monkeypatch) -> None:
    encode = flux.Autoencoder.encode

    def once_infinite(self, *arguments):
        latents = encode(self, *arguments)
        latents[1, 0, 0, 0, 0] = torch.inf
        monkeypatch.setattr(flux.Autoencoder, "encode", encode)
        return latents

    monkeypatch.setattr(flux.Autoencoder, "encode", once_infinite)
    report = home.run(encode_latents.run, f"latents.batch_pixels={3 * PIXELS}")
    assert report.done == 8
    (reject,) = report.rejects
    assert reject["reason"] == "not-finite" and "latents.precision: float32" in reject["message"]
    (name,) = home.shards("latents")
    shard = open_reader(Store(home.root), f"latents/{name}")
    assert [member.id for member in shard.meta.rejects] == [reject["item"]] and len(shard) == 8
    assert home.run(encode_latents.run, retry_rejects=True).rejects == []


@pytest.mark.slow
def test_what_is_mended_stays_on_the_list_until_its_shard_is_there(home, monkeypatch) -> None:
    encode, finish = flux.Autoencoder.encode, cache.shards.arrow.ShardWriter.finish

    def infinite(*places: int):
        def encoded(self, *arguments):
            latents = encode(self, *arguments)
            latents[list(places)] = torch.inf
            return latents

        return encoded

    def killed(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(flux.Autoencoder, "encode", infinite(1, 2))
    first = home.run(encode_latents.run, "stages.max_reject_fraction=1.0")
    monkeypatch.setattr(flux.Autoencoder, "encode", infinite(1))
    monkeypatch.setattr(cache.shards.arrow.ShardWriter, "finish", killed)
    with pytest.raises(KeyboardInterrupt):
        home.run(encode_latents.run, "stages.max_reject_fraction=1.0", retry_rejects=True)
    listed = encode_latents.run(home.config(), Options(dry_run=True), Console(stderr=io.StringIO())).rejects
    assert {row["item"] for row in listed} == {row["item"] for row in first.rejects} and len(listed) == 2
    monkeypatch.setattr(cache.shards.arrow.ShardWriter, "finish", finish)
    assert len(home.run(encode_latents.run, "stages.max_reject_fraction=1.0", retry_rejects=True).rejects) == 1


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [1, long(100)])
def test_how_far_it_reads_ahead_changes_no_byte(home, prefetch) -> None:
    home.run(encode_latents.run, "cache.unit_mib=0.05")
    alone = home.shards("latents")
    for name in alone:
        (home.root / "latents" / name).unlink()
    home.run(encode_latents.run, prefetch=prefetch, readers=3)
    assert home.shards("latents") == alone
