"""run: every stage in order, each its own process, so that no two models are ever in memory together.

Each stage finds by itself what is done, so a second run ends in seconds. It stops at the first stage that fails.
"""

import json
import subprocess
import sys
import time

from schemas.config import Config, StageName
from schemas.console import Console, Options, Report, program
from schemas.errors import DAMAGE, OK, REMAINS, LatentpressError
from stages.stage import refuse_shard


def run(config: Config, options: Options, console: Console) -> Report:
    refuse_shard(options, "run")
    report = Report(program="run", dry_run=options.dry_run)
    rows = []
    for stage in config.stages.order:
        if stage == "encode-vision" and not config.vision.model:
            continue
        started = time.monotonic()
        console.log(f"--- {stage}")
        code, document = _stage(stage, options)
        seconds = round(time.monotonic() - started, 1)
        if "error" in document or code not in (OK, REMAINS, DAMAGE):
            raise StageFailed(stage, code, document)
        rows.append({"stage": stage, "seconds": seconds} | {key: document[key] for key in COUNTS})
        rows[-1]["set aside"] = len(document["set_aside"]) + document["more_set_aside"]
        report.done += document["done"]
        report.skipped += document["skipped"]
        report.remaining += document["remaining"]
        report.set_aside += document["set_aside"]
        report.more_set_aside += document["more_set_aside"]
        report.failed += document["failed"]
        report.damage += document["damage"]
        if code != OK:
            report.next_steps += document["next_steps"]
            break
        if options.dry_run and document["remaining"]:
            console.log(f"{stage} has work to do; what comes after it depends on the result")
            break
    report.details["stages"] = rows
    return report


COUNTS = ("done", "skipped", "remaining")


class StageFailed(LatentpressError):
    """A stage ended with an error of its own; its message is passed on."""

    def __init__(self, stage: str, code: int, document: dict) -> None:
        error = document.get("error", {})
        message = error.get("message", f"it ended with exit code {code}; its output stands above")
        super().__init__(f"{stage}: {message}", error.get("next_step", ""))
        self.exit_code = error.get("exit_code", document.get("exit_code", REMAINS))  # type: ignore[misc]


def _stage(stage: StageName, options: Options) -> tuple[int, dict]:
    """Run one program as a process; its log passes through, its report is returned."""
    module = "trainer" if stage == "train" else f"stages.{stage.replace('-', '_')}"
    words = [word for word in options.argv() if word != "--json"]
    command = [sys.executable, "-m", module, *words, "--json"]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    try:
        return process.returncode, json.loads(process.stdout)
    except json.JSONDecodeError:
        return process.returncode, {"error": {}}


app = program("run", "Run every stage in order, each in its own process, skipping what is done.", run)

if __name__ == "__main__":
    app()
