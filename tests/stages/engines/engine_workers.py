"""Workers for tests of the engines. Ray's processes import this module."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cache.sets.plans import Unit
from schemas.activities import announce
from schemas.config.encoding import Encoding
from schemas.config.pipeline import Config
from schemas.errors import LatentpressError
from schemas.json_records import format_record
from stages.engines.jobs import Job, NextUnit, UnitResult


class Echo:
    """A worker that writes a file for each unit. Units named die-* kill their process: always, or with die-once only
    the first time. error-beside waits for a slow unit. The first hang-once hangs; slow-* wait until the file "go-on"
    exists."""

    def __init__(self, job: Job) -> None:
        self.folder = Path(job.config.root)
        self.cleaned = self.folder / f"cleaned-{os.getpid()}"

    def run_units(self, take: NextUnit, advance: Callable[[int], None]) -> Iterator[UnitResult]:
        try:
            while (unit := take(True)) is not None:
                yield self.run_unit(unit, advance)
        finally:
            self.cleaned.touch()

    def run_unit(self, unit: Unit, advance: Callable[[int], None]) -> UnitResult:
        mark = self.folder / f"tried-{unit.unit_id}"
        with mark.open("a") as tries:
            tries.write(f"{os.getpid()}\n")
        first = len(mark.read_text().splitlines()) == 1
        if unit.unit_id.startswith("die") and (first or "once" not in unit.unit_id):
            advance(1)
            os.kill(os.getpid(), signal.SIGKILL)
        if unit.unit_id.startswith("error"):
            while "beside" in unit.unit_id and not list(self.folder.glob("tried-slow-*")):
                time.sleep(0.01)
            raise LatentpressError("no more room", "make some")
        while unit.unit_id.startswith("hang") and first:
            time.sleep(0.05)
        while unit.unit_id.startswith("slow") and not (self.folder / "go-on").exists():
            advance(0)
            time.sleep(0.05)
        if unit.unit_id.startswith("announced"):
            announce(f"{unit.unit_id}: the request is tried again")
        advance(len(unit.members))
        (self.folder / unit.unit_id).write_text(str(os.getpid()))
        return UnitResult(unit.unit_id, unit.unit_id, encoded=len(unit.members))


def make_job(folder: Path, workers: int, resources: dict[str, Any] | None = None, **stages: Any) -> Job:
    """A job of an existing plan."""
    settings = {"root": str(folder), "model": {"family": "sana"}, "datasets": [{"id": "a", "instance_data_dir": "a"}]}
    plan = folder / "plans" / "generation" / "plan.json"
    plan.parent.mkdir(parents=True, exist_ok=True)
    plan.write_bytes(format_record({}))
    config = Config.model_validate(settings | {"stages": stages})
    encoding = Encoding(workers=workers, threads=1, **(resources or {}))
    return Job(config, "generation", "fingerprint", encoding, stage="encode-text")


def make_units(*names: str) -> list[Unit]:
    return [Unit(name, "latents", "8x8@1", ("a", "b"), 1) for name in names]
