"""cache.unit_mib is lowered for short jobs: later plans, and the division of existing units."""

import pytest

from cache.sets import plans
from cache.sets.plans import Unit
from cache.sets.set_lookup import current_plan
from cache.store.store import Store
from stages import bucket, discover, encode_latents, encode_text, gc, index, status, verify
from tests.project import Project

pytestmark = pytest.mark.slow

SMALL = "cache.unit_mib=0.004"


@pytest.fixture
def home(project, built) -> Project:
    """Six photographs of two shapes: a unit for each shape; one of them is encoded."""
    return built(project(cache={"unit_mib": 1}), plan_six)


def plan_six(home: Project) -> None:
    for number in range(6):
        home.image(f"{number}.png", (64, 64) if number % 2 else (128, 64), f"picture {number}", number)
    for program in (discover, bucket):
        home.run(program.run)
    home.run(encode_latents.run, shard="0/2")


def units(home: Project, kind: str) -> dict[str, Unit]:
    return {unit.unit_id: unit for unit in current_plan(Store(home.root), home.config()).units(kind)}


def members(found: dict[str, Unit]) -> list[str]:
    return sorted(name for unit in found.values() for name in unit.members)


def test_a_changed_size_holds_for_what_is_planned_from_then_on(home) -> None:
    before = units(home, "latents")
    assert [len(unit.members) for unit in before.values()] == [3, 3]
    assert home.run(bucket.run, SMALL).details["generation"].endswith("(unchanged)")
    for number in range(6, 9):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    home.run(discover.run)
    report = home.run(bucket.run, SMALL)
    assert report.details["new_units"]["latents"] == 3
    after = units(home, "latents")
    assert before.items() <= after.items() and sorted(len(unit.members) for unit in after.values()) == [1, 1, 1, 3, 3]


def test_what_has_no_shard_is_divided_again_and_what_has_one_stays(home) -> None:
    before, texts, encoded_shards = units(home, "latents"), units(home, "text"), home.shards("latents")
    (encoded,) = [name.rpartition("/")[2].removesuffix(".arrow") for name in encoded_shards]
    report = home.run(bucket.run, SMALL, divide_again=True)
    assert report.details["divided_again"] == 1 + len([unit for unit in texts.values() if len(unit.members) > 1])
    after = units(home, "latents")
    assert after.pop(encoded) == before[encoded] and [len(unit.members) for unit in after.values()] == [1, 1, 1]
    assert members({**after, encoded: before[encoded]}) == members(before)
    assert members(units(home, "text")) == members(texts)
    # Again there is nothing to divide, and without the option the plan stays as it is.
    for options in ({"divide_again": True}, {}):
        assert home.run(bucket.run, SMALL, **options).details["generation"].endswith("(unchanged)")
    assert units(home, "latents").keys() == {*after, encoded}
    for program in (encode_latents, encode_text, index):
        assert home.run(program.run).exit_code == 0
    assert encoded_shards.items() <= home.shards("latents").items() and len(home.shards("latents")) == 4
    assert home.run(status.run).remaining == 0 and home.run(verify.run).damage == []
    assert "no files" in home.run(gc.run).details["unused"]


def test_a_shard_that_a_job_makes_of_a_unit_that_was_divided_is_not_used(home) -> None:
    """It began before the division."""
    plan = current_plan(Store(home.root), home.config())
    earlier = {unit.unit_id for unit in plan.units("latents")}
    home.run(bucket.run, SMALL, divide_again=True)
    assert {unit.unit_id for unit in plans.load_plan(plan.store, plan.name).units("latents")} == earlier
    replaced = current_plan(Store(home.root), home.config()).replaced_units
    assert len(replaced & earlier) == 1
    (shard,) = home.shards("latents")
    late_shard = home.root / "latents" / shard.replace(*(earlier - replaced), *(replaced & earlier))
    late_shard.write_bytes(b"late")
    for program in (encode_latents, encode_text, index):
        assert home.run(program.run).exit_code == 0
    assert len(home.shards("latents")) == 5
