"""The page of a plan, as a browser shows it."""

from functools import partial
from typing import Any

from cache.sets.set_lookup import current_plan
from cache.store.store import Store
from schemas.cli.console import Report
from stages import bucket, discover, preview
from tests.stages.html_page import Page


def show(home, *overrides: str, **own: Any) -> tuple[Report, Page]:
    out = home.folder / "page.html"
    report = home.run(partial(preview.run, plan=True, out=out, **own), *overrides)
    return report, Page(out.read_text(encoding="utf-8"))


def planned(home, *overrides: str) -> Report:
    home.run(discover.run, *overrides)
    return home.run(bucket.run, *overrides)


def rows(home, *overrides: str) -> dict[str, dict]:
    """path -> row of SAMPLES of the current plan."""
    config = home.config(*overrides)
    return {row["path"]: row for row in current_plan(Store(config.root), config).samples.values()}


def settings(**dataset: Any) -> dict[str, Any]:
    base = {"id": "photos", "instance_data_dir": "media", "resolution": 64, "allow_upscale": True}
    return {"datasets": [base | dataset]}


def video_settings(**video: Any) -> dict[str, Any]:
    return settings(dataset_type="video", video={"num_frames": 17, "frame_rate": 12.0, **video})
