"""Texts in units by the samples that use them: steps of the order by sections read few shards of texts."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.common import run_silently
from benchmarks.index import write_shards
from benchmarks.planning import make_project
from cache.sets.set_lookup import open_configured_set
from cache.sets.window import needed_shards
from schemas.config.loading import load_config
from schemas.config.training import Train
from stages import bucket, index

ITEMS, SHUFFLE, WINDOW = 3600, 12, 16  # steps that use up about a section


def most_at_a_time(needs: Sequence[set[int]]) -> int:
    return max(len(set.union(*needs[first : first + WINDOW])) for first in range(len(needs) - WINDOW))


@pytest.mark.long
@pytest.mark.slow
def test_steps_in_a_row_read_few_shards_of_latents_and_of_texts(tmp_path: Path, tiny) -> None:
    """From media tables to training, with units of 2 MiB: 16 samples, or about 12 texts."""
    (tmp_path / "model").symlink_to(tiny("kandinsky5-image-t2i"))
    dataset = {"id": "items", "instance_data_dir": "media", "resolution": 512, "bucket_step": 256}
    path = make_project(tmp_path, ITEMS, "image", 0.0, cache={"unit_mib": 2.0}, datasets=[dataset])
    run_silently(bucket.run, path)
    write_shards(path)
    run_silently(index.run, path)
    data = open_configured_set(load_config(path), print)
    kinds = data.tables["shards"]["kind"].to_pylist()
    by_kind, total = dict[tuple[str, int | None], int](), {kind: kinds.count(kind) for kind in ("latents", "text")}
    for shuffle in (SHUFFLE, None):
        settings = Train(batch_size=4, accumulate=3, shuffle_shards=shuffle)
        schedule = data.make_schedule(settings)
        steps = int(schedule.steps_per_epoch)
        needs = [set(each.tolist()) for each in needed_shards(data, schedule, 0.1, 0, steps)]
        assert set.union(*needs) == set(range(len(kinds)))
        for kind in total:
            own = [{number for number in each if kinds[number] == kind} for each in needs[: -len(schedule.buckets)]]
            by_kind[kind, shuffle] = most_at_a_time(own)
    assert by_kind["latents", SHUFFLE] <= 2 * SHUFFLE + len(schedule.buckets)
    assert by_kind["text", SHUFFLE] <= 2 * (2 * SHUFFLE + len(schedule.buckets)) * total["text"] / total["latents"]
    assert by_kind["text", SHUFFLE] < by_kind["text", None] / 2
