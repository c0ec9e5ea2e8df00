"""The hash of the training rows in checkpoints, compared with a hash computed value by value."""

from pathlib import Path

import numpy as np
import pytest
import xxhash

from cache.sets.trainset import TrainSet
from cache.shards.shard import canonical_json
from cache.store.store import Store
from tests.cache.sets.small_set import make_source, opened
from trainer.run import run_state


def reference_digest(data: TrainSet, block: int) -> str:
    """The digest of `run_state.data_signature`, `block` rows at a time."""
    rows = data.tables["index"].to_pylist()[: len(data)]
    names = data.tables["texts"].column("text_id").to_pylist()
    result = xxhash.xxh3_128(canonical_json({kind: data.fingerprints[kind] for kind in ("latents", "text")}))
    for first in range(0, len(rows), block):
        part = rows[first : first + block]
        columns = [[row[key] for row in part] for key in ("sample_id", "bucket", "dataset")]
        columns.append([names[number] for row in part for number in row["texts"]])
        nulls = [data.meta.null_text if row["null_text"] is None else row["null_text"] for row in part]
        columns.append([None if number is None else names[number] for number in nulls])
        for column in columns:
            result.update(np.array([-1 if value is None else len(value) for value in column], "<i8").tobytes())
            result.update("".join(value or "" for value in column).encode())
        for key in ("repeats", "weight", "regularization"):
            result.update(np.array([row[key] for row in part], "<f8").tobytes())
        result.update(np.array([len(row["texts"]) for row in part], "<f8").tobytes())
    return result.hexdigest()


@pytest.mark.parametrize("block", [3, run_state.HASH_ROWS])
@pytest.mark.parametrize("null", [True, False])
def test_the_digest_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, null: bool) -> None:
    data = opened(make_source(Store(tmp_path), "arrow"))
    if not null:
        data.meta = data.meta.model_copy(update={"null_text": None})
    monkeypatch.setattr(run_state, "HASH_ROWS", block)
    result = run_state.data_signature(data)
    assert result["digest"] == reference_digest(data, block) and result["samples"] == len(data) > 3
