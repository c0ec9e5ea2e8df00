"""What a person reads of jobs fits the width, whatever machines, counts and reasons there are."""

import pytest
from rich.cells import cell_len

from schemas.cli.report import Report
from schemas.cli.tables import WIDTH
from stages.encoding.job_reports import JobReport
from stages.maintenance.job_table import MAX_SHOWN, describe_jobs, list_jobs
from tests.reports import odd_keys


def job(**about: object) -> JobReport:
    usual = {
        "program": "encode-latents",
        "host": "vm",
        "process": 21341,
        "engine": "local",
        "workers": 1,
        "shard": "0/1",
        "members": 7,
        "done": 7,
    }
    usual |= {"units": 1, "units_done": 1, "items_per_second": 53.2, "seconds": 11, "exit_code": 0}
    return JobReport.model_validate(usual | about)


def lines_of(**jobs: list[JobReport]) -> list[str]:
    report = Report("status", details=describe_jobs({name.replace("_", "-"): found for name, found in jobs.items()}))
    assert list(odd_keys(report.to_dict())) == []
    return report.summary().splitlines()[1:]


def test_usual_jobs_take_a_line_each() -> None:
    assert lines_of(
        encode_text=[job()], encode_latents=[job(process=22065, exit_code=None, items_per_second=None)]
    ) == [
        "  jobs:",
        "    stage           state    where      done    units   per second  took",
        "    encode-latents  running  vm, 22065  7 of 7  1 of 1              0:00:11",
        "    encode-text     ended    vm, 21341  7 of 7  1 of 1  53.2        0:00:11",
    ]


@pytest.mark.parametrize(
    "host", ["ip-10-0-12-134.eu-central-1.compute.internal", "encode-latents-7-x8k2p", "写真" * 20]
)
def test_long_names_counts_and_reasons_keep_to_the_width(host) -> None:
    why = "13 of 25 samples were set aside; the whole list: s3://bucket/work/rejects/encode-latents/0123456789abcdef.arrow"
    big = {"host": host, "members": 10**7, "done": 10**6, "units": 40000, "units_done": 1201, "seconds": 2 * 86400 + 5}
    jobs = [job(**big, shard=f"{i}/128", set_aside=i, units_failed=i, exit_code=None) for i in range(5)]
    jobs += [job(**big, shard="7/128", engine="ray", workers=512, exit_code=3, reason=why)]
    lines = lines_of(encode_latents=jobs)
    assert max(map(cell_len, lines)) <= WIDTH
    text = " ".join(" ".join(lines).split())
    assert "48:00:05" in text and "why jobs stopped" in text and "compute.internal" not in text
    assert why in text.replace(" reason: ", " ")


def test_programs_get_every_job_and_people_the_most_interesting() -> None:
    many = {
        "encode-text": [job(process=i + 1, exit_code=0) for i in range(MAX_SHOWN)]
        + [job(exit_code=None, reason="gone")]
    }
    found = describe_jobs(many)
    assert len(found["jobs"]) == MAX_SHOWN and found["jobs"][0]["state"] == "lost" and found["more_jobs"] == 1
    rows = list_jobs(many)["jobs"]
    assert len(rows) == MAX_SHOWN + 1 and rows[0]["state"] == "lost: gone" and rows[0]["engine"] == "local, 1 worker"
    assert describe_jobs({"encode-text": []}) == list_jobs({}) == {}
