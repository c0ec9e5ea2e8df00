"""The rate at which shards appear, and a report that is refreshed until nothing remains."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from schemas.cli.console import Console, Report

RECENT_S = 3600.0  # shards published before do not count
MAX_COUNTED_SHARDS = 32
MIN_PAUSE_FACTOR = 4  # building a report may take at most this fraction of the time: 1/4

TableRow = dict[str, Any]


def estimate_rate(published: Sequence[tuple[float, int]], remaining: int, now: float) -> TableRow:
    """Items per second and the time left, as columns of a table; empty where nothing was published lately.

    published: time and number of items of each shard. The rate is that of the last shards up to `now`, whoever wrote
    them, so the first report has it, and it falls when no more shards appear.
    """
    recent = sorted(shard for shard in published if now - RECENT_S <= shard[0] <= now)[-MAX_COUNTED_SHARDS:]
    # The first shard is the start of the count: its items were done before.
    items = sum(count for _, count in recent[1:])
    if not items:
        return {"items_per_second": "", "left": ""}
    rate = items / max(now - recent[0][0], 1e-3)
    return {
        "items_per_second": f"{rate:.3g}" if rate < 100 else f"{rate:.0f}",
        "left": str(timedelta(seconds=round(remaining / rate))),
    }


def refresh_until_done(build_report: Callable[[], Report], console: Console, every: float) -> Report:
    """Show a new report every `every` seconds until nothing remains, less often where building one takes long. Ctrl-C
    ends with exit code 0."""
    report = Report(program="status")
    try:
        with console.live_display() as show:
            while True:
                started = time.monotonic()
                report = build_report()
                show(_stage_lines(report), report.summary())
                if not report.remaining:
                    return report
                took = time.monotonic() - started
                time.sleep(max(every - took, took * (MIN_PAUSE_FACTOR - 1)))
    except KeyboardInterrupt:
        report.details["stopped"] = f"watching, with {report.remaining} items remaining"
        report.remaining = 0
        return report


def _stage_lines(report: Report) -> dict[str, str]:
    """A line for each stage -> the same line with its rate, which changes at every refresh."""
    lines = {}
    for row in report.details.get("stages", []):
        line = f"{row['stage']}: {row['done']} {row['what']} done, {row['remaining']} remaining"
        line += f", {row['set_aside']} set aside" if row["set_aside"] else ""
        rate = f", {row['items_per_second']} {row['what']}/s, {row['left']} left" if row.get("left") else ""
        lines[line] = line + rate
    return lines
