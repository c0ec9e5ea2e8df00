"""The encoding stages as programs: rejected, missing and damaged samples."""

import shutil
from dataclasses import replace

import pytest

from cache.sets import rejects
from cache.store.damage import DamageError
from cache.store.store import Store
from schemas.errors import LatentpressError
from stages import bucket, encode_latents, encode_text, index, status
from tests.stages.encoded_photos import IMAGE, encode, prepare


@pytest.mark.slow
def test_a_file_changed_since_discovery_is_rejected_and_retried(photos) -> None:
    path = photos.media / "0.png"
    content = path.read_bytes()
    photos.image("0.png", (96, 64), "picture number 0", seed=50)
    _, latents = encode(photos)
    assert (latents.done, photos.rejects(latents)) == (3, {"0.png": "changed"})
    path.write_bytes(content)
    _, latents = encode(photos)
    assert (latents.rejects, latents.exit_code) == ([], 0)
    assert photos.run(index.run).details["samples"] == 4


@pytest.mark.slow
def test_what_is_still_missing_is_listed_and_not_encoded_again(photos) -> None:
    path = photos.media / "0.png"
    content = path.read_bytes()
    path.unlink()
    encode(photos)
    unable = replace(encode_latents.STAGE, load_worker=lambda job: pytest.fail("loaded for nothing"))
    second_report = photos.run(unable.run)
    assert (second_report.done, second_report.skipped, photos.rejects(second_report)) == (0, 3, {"0.png": "missing"})
    (photos.media / "moved.png").write_bytes(content)
    (photos.media / "moved.txt").write_text("picture number 0")
    prepare(photos)
    second_report = photos.run(encode_latents.run)
    assert (second_report.rejects, second_report.exit_code) == ([], 0)
    assert second_report.done > 0


@pytest.mark.slow
def test_a_list_of_rejects_exists_before_its_shard(photos, monkeypatch: pytest.MonkeyPatch) -> None:
    (photos.media / "0.png").unlink()
    reject_lists: list[list[dict]] = []
    monkeypatch.setattr(Store, "publish", spy_on_shards(Store.publish, reject_lists))
    encode(photos)
    assert [row["item"] for rows in reject_lists for row in rows] == [row["item"] for row in listed(photos)] != []


def spy_on_shards(publish, reject_lists: list):
    """Store.publish that records the list of rejects of each unit of latents before its shard is published."""

    def spy(store: Store, temporary, rel: str) -> None:
        if rel.startswith("latents/") and rel.endswith(".arrow"):
            _, fingerprint, name = rel.split("/")
            lists = rejects.read_stage(store, f"encode-latents/{fingerprint}")
            reject_lists.append(lists.get(name.removesuffix(".arrow"), []))
        publish(store, temporary, rel)

    return spy


def listed(home) -> list[dict]:
    folder = f"encode-latents/{encode_latents.STAGE.fingerprint(home.config())}"
    return [row for rows in rejects.read_stage(Store(home.root), folder).values() for row in rows]


@pytest.mark.slow
def test_a_plan_whose_parents_were_removed_says_what_to_run(photos) -> None:
    photos.image("new.png", (64, 64), "a new one", 40)
    prepare(photos)
    first = min((photos.root / "plans").iterdir())
    shutil.rmtree(first)
    for program in (status.run, encode_text.run, index.run):
        with pytest.raises(LatentpressError, match="no unit") as caught:
            photos.run(program)
        assert "latentpress bucket" in caught.value.next_step
    photos.run(bucket.run)
    assert [report.exit_code for report in encode(photos)] == [0, 0]
    assert photos.run(index.run).details["samples"] == 5


def test_a_damaged_plan_is_named(photos) -> None:
    (plan,) = (photos.root / "plans").glob("*-*")
    problems = {
        "units.arrow": r"units\.arrow: the file is missing",
        "plan.json": r"plan\.json: it is not an undamaged",
    }
    for name, problem in problems.items():
        (plan / name).rename(photos.root / name)
        if name == "plan.json":
            (plan / name).write_text("{")
        with pytest.raises(DamageError, match=problem) as caught:
            photos.run(encode_text.run)
        assert "latentpress bucket" in caught.value.next_step
        (photos.root / name).rename(plan / name)


@pytest.mark.slow
def test_a_file_damaged_after_its_header_is_rejected_and_the_stage_continues(project) -> None:
    home = project(IMAGE)
    for number in range(12):
        home.image(f"{number}.jpg", (64, 64), f"picture {number}", number)
    big = home.image("cut.jpg", (640, 640), "cut", 40)
    big.write_bytes(big.read_bytes()[:2000])
    prepare(home)
    _, latents = encode(home)
    assert home.rejects(latents) == {"cut.jpg": "truncated"}
    joined = home.run(index.run)
    assert (joined.exit_code, joined.details["samples"]) == (0, 12)
    second_report = home.run(encode_latents.run)
    assert (second_report.done, home.rejects(second_report)) == (0, {"cut.jpg": "truncated"})  # listed, not read again
    big.write_bytes(home.image("whole.jpg", (640, 640), "cut", 40).read_bytes())


@pytest.mark.slow
def test_too_many_rejects_stop_the_stage_with_the_last_reason(project) -> None:
    home = project(IMAGE, cache={"unit_mib": 1})
    for number in range(8):
        path = home.image(f"{number}.jpg", (300, 300), f"picture {number}", number)
        path.write_bytes(path.read_bytes()[:1500])
    prepare(home)
    for _ in range(2):  # the second run has nothing to encode, and fails in the same way
        with pytest.raises(LatentpressError, match=r"(?s)max_reject_fraction = 0\.2.*jpg"):
            home.run(encode_latents.run)
    assert home.run(encode_latents.run, "stages.max_reject_fraction=1.0").exit_code == 0
