"""The image that a validation prompt without one starts from: of a sample of the data, for i2v its first frames, for
i2i its source. The prompt's name and the samples' contents choose it, so other prompts and moved items change nothing.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.family import Condition
from schemas.identity import derive_seeds
from stages.planning.plan_builder import DraftPlan

TableRow = dict[str, Any]


class DataImage(NamedTuple):
    """described: in the plan, "dataset", "role" and "path" of the file, and of a clip "start" (seconds). media: its
    "media_id", "kind", "width" and "height", and of a clip "start" and "rate"."""

    described: TableRow
    media: TableRow


def choose_image(plan: DraftPlan, media: Mapping[str, pa.Table], condition: Condition, name: str) -> DataImage:
    """The image of prompt `name`: of a held-out sample where there are any, which are not trained on.

    media: as of `build_plan`.
    """
    active = plan.active
    for role in ("train", "eval"):
        if pc.any(pc.equal(plan.active.column("role"), role)).as_py():
            active = plan.active.filter(pc.equal(plan.active.column("role"), role))
    if pc.any(pc.invert(active.column("regularisation"))).as_py():
        active = active.filter(pc.invert(active.column("regularisation")))
    ids = active.column("sample_id").combine_chunks()
    row = active.slice(int(np.argmin(derive_seeds(ids, f"validation image of {name}"))), 1).to_pylist()[0]
    found = plan.samples.filter(pc.equal(plan.samples.column("sample_id"), row["sample_id"])).to_pylist()[0]
    item = media[row["dataset"]]
    (item,) = item.slice(pc.index(item.column("path"), row["path"]).as_py(), 1).to_pylist()
    if condition.kind == "source":
        described = {"dataset": row["dataset"], "role": "source", "path": row["source_path"]}
        sizes = {"width": item["source_width"], "height": item["source_height"]}
        return DataImage(described, {"media_id": found["source_id"], "kind": "image", **sizes})
    described = {"dataset": row["dataset"], "role": "media", "path": row["path"], "start": found["start"]}
    clip = {key: found[key] for key in ("media_id", "kind", "start", "rate")}
    return DataImage(described, clip | {"width": item["width"], "height": item["height"]})


def describe_image(image: Mapping[str, Any]) -> str:
    """In words: "clips: a.mp4 at 1.5 s"."""
    place = f"{image['dataset']}: {image['path']}"
    return place if image.get("start") is None else f"{place} at {image['start']:g} s"
