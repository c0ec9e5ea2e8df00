"""Plans of media tables that tests write row by row."""

from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from schemas.config.pipeline import Config
from schemas.tables import MEDIA_SCHEMA
from stages.planning.plan_builder import DraftPlan, build_plan
from stages.planning.units import sample_tensor_bytes, sample_units, text_tensor_bytes, text_units

VIDEO = {"num_frames": 9, "frame_rate": 10.0, "min_frames": 5}


def config(
    family: str = "kandinsky5-image", unit_mib: float = 0.5, flavour: str | None = None, **dataset: Any
) -> Config:
    """One dataset "a" of 64-pixel buckets, in which enlarging is allowed by default."""
    section = {"id": "a", "instance_data_dir": "a", "resolution": 64, "allow_upscale": True, **dataset}
    model = {"family": family, "flavour": flavour}
    return Config.model_validate(
        {"root": "work", "cache": {"unit_mib": unit_mib}, "model": model, "datasets": [section]}
    )


def videos(**video: Any) -> Config:
    return config("kandinsky5-video", dataset_type="video", video=VIDEO | video)


def row(number: int, width: int = 640, height: int = 480, **more: Any) -> dict[str, Any]:
    base = {
        "path": f"{number:03}.jpg",
        "media_id": f"{number:032x}",
        "kind": "image",
        "width": width,
        "height": height,
        "captions": [f"caption {number % 7}", f"another {number}"],
    }
    return base | more


def clip(number: int, duration: float, rate: float = 25.0, **more: Any) -> dict[str, Any]:
    return row(number, kind="video", duration=duration, rate=rate, frames=round(duration * rate), **more)


def plan_rows(settings_: Config, rows: list[dict], multiple: int = 16) -> DraftPlan:
    extra = sorted({name for row in rows for name in row if name.startswith("extra.")})
    table = pa.table({name: [row.get(name) for row in rows] for name in extra}) if extra else None
    media = pa.Table.from_pylist(
        [{key: row.get(key) for key in MEDIA_SCHEMA.names} for row in rows], schema=MEDIA_SCHEMA
    )
    for name in extra:
        assert table is not None
        media = media.append_column(name, table.column(name))
    return build_plan(settings_.model, settings_.datasets, {"a": media}, multiple)


def ids(plan: DraftPlan) -> dict[str, dict]:
    return {row["sample_id"]: row for row in plan.samples.to_pylist()}


def units_of(plan: DraftPlan, limit: int = 2**19) -> tuple[pa.Table, pa.Table]:
    """The units of samples, and the units of texts."""
    model, latents, text = (getattr(config(), name) for name in ("model", "latents", "text"))
    samples = sample_units(plan.samples, sample_tensor_bytes(model, latents, plan.samples), limit)
    return samples, text_units(plan.texts, plan.active, text_tensor_bytes(model, text, plan.texts), limit)


def reasons(plan: DraftPlan) -> dict[str, str]:
    return {row["path"]: row["reason"] for row in plan.rejects.to_pylist()}


def captions(plan: DraftPlan) -> list[list[str]]:
    """The cleaned captions of each active row."""
    words = {row["text_id"]: row["text"] for row in plan.texts.to_pylist()}
    return [[words[name] for name in texts] for texts in plan.active.column("texts").to_pylist()]


sizes = st.tuples(st.integers(16, 4000), st.integers(16, 4000))


def bucket_of(plan: DraftPlan) -> list[str]:
    return plan.active.column("bucket").to_pylist()


def edits(**dataset: Any) -> Config:
    return config(flavour="i2i-lite-sft", conditioning_data="b", **dataset)


def source(number: int, width: int = 640, height: int = 480) -> dict[str, Any]:
    return {
        "source": f"{number}.png",
        "source_id": f"{number + 500:032x}",
        "source_width": width,
        "source_height": height,
    }
