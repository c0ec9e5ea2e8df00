"""How fast shards appear, and a report that is shown again and again. Knows nothing of what it watches."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from schemas.cli.console import Console, Report

RECENT_S = 3600.0  # seconds: what was published before says nothing of the pace now
MAX_COUNTED_SHARDS = 32  # shards that a pace is taken from
MIN_PAUSE_FACTOR = 4  # a look may take one part in so many of the time between two

TableRow = dict[str, Any]


def estimate_rate(published: Sequence[tuple[float, int]], remaining: int, now: float) -> TableRow:
    """Items a second and the time left, as columns of a table; empty ones where nothing was published lately.

    published: time and number of items of each shard. The pace is that of the last shards up to `now`, whoever wrote
    them, so it is known at the first look, and falls where nothing comes any more.
    """
    recent = sorted(shard for shard in published if now - RECENT_S <= shard[0] <= now)[-MAX_COUNTED_SHARDS:]
    # The first says when counting begins: what it holds was done before.
    items = sum(count for _, count in recent[1:])
    if not items:
        return {"items_per_second": "", "left": ""}
    rate = items / max(now - recent[0][0], 1e-3)
    return {
        "items_per_second": f"{rate:.3g}" if rate < 100 else f"{rate:.0f}",
        "left": str(timedelta(seconds=round(remaining / rate))),
    }


def refresh_until_done(look: Callable[[], Report], console: Console, every: float) -> Report:
    """Show `look()` every so many seconds until it says that nothing remains. Ctrl-C ends it well: exit code 0.

    A look that takes long is taken less often.
    """
    report = Report(program="status")
    try:
        with console.live_display() as show:
            while True:
                started = time.monotonic()
                report = look()
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
    """A line for each stage -> the same with what changes by itself."""
    found = {}
    for row in report.details.get("stages", []):
        line = f"{row['stage']}: {row['done']} {row['what']} done, {row['remaining']} remaining"
        line += f", {row['set_aside']} set aside" if row["set_aside"] else ""
        found[line] = line + (
            f", {row['items_per_second']} {row['what']}/s, {row['left']} left" if row.get("left") else ""
        )
    return found
