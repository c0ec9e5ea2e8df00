"""The program bucket: its output, plans, warnings and errors."""

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


def run_with_output(project, program, *overrides):
    """The report, and the text on stderr."""
    screen = io.StringIO()
    options = Options(project.folder / "pipeline.yaml", overrides)
    report = program.run(project.config(*overrides), options, Console(stderr=screen))
    return report, " ".join(screen.getvalue().split())


def plan(project, *overrides):
    project.run(discover.run, *overrides)
    return project.run(bucket.run, *overrides)


def active(project, *overrides):
    table = current_plan(Store(project.root), project.config(*overrides)).active
    return {row["path"]: row for row in table.to_pylist()}


def files(project):
    return {path: path.stat().st_mtime_ns for path in project.root.rglob("*") if path.is_file()}


@pytest.fixture
def photos(project):
    return add_four(project())


def add_four(home):
    for number in range(4):
        home.image(f"{number}.png", (96, 64 + 32 * (number % 2)), f"picture {number}", seed=number)
    return home


def plan_four(home):
    plan(add_four(home))


@pytest.fixture
def planned(project, built):
    """The photographs with their first plan."""
    return built(project(), plan_four)


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
def test_only_what_is_new_is_planned_again(planned):
    store = Store(planned.root)
    before = {name for kind in ("latents", "text") for name in plans.planned_ids(store, kind).to_pylist()}
    (planned.media / "1.txt").write_text("another caption")
    report = plan(planned)
    assert report.done == 1, "only a text is new, because the picture is unchanged"
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
    """The advised settings remove the warning; `repeats` does not, as the warning states."""
    photos.run(discover.run)
    steps = ("train.batch_size=4", "train.accumulate=1")
    report, text = run_with_output(photos, bucket, *steps)
    counts = [row["samples"] for row in report.details["buckets"]]
    assert sum(counts) == 4 and len(counts) > 1
    assert "fewer samples than train.batch_size (4)" in text
    assert f"train.batch_size: {min(counts)};" in text and "`repeats` does not" in text
    assert "fewer samples than" in run_with_output(photos, bucket, *steps, "datasets.photos.repeats=9")[1]
    assert "fewer samples than" not in run_with_output(photos, bucket, "train.batch_size=1", "train.accumulate=4")[1]
    assert "fewer samples than" not in run_with_output(photos, bucket, *steps, "datasets.photos.crop_aspect=square")[1]


@pytest.mark.slow
def test_a_lite_video_model_is_warned_of_sizes_that_it_was_not_made_for(project):
    home = project("kandinsky5-video-t2v")
    home.settings["datasets"][0] |= {"resolution": 512}
    home.video("a.mp4", size=(128, 72), frames=12)
    home.run(discover.run)
    report, text = run_with_output(home, bucket)
    assert report.details["buckets"][0]["bucket"] == "688x384@9"
    assert report.details["buckets"][0]["scale_class"] == "1x3.16x3.16"
    assert "was made for sides of" in text and "688x384@9. Choose a resolution" in text
    inside, text = run_with_output(home, bucket, "datasets.photos.resolution=632")
    assert inside.details["buckets"][0]["scale_class"] == "1x2x2" and "was made for" not in text


@pytest.mark.slow
def test_a_disk_with_too_little_room_is_warned_of(project, monkeypatch):
    home = project()
    home.image("a.png", (64, 64))
    home.run(discover.run)
    assert "the disk of" not in run_with_output(home, bucket)[1]
    home.image("b.png", (64, 64), "other", 2)
    home.run(discover.run)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    for program in (bucket, encode_latents):
        text = run_with_output(home, program)[1]
        assert "work has 0 bytes" in text, program
    assert "the disk of" not in run_with_output(home, encode_latents)[1]  # all samples are encoded


def test_repeated_frames_are_counted_and_warned_about(project):
    home = project("kandinsky5-video-t2v")
    home.video("slow.mp4", rate=6, frames=12)
    home.video("fast.mp4", rate=12)
    home.run(discover.run)
    report, text = run_with_output(home, bucket)
    assert report.details["datasets"][0]["repeating_frames"] == 1 and "max_repeated_frames" in text
    limited = home.run(bucket.run, "datasets.photos.video.max_repeated_frames=0.2")
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


def test_a_plan_of_another_version_is_none(planned):
    store = Store(planned.root)
    (name,) = plans.list_plans(store)
    old_name = name[:-12] + "0" * 12
    os.rename(planned.root / "plans" / name, planned.root / "plans" / old_name)
    record = plans.load_plan(store, old_name).info
    store.publish_record(f"plans/{old_name}/plan.json", record.model_copy(update={"key": "0" + record.key}))
    with pytest.raises(LatentpressError, match="plan"):
        current_plan(store, planned.config())
    assert plan(planned).details["generation"].startswith("000002-")


@pytest.mark.long
@pytest.mark.parametrize(("remote", "other_settings"), in_turn([False, True], [False, True]))
def test_of_two_at_once_one_plans_again(photos, monkeypatch, s3, remote, other_settings):
    """The second run publishes while the first has its tables: no unit is planned twice, and the second plan stays."""
    root = [f"root=s3://{BUCKET}/work"] if remote else []
    overrides = ["train.caption_dropout=0", "validation.prompts=[]"] if other_settings else []
    photos.run(discover.run, *root)
    real, second = plans.publish_plan, []

    def publish_plan(*arguments):
        if not second:
            second.append(None)
            second[0] = photos.run(bucket.run, *root, *overrides)
        return real(*arguments)

    monkeypatch.setattr(plans, "publish_plan", publish_plan)
    first = photos.run(bucket.run, *root)
    store = Store(photos.config(*root).root)
    members = [id for unit in plans.all_units(store).to_pylist() for id in unit["members"]]
    assert second[0].done and not first.done and "planning again" in photos.said
    assert len(set(members)) == len(members), "each member is in one unit"


def test_a_plan_that_was_made_on_other_plans_is_refused(tmp_path):
    store, info = Store(tmp_path), plans.PlanInfo(null_text=None, validation=[])
    empty = {name: plan_schema(name, ()).empty_table() for name in plans.PLAN_TABLES}
    plans.publish_plan(store, "a", empty, info, [])
    with pytest.raises(plans.PlanOutdated, match="plan"):
        plans.publish_plan(store, "b", empty, info, [])


@pytest.mark.slow
def test_what_was_removed_is_planned_again(planned):
    """A generation with all samples; the next generation has one text and no samples."""
    store = Store(planned.root)
    (first,) = plans.list_plans(store)
    (planned.media / "1.txt").write_text("another caption")
    plan(planned)
    second = current_plan(store, planned.config())
    assert second.is_complete and not len(second.own_table("samples"))
    shutil.rmtree(planned.root / "plans" / first)
    assert not current_plan(store, planned.config()).is_complete
    assert plan(planned).details["new_units"]["latents"] > 0
    assert current_plan(store, planned.config()).is_complete


def test_rows_are_found_by_their_id_and_the_first_of_equal_ones_counts():
    names = [f"{n * 7919:032x}" for n in range(200)]
    same_head = ["a" * 16 + "0" * 16, "a" * 16 + "1" * 16]
    table = pa.table({"id": [*names, *same_head, names[3]], "n": list(range(203))})
    rows = RowLookup(table, "id")
    assert [rows[name]["n"] for name in (*names, *same_head)] == list(range(202))
    assert len(rows) == 203 and names[0] in rows and "f" * 32 not in rows


def test_what_training_does_not_use_yet_is_said_when_it_is_asked_for(project) -> None:
    """bucket and the encoding stage warn; tests/trainer/test_main.py tests the warning of train."""
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
    output = " ".join(home.said.split())
    assert "photos: masks are encoded, but training does not use them without train.methods.masked_loss" in output
    assert "regularization" not in output, "regularization is used without an option"
    features = "vision.model dinov2_vits14: features are encoded, but training does not use them"
    assert f"{features} without train.methods.crepa" in output
    home.run(encode_latents.run, dry_run=True)
    assert "masks are encoded, but" in home.said and "regularization" not in home.said


@pytest.mark.slow
@pytest.mark.parametrize("odd", ["pipe", "folder", "link to itself"])
def test_a_plan_of_which_a_file_is_none_is_planned_again(planned, odd) -> None:
    [name] = plans.list_plans(Store(planned.root))
    table = planned.root / "plans" / name / "texts.arrow"
    content = table.read_bytes()
    table.unlink()
    if odd == "link to itself":
        table.symlink_to(table.name)
    else:
        os.mkfifo(table) if odd == "pipe" else table.mkdir()
    planned.run(bucket.run)
    assert f"damaged/plans/{name}.1" in planned.said
    assert table.read_bytes() == content and plans.list_plans(Store(planned.root)) == [name]
