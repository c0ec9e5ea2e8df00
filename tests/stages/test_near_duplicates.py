"""Near-duplicates of real photographs in `features`, and their exclusion and hold-out in `bucket`."""

import io
import shutil
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image, ImageFilter

from cache.sets import plans
from cache.sets.item_rows import read_item_table
from cache.store.damage import DamageError
from cache.store.store import Store
from schemas.errors import LatentpressError
from schemas.identity import derive_seeds, to_unit_interval
from schemas.recipe import plan_key
from stages import bucket, discover, features, gc, preview, verify
from stages.discovery.media_table import read_configured_media
from stages.encoding.features import comparison
from stages.encoding.item_plans import NoFeatures, find_item_table
from tests.project import Project
from tests.stages.encoding.features.photographs import photograph

pytestmark = pytest.mark.slow
#: Copies of chelsea.png and of other pictures; chelsea.png is the largest copy.
COPIES = ("small.png", "cropped.png", "mirrored.png", "compressed.png")


@pytest.fixture
def configured(project: Any, tiny: Any) -> Project:
    """Two datasets without media."""
    home_project = project("kandinsky5-image-t2i", features={"model": str(tiny("dinov2")), "size": 84})
    home_project.settings["stages"] |= {"features": {"threads": 1, "readers": 1}}
    home_project.settings["datasets"].append(
        {**home_project.settings["datasets"][0], "id": "more", "instance_data_dir": "more"}
    )
    (home_project.folder / "more").mkdir()
    return home_project


@pytest.fixture
def home(configured: Project, built: Any) -> Project:
    """Four photographs with copies of one; another dataset has a soft copy of a second photograph."""
    return built(configured, _discover_copies)


def _discover_copies(home: Project) -> None:
    def save(name: str, image: Image.Image) -> None:
        image.save(home.media / name)
        (home.media / name).with_suffix(".txt").write_text(name)

    for name in ("chelsea.png", "coffee.png", "astronaut.png", "rocket.png"):
        save(name, photograph(name if name != "rocket.png" else "rocket.jpg").reduce(2))
    cat = photograph("chelsea.png").reduce(2)
    save("small.png", cat.resize((160, 106)))
    save("cropped.png", cat.crop((30, 10, 200, 140)))
    save("mirrored.png", cat.crop((10, 0, cat.width, cat.height)).transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    with io.BytesIO() as file:
        cat.save(file, "JPEG", quality=40)
        save("compressed.png", Image.open(file))
    soft = photograph("coffee.png").reduce(2).filter(ImageFilter.GaussianBlur(1))
    soft.save(home.folder / "more" / "soft.png")
    (home.folder / "more" / "soft.txt").write_text("soft")
    home.run(discover.run)


def items(home: Project, *overrides: str) -> dict[str, dict[str, Any]]:
    """Path -> row of the table, with the path of the best copy instead of its media id."""
    store, config = Store(home.root), home.config(*overrides)
    media = {dataset.id: read_configured_media(store, dataset) for dataset in config.datasets}
    table = read_item_table(store, find_item_table(config, media))
    assert table is not None
    joined = pa.concat_tables([one.select(["path", "media_id"]) for one in media.values()]).to_pylist()
    paths = {row["media_id"]: row["path"] for row in joined}
    return {
        paths[row["media_id"]]: {**row, "duplicate_of": paths.get(row["duplicate_of"])} for row in table.to_pylist()
    }


def table_bytes(home: Project) -> bytes:
    [path] = (home.root / "items").glob("*.arrow")
    return path.read_bytes()


def planned_roles(home: Project) -> dict[str, str]:
    """Path -> role in the newest plan of samples."""
    store = Store(home.root)
    every = [plans.load_plan(store, name) for name in plans.list_plans(store)]
    plan = [plan for plan in every if plan.kind == "samples"][-1]
    return dict(zip(plan.active["path"].to_pylist(), plan.active["role"].to_pylist(), strict=True))


def test_copies_are_found_and_the_best_of_each_group_stays(home: Project) -> None:
    report = home.run(features.run)
    assert report.details["near_duplicates"].startswith("5 in 2 groups")
    of = {path: row["duplicate_of"] for path, row in items(home).items()}
    assert of == {
        **dict.fromkeys(("chelsea.png", "coffee.png", "astronaut.png", "rocket.png")),
        **dict.fromkeys(COPIES, "chelsea.png"),
        "soft.png": "coffee.png",
    }
    before = table_bytes(home)
    second_report = home.run(features.run)
    assert (second_report.done, second_report.details["near_duplicates"]) == (0, report.details["near_duplicates"])
    assert table_bytes(home) == before


@pytest.mark.long
def test_of_many_pairs_the_likeliest_are_looked_at_until_none_of_some_thousand_is_one(
    home: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.settings["features"]["model"] = None
    home.run(features.run)
    assert "candidate pairs" not in home.said
    expected = table_bytes(home)
    shutil.rmtree(home.root / "items")
    for module, name, value in (
        (comparison, "MIN_LAYOUT_COSINE", -1),  # all pairs
        (comparison, "_PAIRS_AT_ONCE", 1),
        (comparison, "MAX_MISSES", 3),
    ):
        monkeypatch.setattr(module, name, value)
    home.run(features.run)
    assert "candidate pairs with similarity <=" in home.said and table_bytes(home) == expected


@pytest.mark.long
def test_parts_make_the_same_table_and_the_last_of_them_makes_it(home: Project) -> None:
    second_project = Project(home.folder.with_name("other"), home.settings)
    shutil.copytree(home.folder, second_project.folder, symlinks=True)
    home.run(features.run, "cache.unit_mib=1")
    first = second_project.run(features.run, "cache.unit_mib=1", shard="0/2")
    assert "units" in first.details["items"] and not (second_project.root / "items").exists()
    second_project.run(features.run, "cache.unit_mib=1", shard="1/2")
    assert table_bytes(second_project) == table_bytes(home)


@pytest.mark.long
def test_clusters_and_distances_are_columns_that_a_filter_and_the_page_show(home: Project) -> None:
    report = home.run(features.run, "features.clusters=3")
    assert report.details["clusters"] == 3
    rows = items(home, "features.clusters=3")
    ids = {row["media_id"]: path for path, row in rows.items()}
    centers = {path: ids[row["cluster"]] for path, row in rows.items()}
    assert len({*centers.values()}) == 3 and all(centers[center] == center for center in centers.values())
    assert all(0 <= row["outlier"] <= 2 for row in rows.values())
    center = rows[centers["chelsea.png"]]["cluster"]
    home.settings["features"]["clusters"] = 3
    home.settings["datasets"][0]["where"] = f"cluster == '{center}' and outlier < 3"
    home.run(bucket.run)
    expected = {path for path, row in rows.items() if row["cluster"] == center} - {"soft.png"}
    assert {*planned_roles(home)} - {"soft.png"} == expected
    home.run(preview.run, plan=True, out=home.folder / "plan.html")
    text = (home.folder / "plan.html").read_text()
    assert f"cluster of {centers['chelsea.png']}" in text and "outlier 0" in text
    home.settings["features"] |= {"clusters": 0, "duplicates": False}
    assert "clusters" not in home.run(features.run).details
    assert {row["cluster"] for row in items(home).values()} == {None}
    home.settings["features"] |= {"model": None, "clusters": None}
    home.run(features.run)
    assert {(row["cluster"], row["outlier"]) for row in items(home).values()} == {(None, None)}


def test_bucket_counts_them_and_leaves_them_out_where_the_filter_says_so(home: Project) -> None:
    report = home.run(bucket.run)
    assert "latentpress features" in report.details["near_duplicates"]
    everything = planned_roles(home)
    home.run(features.run)
    report = home.run(bucket.run)
    assert {row["dataset"]: row["items"] for row in report.details["near_duplicates"]} == {"photos": 4, "more": 1}
    assert 'where: "duplicate_of is null"' in report.details["near_duplicates"][0]["step"]
    assert planned_roles(home) == everything and len(everything) == 9
    page = home.folder / "plan.html"
    home.run(preview.run, plan=True, out=page)
    text = page.read_text()
    assert "near-duplicate of chelsea.png" in text and "sharpness" in text and "near-duplicate of small" not in text
    for dataset in home.settings["datasets"]:
        dataset["where"] = "duplicate_of is null and sharpness > 20"
    report = home.run(bucket.run)
    assert set(planned_roles(home)) == {"chelsea.png", "coffee.png", "astronaut.png", "rocket.png"}
    assert all(row["step"].startswith("filtered by") for row in report.details["near_duplicates"])
    (home.media / "new.png").write_bytes((home.folder / "more" / "soft.png").read_bytes())
    photograph("camera.png").reduce(2).save(home.media / "camera.png")
    for name in ("new.txt", "camera.txt"):
        (home.media / name).write_text(name)
    home.run(discover.run)
    with pytest.raises(NoFeatures, match="`features`") as caught:
        home.run(bucket.run)
    assert "latentpress features" in caught.value.next_step
    assert home.run(features.run).done == 1
    home.run(bucket.run)
    assert set(planned_roles(home)) == {"chelsea.png", "coffee.png", "astronaut.png", "rocket.png", "camera.png"}


@pytest.mark.long
def test_a_group_is_on_one_side_of_what_is_held_out_and_without_features_nothing_moves(home: Project) -> None:
    home.run(features.run)
    draws = {
        path: to_unit_interval(derive_seeds(pa.array([row["media_id"]]), "eval"))[0]
        for path, row in items(home).items()
    }
    fraction = float(max(draws["chelsea.png"], draws["coffee.png"]) + 1e-6)
    assert max(draws[name] for name in COPIES) > fraction < draws["rocket.png"], "other pictures would reveal it"
    section = home.settings.pop("features")
    home.settings["datasets"][0]["eval_fraction"] = fraction
    home.run(bucket.run)
    without = planned_roles(home)
    assert {path: role == "eval" for path, role in without.items()} == {
        path: draw < fraction and path != "soft.png" for path, draw in draws.items()
    }
    home.settings["features"] = section
    home.run(bucket.run)
    roles = planned_roles(home)
    assert {roles[name] for name in ("chelsea.png", *COPIES)} == {"eval"}
    assert all(roles[name] == without[name] for name in ("chelsea.png", "coffee.png", "astronaut.png", "rocket.png"))
    assert "soft.png" not in roles  # its dataset is trained on, but coffee.png is held out
    home.settings["features"]["frames"] = 2
    with pytest.raises(NoFeatures):
        home.run(bucket.run)


def test_a_plan_depends_on_features_only_where_a_filter_or_a_share_says_so(configured: Project) -> None:
    def key(*overrides: str) -> str:
        return plan_key(configured.config(*overrides), 16)

    plain = key()
    section = configured.settings.pop("features")
    assert key() == plain
    configured.settings["features"] = section
    assert key("features.frames=2") == plain
    filter_override = "datasets.photos.where=sharpness > 1"
    assert (
        len(
            {
                plain,
                key(filter_override),
                key(filter_override, "features.frames=2"),
                key(filter_override, "features.duplicates=false"),
            }
        )
        == 4
    )
    assert key("datasets.photos.eval_fraction=0.5") != key("datasets.photos.eval_fraction=0.5", "features.frames=2")


def test_a_filter_without_the_section_names_what_to_add(home: Project) -> None:
    home.settings.pop("features")
    with pytest.raises(LatentpressError, match="duplicate_of is") as caught:
        home.run(bucket.run, "datasets.photos.where=duplicate_of is null")
    assert "features: {}" in caught.value.next_step


@pytest.mark.long
def test_a_damaged_table_is_named_and_made_again_and_gc_removes_old_ones(home: Project) -> None:
    home.run(features.run)
    before = table_bytes(home)
    [path] = (home.root / "items").glob("*.arrow")
    data = bytearray(before)
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for dataset in home.settings["datasets"]:
        dataset["where"] = "duplicate_of is null"
    with pytest.raises(DamageError) as caught:
        home.run(bucket.run)
    assert "latentpress features" in caught.value.next_step
    assert "latentpress features" in home.run(verify.run).next_steps
    home.run(features.run)
    assert table_bytes(home) == before
    home.run(features.run, "features.duplicates=false")
    home.run(bucket.run)
    assert len([*(home.root / "items").iterdir()]) == 2
    home.run(gc.run, yes=True, keep_days=0)
    assert [*(home.root / "items").iterdir()] == [path]
