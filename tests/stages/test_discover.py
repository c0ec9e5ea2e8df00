import os
from pathlib import Path

import pytest

from cache import rejects
from cache.store import Store
from schemas.errors import LatentpressError
from stages import discover
from stages.discover import read_media

MANY = "stages.max_reject_fraction=1.0"


def test_finds_images_with_their_captions(project) -> None:
    home = project()
    home.image("one.png", (64, 48), "first line\n\n  second line \nfirst line\n")
    home.image("deep/er/two.jpg", (30, 90))
    (home.media / "notes.md").write_text("not media")
    report = home.run(discover.run)
    rows = read_media(Store(home.root), "photos")
    assert [(row["path"], row["width"], row["height"]) for row in rows] == [
        ("deep/er/two.jpg", 30, 90),
        ("one.png", 64, 48),
    ]
    assert rows[1]["captions"] == ["first line", "second line"]
    assert report.exit_code == 0
    assert report.done == 2
    assert report.details["photos"]["other files"] == "1 other files: .md 1"


def test_finds_videos_and_reads_their_headers(project) -> None:
    home = project("kandinsky5-video-t2v")
    home.video("clip.mp4", frames=24, size=(64, 48), rate=12)
    home.run(discover.run)
    (row,) = read_media(Store(home.root), "photos")
    assert (row["kind"], row["width"], row["height"], row["frames"]) == ("video", 64, 48, 24)
    assert row["rate"] == pytest.approx(12)
    assert row["duration"] == pytest.approx(2.0)


def test_an_unchanged_file_is_not_read_again(project, monkeypatch: pytest.MonkeyPatch) -> None:
    home = project()
    home.image("one.png")
    changed = home.image("two.png", seed=1)
    home.run(discover.run)
    read: list[str] = []
    original = discover.hash_file
    monkeypatch.setattr(discover, "hash_file", lambda path: read.append(path.name) or original(path))
    report = home.run(discover.run)
    assert (read, report.skipped, report.done) == ([], 2, 0)
    home.image("two.png", (80, 60), seed=2)
    os.utime(changed, ns=(1, 1))
    home.run(discover.run)
    assert read == ["two.png"]


def test_a_changed_caption_is_noticed_without_reading_the_media(project, monkeypatch: pytest.MonkeyPatch) -> None:
    home = project()
    path = home.image("one.png", caption="before")
    home.run(discover.run)
    monkeypatch.setattr(discover, "hash_file", lambda path: pytest.fail(f"read {path}"))
    path.with_suffix(".txt").write_text("after")
    home.run(discover.run)
    assert read_media(Store(home.root), "photos")[0]["captions"] == ["after"]


def test_bad_input_is_set_aside_with_its_reason_and_stops_nothing(project) -> None:
    home = project("kandinsky5-video-t2v")
    home.image("good.png")
    whole = home.video("cut.mp4").read_bytes()
    (home.media / "cut.mp4").write_bytes(whole[: len(whole) // 3])
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
    assert [row["path"] for row in read_media(Store(home.root), "photos")] == ["good.png"]
    assert report.exit_code == 0
    assert reasons["empty.jpg"] == reasons["empty.mp4"] == "empty-file"
    assert reasons["text.jpg"] == "not-an-image"
    assert reasons["silent.png"] == "no-caption"
    assert reasons["blank.png"] == "empty-caption"
    assert reasons["latin.png"] == "caption-not-utf8"
    assert {"cut.mp4", "text.mp4"} <= set(reasons)
    for row in report.set_aside:
        assert row["path"] in row["message"] or Path(row["path"]).stem in row["message"]


def test_a_mended_file_leaves_the_rejects(project) -> None:
    home = project()
    home.image("good.png")
    path = home.image("bad.png", caption="")
    home.run(discover.run, MANY)
    path.with_suffix(".txt").write_text("now it has one")
    report = home.run(discover.run)
    assert report.set_aside == []
    assert not (home.root / "rejects/discover/photos.arrow").exists()


def test_a_dry_run_counts_what_was_set_aside_before_as_no_work(project) -> None:
    home = project()
    home.image("good.png")
    home.image("bad.png", caption="")
    assert home.run(discover.run, MANY, dry_run=True).remaining == 2
    home.run(discover.run, MANY)
    again = home.run(discover.run, MANY, dry_run=True)
    assert (again.remaining, again.skipped) == (0, 2)


def test_too_many_rejects_stop_with_the_list(project) -> None:
    home = project()
    home.image("good.png")
    (home.media / "bad.jpg").write_bytes(b"")
    (home.media / "bad.txt").write_text("x")
    with pytest.raises(LatentpressError, match="max_reject_fraction"):
        home.run(discover.run)


def test_an_absent_folder_is_named(project) -> None:
    home = project()
    home.media.rmdir()
    with pytest.raises(LatentpressError, match=r"instance_data_dir: .*media is not a folder"):
        home.run(discover.run)


def test_links_are_followed_inside_the_folder_only(project, tmp_path: Path) -> None:
    home = project()
    home.image("real/one.png")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.png").write_bytes((home.media / "real/one.png").read_bytes())
    (home.media / "link").symlink_to(home.media / "real")
    (home.media / "loop").symlink_to(home.media)
    (home.media / "out").symlink_to(outside)
    report = home.run(discover.run)
    assert [row["path"] for row in read_media(Store(home.root), "photos")] == ["link/one.png", "real/one.png"]
    assert report.details["photos"]["other files"] == "2 other files: link that leads outside 2"


def test_dry_run_writes_nothing(project) -> None:
    home = project()
    home.image("one.png")
    report = home.run(discover.run, dry_run=True)
    assert report.remaining == 1
    assert not home.root.exists()


def test_what_is_no_file_or_has_no_utf8_name_is_set_aside(project) -> None:
    home = project()
    home.image("good.png")
    content = (home.media / "good.png").read_bytes()
    strange = os.fsencode(home.media) + b"/strange\xff.png"
    with open(strange, "wb") as file:
        file.write(content)
    for name in ("gone.png", "pipe.png"):
        (home.media / name).with_suffix(".txt").write_text("x")
    (home.media / "gone.png").symlink_to(home.media / "never was.png")
    os.mkfifo(home.media / "pipe.png")
    report = home.run(discover.run, MANY)
    assert home.rejects(report) == {
        "gone.png": "missing",
        "pipe.png": "unreadable",
        "strange\\udcff.png": "name-not-utf8",
    }
    assert report.document()["exit_code"] == 0
    assert [row["path"] for row in read_media(Store(home.root), "photos")] == ["good.png"]


def test_too_many_rejects_are_listed_though_the_stage_stops(project) -> None:
    home = project()
    home.image("bad.png", caption="")
    with pytest.raises(LatentpressError, match="max_reject_fraction"):
        home.run(discover.run)
    assert [row["reason"] for row in rejects.read(Store(home.root), "discover")["photos"]] == ["empty-caption"]


def sources(project, *names: str):
    home = project("kandinsky5-image-i2i")
    home.settings["datasets"][0]["conditioning_data"] = "sources"
    for name in names:
        home.image(f"../sources/{name}", seed=len(name))
    return home


def test_a_source_has_the_very_name_of_its_target(project) -> None:
    home = sources(project, "one.jpg", "two.v2.png", "three.png", "three.jpg")
    for name in ("one.png", "two.png", "two.v2.png", "three.png"):
        home.image(name)
    report = home.run(discover.run, MANY)
    assert home.rejects(report) == {"two.png": "no-source", "three.png": "several-sources"}
    found = {row["path"]: row["source"] for row in read_media(Store(home.root), "photos")}
    assert found == {"one.png": "one.jpg", "two.v2.png": "two.v2.png"}


def test_a_folder_of_sources_is_listed_once(project, monkeypatch: pytest.MonkeyPatch) -> None:
    home = sources(project, "0.png", "1.png", "2.png")
    for number in range(3):
        home.image(f"{number}.png", seed=number)
    listed = []
    iterdir = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: (listed.append(path.name), iterdir(path))[1])
    assert home.run(discover.run, "stages.discover.workers=1").done == 3
    assert listed.count("sources") == 1
