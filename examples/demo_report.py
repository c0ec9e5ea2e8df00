"""The demo's report page: what each stage did, the loss curve, the samples. One HTML file beside its pictures."""

import html
import json
from collections import Counter
from pathlib import Path
from typing import Any

from cache.store import Store
from schemas.loading import load
from stages.plan import current_plan

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }
h1 { font-size: 1.6rem } h2 { margin-top: 2.5rem; border-bottom: 1px solid #d0d7de; padding-bottom: .3rem }
table { border-collapse: collapse; margin: .8rem 0 } td, th { padding: .25rem .8rem; border: 1px solid #d0d7de }
th { background: #f6f8fa; text-align: left } td.n { text-align: right; font-variant-numeric: tabular-nums }
.row { display: flex; flex-wrap: wrap; gap: 2rem; align-items: flex-start }
img { max-width: 100%; border: 1px solid #d0d7de; image-rendering: auto } code { background: #f6f8fa; padding: 0 .3rem }
video { width: 288px; border: 1px solid #d0d7de } figure { margin: .8rem 0 }
.media img { height: 84px; border: 0; margin-right: 4px }
figcaption { color: #57606a; font-size: .85rem }
"""


def write_report(out: Path, results: dict[str, dict[str, Any]]) -> Path:
    """Write <out>/report.html and give its path."""
    sections = "\n".join(_section(out, name, report) for name, report in results.items())
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>latentpress demo</title>
<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>
<h1>latentpress demo</h1>
<p>Real photographs and videos, real architectures, tiny random weights: the pictures are texture. What counts here
is the path: media, buckets, embeddings, latents, shards, training, samples.</p>
{sections}
</body></html>
"""
    path = out / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _section(out: Path, name: str, report: dict[str, Any]) -> str:
    folder = out / name
    return f"""<h2>{html.escape(name)}</h2>
<p><code>latentpress run --config {name}/pipeline.yaml</code>: {report["seconds"]:.0f} s</p>
{_media(out, folder)}
<div class="row"><div>{_stages(report)}{_shards(folder)}</div>
<figure>{curve(report["eval"])}<figcaption>eval loss on fixed samples, noise and sigmas:
{report["eval"][0][1]:.3f} &rarr; {report["eval"][-1][1]:.3f}</figcaption></figure></div>
<figure>{_samples(out, folder)}<figcaption>validation samples by step</figcaption></figure>"""


def _media(out: Path, folder: Path) -> str:
    """The media that went in, and the buckets they became."""
    config = load(folder / "pipeline.yaml")
    place = Path(config.datasets[0].instance_data_dir)
    files = sorted(path for path in place.iterdir() if path.suffix in (".png", ".jpg", ".mp4"))
    shown = "".join(_thumbnail(path.relative_to(out).as_posix()) for path in files[:8])
    plan = current_plan(Store(config.root), config)
    buckets = Counter(row["bucket"] for row in plan.active.to_pylist() if row["role"] == "train")
    text = ", ".join(f"{count} of {bucket}" for bucket, count in sorted(buckets.items()))
    return f'<figure class="media">{shown}<figcaption>{len(files)} files; buckets: {text}</figcaption></figure>'


def _thumbnail(source: str) -> str:
    if source.endswith(".mp4"):
        return f'<video src="{source}" style="width:130px" muted></video> '
    return f'<img alt="" src="{source}">'


def _stages(report: dict[str, Any]) -> str:
    keys = ("stage", "done", "skipped", "set aside", "seconds")
    rows = "".join("<tr>" + "".join(_cell(row[key]) for key in keys) + "</tr>" for row in report["details"]["stages"])
    return f"<table><tr>{''.join(f'<th>{key}</th>' for key in keys)}</tr>{rows}</table>"


def _cell(value: Any) -> str:
    kind = ' class="n"' if isinstance(value, int | float) else ""
    return f"<td{kind}>{html.escape(str(value))}</td>"


def _shards(folder: Path) -> str:
    rows = ""
    for kind in ("text", "latents"):
        files = [path for path in (folder / "work" / kind).rglob("*") if path.suffix in (".arrow", ".tar")]
        size = sum(path.stat().st_size for path in files) / 2**10
        rows += f"<tr><td>{kind} shards</td>{_cell(len(files))}<td class='n'>{size:.0f} KiB</td></tr>"
    return f"<table>{rows}</table>"


def _samples(out: Path, folder: Path) -> str:
    samples = folder / "output" / "demo" / "samples"
    sheet = samples / "contact-sheet.png"
    parts = [f'<img alt="contact sheet" src="{sheet.relative_to(out).as_posix()}">'] if sheet.exists() else []
    last = sorted(samples.glob("step-*"))[-1:]
    for video in sorted(path for step in last for path in step.glob("*.mp4")):
        parts.append(f'<video src="{video.relative_to(out).as_posix()}" controls muted loop></video>')
    return "<br>".join(parts)


def curve(points: list[tuple[int, float]], width: int = 340, height: int = 180) -> str:
    """An SVG line of (step, loss) with its axes' ends written out."""
    steps, losses = [step for step, _ in points], [loss for _, loss in points]
    low, high = min(losses), max(losses)
    left, bottom, top = 48, height - 24, 12

    def x(step: int) -> float:
        return left + (width - left - 12) * (step - steps[0]) / max(1, steps[-1] - steps[0])

    def y(loss: float) -> float:
        return bottom - (bottom - top) * (loss - low) / max(high - low, 1e-9)

    line = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
    dots = "".join(f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="3" fill="#0969da"/>' for step, loss in points)
    label = 'font-size="11" fill="#57606a"'
    return f"""<svg width="{width}" height="{height}" role="img" aria-label="eval loss {json.dumps(points)}">
<path d="M{left} {top}V{bottom}H{width - 12}" fill="none" stroke="#d0d7de"/>
<polyline points="{line}" fill="none" stroke="#0969da" stroke-width="2"/>{dots}
<text x="{left - 6}" y="{y(high) + 4:.0f}" text-anchor="end" {label}>{high:.3f}</text>
<text x="{left - 6}" y="{y(low) + 4:.0f}" text-anchor="end" {label}>{low:.3f}</text>
<text x="{left}" y="{height - 8}" {label}>step {steps[0]}</text>
<text x="{width - 12}" y="{height - 8}" text-anchor="end" {label}>step {steps[-1]}</text></svg>"""
