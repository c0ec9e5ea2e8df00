"""Only what nothing needs is listed, and only what was listed is removed."""

import json
import os
import shutil
import time

import pytest

from cache import rejects
from cache.rejects import reject
from cache.store import Store
from stages import bucket, discover, encode_latents, encode_text, gc, index, status, verify
from stages.usage import use

ENCODE = (encode_text, encode_latents)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder in which the first test leaves what it encoded."""
    return tmp_path_factory.mktemp("kept") / "indexed"


@pytest.fixture
def indexed(project, kept):
    """Three pictures, one a unit, encoded and indexed."""
    home = project("kandinsky5-image-t2i", cache={"unit_mib": 0.004})
    if kept.exists():
        shutil.copytree(kept, home.folder, dirs_exist_ok=True)
        return home
    for number in range(3):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    for program in (discover, bucket, *ENCODE, index):
        home.run(program.run)
    shutil.copytree(home.folder, kept)
    return home


def files(home) -> set[str]:
    return {entry.name for entry in Store(home.root).entries()}


def paths(report) -> list[str]:
    rows = report.details["unused"]
    return [] if isinstance(rows, str) else [row["path"] for row in rows]


def age(home, days: float) -> None:
    """Everything as it would be after so many days."""
    for path in home.root.rglob("*"):
        if path.is_file():
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - days * 86400))


def test_nothing_is_listed_of_a_root_in_use(indexed) -> None:
    age(indexed, 400)
    before = files(indexed)
    report = indexed.run(gc.run, yes=True, keep_days=0.0)
    assert (paths(report), report.exit_code, report.done) == ([], 0, 0)
    assert files(indexed) == before


def test_another_precision_leaves_caches_that_are_removed_only_when_old_and_only_on_yes(indexed) -> None:
    float32 = {f"{kind}/{name.split('/')[0]}" for kind in ("text", "latents") for name in indexed.shards(kind)}
    indexed.settings["model"]["precision"] = "bfloat16"
    for program in (*ENCODE, index):
        indexed.run(program.run)
    before = files(indexed)
    assert paths(indexed.run(gc.run)) == []  # written today
    age(indexed, 31)
    listed = indexed.run(gc.run)
    assert {path for path in paths(listed) if path.startswith(("text/", "latents/"))} == float32
    assert any(path.startswith("sets/") for path in paths(listed))
    sizes = [row["MiB"] for row in listed.details["unused"]]
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


def test_what_another_configuration_uses_stays(indexed) -> None:
    other = indexed.folder / "other.yaml"
    indexed.config()
    shutil.copy(indexed.folder / "pipeline.yaml", other)
    indexed.settings["model"]["precision"] = "bfloat16"
    for program in (*ENCODE, index):
        indexed.run(program.run)
    caches = {f"{kind}/{name.split('/')[0]}" for kind in ("text", "latents") for name in indexed.shards(kind)}
    indexed.run(gc.run, also=[other], keep_days=0.0, yes=True)
    assert all((indexed.root / cache).exists() for cache in caches)
    step = indexed.run(gc.run, keep_days=0.0, also=[other]).next_steps
    assert step in ([], [f"latentpress gc --keep-days 0 --also {other} --yes"])


def test_a_configuration_of_another_root_is_refused(indexed) -> None:
    other = indexed.folder / "other.yaml"
    other.write_text(json.dumps(indexed.settings | {"root": "elsewhere"}))
    with pytest.raises(gc.WrongUse, match="elsewhere"):
        indexed.run(gc.run, also=[other])


def test_a_configuration_without_a_plan_removes_nothing(indexed) -> None:
    indexed.settings["datasets"][0]["repeats"] = 7
    with pytest.raises(Exception, match="no plan for this configuration"):
        indexed.run(gc.run, yes=True, keep_days=0.0)


def test_units_of_deleted_files_go_and_the_set_in_use_keeps_its_own(indexed) -> None:
    for path in indexed.media.glob("2.*"):
        path.unlink()
    for program in (discover, bucket):
        indexed.run(program.run)
    age(indexed, 31)
    # The newest set is still that of three pictures: everything it names stays.
    shards = indexed.shards("latents")
    assert indexed.run(gc.run, yes=True).exit_code == 0
    assert indexed.shards("latents") == shards
    indexed.run(index.run)
    age(indexed, 31)
    report = indexed.run(gc.run, yes=True)
    assert any("units that no plan has any longer" in row["what"] for row in report.details["unused"])
    assert len(indexed.shards("latents")) == len(shards) - 1
    assert indexed.run(status.run).remaining == 0
    assert indexed.run(verify.run).exit_code == 0
    assert [indexed.run(program.run).done for program in ENCODE] == [0, 0]
    assert indexed.run(index.run).skipped == 2


def test_generations_that_hold_what_is_active_stay(indexed) -> None:
    indexed.image("3.png", (64, 64), "one more", 3)
    for program in (discover, bucket):
        indexed.run(program.run)
    for path in indexed.media.glob("3.*"):
        path.unlink()
    for program in (discover, bucket):
        indexed.run(program.run)
    names = sorted(path.name for path in (indexed.root / "plans").iterdir())
    assert len(names) == 3
    age(indexed, 31)
    indexed.run(gc.run, yes=True)
    # The first holds the samples and is what the set was made of; what the second alone holds is gone.
    assert sorted(path.name for path in (indexed.root / "plans").iterdir()) == [names[0], names[2]]
    assert [indexed.run(program.run).remaining for program in (*ENCODE, index)] == [0, 0, 0]


def test_a_set_that_a_run_trains_on_stays(indexed) -> None:
    (old,) = [path.name for path in (indexed.root / "sets").iterdir() if path.is_dir()]
    run = indexed.folder / "output" / "first"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(f"train: {{set: {old}}}\n")
    indexed.settings["model"]["precision"] = "bfloat16"
    for program in (*ENCODE, index):
        indexed.run(program.run)
    age(indexed, 31)
    before = indexed.shards("latents")
    indexed.run(gc.run, yes=True)
    assert (indexed.root / "sets" / old / "set.json").exists() and indexed.shards("latents") == before
    shutil.rmtree(run)
    indexed.run(gc.run, yes=True)
    assert not (indexed.root / "sets" / old).exists() and len(indexed.shards("latents")) < len(before)


def test_leftovers(indexed) -> None:
    store = Store(indexed.root)
    config = indexed.config()
    rejects.write(store, "discover", "photos", [reject("discover", "x", "x", "corrupt", "x")])
    rejects.write(store, "discover", "gone", [reject("discover", "x", "x", "corrupt", "x")])
    rejects.write(store, f"encode-text/{'0' * 24}", "text-1", [reject("encode-text", "x", "x", "corrupt", "x")])
    rejects.write(store, "no-such-stage", "x", [reject("no-such-stage", "x", "x", "corrupt", "x")])
    store.publish_bytes(f"damaged/text/{'0' * 24}/text-1.1.arrow", b"x")
    store.publish_bytes("media/gone/media.arrow", b"x")
    store.publish_bytes("notes/mine.txt", b"not of this project")
    (indexed.root / "text" / ".half.arrow.0123.tmp").write_bytes(b"x")
    assert paths(indexed.run(gc.run)) == []
    age(indexed, 31)
    report = indexed.run(gc.run, yes=True)
    assert sorted(paths(report)) == [
        "",
        "damaged/text",
        "media/gone",
        "rejects/discover",
        "rejects/encode-text",
        "rejects/no-such-stage",
    ]
    left = files(indexed)
    assert {"notes/mine.txt", "rejects/discover/photos.arrow"} <= left
    assert not any(name.startswith(("damaged", "media/gone", "rejects/no", "rejects/encode")) for name in left)
    assert not list(indexed.root.rglob("*.tmp")) and not (indexed.root / "damaged").joinpath("text").exists()
    assert use(store, [config], store.entries(), time.time()).datasets == {"photos", "validation"}


def test_what_comes_into_use_while_the_list_is_made_stays(indexed, monkeypatch) -> None:
    """As a shard that is written anew, of a unit that came back."""
    for path in indexed.media.glob("2.*"):
        path.unlink()
    for program in (discover, bucket, index):
        indexed.run(program.run)
    age(indexed, 31)
    units = indexed.shards("latents")
    listing, calls = gc.unused, []

    def slow(*arguments):
        calls.append(listing(*arguments))
        if len(calls) == 1:
            for path in (indexed.root / "latents").rglob("*.arrow"):
                os.utime(path)
        return calls[-1]

    monkeypatch.setattr(gc, "unused", slow)
    assert "units that no plan has any longer" in str(indexed.run(gc.run, yes=True).details["unused"])
    assert indexed.shards("latents") == units


def test_killed_at_any_file_the_root_stays_whole(indexed, monkeypatch) -> None:
    """Whatever has been removed so far, what is left verifies, and a second gc removes the rest."""
    indexed.settings["model"]["precision"] = "bfloat16"
    for program in (*ENCODE, index):
        indexed.run(program.run)
    age(indexed, 31)
    remove, left = Store.remove, [0]

    def stopping(store: Store, rel: str) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        remove(store, rel)

    monkeypatch.setattr(Store, "remove", stopping)
    for limit in (1, 2, 3):
        left[0] = limit
        with pytest.raises(KeyboardInterrupt):
            indexed.run(gc.run, yes=True)
        assert indexed.run(verify.run).exit_code == 0
        assert indexed.run(status.run).remaining == 0
    monkeypatch.undo()
    assert indexed.run(gc.run, yes=True).exit_code == 0
    assert paths(indexed.run(gc.run)) == [] and indexed.run(index.run).skipped == 3
