"""Lists of rejects: on an object store they are read by requests that run together."""

import pytest

from cache.sets.rejects import make_reject, read_stage, write_rejects
from cache.store.damage import DamageError
from cache.store.store import Store
from tests.s3_server import BUCKET, S3Server

STAGE = f"encode-latents/{'0' * 24}"


def test_a_damaged_list_is_named(s3: S3Server) -> None:
    store, lists = Store(f"s3://{BUCKET}/work"), {}
    for number in range(3):
        rows = [make_reject("encode-latents", f"{number}-{row}", "a.png", "corrupt", "why") for row in range(2)]
        write_rejects(store, STAGE, f"unit-{number}", rows)
        lists[f"unit-{number}"] = rows
    assert read_stage(store, STAGE) == lists
    write_rejects(store, STAGE, "unit-2", [])
    store.publish_bytes(f"rejects/{STAGE}/unit-1.arrow", b"ARROW1")
    with pytest.raises(DamageError, match=f"s3://{BUCKET}/work/rejects/{STAGE}/unit-1.arrow"):
        read_stage(store, STAGE)
    damaged: dict[str, DamageError] = {}
    assert read_stage(store, STAGE, damaged) == {"unit-0": lists["unit-0"]} and [*damaged] == ["unit-1"]
