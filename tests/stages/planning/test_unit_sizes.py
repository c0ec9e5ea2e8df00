"""The bytes that planning expects of a unit, against the tensors in its shard."""

import pytest
from PIL import Image

from cache.sets.set_lookup import current_plan
from cache.shards.shard_io import open_reader
from cache.store.store import Store
from stages import bucket, discover, encode_latents


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "posterior", "masks"),
    [
        ("kandinsky5-image-i2i", "moments", True),
        ("kandinsky5-video-i2v", "sample", True),
    ],
)
def test_estimated_bytes_are_those_of_the_shard(project, kind: str, posterior: str, masks: bool) -> None:
    """With conditions (a source, a first frame) and masks."""
    home = project(kind, latents={"posterior": posterior}, cache={"unit_mib": 0.05})
    dataset = home.settings["datasets"][0]
    for seed, name in enumerate(("one", "two")):
        if "video" in kind:
            home.video(f"{name}.mp4", frames=12)
        else:
            home.image(f"{name}.png", seed=seed)
    if kind.endswith("i2i"):
        dataset["conditioning_data"] = "sources"
        for name in ("one", "two"):
            home.image(f"../sources/{name}.png", seed=9)
    if masks:
        dataset["mask_data"] = "masks"
        (home.folder / "masks").mkdir()
        for name in ("one", "two"):
            Image.new("L", (64, 48), 255).save(home.folder / "masks" / f"{name}.png")
    home.run(discover.run)
    details = home.run(bucket.run).details
    home.run(encode_latents.run)

    store = Store(home.root)
    units = {unit.unit_id: unit for unit in current_plan(store, home.config()).units("latents")}
    total = 0
    for name in home.shards("latents"):
        shard = open_reader(store, f"latents/{name}")
        stored_bytes = sum(
            tensor.nbytes for row in map(shard.read, range(len(shard))) for tensor in row.tensors.values()
        )
        assert stored_bytes == units.pop(shard.meta.unit).estimated_bytes
        total += stored_bytes
    assert not units and total
    [row] = details["buckets"]
    assert row["latents_mib"] == details["disk"][0]["plan_mib"] == round(total / 2**20, 2)
