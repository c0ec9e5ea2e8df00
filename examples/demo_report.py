"""The demo's report page: what each stage did, the loss curve and the samples, as one HTML file."""

from collections import Counter
from pathlib import Path
from typing import Any

from cache.store import Store
from schemas.config.loading import load_config
from stages.pages.html import template_environment
from stages.planning.plan_lookup import current_plan

STAGE_COLUMNS = ("stage", "done", "skipped", "set_aside", "seconds")


def write_report(out: Path, results: dict[str, dict[str, Any]]) -> Path:
    """Write <out>/report.html and return its path."""
    template = template_environment(Path(__file__).with_name("templates")).get_template("demo_report.html")
    page = template.render(flavours=[describe_flavour(out, name, report) for name, report in results.items()])
    path = out / "report.html"
    path.write_text(page, encoding="utf-8", errors="backslashreplace")
    return path


def describe_flavour(out: Path, name: str, report: dict[str, Any]) -> dict[str, Any]:
    folder = out / name
    config = load_config(folder / "pipeline.yaml")
    media = Path(config.datasets[0].instance_data_dir)
    active = current_plan(Store(config.root), config).active.to_pylist()
    samples = folder / "output" / "demo" / "samples"
    last = sorted(samples.glob("step-*"))[-1:]

    def links(paths: list[Path]) -> list[str]:
        return [path.relative_to(out).as_posix() for path in sorted(paths)]

    return {
        "name": name,
        "seconds": report["seconds"],
        "media": links([path for path in media.iterdir() if path.suffix in (".png", ".jpg", ".mp4")]),
        "buckets": Counter(row["bucket"] for row in active if row["role"] == "train"),
        "stages": [{key: row[key] for key in STAGE_COLUMNS} for row in report["details"]["stages"]],
        "shards": [(kind, *shard_sizes(folder / "work" / kind)) for kind in ("text", "latents")],
        "curve": loss_curve_svg(report["eval"]),
        "sheet": next(iter(links(list(samples.glob("contact-sheet.png")))), ""),
        "clips": links([clip for step in last for clip in step.glob("*.mp4")]),
    }


def shard_sizes(folder: Path) -> tuple[int, float]:
    """Number and total KiB of the shards in a folder."""
    files = [path for path in folder.rglob("*") if path.suffix in (".arrow", ".tar")]
    return len(files), sum(path.stat().st_size for path in files) / 2**10


def loss_curve_svg(losses: list[tuple[int, float]], width: int = 340, height: int = 180) -> dict[str, Any]:
    """Points, edges and ends of the axes of a curve of (step, loss), in pixels."""
    first, last = losses[0][0], losses[-1][0]
    low, high = min(loss for _, loss in losses), max(loss for _, loss in losses)
    left, right, top, bottom = 48, width - 12, 12, height - 24

    points = []
    for step, loss in losses:
        across, up = (step - first) / max(1, last - first), (loss - low) / max(high - low, 1e-9)
        points.append((round(left + (right - left) * across, 1), round(bottom - (bottom - top) * up, 1)))
    edges = {"width": width, "height": height, "left": left, "right": right, "top": top, "bottom": bottom}
    return {"losses": losses, "points": points, "lowest": low, "highest": high, **edges}
