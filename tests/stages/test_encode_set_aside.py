"""The encoding stages as a user runs them: what is set aside, missing or damaged."""

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
def test_a_file_changed_since_discovery_is_set_aside_and_tried_again(photos) -> None:
    path = photos.media / "0.png"
    content = path.read_bytes()
    photos.image("0.png", (96, 64), "picture number 0", seed=50)
    _, latents = encode(photos)
    assert (latents.done, photos.rejects(latents)) == (3, {"0.png": "changed"})
    path.write_bytes(content)
    _, latents = encode(photos)
    assert (latents.set_aside, latents.exit_code) == ([], 0)
    assert photos.run(index.run).details["samples"] == 4


@pytest.mark.slow
def test_what_is_still_missing_is_listed_and_not_encoded_again(photos) -> None:
    path = photos.media / "0.png"
    content = path.read_bytes()
    path.unlink()
    encode(photos)
    unable = replace(encode_latents.STAGE, load_worker=lambda job: pytest.fail("loaded for nothing"))
    again = photos.run(unable.run)
    assert (again.done, again.skipped, photos.rejects(again)) == (0, 3, {"0.png": "missing"})
    (photos.media / "moved.png").write_bytes(content)
    (photos.media / "moved.txt").write_text("picture number 0")
    prepare(photos)
    again = photos.run(encode_latents.run)
    assert (again.set_aside, again.exit_code) == ([], 0)
    assert again.done > 0


@pytest.mark.slow
def test_a_list_of_what_was_set_aside_is_there_before_its_shard(photos, monkeypatch: pytest.MonkeyPatch) -> None:
    (photos.media / "0.png").unlink()
    found: list[list[dict]] = []
    monkeypatch.setattr(Store, "publish", spy_on_shards(Store.publish, found))
    encode(photos)
    assert [row["item"] for rows in found for row in rows] == [row["item"] for row in listed(photos)] != []


def spy_on_shards(publish, found: list):
    """Store.publish that notes, before each shard of latents appears, what its unit's list of rejects says."""

    def spy(store: Store, temporary, rel: str) -> None:
        if rel.startswith("latents/") and rel.endswith(".arrow"):
            _, fingerprint, name = rel.split("/")
            lists = rejects.read_stage(store, f"encode-latents/{fingerprint}")
            found.append(lists.get(name.removesuffix(".arrow"), []))
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
        with pytest.raises(LatentpressError, match="in no unit") as caught:
            photos.run(program)
        assert "latentpress bucket" in caught.value.next_step
    photos.run(bucket.run)
    assert [report.exit_code for report in encode(photos)] == [0, 0]
    assert photos.run(index.run).details["samples"] == 5


def test_a_damaged_plan_is_named(photos) -> None:
    (plan,) = (photos.root / "plans").glob("*-*")
    problems = {
        "units.arrow": r"units\.arrow: the file is missing",
        "plan.json": r"plan\.json: it is not a JSON object",
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
def test_a_file_damaged_beyond_its_header_is_set_aside_and_the_rest_goes_on(project) -> None:
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
    again = home.run(encode_latents.run)
    assert (again.done, home.rejects(again)) == (0, {"cut.jpg": "truncated"})  # listed, not read again
    big.write_bytes(home.image("whole.jpg", (640, 640), "cut", 40).read_bytes())


@pytest.mark.slow
def test_too_many_set_aside_stop_the_stage_with_the_last_reason(project) -> None:
    home = project(IMAGE, cache={"unit_mib": 1})
    for number in range(8):
        path = home.image(f"{number}.jpg", (300, 300), f"picture {number}", number)
        path.write_bytes(path.read_bytes()[:1500])
    prepare(home)
    for _ in range(2):  # the second time nothing is left to be encoded, and it is as wrong
        with pytest.raises(LatentpressError, match=r"(?s)max_reject_fraction = 0\.2.*jpg"):
            home.run(encode_latents.run)
    assert home.run(encode_latents.run, "stages.max_reject_fraction=1.0").exit_code == 0
