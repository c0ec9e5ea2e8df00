"""Each job of a stage writes a report; `status` merges the reports into tables that fit the width."""

import os
import socket
import time
from pathlib import Path

import pytest

from cache.store.store import Store
from schemas.errors import LatentpressError
from schemas.json_records import format_record
from stages import bucket, discover, encode_latents, encode_text, gc, status
from stages.encoding import job_reports
from stages.encoding.job_reports import (
    MAX_SHOWN,
    JobReport,
    list_jobs,
    read_reports,
    reported,
    sum_rates,
)
from tests.background import until
from tests.project import Project

STAGE, CACHE = "encode-latents", "0" * 24


@pytest.fixture
def home(project, built) -> Project:
    return built(project(cache={"unit_mib": 0.004}), plan_six)


def plan_six(home: Project) -> None:
    for number in range(6):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    home.run(discover.run)
    home.run(bucket.run)


def rows(home: Project, **options: bool) -> tuple[dict, list[dict]]:
    """The rows of the stage and of its jobs."""
    details = home.run(status.run, json=True, **options).details
    (row,) = [row for row in details["stages"] if row["stage"] == STAGE]
    return row, [row for row in details.get("jobs", []) if row["stage"] == STAGE]


def reporter(root: object, stopped_by: str = "", **counts: object):
    about = JobReport(program=STAGE, engine="local", workers=2, shard="1/4", members=10, units=5)
    return reported(str(root), CACHE, about, lambda: counts, lambda: stopped_by)


def reports(root: object, time_s: float | None = None) -> list[JobReport]:
    return read_reports(Store(str(root)), {STAGE: CACHE}, time.time() if time_s is None else time_s)[STAGE]


@pytest.mark.slow
def test_status_merges_the_jobs_of_a_stage(home, monkeypatch) -> None:
    row, jobs = rows(home)
    assert (row["units"], row.get("jobs", ""), jobs) == ("0 of 6", "", [])
    for shard, remaining in (("0/2", 3), ("1/2", 0)):
        home.run(encode_latents.run, shard=shard)
        row, _ = rows(home)
        assert row["remaining"] == remaining and not row.get("left"), "nobody works on it"
        path = next((home.root / "jobs" / STAGE).glob("*/*.json")).with_name(f"{0:016x}.json")
        report = JobReport(program=STAGE, engine="local", workers=1, shard="1/2")
        path.write_bytes(format_record(report.model_dump(mode="json")))
        row, _ = rows(home)
        path.unlink()
        assert "1 running" in row["jobs"] and not row.get("left"), "it loads its model"
    shards = home.shards("latents")
    row, jobs = rows(home)
    assert (row["units"], row["jobs"]) == ("6 of 6", "2 ended")
    assert {job["shard"] for job in jobs} == {"0/2", "1/2"}
    for job in jobs:
        assert (job["state"], job["done"], job["units"], job["rejected"]) == ("ended", "3 of 3", "3 of 3", 0)
        assert job["where"] == f"{socket.gethostname()}, {os.getpid()}" and job["workers"] == "1"
    assert [job for job in home.run(status.run, everything=True).details["jobs"] if job["stage"] != STAGE] == []
    # Nothing remains: no job, no report.
    home.run(encode_latents.run)
    assert len(rows(home)[1]) == 2
    # A rejected file, a job that ends with an error, and a job whose reports can't be written.
    for name in shards:
        (home.root / "latents" / name).unlink()
    (home.media / "0.png").write_bytes(b"no picture")
    with pytest.raises(LatentpressError, match="max_reject_fraction"):
        home.run(encode_latents.run, "stages.max_reject_fraction=0")
    job = rows(home)[1][0]
    assert job["state"] == "failed" and job["rejected"] == 1
    monkeypatch.setattr(Store, "publish_bytes", lambda *arguments: (_ for _ in ()).throw(OSError("full")))
    assert home.run(encode_latents.run).exit_code == 0
    assert len(rows(home)[1]) == 3


def test_a_job_runs_and_ends_or_is_lost(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(job_reports, "INTERVAL_S", 0.01)
    counts = {"done": 4, "units_done": 1, "items_per_second": 2.0}
    with reporter(tmp_path, **counts), reporter(tmp_path, **counts, units_failed=1):
        until(lambda: [job.done for job in reports(tmp_path)] == [4, 4])
        running = reports(tmp_path)
        assert [job.state for job in running] == ["running", "running"]
        assert {(job.units_done, job.units_failed) for job in running} == {(1, 0), (1, 1)}
        assert sum_rates(running) == 4
        lost_jobs = reports(tmp_path, time.time() + 2 * job_reports.LOST_AFTER_S)
        assert [job.state for job in lost_jobs] == ["lost", "lost"] and "no sign of life for" in lost_jobs[0].reason
        assert sum_rates(lost_jobs) == 0
        assert status.count_states([*running, *lost_jobs]) == "2 running, 2 lost"
    assert [job.state for job in reports(tmp_path, time.time() + 2 * job_reports.LOST_AFTER_S)] == ["ended", "ended"]
    assert reports(tmp_path, time.time() + 2 * job_reports.KEPT_S) == []


@pytest.mark.parametrize(
    ("error", "stopped_by", "state", "reason"),
    [
        (KeyboardInterrupt(), "SIGTERM", "stopped", "SIGTERM"),
        (None, "--max-time", "stopped", "--max-time"),
        (LatentpressError("no room", "make some"), "", "failed", "no room"),
        (ValueError("odd"), "", "failed", "ValueError('odd')"),
    ],
)
def test_how_a_job_ended_is_said(tmp_path: Path, error, stopped_by: str, state: str, reason: str) -> None:
    try:
        with reporter(tmp_path, stopped_by):
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    (job,) = reports(tmp_path)
    assert (job.state, job.reason) == (state, reason)


@pytest.mark.slow
def test_gc_removes_reports_of_jobs_that_ended_long_ago(home) -> None:
    home.run(encode_text.run)
    (path,) = (home.root / "jobs").rglob("*.json")
    assert isinstance(home.run(gc.run, keep_days=0.0).details["unused"], str), "a job may run"
    os.utime(path, (0, 0))
    (row,) = home.run(gc.run, yes=True).details["unused"]
    assert row["path"].startswith("jobs/encode-text") and not path.exists()
    assert not (home.root / "jobs" / "encode-text").exists()


def test_programs_get_every_job_and_people_the_most_interesting() -> None:
    about = {"program": STAGE, "engine": "local", "workers": 1, "shard": "0/1", "host": "vm"}
    ended = [JobReport(**about, process=number + 1, exit_code=0) for number in range(MAX_SHOWN)]
    many = {STAGE: [*ended, JobReport(**about, process=21341, reason="gone")]}
    result = list_jobs(many, for_people=True)
    assert len(result["jobs"]) == MAX_SHOWN and result["jobs"][0]["state"] == "lost" and result["more_jobs"] == 1
    assert result["why_jobs_stopped"] == [{"where": "vm, 21341", "reason": "gone"}]
    rows = list_jobs(many)["jobs"]
    assert len(rows) == MAX_SHOWN + 1 and rows[0]["state"] == "lost" and rows[0]["workers"] == "1"
    assert list_jobs({STAGE: []}) == {}
