import os
from pathlib import Path

import pytest

from cache.sets import rejects
from cache.sets.set_lookup import current_plan
from cache.store.store import Store
from schemas.errors import LatentpressError
from stages import bucket, discover
from stages.discovery.media_table import media_table_path, read_media_table

MANY = "stages.max_reject_fraction=1.0"


def rows_of(home) -> list[dict]:
    return read_media_table(Store(home.root), "photos").to_pylist()


def test_finds_images_with_their_captions(project) -> None:
    home = project()
    home.image("one.png", (64, 48), "first line\n\n  second line \nfirst line\n")
    home.image("deep/er/two.jpg", (30, 90))
    (home.media / "notes.md").write_text("not media")
    report = home.run(discover.run)
    rows = rows_of(home)
    assert [(row["path"], row["width"], row["height"]) for row in rows] == [
        ("deep/er/two.jpg", 30, 90),
        ("one.png", 64, 48),
    ]
    assert rows[1]["captions"] == ["first line", "second line"]
    assert report.exit_code == 0
    assert report.done == 2
    assert report.details["datasets"][0]["other_files"] == "1: .md 1"


def read(report, dataset: str = "photos") -> int:
    return next(row["files_read"] for row in report.details["datasets"] if row["dataset"] == dataset)


def test_an_unchanged_file_is_not_read_again(project) -> None:
    home = project()
    home.image("one.png")
    changed = home.image("two.png", seed=1)
    assert read(home.run(discover.run)) == 2
    table = home.root / media_table_path("photos")
    before = table.stat()
    report = home.run(discover.run)
    assert (read(report), report.skipped, report.done) == (0, 2, 0)
    assert table.stat().st_mtime_ns == before.st_mtime_ns
    first = rows_of(home)
    (home.media / "one.png").write_bytes(b"x" * (home.media / "one.png").stat().st_size)
    os.utime(home.media / "one.png", ns=(1, int(first[0]["version"])))  # neither size nor time shows the change
    home.image("two.png", (80, 60), seed=2)
    os.utime(changed, ns=(1, 1))
    report = home.run(discover.run)
    assert (read(report), report.done, report.details["datasets"][0]["changed"]) == (1, 1, 1)
    assert rows_of(home)[0] == first[0]
    assert (rows_of(home)[1]["width"], rows_of(home)[1]["version"]) == (80, "1")


def test_a_changed_caption_is_noticed_without_reading_the_media(project) -> None:
    home = project()
    path = home.image("one.png", caption="before")
    home.run(discover.run)
    (before,) = rows_of(home)
    path.with_suffix(".txt").write_text("after")
    path.write_bytes(b"x" * before["size"])  # would be rejected if it was read
    os.utime(path, ns=(1, int(before["version"])))
    report = home.run(discover.run)
    (after,) = rows_of(home)
    assert after["captions"] == ["after"]
    assert after | {"captions": ["before"], "captions_version": before["captions_version"]} == before
    assert report.details["datasets"][0]["captions_changed"] == 1
    assert (report.done, report.skipped, report.details["datasets"][0]["changed"]) == (0, 1, 0)


@pytest.mark.parametrize("source", ["folder", "manifest"])
def test_a_caption_of_the_same_length_and_time_is_read_again(project, source: str) -> None:
    home = project()
    path = home.image("one.png", caption="before").with_suffix(".txt")
    options = ["datasets.photos.caption_strategy=textfile"]
    if source == "manifest":
        (home.folder / "list.csv").write_text("path\nmedia/one.png\n")
        options.append("datasets.photos.instance_data_dir=list.csv")
    home.run(discover.run, *options)
    status = path.stat()
    path.write_text("behind")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_mtime_ns, path.stat().st_size) == (status.st_mtime_ns, status.st_size)
    report = home.run(discover.run, *options)
    assert rows_of(home)[0]["captions"] == ["behind"]
    assert (report.done, read(report), report.details["datasets"][0]["captions_changed"]) == (0, 1, 1)
    assert read(home.run(discover.run, *options)) == 0


def test_bad_input_is_rejected_with_its_reason_and_stops_nothing(project) -> None:
    home = project("kandinsky5-video-t2v")
    home.image("good.png")
    content = home.video("cut.mp4").read_bytes()
    (home.media / "cut.mp4").write_bytes(content[: len(content) // 3])
    for name, data in (
        ("empty.jpg", b""),
        ("empty.mp4", b""),
        ("text.jpg", b"not a picture"),
        ("text.mp4", b"no clip"),
    ):
        (home.media / name).write_bytes(data)
        (home.media / name).with_suffix(".txt").write_text("x")
    home.image("silent.png", caption="").with_suffix(".txt").unlink()
    home.image("blank.png", caption=" \n \n")
    home.image("latin.png").with_suffix(".txt").write_bytes("gar\xe7on".encode("latin-1"))
    report = home.run(discover.run, MANY)
    reasons = home.rejects(report)
    assert [row["path"] for row in rows_of(home)] == ["good.png"]
    assert report.exit_code == 0
    assert reasons["empty.jpg"] == reasons["empty.mp4"] == "empty-file"
    assert reasons["text.jpg"] == "not-an-image"
    assert reasons["silent.png"] == "no-caption"
    assert reasons["blank.png"] == "empty-caption"
    assert reasons["latin.png"] == "caption-not-utf8"
    assert {"cut.mp4", "text.mp4"} <= set(reasons)
    for row in report.rejects:
        assert row["path"] in row["message"] or Path(row["path"]).stem in row["message"]


def test_a_dry_run_counts_what_was_rejected_as_no_work_and_a_mended_file_leaves_the_rejects(project) -> None:
    home = project()
    home.image("good.png")
    path = home.image("bad.png", caption="")
    assert home.run(discover.run, MANY, dry_run=True).remaining == 2
    assert not home.root.exists(), "a dry run writes nothing"
    home.run(discover.run, MANY)
    dry_report = home.run(discover.run, MANY, dry_run=True)
    assert (dry_report.remaining, dry_report.skipped) == (0, 2)
    path.with_suffix(".txt").write_text("now it has one")
    assert home.run(discover.run).rejects == []
    assert not (home.root / "rejects/discover/photos.arrow").exists()


def test_items_without_captions_name_three_ways_to_caption_them(project) -> None:
    home = project()
    for number in range(4):
        home.image(f"{number}.png", caption=None)
    home.image("captioned.png", caption="a picture")
    with pytest.raises(LatentpressError, match="4 of 5") as caught:
        home.run(discover.run)
    for way in ("datasets.photos.trigger=", "`latentpress caption`", "`latentpress ui`"):
        assert way in caught.value.next_step
    report = home.run(discover.run, "datasets.photos.trigger=ohwx woman")
    assert report.details["datasets"][0]["default_caption"] == "'ohwx woman' for 4 items without one"
    assert report.rejects == [] and len(rows_of(home)) == 5
    home.run(bucket.run, "datasets.photos.trigger=ohwx woman")
    plan = current_plan(Store(home.root), home.config("datasets.photos.trigger=ohwx woman"))
    assert {*plan.text_table["text"].to_pylist()} >= {"ohwx woman", "ohwx woman a picture"}


def test_too_many_rejects_are_listed_though_the_stage_stops(project) -> None:
    home = project()
    for number in range(3):
        home.image(f"bad{number}.png").write_bytes(b"")
    with pytest.raises(LatentpressError, match="max_reject_fraction") as caught:
        home.run(discover.run)
    listed = caught.value.message.splitlines()[1:]
    assert len(listed) == 3 and all(line.count("bad") == 1 for line in listed), "named once"
    assert [row["reason"] for row in rejects.read_stage(Store(home.root), "discover")["photos"]] == ["empty-file"] * 3


@pytest.mark.slow
def test_new_removed_and_changed_items_are_counted(project) -> None:
    home = project()
    for number in range(4):
        home.image(f"{number}.png", seed=number)
    first = home.run(discover.run).details["datasets"][0]
    assert (first["new"], first["removed"], first["changed"]) == (4, 0, 0)
    (home.media / "0.png").unlink()
    home.image("1.png", (90, 90))
    home.image("new.png", seed=3)  # the bytes of 3.png
    report = home.run(discover.run)
    counts = report.details["datasets"][0]
    assert (counts["new"], counts["removed"], counts["changed"], counts["files_read"]) == (1, 1, 1, 2)
    assert counts["duplicate_files"] == 1
    assert [row["path"] for row in rows_of(home)] == ["1.png", "2.png", "3.png", "new.png"]


def test_a_folder_of_two_datasets_is_hashed_once_and_each_names_what_it_rejects(project) -> None:
    home = project()
    home.settings["datasets"].append(home.settings["datasets"][0] | {"id": "again", "prepend": "a photograph of "})
    for number in range(3):
        home.image(f"{number}.png", seed=number)
    home.image("bad.png").write_text("no picture")
    report = home.run(discover.run, MANY)
    assert (report.done, report.skipped, read(report)) == (3, 3, 4)
    assert read(report, "again") == 1, "only the damaged file"
    tables = [read_media_table(Store(home.root), name) for name in ("photos", "again")]
    assert tables[0].equals(tables[1]) and len(tables[0]) == 3
    listed = report.summary().partition("Rejected:")[2]
    assert "photos/bad.png  " in listed and "again/bad.png  " in listed
    home.image("0.png", (90, 90))  # changed, new, and with `--rehash`: each is read once
    home.image("new.png", seed=9)
    report = home.run(discover.run, MANY)
    assert (report.done, read(report), read(report, "again")) == (2, 3, 1)
    report = home.run(discover.run, MANY, rehash=True)
    assert (report.done, read(report), read(report, "again")) == (4, 5, 1)
    (home.folder / "other").mkdir()
    (home.folder / "other" / "0.png").write_bytes((home.media / "1.png").read_bytes())
    os.utime(home.folder / "other" / "0.png", ns=((home.media / "0.png").stat().st_mtime_ns,) * 2)
    home.settings["datasets"][1]["instance_data_dir"] = "other"
    (home.folder / "other" / "0.txt").write_text("other")
    report = home.run(discover.run, MANY, accept_removed=True)
    assert read(report, "again") == 1, "another folder has its own files"


@pytest.mark.slow
def test_other_settings_read_again_what_they_affect_and_no_more(project) -> None:
    home = project("kandinsky5-video-t2v")
    home.image("still.jpg")
    home.image("maybe.png", seed=1)
    home.video("clip.mp4")
    home.run(discover.run)
    assert home.run(discover.run, "datasets.photos.animations=video").done == 1
    assert home.run(discover.run, "datasets.photos.animations=video").done == 0


def test_a_table_can_be_taken_as_it_is(project) -> None:
    home = project()
    home.image("one.png")
    with pytest.raises(LatentpressError, match="is not discovered"):
        home.run(discover.run, "datasets.photos.skip_file_discovery=true")
    home.run(discover.run)
    home.image("two.png")
    report = home.run(discover.run, "datasets.photos.skip_file_discovery=true")
    assert (report.skipped, report.done, len(rows_of(home))) == (1, 0, 1)


def test_a_table_of_another_version_is_not_read(project) -> None:
    home = project()
    home.image("one.png")
    home.run(discover.run)
    store = Store(home.root)
    store.write_table(
        media_table_path("photos"), store.read_table(media_table_path("photos")).replace_schema_metadata(None)
    )
    with pytest.raises(LatentpressError, match="latentpress discover"):
        rows_of(home)
    assert home.run(discover.run).done == 1
    assert len(rows_of(home)) == 1


def test_a_dry_run_counts_what_is_to_be_read(project) -> None:
    home = project()
    size = sum(home.image(f"{number}.png", (300, 300), seed=number).stat().st_size for number in range(3))
    counts = home.run(discover.run, dry_run=True).details["datasets"][0]
    assert (counts["files"], counts["files_to_read"]) == (3, 3)
    assert counts["to_read_mib"] == pytest.approx(size / 2**20, abs=0.06)
    home.run(discover.run)
    counts = home.run(discover.run, dry_run=True).details["datasets"][0]
    assert (counts["files"], counts["files_to_read"], counts["to_read_mib"]) == (3, 0, 0)


# -- companions ------------------------------------------------------------------------------------------------------


def sources(project, *names: str):
    home = project("kandinsky5-image-i2i")
    home.settings["datasets"][0]["conditioning_data"] = "sources"
    for name in names:
        home.image(f"../sources/{name}", seed=len(name))
    return home


def test_a_folder_of_sources_is_listed_once(project, monkeypatch: pytest.MonkeyPatch) -> None:
    home = sources(project, "0.png", "1.png", "2.png")
    for number in range(3):
        home.image(f"{number}.png", seed=number)
    listed = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (listed.append(Path(str(path)).name), scandir(path))[1])
    assert home.run(discover.run, "stages.discover.workers=1").done == 3
    assert listed.count("sources") == 1
