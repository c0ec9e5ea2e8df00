"""The encoding stages as programs: which samples are encoded, and which again after a change."""

import json
import shutil
from pathlib import Path

import pytest

from cache.shards.shard_io import open_reader
from cache.store.store import Store
from stages import bucket, discover, encode_latents, encode_text, index
from stages.encoding.text.worker import TextWorker
from tests.forms import in_turn, long
from tests.s3_server import BUCKET
from tests.stages.encoded_photos import IMAGE, encode, plan_four, prepare


@pytest.fixture
def encoded(photos, built):
    """The photographs with all their shards."""
    return built(photos, encode)


@pytest.mark.slow
def test_everything_once_and_nothing_the_second_time(photos) -> None:
    text, latents = encode(photos)
    assert (text.done, latents.done) == (5, 4)  # four captions and the null prompt
    before = photos.shards("text"), photos.shards("latents")
    text, latents = encode(photos)
    assert (text.done, text.skipped, latents.done, latents.skipped) == (0, 5, 0, 4)
    assert (photos.shards("text"), photos.shards("latents")) == before


def test_dry_run_says_how_much_and_writes_nothing(photos) -> None:
    text, latents = encode(photos, dry_run=True)
    assert (text.remaining, latents.remaining) == (5, 4)
    assert photos.shards("text") == photos.shards("latents") == {}


@pytest.mark.slow
def test_texts_longer_than_the_limit_are_counted_and_listed(photos) -> None:
    """The run that encodes them lists them, and each later index."""
    overrides = "text.max_length=6", "cache.format=webdataset"
    report = encode(photos, *overrides)[0]
    store, limited = Store(photos.root), {}
    for name in photos.shards("text"):
        shard = open_reader(store, f"text/{name}")
        for row in map(shard.read, range(len(shard))):
            if row.info["tokens"] > 6:
                limited[row.id] = f"6 of {row.info['tokens']} tokens kept"
    assert len(limited) > 1
    assert {row["item"]: row["reason"] for row in report.truncated} == limited
    assert f"{len(limited)} truncated" in report.summary()
    assert all(row["path"] in report.summary() for row in report.truncated)
    joined = photos.run(index.run, *overrides)
    assert sorted(joined.truncated, key=str) == sorted(report.truncated, key=str)


@pytest.mark.slow
def test_a_part_does_its_units_and_stops(project) -> None:
    """The bytes equal the bytes of one run, and a process without --shard encodes the remaining units."""
    home = project(IMAGE, cache={"unit_mib": 0.004})
    plan_four(home)
    home.run(encode_latents.run)
    shards = home.shards("latents")
    prepare(home, "root=parts")
    reports = [home.run(encode_latents.run, "root=parts", shard=shard) for shard in ("1/2", "1/2", None)]
    assert [(report.done, report.exit_code) for report in reports] == [(2, 0), (0, 0), (2, 0)]
    folder = home.folder / "parts" / "latents"
    assert {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.arrow")} == shards


@pytest.mark.long
@pytest.mark.parametrize(
    ("unit_mib", "parts", "root"),
    in_turn([0.004, 128], [(None, None), ("0/1", "0/1")], [f"s3://{BUCKET}/work", "work"]),
)
def test_jobs_on_the_same_units_encode_each_once(project, monkeypatch, s3, root, parts, unit_mib) -> None:
    """Except for the unit that the first job encodes while the second encodes all other units: a job lists the shards
    again before it encodes a unit, even if it has read several units ahead."""
    home = project(IMAGE, root=root, cache={"unit_mib": unit_mib}, train={"shuffle_shards": 2})
    for number in range(10):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    home.run(discover.run)
    home.run(bucket.run)
    reports = []
    real = TextWorker.encode

    def encode(worker: TextWorker, *batch):
        if not reports:
            reports.append(None)
            reports[0] = home.run(encode_text.run, shard=parts[1])
        return real(worker, *batch)

    monkeypatch.setattr(TextWorker, "encode", encode)
    first = home.run(encode_text.run, shard=parts[0])
    units = home.run(encode_text.run, dry_run=True)
    assert units.remaining == 0 and units.skipped == 11, "ten captions and the null prompt"
    unit_samples = 1 if unit_mib < 1 else 11
    assert 11 <= first.done + reports[0].done <= 11 + unit_samples
    assert first.exit_code == reports[0].exit_code == 0


def changed(home, *overrides: str) -> tuple[int, int]:
    """Numbers of (texts, samples) that are encoded again after a change."""
    prepare(home, *overrides)
    text, latents = encode(home, *overrides)
    return text.done, latents.done


@pytest.mark.slow
def test_a_change_encodes_what_it_concerns_alone(encoded) -> None:
    shards, first = encoded.shards("latents"), encoded.media / "0.png"
    assert changed(encoded, "datasets.photos.resolution=96") == (0, 4)
    for suffix in (".png", ".txt"):
        (encoded.media / f"1{suffix}").rename(encoded.media / f"other{suffix}")
    assert changed(encoded) == (0, 0), "after the change back, and a file that was renamed"
    content = first.read_bytes()
    first.unlink()
    assert changed(encoded) == (0, 0) and encoded.run(index.run).details["samples"] == 3
    first.write_bytes(content)
    (encoded.media / "0.txt").write_text("quite another caption")
    assert changed(encoded) == (1, 0), "a picture that was there before has another caption"
    details = encoded.run(index.run).details
    assert (details["samples"], details["texts"]) == (4, 5), "the old caption is not in the set any longer"
    encoded.image("0.png", (96, 64), "quite another caption", seed=99)
    encoded.image("new.png", (64, 64), "something new", seed=7)
    assert changed(encoded) == (1, 2), "a picture that has changed, and a new one"
    assert shards.items() <= encoded.shards("latents").items()


def test_settings_that_change_bytes_change_the_cache_and_others_do_not(photos) -> None:
    config = photos.config()
    text, latents = encode_text.STAGE.fingerprint(config), encode_latents.STAGE.fingerprint(config)

    def prints(*overrides: str) -> tuple[bool, bool]:
        changed_config = photos.config(*overrides)
        return encode_text.STAGE.fingerprint(changed_config) != text, encode_latents.STAGE.fingerprint(
            changed_config
        ) != latents

    assert prints("model.precision=bfloat16") == (True, True)
    assert prints("text.precision=bfloat16") == (True, False)
    assert prints("latents.precision=bfloat16") == (False, True)
    assert prints("text.max_length=256") == (True, False)
    assert prints("text.storage=float8") == (True, False)
    assert prints("text.storage=exact", "text.positions=pipeline") == (False, False)
    assert prints("latents.posterior=mode") == (False, True)
    assert prints("latents.decoder=decord") == (False, False)  # pictures only
    assert prints("model.flavour=i2i-lite-sft", "datasets.photos.conditioning_data=media") == (True, False)  # template
    for harmless in ("train.steps=5", "cache.unit_mib=9", "cache.format=webdataset", "stages.encode-text.workers=3"):
        assert prints(harmless) == (False, False), harmless
    assert prints("datasets.photos.media_root=/elsewhere", "train.seed=4") == (False, False)


@pytest.mark.parametrize(
    ("part", "which"), [("text_encoder", (True, False)), ("vae", (False, True)), ("transformer", (False, False))]
)
def test_changed_weights_change_the_cache_of_their_stage(photos, tmp_path: Path, part: str, which: tuple) -> None:

    copy = tmp_path / "copy"
    shutil.copytree(photos.settings["model"]["path"], copy)
    config = photos.config()
    config_of_copy = photos.config(f"model.path={copy}")
    assert encode_text.STAGE.fingerprint(config_of_copy) == encode_text.STAGE.fingerprint(config)
    weights = next((copy / part).glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    import cache.models.weights

    cache.models.weights._hashes.clear()
    changes = (
        encode_text.STAGE.fingerprint(config_of_copy) != encode_text.STAGE.fingerprint(config),
        encode_latents.STAGE.fingerprint(config_of_copy) != encode_latents.STAGE.fingerprint(config),
    )
    assert changes == which


@pytest.mark.slow
@pytest.mark.parametrize("kind", [long("kandinsky5-image-i2i"), "kandinsky5-video-i2v"])
def test_every_flavour_from_media_to_set(project, kind: str) -> None:
    home = project(kind)
    i2i, video = kind.endswith("i2i"), "video" in kind
    for number in range(2):
        if video:
            home.video(f"{number}.mp4", 12, caption=f"clip {number}")
        else:
            home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    if i2i:
        home.settings["datasets"][0]["conditioning_data"] = "sources"
        for number in range(2):
            home.image(f"../sources/{number}.png", (80, 80), "", 10 + number)
    prompt = {"name": "try", "prompt": "a try"}
    if kind.endswith(("i2i", "i2v")):
        home.image("../first.png", (70, 64), "")
        prompt["image"] = "first.png"
    home.settings["validation"] = {"size": "64x64@9" if video else "64x64", "prompts": [prompt]}
    prepare(home)
    encode(home)
    report = home.run(index.run)
    assert (report.exit_code, report.details["samples"]) == (0, 2)
    meta = json.loads((home.root / report.details["set"] / "set.json").read_text())
    (entry,) = meta["validation"]
    assert (entry["condition"] is not None) == kind.endswith(("i2i", "i2v"))
    assert (meta["null_text"] is None) == i2i
    for name in home.shards("latents"):
        shard = open_reader(Store(home.root), f"latents/{name}")
        for row in range(len(shard)):
            tensors = shard.read(row).tensors
            frames = 3 if video and "@9" in shard.meta.bucket else 1
            assert tensors["latent"].shape[1] == frames
            assert ("condition" in tensors) == (
                kind.endswith(("i2i", "i2v")) and ((i2i and len(shard) > 1) or frames == 3)
            )
