"""Edited captions: they replace the captions of files in the plan, and verify, gc and status support them."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cache.sets.caption_edits import KEPT_TABLES, EditConflict, list_edit_tables, read_edits, write_edit
from cache.sets.plans import newest_plan
from cache.sets.set_lookup import current_plan
from cache.store.damage import DamageError
from cache.store.store import Store
from stages import bucket, discover, gc, status, verify
from stages.discovery.media_table import read_media_table
from tests.project import Project
from tests.s3_server import BUCKET, S3Server

A, B = "a" * 32, "b" * 32


@pytest.fixture
def home(project: Callable[..., Project]) -> Project:
    home_project = project()
    home_project.settings["datasets"][0]["prepend"] = "sks, "
    for number in range(2):
        home_project.image(f"{number}.png", (64, 64), f"picture {number}", number)
    home_project.run(discover.run)
    home_project.run(bucket.run)
    return home_project


def ids(home: Project) -> list[str]:
    return read_media_table(Store(home.root), "photos")["media_id"].to_pylist()


def active_texts(home: Project) -> set[str]:
    plan = current_plan(Store(home.root), home.config())
    texts = {row["text_id"]: row["text"] for row in plan.text_table.to_pylist()}
    return {texts[id] for row in plan.active.to_pylist() for id in row["texts"]}


def test_an_edit_is_one_text_and_its_end_none(home: Project) -> None:
    store, before = Store(home.root), current_plan(Store(home.root), home.config())
    write_edit(store, ids(home)[0], ["another", "two lines"])
    report = home.run(bucket.run)
    assert (report.done, report.details["edited_captions"]) == (2, 1)
    assert active_texts(home) == {"sks, another", "sks, two lines", "sks, picture 1"}
    assert (home.media / "0.txt").read_text() == "picture 0"
    assert home.run(bucket.run).details["generation"].endswith("(unchanged)")
    plan = current_plan(store, home.config())
    assert plan.info.key == before.info.key and newest_plan(store, before.info.key).name == plan.name
    assert home.run(status.run).details["edited_captions"] == 1
    write_edit(store, ids(home)[0], None, ["another", "two lines"])
    report = home.run(bucket.run)
    assert report.done == 0 and "edited_captions" not in report.details
    assert active_texts(home) == {"sks, picture 0", "sks, picture 1"}


def test_verify_and_gc_know_it(home: Project) -> None:
    store = Store(home.root)
    write_edit(store, ids(home)[0], ["first"])
    write_edit(store, ids(home)[0], ["second"], ["first"])
    assert home.run(verify.run).exit_code == 0
    report = home.run(gc.run, keep_days=0.0, yes=True)
    assert len(list_edit_tables(store)) == 2 and "other_files" not in report.details
    newest = Path(home.root) / list_edit_tables(store)[-1]
    newest.write_bytes(newest.read_bytes()[:-20])
    with pytest.raises(DamageError, match=r"captions/edits/000002\.arrow") as caught:
        home.run(bucket.run)
    assert "latentpress verify --repair" in caught.value.next_step
    report = home.run(verify.run)
    assert [row["path"] for row in report.damage] == ["captions/edits/000002.arrow"]
    repaired = home.run(verify.run, repair=True)
    assert repaired.details["moved_tables"] == ["damaged/captions/edits/000002.1.arrow"] and not repaired.damage
    home.run(bucket.run)
    assert active_texts(home) == {"sks, first", "sks, picture 1"}


def test_changes_at_once_are_all_kept(tmp_path: Path) -> None:
    def edit(number: int) -> None:
        store = Store(tmp_path)
        for turn in range(5):
            write_edit(store, f"{number:016d}{turn:016d}", [f"{number} {turn}"])

    threads = [threading.Thread(target=edit, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_edits(Store(tmp_path))) == 15
    assert len(list_edit_tables(Store(tmp_path))) == KEPT_TABLES


def test_in_an_object_store(s3: S3Server) -> None:
    """The second of two people who edit the same caption gets an error; all other edits stay."""
    pages = [Store(f"s3://{BUCKET}/work") for _ in range(2)]
    write_edit(pages[0], A, ["one"])
    write_edit(pages[1], B, ["other"])
    with pytest.raises(EditConflict):
        write_edit(pages[1], A, ["two"])
    write_edit(pages[1], A, ["two"], ["one"])
    assert read_edits(pages[0])["captions"].to_pylist() == [["two"], ["other"]]
    write_edit(pages[0], A, None, ["two"])
    assert read_edits(pages[1])["media_id"].to_pylist() == [B]
