"""Texts with references: their units, and what a reference that is damaged sets aside."""

import pytest

from cache.sets.plans import newest_plan
from cache.store.store import Store
from schemas.recipe import plan_key
from stages import bucket, discover, encode_latents, encode_text, index
from tests.conformance.flavours import ROWS
from tests.project import Project

KIND = "qwen-image-edit-plus"


@pytest.fixture
def referenced(project) -> Project:
    """a and b share their references, in another order, and their caption; c has one of them."""
    home = project(KIND, cache={"unit_mib": 1.0})
    for seed, (name, size) in enumerate({"first": (97, 65), "second": (65, 211)}.items()):
        home.image(f"../pictures/{name}.png", size, seed=10 + seed)
    for seed, (name, given) in enumerate({"a": "first second", "b": "second first", "c": "first"}.items()):
        home.image(f"{name}.png", (64, 64), seed=seed)
        for folder, source in zip(("one", "two"), given.split(), strict=False):
            (home.folder / folder).mkdir(exist_ok=True)
            picture = (home.folder / f"pictures/{source}.png").read_bytes()
            (home.folder / f"{folder}/{name}.png").write_bytes(picture)
    home.settings["datasets"][0]["conditioning_data"] = ["one", "two"]
    return home


@pytest.mark.slow
@pytest.mark.long
def test_units_are_divided_again_and_a_damaged_reference_sets_its_samples_aside(referenced, monkeypatch) -> None:
    """Of texts with references, in a root in which another family was planned before."""
    ROWS[KIND].patch(monkeypatch, ROWS[KIND].spec)
    home = referenced
    home.settings["stages"]["max_reject_fraction"] = 1.0
    home.run(discover.run)
    home.run(bucket.run, "model.family=flux2-klein", "model.flavour=klein-base-4b-i2i", "model.path=null")
    before = home.run(bucket.run, "cache.unit_mib=64").details["new_units"]["text"]
    divided = home.run(bucket.run, divide_again=True)
    assert divided.details["new_units"]["text"] > before == 2  # of one reference, and of two
    plan = newest_plan(Store(home.root), plan_key(home.config(), 16))
    texts = [text for unit in plan.units("text") for text in unit.members]
    assert sorted(texts) == sorted(plan.active_text_ids.to_pylist()) and len(texts) == 6
    for place in ("two/a.png", "one/b.png"):  # the same file
        (home.folder / place).write_bytes(b"no picture")
    assert len(home.run(encode_text.run).rejects) == 4  # a caption and a null text of each of the two
    home.run(encode_latents.run)
    assert sorted(home.rejects(home.run(index.run))) == ["a.png", "b.png"]
