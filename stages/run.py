"""run: every stage in order, each its own process, so that no two models are ever in memory together.

Each stage finds by itself what is done, so a second run ends in seconds. It stops at the first stage that fails.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from schemas.cli.console import Console, Options, Report, make_app
from schemas.config.encoding import StageName
from schemas.config.pipeline import Config
from schemas.errors import DAMAGE, INCOMPLETE, OK, LatentpressError
from stages.encoding.interruption import MaxTimeOption, StopHandler
from stages.encoding.stage import refuse_partition


def run(
    config: Config,
    options: Options,
    console: Console,
    *,
    max_time: MaxTimeOption = None,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="As of index: leave out the samples whose media were missing.")
    ] = False,
) -> Report:
    refuse_partition(options, "run")
    stages = _StageProcesses({"index": ["--allow-missing"]} if allow_missing else {})
    stopping = StopHandler(max_time, stages.stop)
    with stopping.stop_on_signals():
        report = _run_stages(config, options, console, stages, stopping)
    if stopping.reason:
        report.details["stopped"] = f"by {stopping.reason}; what is done is kept"
        report.remaining = max(report.remaining, 1)
        report.next_steps = ["latentpress run"]
    return report


def _run_stages(
    config: Config, options: Options, console: Console, stages: "_StageProcesses", stopping: StopHandler
) -> Report:
    report = Report(program="run", what="stages", dry_run=options.dry_run)
    rows: list[dict] = []
    report.details["stages"] = rows
    for stage in config.stages.order:
        if stage == "encode-vision" and not config.vision.model:
            continue
        started = time.monotonic()
        console.log(f"--- {stage}")
        code, document = stages.run(stage, options)
        if stopping.reason and (not document or "error" in document):
            break  # it was interrupted where it has nothing to say
        seconds = round(time.monotonic() - started, 1)
        if "error" in document or code not in (OK, INCOMPLETE, DAMAGE):
            raise StageFailed(stage, code, document)
        rows.append({"stage": stage, "seconds": seconds} | {key: document[key] for key in COUNT_KEYS})
        rows[-1]["set_aside"] = len(document["set_aside"]) + document["more_set_aside"]
        report.remaining += bool(document["remaining"])
        report.done += bool(document["done"]) and not document["remaining"]
        report.skipped += not document["done"] and not document["remaining"]
        report.set_aside += document["set_aside"]
        report.more_set_aside += document["more_set_aside"]
        report.truncated = document["truncated"] or report.truncated  # index lists all, encode-text what is new
        report.failed += document["failed"]
        report.damage += document["damage"]
        if not options.dry_run:
            report.details |= _result_paths(config, stage, document["details"])
        if code != OK:
            report.next_steps += [_as_run_step(step) for step in document["next_steps"]]
        if code != OK or stopping.reason:
            break
        if options.dry_run and document["remaining"]:
            console.log(f"{stage} has work to do; what comes after it depends on the result")
            break
    return report


def _as_run_step(step: str) -> str:
    """A stage's next step where `run` has its option."""
    return step.replace("latentpress index", "latentpress run", 1) if "--allow-missing" in step else step


COUNT_KEYS = ("done", "skipped", "remaining")


def _result_paths(config: Config, stage: StageName, said: dict) -> dict[str, str]:
    """Where lies what somebody wanted of it all."""
    if stage == "train" and "saved" in said:
        names = {"metrics.jsonl": "numbers", "tensorboard": "tensorboard"}
        folder = Path(said["run"])
        result = "adapter" if config.train.adapter.type == "lora" else "model"
        return {result: said["saved"]} | {what: str(folder / name) for name, what in names.items()}
    if stage == "decode" and "contact_sheet" in said:
        return {"pictures": said["samples"], "contact_sheet": said["contact_sheet"]}
    return {}


class StageFailed(LatentpressError):
    """A stage ended with an error of its own. It has printed it; in the JSON report it is passed on."""

    def __init__(self, stage: str, code: int, document: dict) -> None:
        error = document.get("error", {})
        super().__init__(f"{stage} ended with exit code {code}: why stands above")
        message = error.get("message", f"it ended with exit code {code}; its output stands above")
        self._forwarded_error = {"message": f"{stage}: {message}", "next_step": error.get("next_step", "")}
        self.exit_code = error.get("exit_code", document.get("exit_code", INCOMPLETE))  # type: ignore[misc]

    def to_dict(self) -> dict:
        return super().to_dict() | self._forwarded_error


class _StageProcesses:
    """One program at a time, each a process of its own; its log passes through."""

    def __init__(self, own: Mapping[str, list[str]]) -> None:
        """own: options of single programs, beside those of all."""
        self._extra_options = own
        self._process: subprocess.Popen | None = None
        self._stopped = False

    def run(self, stage: StageName, options: Options) -> tuple[int, dict]:
        """Exit code and report; an empty error where it has none, an empty report where it was told to stop before."""
        module = "trainer" if stage == "train" else f"stages.{stage.replace('-', '_')}"
        words = [word for word in options.argv() if word != "--json"]
        command = [sys.executable, "-P", "-m", module, *words, *self._extra_options.get(stage, ()), "--json"]
        if self._stopped:
            return INCOMPLETE, {}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as self._process:
            if self._stopped:  # between the question and the start
                self._process.terminate()
            output, _ = self._process.communicate()
        try:
            return self._process.returncode, json.loads(output)
        except json.JSONDecodeError:
            return self._process.returncode, {"error": {}}

    def stop(self) -> None:
        """Tell the program that runs, and wait for it no less: it finishes or drops what it is at."""
        self._stopped = True
        if self._process is not None:
            self._process.terminate()


app = make_app("run", "Run every stage in order, each in its own process, skipping what is done.", run)

if __name__ == "__main__":
    app()
