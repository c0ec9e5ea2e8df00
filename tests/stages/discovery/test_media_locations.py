"""Media that is not there: a disk that is not mounted, a forgotten `media_root`, files that were deleted."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.errors import LatentpressError
from stages import bucket, discover, encode_latents, encode_text, encode_vision
from tests.forms import long
from tests.stages.discovery.missing_files import files, prepared, stops, unloaded

# -- discovery -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_discover_asks_before_most_of_what_it_knew_leaves_the_table(project) -> None:
    home = prepared(project(), 5)
    moved_folder = home.folder / "away"
    moved_folder.mkdir()
    for number in range(3):
        (home.media / f"{number}.png").rename(moved_folder / f"{number}.png")
    words = "datasets.photos.instance_data_dir", str(home.media), "2 items", "found 5", "media_root", "--accept-removed"
    stops(home, discover.run, *words)
    stops(home, discover.run, *words, dry_run=True)
    for path in home.media.iterdir():
        path.rename(moved_folder / path.name)
    stops(home, discover.run, "0 items", "found 5")
    home.media.rmdir()
    stops(home, discover.run, "does not exist", "media_root")
    moved_folder.rename(home.media)
    (home.media / "0.png").unlink()
    assert home.run(discover.run).details["datasets"][0]["removed"] == 1
    for number in range(1, 4):
        (home.media / f"{number}.png").unlink()
    assert home.run(discover.run, accept_removed=True).details["datasets"][0]["removed"] == 3
    assert home.run(discover.run).exit_code == 0


@pytest.mark.slow
def test_renamed_files_are_not_gone(project) -> None:
    home = prepared(project(), 3)
    home.media.rename(home.folder / "b")
    home.media.mkdir()
    (home.folder / "b").rename(home.media / "b")
    assert home.run(discover.run).details["datasets"][0]["removed"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("role", ["conditioning_data", "mask_data"])
def test_discover_asks_before_companions_leave_the_table(project, role: str) -> None:
    home = project("kandinsky5-image-i2i" if role == "conditioning_data" else "kandinsky5-image-t2i")
    home.settings["datasets"][0][role] = "beside"
    for number in range(2):
        home.image(f"../beside/{number}.png", (64, 64), "", 10 + number)
    prepared(home, 2)
    (home.folder / "beside").rename(home.folder / "away")
    stops(home, discover.run, f"datasets.photos.{role}", "does not exist")
    (home.folder / "beside").mkdir()
    stops(home, discover.run, f"datasets.photos.{role}", "0 ", "found 2", "--accept-removed")
    home.run(discover.run, "stages.max_reject_fraction=1.0", accept_removed=True)


def test_a_table_of_files_that_are_not_there(project) -> None:
    """The floor below which no share of bad files stops discover is none for missing ones."""
    home = project()
    home.image("there.png")
    table = home.folder / "list.csv"
    table.write_text("path,caption\n" + "".join(f"{home.folder}/away/{name}.png,x\n" for name in "ab"))
    home.settings["datasets"][0]["instance_data_dir"] = "list.csv"
    stops(home, discover.run, "datasets.photos.instance_data_dir", "2 of 2", "media_root")
    home.run(discover.run, "stages.max_reject_fraction=1.0")
    table.write_text(f"path,caption\n{home.media}/there.png,x\n{home.media}/not.png,x\n")
    report = home.run(discover.run)
    assert (report.done, home.rejects(report)) == (1, {"not.png": "missing"})


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a.jxl", "b.JXL", "c.svg"], [".jxl 2, .svg 1", "png", "convert"]),
        (["a.mp4"], [".mp4 1", "dataset_type: video"]),
        ([], ["is empty", "media_root"]),
    ],
)
def test_a_dataset_without_media_says_what_is_there(project, names: list[str], said: list[str]) -> None:
    home = project()
    for name in names:
        (home.media / name).write_bytes(b"x")
    stops(home, discover.run, "datasets.photos.instance_data_dir", str(home.media), "images", *said)
    home.image("one.png")
    assert home.run(discover.run).done == 1


@pytest.mark.slow
def test_rehash_finds_what_size_and_time_hide(project, built) -> None:
    home = built(project(), prepared)
    path = home.media / "0.png"
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    report = home.run(encode_latents.run)
    assert home.rejects(report) == {"0.png": "changed"}
    assert "--rehash" in report.rejects[0]["message"]
    assert home.run(discover.run).details["datasets"][0]["files_read"] == 0
    dataset_row = home.run(discover.run, rehash=True).details["datasets"][0]
    assert (dataset_row["files_read"], dataset_row["changed"]) == (4, 1)
    home.run(bucket.run)
    assert home.run(encode_latents.run).rejects == []
    before = files(home)
    home.run(discover.run, rehash=True)
    assert files(home) == before


# -- before a model is loaded ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, long(2), long(4)])
def test_a_place_that_is_not_there_stops_the_stage_and_changes_nothing(project, count: int) -> None:
    home = prepared(project(), count)
    home.media.rename(home.folder / "elsewhere")
    words = (
        "datasets.photos.instance_data_dir",
        str(home.media),
        "does not exist",
        f"{count} of {count}",
        "media_root",
    )
    stops(home, unloaded(encode_latents), *words)
    assert home.run(encode_latents.run, "datasets.photos.media_root=elsewhere").done == count


def test_a_media_root_that_is_wrong_is_named(project, built) -> None:
    home = built(project(), prepared)
    home.settings["datasets"][0]["media_root"] = "wrong"
    (home.folder / "wrong").mkdir()
    stops(home, unloaded(encode_latents), "datasets.photos.media_root", str(home.folder / "wrong"), "media_root=PLACE")


def test_most_of_a_place_is_missing_and_the_stage_stops_and_fewer_are_rejected(project, built) -> None:
    home = built(project(), prepared)
    for number in range(3):
        (home.media / f"{number}.png").rename(home.folder / f"{number}.png")
    stops(home, unloaded(encode_latents), "3 of 4 ", "0.png", "latentpress discover")
    (home.folder / "0.png").rename(home.media / "0.png")
    report = home.run(encode_latents.run)
    assert (report.done, home.rejects(report)) == (2, {"1.png": "missing", "2.png": "missing"})
    assert report.next_steps == ["latentpress encode-latents   # once the missing files are back"]


@pytest.mark.slow
def test_every_dataset_is_looked_at_by_itself(project) -> None:
    home = project()
    home.settings["datasets"].append(
        {"id": "few", "instance_data_dir": "few", "resolution": 64, "allow_upscale": True, "repeats": 3}
    )
    home.image("../few/a.png", caption="one of few", seed=40)
    prepared(home, 6)
    (home.folder / "few").rename(home.folder / "gone")
    stops(home, unloaded(encode_latents), "datasets.few.instance_data_dir", "1 of 1", "--set datasets.few.media_root=")


@pytest.mark.parametrize("stage", [encode_text, encode_latents])
def test_source_images_that_are_not_there(project, stage) -> None:
    home = project("kandinsky5-image-i2i")
    home.settings["datasets"][0]["conditioning_data"] = "sources"
    for number in range(4):
        home.image(f"../sources/{number}.png", (80, 80), "", 10 + number)
    prepared(home)
    (home.folder / "sources").rename(home.folder / "elsewhere")
    place = str(home.folder / "sources")
    stops(home, unloaded(stage), f"datasets.photos.conditioning_data: {place}", "datasets.photos.conditioning_data=")


@pytest.mark.slow
def test_masks_that_are_not_there_stop_what_reads_them_alone(project, tiny) -> None:
    home = project(vision={"model": str(tiny("dinov2")), "size": 84, "batch_size": 4})
    home.settings["datasets"][0]["mask_data"] = "masks"
    for number in range(4):
        home.image(f"../masks/{number}.png", (64, 64), "", 10 + number)
    prepared(home)
    (home.folder / "masks").rename(home.folder / "elsewhere")
    stops(home, unloaded(encode_latents), "datasets.photos.mask_data", str(home.folder / "masks"))
    assert home.run(encode_vision.run).done == 4
    home.media.rename(home.folder / "media away")
    for path in (home.root / "vision").rglob("*.arrow"):
        path.unlink()
    stops(home, unloaded(encode_vision), "datasets.photos.instance_data_dir")


@pytest.mark.slow
def test_images_of_validation_prompts_that_are_not_there(project) -> None:
    home = project("kandinsky5-image-i2i")
    home.settings["datasets"][0]["conditioning_data"] = "media"
    home.image("../first.png", (70, 64), "")
    home.settings["validation"] = {
        "size": "64x64",
        "prompts": [{"name": "try", "prompt": "a try", "image": "first.png"}],
    }
    prepared(home)
    (home.folder / "first.png").unlink()
    stops(home, unloaded(encode_latents), "validation.prompts", "first.png")
    stops(home, unloaded(encode_text), "validation.prompts", "first.png")
    stops(home, bucket.run, "first.png", "validation.prompts")


def test_a_dry_run_and_texts_without_images_need_no_media(project, built) -> None:
    home = built(project(), prepared)
    home.media.rename(home.folder / "elsewhere")
    assert home.run(encode_latents.run, dry_run=True).remaining == 4
    assert home.run(encode_text.run).done == 5


# -- in the midst of a run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", ["nothing", "empty"])
def test_a_disk_that_goes_while_the_stage_runs(project, built, left: str) -> None:
    home = built(project(), prepared)

    def go_and_load(job):
        home.media.rename(home.folder / "elsewhere")
        if left == "empty":
            home.media.mkdir()
        return encode_latents.STAGE.load_worker(job)

    with pytest.raises(LatentpressError, match=r"datasets\.photos\.instance_data_dir.*4 of 4 "):
        home.run(replace(encode_latents.STAGE, load_worker=go_and_load).run)
    assert home.shards("latents") == {} and not (home.root / "rejects/encode-latents").exists()


@pytest.mark.slow
def test_missing_media_is_not_counted_as_bad_media(project) -> None:
    home = prepared(project(cache={"unit_mib": 1}), 8)
    for number in range(4):
        Path(home.media / f"{number}.png").unlink()
    report = home.run(encode_latents.run, "stages.max_reject_fraction=0.0")
    assert (report.done, len(report.rejects), report.exit_code) == (4, 4, 0)
