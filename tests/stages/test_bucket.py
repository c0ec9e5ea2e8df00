"""bucket as a program: what it prints, publishes, warns of and refuses."""

import io
import json
import os
import shutil
from types import SimpleNamespace

import pyarrow as pa
import pytest

from cache.sets import plans
from cache.sets.plans import RowLookup
from cache.sets.set_lookup import current_plan
from cache.store.store import Store
from schemas.cli.console import Console, Options
from schemas.errors import LatentpressError
from schemas.tables import plan_schema
from stages import bucket, discover, encode_latents
from tests.forms import in_turn
from tests.s3_server import BUCKET


def said(project, program, *overrides):
    """The report and what stood on the screen beside it."""
    screen = io.StringIO()
    options = Options(project.folder / "pipeline.yaml", overrides)
    report = program.run(project.config(*overrides), options, Console(stderr=screen))
    return report, " ".join(screen.getvalue().split())


def plan(project, *overrides):
    project.run(discover.run, *overrides)
    return project.run(bucket.run, *overrides)


def active(project, *overrides):
    found = current_plan(Store(project.root), project.config(*overrides)).active
    return {row["path"]: row for row in found.to_pylist()}


def files(project):
    return {path: path.stat().st_mtime_ns for path in project.root.rglob("*") if path.is_file()}


@pytest.fixture
def photos(project):
    made = project()
    for number in range(4):
        made.image(f"{number}.png", (96, 64 + 32 * (number % 2)), f"picture {number}", seed=number)
    return made


@pytest.mark.slow
def test_new_removed_and_changed_items_are_listed(photos):
    photos.run(discover.run)
    before = files(photos)
    report = photos.run(bucket.run, dry_run=True)
    assert files(photos) == before and report.remaining == 4 + 5 and report.exit_code == 0
    assert plan(photos).details["changes"] == {"new": {"items": 4}}
    before = files(photos)
    report = plan(photos)
    assert files(photos) == before and report.details["changes"] == "none" and report.done == 0
    (photos.media / "0.png").unlink()
    (photos.media / "1.txt").write_text("another caption")
    photos.image("9.png", (96, 64), "a new one", seed=9)
    changes = plan(photos).details["changes"]
    assert changes == {
        "new": {"items": 1, "examples": ["photos/9.png"]},
        "removed": {"items": 1, "examples": ["photos/0.png"]},
        "changed": {"items": 1, "examples": ["photos/1.png"]},
    }


@pytest.mark.slow
def test_only_what_is_new_is_planned_again(photos):
    plan(photos)
    store = Store(photos.root)
    before = {name for kind in ("latents", "text") for name in plans.planned_ids(store, kind).to_pylist()}
    (photos.media / "1.txt").write_text("another caption")
    report = plan(photos)
    assert report.done == 1, "one text; the picture is the same"
    assert report.details["new_units"] == {"latents": 0, "text": 1}
    after = {name for kind in ("latents", "text") for name in plans.planned_ids(store, kind).to_pylist()}
    assert before < after and len(after - before) == 1


@pytest.mark.slow
def test_the_plan_a_person_reads(photos):
    report = plan(photos, "datasets.photos.minimum_image_size=80")
    (row,) = report.details["buckets"]
    assert (row["bucket"], row["orientation"], row["samples"], row["samples_per_pass"]) == ("64x64@1", "square", 2, 2)
    assert row["cut_off_percent_max"] == 0 and row["stretched_percent"] == 0
    (rule,) = report.details["excluded"]
    assert (rule["rule"], rule["items"]) == ("too-small", 2) and rule["example"].startswith("0.png: is 96x64")
    assert "too-small" in report.summary() and "64x64@1" in report.summary()
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.slow
def test_a_bucket_smaller_than_a_batch_is_warned_about_with_what_helps(photos):
    """And what is said to help does; repeats are said not to, and do not."""
    photos.run(discover.run)
    steps = ("train.batch_size=4", "train.accumulate=1")
    report, text = said(photos, bucket, *steps)
    counts = [row["samples"] for row in report.details["buckets"]]
    assert sum(counts) == 4 and len(counts) > 1
    assert "fewer samples than train.batch_size (4)" in text
    assert f"train.batch_size: {min(counts)};" in text and "`repeats` does not" in text
    assert "fewer samples than" in said(photos, bucket, *steps, "datasets.photos.repeats=9")[1]
    assert "fewer samples than" not in said(photos, bucket, "train.batch_size=1", "train.accumulate=4")[1]
    assert "fewer samples than" not in said(photos, bucket, *steps, "datasets.photos.crop_aspect=square")[1]


@pytest.mark.slow
def test_a_lite_video_model_is_warned_of_sizes_that_it_was_not_made_for(project):
    made = project("kandinsky5-video-t2v")
    made.settings["datasets"][0] |= {"resolution": 512}
    made.video("a.mp4", size=(1280, 720), frames=12)
    made.run(discover.run)
    report, text = said(made, bucket)
    assert report.details["buckets"][0]["bucket"] == "688x384@9"
    assert report.details["buckets"][0]["scale_class"] == "1x3.16x3.16"
    assert "was made for sides of" in text and "688x384@9. Choose a resolution" in text
    inside, text = said(made, bucket, "datasets.photos.resolution=632")
    assert inside.details["buckets"][0]["scale_class"] == "1x2x2" and "was made for" not in text


@pytest.mark.slow
def test_a_disk_with_too_little_room_is_warned_of(project, monkeypatch):
    made = project()
    made.image("a.png", (64, 64))
    made.run(discover.run)
    assert "the disk of" not in said(made, bucket)[1]
    made.image("b.png", (64, 64), "other", 2)
    made.run(discover.run)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    for program in (bucket, encode_latents):
        text = said(made, program)[1]
        assert "work has 0 bytes" in text, program
    assert "the disk of" not in said(made, encode_latents)[1]  # all is encoded


def test_repeated_frames_are_counted_and_warned_about(project):
    made = project("kandinsky5-video-t2v")
    made.video("slow.mp4", rate=6, frames=12)
    made.video("fast.mp4", rate=12)
    made.run(discover.run)
    report, text = said(made, bucket)
    assert report.details["datasets"][0]["repeating_frames"] == 1 and "clips that repeat frames, as " in text
    limited = made.run(bucket.run, "datasets.photos.video.max_repeated_frames=0.2")
    assert [row["reason"] for row in limited.rejects] == ["repeats-frames"]


@pytest.mark.parametrize(
    "override, words",
    [
        ("datasets.photos.minimum_image_size=2000", "4 too-small"),
        ("datasets.photos.where=width > 5000", "4 filtered"),
    ],
)
def test_it_refuses_only_when_nothing_could_be_trained(photos, override, words):
    photos.run(discover.run)
    with pytest.raises(LatentpressError, match=words):
        photos.run(bucket.run, override)


def test_a_plan_of_another_version_is_none(photos):
    plan(photos)
    store = Store(photos.root)
    (name,) = plans.list_plans(store)
    old = name[:-12] + "0" * 12
    os.rename(photos.root / "plans" / name, photos.root / "plans" / old)
    record = plans.load_plan(store, old).info
    store.publish_record(f"plans/{old}/plan.json", record.model_copy(update={"key": "0" + record.key}))
    with pytest.raises(LatentpressError, match="plan"):
        current_plan(store, photos.config())
    assert plan(photos).details["generation"].startswith("000002-")


@pytest.mark.long
@pytest.mark.parametrize(("remote", "other_settings"), in_turn([False, True], [False, True]))
def test_of_two_at_once_one_plans_again(photos, monkeypatch, s3, remote, other_settings):
    """The second publishes while the first has its tables: no unit is planned twice, what the second has is kept."""
    root = [f"root=s3://{BUCKET}/work"] if remote else []
    other = ["train.caption_dropout=0", "validation.prompts=[]"] if other_settings else []
    photos.run(discover.run, *root)
    real, second = plans.publish_plan, []

    def publish_plan(*arguments):
        if not second:
            second.append(None)
            second[0] = photos.run(bucket.run, *root, *other)
        return real(*arguments)

    monkeypatch.setattr(plans, "publish_plan", publish_plan)
    first = photos.run(bucket.run, *root)
    store = Store(photos.config(*root).root)
    members = [id for unit in plans.all_units(store).to_pylist() for id in unit["members"]]
    assert second[0].done and not first.done and "planning again" in photos.said
    assert len(set(members)) == len(members), "each is in one unit"


def test_a_plan_that_was_made_on_other_plans_is_refused(tmp_path):
    store, info = Store(tmp_path), plans.PlanInfo(null_text=None, validation=[])
    empty = {name: plan_schema(name, ()).empty_table() for name in plans.PLAN_TABLES}
    plans.publish_plan(store, "a", empty, info, [])
    with pytest.raises(plans.PlanOutdated, match="another plan"):
        plans.publish_plan(store, "b", empty, info, [])


@pytest.mark.slow
def test_what_was_removed_is_planned_again(photos):
    """A generation with every sample; the one after it has a text of its own and no sample."""
    plan(photos)
    store = Store(photos.root)
    (first,) = plans.list_plans(store)
    (photos.media / "1.txt").write_text("another caption")
    plan(photos)
    second = current_plan(store, photos.config())
    assert second.is_complete and not len(second.own_table("samples"))
    shutil.rmtree(photos.root / "plans" / first)
    assert not current_plan(store, photos.config()).is_complete
    assert plan(photos).details["new_units"]["latents"] > 0
    assert current_plan(store, photos.config()).is_complete


def test_rows_are_found_by_their_id_and_the_first_of_equal_ones_counts():
    names = [f"{n * 7919:032x}" for n in range(200)]
    same_head = ["a" * 16 + "0" * 16, "a" * 16 + "1" * 16]
    table = pa.table({"id": [*names, *same_head, names[3]], "n": list(range(203))})
    rows = RowLookup(table, "id")
    assert [rows[name]["n"] for name in (*names, *same_head)] == list(range(202))
    assert len(rows) == 203 and names[0] in rows and "f" * 32 not in rows


def test_what_training_does_not_use_yet_is_said_when_it_is_asked_for(project) -> None:
    """By bucket, by the stage that encodes it, and (tests/trainer/test_main.py) by train."""
    home = project("sana")
    for number in range(2):
        home.image(f"{number}.png", (64, 64), "a picture", number)
        home.image(f"../masks/{number}.png", (64, 64), seed=number)
    home.run(discover.run)
    home.run(bucket.run)
    assert "does not use" not in home.said
    home.settings["datasets"][0] |= {"mask_data": "masks", "is_regularization_data": True}
    home.settings["vision"] = {"model": "dinov2_vits14"}
    home.run(discover.run)
    home.run(bucket.run)
    said = " ".join(home.said.split())
    assert "photos: masks are encoded, but training does not use them without train.methods.masked_loss" in said
    assert "regularization" not in said, "it is used without an option"
    features = "vision.model dinov2_vits14: features are encoded, but training does not use them"
    assert f"{features} without train.methods.crepa" in said
    home.run(encode_latents.run, dry_run=True)
    assert "masks are encoded, but" in home.said and "regularization" not in home.said


@pytest.mark.slow
@pytest.mark.parametrize("odd", ["pipe", "folder", "link to itself"])
def test_a_plan_of_which_a_file_is_none_is_planned_again(photos, odd) -> None:
    plan(photos)
    [name] = plans.list_plans(Store(photos.root))
    table = photos.root / "plans" / name / "texts.arrow"
    whole = table.read_bytes()
    table.unlink()
    if odd == "link to itself":
        table.symlink_to(table.name)
    else:
        os.mkfifo(table) if odd == "pipe" else table.mkdir()
    photos.run(bucket.run)
    assert f"damaged/plans/{name}.1" in photos.said
    assert table.read_bytes() == whole and plans.list_plans(Store(photos.root)) == [name]
