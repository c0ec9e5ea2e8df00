"""gc lists only unused files, and removes only listed files."""

import json
import os
import shutil

import pytest

from cache.sets import rejects
from cache.sets.rejects import make_reject
from cache.store.layout import is_project_file
from cache.store.store import Store
from schemas.errors import LatentpressError, UsageError
from stages import bucket, discover, encode_latents, encode_text, gc, index, status, verify
from tests.forms import long

ENCODE = (encode_text, encode_latents)


@pytest.fixture
def indexed(project, built):
    """Three pictures, one per unit, encoded and indexed."""
    return built(project("kandinsky5-image-t2i", cache={"unit_mib": 0.004}), index_three)


def index_three(home) -> None:
    for number in range(3):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    for program in (discover, bucket, *ENCODE, index):
        home.run(program.run)
    shutil.rmtree(home.root / "jobs")  # reports of jobs, which gc removes when they are old


def files(home) -> set[str]:
    return {entry.name for entry in Store(home.root).list_files()}


def paths(report) -> list[str]:
    rows = report.details["unused"]
    return [] if isinstance(rows, str) else [row["path"] for row in rows]


def age(home, days: float) -> None:
    """Set the times of all files back by `days`."""
    for path in home.root.rglob("*"):
        if path.is_file():
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - days * 86400))


@pytest.mark.slow
def test_nothing_is_listed_of_a_root_in_use(indexed) -> None:
    age(indexed, 400)
    before = files(indexed)
    report = indexed.run(gc.run, yes=True, keep_days=0.0)
    assert (paths(report), report.exit_code, report.done) == ([], 0, 0)
    assert files(indexed) == before and all(map(is_project_file, before)) and "other_files" not in report.details


@pytest.mark.slow
def test_another_precision_leaves_caches_that_are_removed_only_when_old_and_only_on_yes(indexed) -> None:
    float32 = {f"{kind}/{name.split('/')[0]}" for kind in ("text", "latents") for name in indexed.shards(kind)}
    indexed.settings["model"]["precision"] = "bfloat16"
    for program in (*ENCODE, index):
        indexed.run(program.run)
    before = files(indexed)
    assert paths(indexed.run(gc.run)) == []  # all files were written today
    age(indexed, 31)
    listed = indexed.run(gc.run)
    assert {path for path in paths(listed) if path.startswith(("text/", "latents/"))} == float32
    assert any(path.startswith("sets/") for path in paths(listed))
    sizes = [row["mib"] for row in listed.details["unused"]]
    assert sizes == sorted(sizes, reverse=True)
    assert any("encode-latents (flux, float32" in row["what"] for row in listed.details["unused"])
    assert (listed.exit_code, listed.next_steps) == (0, ["latentpress gc --yes"])
    assert files(indexed) == before
    assert indexed.run(gc.run, yes=True, dry_run=True).done == 0 and files(indexed) == before
    report = indexed.run(gc.run, yes=True)
    assert report.done == len(before) - len(files(indexed)) > 0
    assert not any((indexed.root / cache).exists() for cache in float32)
    assert indexed.run(index.run).skipped == 3 and indexed.run(verify.run).exit_code == 0
    assert paths(indexed.run(gc.run, keep_days=0.0)) == []


def test_a_configuration_of_another_root_is_refused(indexed) -> None:
    config_file = indexed.folder / "other.yaml"
    config_file.write_text(json.dumps(indexed.settings | {"root": "elsewhere"}))
    with pytest.raises(UsageError, match=r"other\.yaml.*elsewhere"):
        indexed.run(gc.run, also=[config_file])


def test_a_configuration_without_a_plan_removes_nothing(indexed) -> None:
    indexed.settings["datasets"][0]["repeats"] = 7
    with pytest.raises(LatentpressError, match="plan") as caught:
        indexed.run(gc.run, yes=True, keep_days=0.0)
    assert "latentpress bucket" in caught.value.next_step


def test_units_of_deleted_files_go_and_the_set_in_use_keeps_its_own(indexed) -> None:
    for path in indexed.media.glob("2.*"):
        path.unlink()
    for program in (discover, bucket):
        indexed.run(program.run)
    age(indexed, 31)
    # The newest set still has three pictures, so all of its shards stay.
    shards = indexed.shards("latents")
    assert indexed.run(gc.run, yes=True).exit_code == 0
    assert indexed.shards("latents") == shards
    indexed.run(index.run)
    age(indexed, 31)
    report = indexed.run(gc.run, yes=True)
    assert any(path.startswith("latents/") for path in paths(report))
    assert len(indexed.shards("latents")) == len(shards) - 1
    assert indexed.run(status.run).remaining == 0
    assert indexed.run(verify.run).exit_code == 0
    assert [indexed.run(program.run).done for program in ENCODE] == [0, 0]
    assert indexed.run(index.run).skipped == 2


@pytest.mark.slow
def test_generations_that_hold_what_is_active_stay(indexed) -> None:
    indexed.image("3.png", (64, 64), "one more", 3)
    for program in (discover, bucket):
        indexed.run(program.run)
    for path in indexed.media.glob("3.*"):
        path.unlink()
    for program in (discover, bucket):
        indexed.run(program.run)
    names = sorted(path.name for path in (indexed.root / "plans").glob("*-*"))
    assert len(names) == 3
    age(indexed, 31)
    indexed.run(gc.run, yes=True)
    # The first generation holds the samples and the set was made of it; only the second held the removed sample.
    assert sorted(path.name for path in (indexed.root / "plans").glob("*-*")) == [names[0], names[2]]
    assert [indexed.run(program.run).remaining for program in (*ENCODE, index)] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("by_path", [True, long(False)])
def test_a_set_that_a_run_trains_on_stays(indexed, by_path) -> None:
    (old_set,) = [path.name for path in (indexed.root / "sets").iterdir() if path.is_dir()]
    run = indexed.folder / "output" / "first"
    run.mkdir(parents=True)
    name = str(indexed.root / "sets" / old_set) if by_path else old_set
    (run / "config.yaml").write_text(f"train: {{set: {name}}}\n")
    indexed.settings["model"]["precision"] = "bfloat16"
    for program in (*ENCODE, index):
        indexed.run(program.run)
    age(indexed, 31)
    before = indexed.shards("latents")
    indexed.run(gc.run, yes=True)
    assert (indexed.root / "sets" / old_set / "set.json").exists() and indexed.shards("latents") == before
    shutil.rmtree(run)
    indexed.run(gc.run, yes=True)
    assert not (indexed.root / "sets" / old_set).exists() and len(indexed.shards("latents")) < len(before)


def test_leftovers(indexed) -> None:
    store = Store(indexed.root)
    rejects.write_rejects(store, "discover", "photos", [make_reject("discover", "x", "x", "corrupt", "x")])
    rejects.write_rejects(store, "discover", "gone", [make_reject("discover", "x", "x", "corrupt", "x")])
    rejects.write_rejects(
        store, f"encode-text/{'0' * 24}", "text-1", [make_reject("encode-text", "x", "x", "corrupt", "x")]
    )
    store.publish_bytes(f"damaged/text/{'0' * 24}/text-1.1.arrow", b"x")
    store.publish_bytes("media/gone/media.arrow", b"x")
    store.publish_bytes("media/gone/partial/000000.arrow", b"x")
    store.publish_bytes("notes/mine.txt", b"not of this project")
    (indexed.root / "text" / ".half.arrow.0123456789abcdef.tmp").write_bytes(b"x")
    assert paths(indexed.run(gc.run)) == []
    age(indexed, 31)
    report = indexed.run(gc.run, yes=True)
    assert sorted(paths(report)) == [
        "",
        "damaged/text",
        "media/gone",
        "rejects/discover",
        "rejects/encode-text",
    ]
    names = files(indexed)
    assert {"notes/mine.txt", "rejects/discover/photos.arrow"} <= names
    assert not any(name.startswith(("damaged", "media/gone", "rejects/encode")) for name in names)
    assert not list(indexed.root.rglob("*.tmp")) and not (indexed.root / "damaged").joinpath("text").exists()


USER_FILES = f"""
    media/holiday/beach.jpg media/holiday/raw/1.cr2 media/photos.zip media/holiday/media.arrow.bak text/captions/1.txt
    text/captions/table.arrow text/notes.md text/captions/provenance.json latents/backup/x.pt latents/{"0" * 24}/x.pt
    latents/{"0" * 24}/old/x.arrow latents/{"0" * 23}/x.tar vision/a/b.tar.json plans/notes/idea.md
    plans/notes/plan.json
    plans/000001-0123456789ab/notes.md plans/notes/units.arrow sets/mine/set.json.txt sets/mine/index.arrow
    sets/current.txt rejects/discover/why.txt rejects/mine/x.arrow rejects/encode-text/mine/x.arrow damaged/car.jpg
    damaged/text/x.arrow weights/model.safetensors text/.mine.tmp latents/.x.0123.tmp mine/x.arrow
""".split()


def test_a_persons_own_files_are_left_alone(indexed) -> None:
    """A folder in a root can have a name of the project's layout: its files are removed only if their names match."""
    for name in USER_FILES:
        path = indexed.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    age(indexed, 400)
    report = indexed.run(gc.run, yes=True, keep_days=0.0)
    assert (paths(report), report.done) == ([], 0)
    assert report.details["other_files"].startswith(f"{len(USER_FILES) - 2} files, ")  # all but the two hidden files
    assert all((indexed.root / name).read_text() == "mine" for name in USER_FILES)


def test_a_runs_configuration_that_can_not_be_read_stops_gc(indexed) -> None:
    """The set that the run trains on is unknown."""
    run = indexed.folder / "output" / "first"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("train: {set")
    with pytest.raises(LatentpressError, match=r"first/config\.yaml"):
        indexed.run(gc.run, yes=True)


@pytest.mark.slow
def test_killed_at_any_file_the_root_stays_whole(indexed, monkeypatch) -> None:
    """After a kill at any file, the remaining files verify, and a second gc removes the unused ones."""
    indexed.settings["model"]["precision"] = "bfloat16"
    for program in (*ENCODE, index):
        indexed.run(program.run)
    age(indexed, 31)
    remove, remaining = Store.remove, [0]

    def stopping(store: Store, rel: str) -> None:
        if not remaining[0]:
            raise KeyboardInterrupt
        remaining[0] -= 1
        remove(store, rel)

    monkeypatch.setattr(Store, "remove", stopping)
    for limit in (1, 2, 3):
        remaining[0] = limit
        with pytest.raises(KeyboardInterrupt):
            indexed.run(gc.run, yes=True)
        assert indexed.run(verify.run).exit_code == 0
        assert indexed.run(status.run).remaining == 0
    monkeypatch.undo()
    assert indexed.run(gc.run, yes=True).exit_code == 0
    assert paths(indexed.run(gc.run)) == [] and indexed.run(index.run).skipped == 3
