"""Plans of many generations: read with a bounded number of requests, and whole."""

from pathlib import Path

import pyarrow as pa
import pytest

from cache.sets import plans
from cache.store.store import Store
from schemas.tables import ACTIVE_SCHEMA, SAMPLES_SCHEMA, TEXTS_SCHEMA, UNITS_SCHEMA
from tests.s3_server import BUCKET, S3Server

GENERATIONS = 20
EMPTY = {"samples": SAMPLES_SCHEMA, "texts": TEXTS_SCHEMA, "units": UNITS_SCHEMA, "active": ACTIVE_SCHEMA}


def text_id(number: int) -> str:
    return f"{number:032x}"


def publish(store: Store, number: int, **info) -> plans.Plan:
    """A generation with one more text, which is its null text."""
    id = text_id(number)
    rows = {
        "texts": [{"text_id": id, "text": f"text {number}", "negative": False}],
        "units": [{"unit_id": f"{number:016x}", "kind": "text", "bucket": "", "members": [id], "estimated_bytes": 9}],
    }
    tables = {}
    for name, schema in EMPTY.items():
        values = [{key: row.get(key) for key in schema.names} for row in rows.get(name, ())]
        tables[name] = pa.Table.from_pylist(values, schema)
    return plans.publish_plan(store, "k", tables, plans.PlanInfo(null_text=id, validation=[], **info))


def test_a_plan_of_many_generations_is_read_with_few_requests(s3: S3Server, tmp_path: Path) -> None:
    for number in range(GENERATIONS):
        publish(Store(tmp_path / "work"), number, **({"replaced_units": [f"{3:016x}"]} if number == 5 else {}))
    store = Store(f"s3://{BUCKET}/work")
    for path in (tmp_path / "work").rglob("*.*"):
        s3.put(path.relative_to(tmp_path).as_posix(), path.read_bytes())
    s3.reset()
    plan = plans.newest_plan(Store(f"s3://{BUCKET}/work"), "k")
    assert plan is not None and len(plan.text_table) == GENERATIONS and plan.is_complete
    assert [unit.members for unit in plan.units("text")] == [(text_id(GENERATIONS - 1),)]
    assert plan.replaced_units == {f"{3:016x}"} and plan.sample_table.num_rows == 0 and plan.active.num_rows == 0
    assert len(s3.requests) <= 5 * (plans.MAX_EARLIER + 1) + 10, s3.counts()
    assert sorted(plans.planned_ids(store, "text").to_pylist()) == [text_id(number) for number in range(GENERATIONS)]


@pytest.mark.parametrize("removed", [0, plans.MAX_EARLIER + 1])
def test_what_a_removed_generation_held_is_planned_again(tmp_path, removed: int) -> None:
    store = Store(tmp_path)
    names = [publish(store, number).name for number in range(GENERATIONS)]
    name = names[removed]
    for file in [*store.list_names(f"plans/{name}")]:
        store.remove(f"plans/{name}/{file}")
    planned_texts = set(plans.planned_ids(store, "text").to_pylist())
    plan = plans.newest_plan(store, "k")
    assert plan is not None and {*plan.text_table.column("text_id").to_pylist()} == planned_texts
