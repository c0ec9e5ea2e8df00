"""Verify and every reader of a table find damage in it, and shapes and precisions of a shard match its metadata."""

from pathlib import Path

import numpy as np
import pytest

from cache.sets import plans, rejects
from cache.sets.set_lookup import open_set
from cache.sets.table_checks import Provenance
from cache.shards.shard import ShardRow
from cache.shards.tensors import Array
from cache.store.damage import DamageError
from cache.store.store import Store
from stages import bucket, discover, encode_latents, encode_text, gc, index, status, verify
from stages.discovery.media_table import read_media_table
from stages.maintenance.checks import CacheSpec
from tests.forms import first, in_turn, long

FAMILY, TASK = "kandinsky5-image", "t2i"


@pytest.fixture
def indexed(encoded, built):
    """A set of four pictures: three, and one in a second plan that requires the first plan."""
    return built(encoded, one_more)


def one_more(home) -> None:
    home.image("new.png", (64, 64), "a new one", 40)
    for program in (discover, bucket, encode_text, encode_latents, index):
        home.run(program.run)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGE_KINDS = {
    "flipped": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
}


def files(home, top: str) -> dict[str, bytes]:
    folder = home.root / top
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "damage"),
    first(2, in_turn(["index.arrow", "the pointer", "set.json", "texts.arrow", "shards.arrow"], DAMAGE_KINDS)),
)
def test_index_writes_a_damaged_set_again(indexed, file, damage) -> None:
    before = files(indexed, "sets")
    name = f"current-{FAMILY}-{TASK}.json" if file == "the pointer" else next(n for n in before if n.endswith(file))
    DAMAGE_KINDS[damage](indexed.root / "sets" / name)
    foreseen = indexed.run(index.run, dry_run=True)
    assert foreseen.exit_code == 0 and foreseen.remaining == (0 if file == "the pointer" else 4)
    report = indexed.run(index.run)
    assert (report.exit_code, report.done, report.skipped) == ((0, 0, 4) if file == "the pointer" else (0, 4, 0))
    assert files(indexed, "sets") == before
    assert indexed.run(index.run).skipped == 4
    assert len(open_set(Store(indexed.root), "current", FAMILY, TASK)) == 4


@pytest.mark.parametrize(
    ("file", "number"),
    first(2, in_turn(["samples.arrow", "plan.json", "texts.arrow", "units.arrow", "active.arrow"], [0, 1])),
)
def test_bucket_plans_again_what_a_damaged_plan_held(indexed, file, number) -> None:
    """Nothing is encoded again, because units are named by their members, so their shards are found."""
    name = plans.list_plans(Store(indexed.root))[number]
    flip(indexed.root / "plans" / name / file)
    with pytest.raises(DamageError) as caught:
        indexed.run(bucket.run, dry_run=True)
    assert name in str(caught.value) and "latentpress bucket" in caught.value.next_step
    report = indexed.run(bucket.run)
    assert report.exit_code == 0 and f"damaged/plans/{name}.1" in indexed.said
    assert set(files(indexed, f"damaged/plans/{name}.1")) >= {file, "plan.json"}
    for program in (encode_text, encode_latents):
        assert indexed.run(program.run, dry_run=True).remaining == 0
    assert indexed.run(index.run).exit_code == 0
    assert indexed.run(verify.run).exit_code == 0
    assert "(unchanged)" in indexed.run(bucket.run).details["generation"]


@pytest.mark.parametrize("damage", ["flipped", long("cut"), long("empty")])
def test_discover_reads_the_media_again(indexed, damage) -> None:
    table = indexed.root / "media/photos/media.arrow"

    def rows() -> list[
        dict
    ]:  # without the modification times of the captions, which differ in each copy of the project
        return read_media_table(Store(indexed.root), "photos").drop_columns("captions_version").to_pylist()

    before = rows()
    DAMAGE_KINDS[damage](table)
    for program in (bucket.run, status.run):
        with pytest.raises(DamageError) as caught:
            indexed.run(program)
        assert str(table) in str(caught.value) and "latentpress discover" in caught.value.next_step
    report = indexed.run(discover.run)
    assert report.exit_code == 0 and "read again" in indexed.said
    assert rows() == before


@pytest.mark.slow
def test_a_stage_does_a_unit_again_whose_list_is_damaged(indexed) -> None:
    folder = f"encode-text/{encode_text.STAGE.fingerprint(indexed.config())}"
    store, unit = Store(indexed.root), next(iter(indexed.shards("text"))).split("/")[-1].removesuffix(".arrow")
    rejects.write_rejects(store, folder, unit, [rejects.make_reject("encode-text", "0" * 32, "x", "odd", "it is odd")])
    flip(indexed.root / f"rejects/{folder}/{unit}.arrow")
    report = indexed.run(verify.run)
    assert report.exit_code == 4 and report.next_steps == ["latentpress encode-text"]
    assert indexed.run(encode_text.run, dry_run=True).remaining
    assert indexed.run(encode_text.run).exit_code == 0 and "its unit is encoded again" in indexed.said
    assert indexed.run(verify.run).exit_code == 0


TABLES = ["media", "units", "set", "plan", "current", "samples", "texts", "active", "index", "shards"]


def one(home, what: str) -> Path:
    return min(path for top in ("media", "plans", "sets") for path in (home.root / top).rglob(f"{what}*.*"))


@pytest.mark.parametrize(("what", "damage"), first(3, in_turn(TABLES, ["flipped", "cut"])))
def test_verify_finds_damage_and_repairs_it(indexed, what, damage) -> None:
    path = one(indexed, what)
    DAMAGE_KINDS[damage](path)
    rel = path.relative_to(indexed.root).as_posix()
    report = indexed.run(verify.run)
    assert report.exit_code == 4 and rel in [row["path"] for row in report.damage]
    program = {"media": "discover", "plans": "bucket", "sets": "index"}[rel.split("/")[0]]
    assert f"latentpress {program}" in report.next_steps
    report = indexed.run(verify.run, repair=True)
    if what == "media":
        assert report.exit_code == 4 and report.next_steps == ["latentpress discover"]
        return
    assert report.exit_code == 0 and report.details["damaged_tables"] == [rel]
    assert indexed.run(verify.run).exit_code == 0
    assert indexed.run(index.run).exit_code == 0


def test_gc_removes_nothing_while_a_plan_is_damaged(indexed) -> None:
    flip(one(indexed, "units"))
    before = files(indexed, "latents")
    with pytest.raises(DamageError):
        indexed.run(gc.run, yes=True, keep_days=0)
    assert files(indexed, "latents") == before


FLUX = CacheSpec.of(Provenance(stage="encode-latents", autoencoder="flux"))


def row(**shapes: tuple[int, ...]) -> ShardRow:
    return ShardRow("a", {name: Array.from_numpy(np.zeros(shape, np.float32)) for name, shape in shapes.items()})


CLIP = CacheSpec((8, 4), 16)  # its latents have 3 frames of the 9 frames


@pytest.mark.parametrize(
    ("spec", "tensors", "problem"),
    [
        (FLUX, {"latent": (16, 1, 8, 12)}, None),
        (FLUX, {"latent": (32, 1, 8, 12)}, None),  # mean and log-variance
        (FLUX, {"latent": (16, 1, 8, 12), "condition": (16, 1, 8, 12), "mask": (1, 8, 12)}, None),
        (FLUX, {"latent": (16, 1, 12, 8)}, "bucket 96x64@1"),
        (FLUX, {"latent": (4, 1, 8, 12)}, "bucket 96x64@1"),
        (FLUX, {"latent": (16, 1, 8, 12), "mask": (1, 12, 8)}, r"\(1, 8, 12\)"),
        (FLUX, {"latent": (16, 1, 8, 12), "mask": (1, 1, 8, 12)}, "shape"),
        (FLUX, {"latent": (16, 1, 8, 12), "condition": (16, 2, 8, 12)}, "condition"),
        (FLUX, {"embeds": (0, 4)}, "embeds"),
        (FLUX, {}, "no tensors"),
        (CLIP, {"latent": (16, 3, 8, 12), "mask": (3, 8, 12)}, None),
        (CLIP, {"latent": (16, 3, 8, 12), "mask": (1, 8, 12)}, r"mask has shape .*\(3, 8, 12\)"),
    ],
)
def test_shapes_are_those_of_the_bucket(spec, tensors, problem) -> None:
    bucket = "96x64@1" if spec is FLUX else "96x64@9"
    if problem is None:
        spec.check(row(**tensors), bucket)
    else:
        with pytest.raises(ValueError, match=problem):
            spec.check(row(**tensors), bucket)
