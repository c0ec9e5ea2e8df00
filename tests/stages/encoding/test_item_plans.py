"""Plans of item stages: the units that a larger dataset adds, equal plans on all machines, and the plans of
`bucket`."""

from typing import Any

import pytest

from cache.sets import plans
from cache.store.store import Store
from schemas.errors import LatentpressError
from stages import discover
from stages.encoding.captions.settings import caption_request
from stages.encoding.item_plans import UNPUBLISHED, find_item_plan
from tests.project import Project


@pytest.fixture
def home(project: Any) -> Project:
    home = project(caption={"resolution": 56})
    home.settings["stages"]["max_reject_fraction"] = 1.0
    for number in range(5):
        home.image(f"{number}.png", (64, 48), None, number)
    home.image("own.png", (64, 48), "a cat", 9)
    home.run(discover.run)
    return home


def find(home: Project, publish: bool = True) -> plans.Plan:
    config = home.config()
    return find_item_plan(Store(home.root), config, caption_request(config), publish)


def members(plan: plans.Plan) -> dict[str, tuple[str, ...]]:
    return {unit.unit_id: unit.members for unit in plan.units("items")}


def test_machines_that_start_at_different_moments_have_one_plan(home: Project) -> None:
    draft = find(home, publish=False)
    assert draft.name == UNPUBLISHED and plans.list_plans(Store(home.root)) == []
    first, second = find(home), find(home)
    assert first.name == second.name == find(home, publish=False).name
    assert members(draft) == members(first) == members(second) and len(first.active) == 5
    assert plans.load_plan(Store(home.root), first.name).is_complete


def test_a_dataset_that_grows_gets_a_generation_of_the_new_items_alone(home: Project) -> None:
    before = members(find(home))
    for number in range(5, 8):
        home.image(f"{number}.png", (64, 48), None, number)
    home.run(discover.run)
    draft, grown = find(home, publish=False), find(home)
    assert len(grown.own_table("samples")) == 3 and len(grown.active) == 8
    assert before.items() <= members(grown).items() and members(draft) == members(grown)
    [gone] = [row["sample_id"] for row in grown.active.to_pylist() if row["path"] == "0.png"]
    (home.media / "0.png").unlink()
    home.run(discover.run)
    assert len(find(home).active) == 7
    expected = {unit: names for unit, names in members(grown).items() if names != (gone,)}
    assert members(find(home)) == expected, "only a unit of nothing else is gone"


def test_an_item_with_a_caption_of_its_own_leaves_the_plan(home: Project) -> None:
    find(home)
    (home.media / "1.txt").write_text("a dog")
    home.run(discover.run)
    assert sorted(find(home).active.column("path").to_pylist()) == ["0.png", "2.png", "3.png", "4.png"]


def test_a_damaged_plan_of_items_is_quarantined_and_made_again(home: Project) -> None:
    before = find(home)
    path = home.root / "plans" / before.name / "units.arrow"
    path.write_bytes(path.read_bytes()[:-30])
    log = list[str]()
    config = home.config()
    second = find_item_plan(Store(home.root), config, caption_request(config), True, log.append)
    assert "planned again" in log[0] and members(second) == {
        name: ids for name, ids in members(plans.load_plan(Store(home.root), second.name)).items()
    }
    assert len(second.active) == 5 and (home.root / "damaged" / "plans").is_dir()


def test_what_was_not_discovered_is_named(home: Project) -> None:
    home.settings["datasets"].append({"id": "more", "instance_data_dir": "more"})
    (home.folder / "more").mkdir()
    with pytest.raises(LatentpressError, match="dataset more is not discovered") as caught:
        find(home)
    assert "latentpress discover" in caught.value.next_step
