"""Media that are missing when a training set is made."""

import pytest

from schemas.errors import LatentpressError
from stages import encode_latents, encode_text, index, run
from tests.forms import long
from tests.stages.discovery.missing_files import again, files, prepared


@pytest.fixture
def lacking(project, built):
    """Four photos, encoded while 0.png was missing."""
    return built(project(), encode_without_the_first)


def encode_without_the_first(home):
    prepared(home)
    (home.media / "0.png").rename(home.folder / "0.png")
    home.run(encode_text.run)
    assert home.rejects(home.run(encode_latents.run)) == {"0.png": "missing"}


@pytest.mark.slow
def test_index_refuses_a_set_without_the_media_that_were_missing(lacking) -> None:
    before = files(lacking)
    report = lacking.run(index.run)
    assert (report.exit_code, report.remaining, lacking.rejects(report)) == (3, 1, {"0.png": "missing"})
    assert files(lacking) == before
    assert [step.partition("   #")[0] for step in report.next_steps] == [
        "latentpress encode-text",
        "latentpress encode-latents",
        "latentpress discover",
        "latentpress index --allow-missing",
    ]
    report = lacking.run(index.run, allow_missing=True)
    assert (report.exit_code, report.done, lacking.rejects(report)) == (0, 3, {"0.png": "missing"})


def test_media_that_come_back_are_in_the_next_set(lacking) -> None:
    (lacking.folder / "0.png").rename(lacking.media / "0.png")
    assert lacking.run(encode_latents.run).rejects == []
    assert (lacking.run(index.run).exit_code, lacking.run(index.run).details["samples"]) == (0, 4)


def test_media_that_were_deleted_for_good_leave_by_discover_and_bucket(lacking) -> None:
    again(lacking)
    assert lacking.run(encode_latents.run).exit_code == 0
    report = lacking.run(index.run)
    assert (report.exit_code, report.details["samples"], report.rejects) == (0, 3, [])


@pytest.mark.long
@pytest.mark.slow
def test_run_passes_or_stops_as_index_does(lacking, forked_programs) -> None:
    alone = "stages.order=[index]"
    report = lacking.run(run.run, alone)
    assert report.exit_code == 3
    (step,) = [step for step in report.next_steps if "--allow-missing" in step]
    assert step.startswith("latentpress run ")
    report = lacking.run(run.run, alone, allow_missing=True)
    assert (report.exit_code, report.details["stages"][0]["done"]) == (0, 3)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(200, 300), long((300, 300))])
def test_index_reports_the_rejects_of_a_stopped_stage(project, forked_programs, shape: tuple[int, int]) -> None:
    """Six of eight photos are damaged: in a separate unit, after which the stage stops, or in one unit with others."""
    home = project(cache={"unit_mib": 1})
    for number in range(8):
        path = home.image(f"{number}.jpg", (300, 300) if number < 6 else shape, f"picture {number}", number)
        path.write_bytes(path.read_bytes()[: 1500 if number < 6 else None])
    again(home)
    home.run(encode_text.run)
    with pytest.raises(LatentpressError, match=r"6 of [68] samples were rejected"):
        home.run(encode_latents.run)
    report = home.run(index.run)
    assert report.exit_code == 3 and not (home.root / "sets").exists()
    assert home.rejects(report) == {f"{number}.jpg": "truncated" for number in range(6)}
    assert "were rejected" in report.details["stopped_by_limit"][0]["message"]
    assert report.next_steps[0].startswith("latentpress encode-latents --retry-rejects")
    raised = "stages.max_reject_fraction=1.0"
    assert home.run(encode_latents.run, raised).exit_code == 0
    report = home.run(index.run, raised)
    assert (report.exit_code, report.done, len(report.rejects)) == (0, 2, 6)
    report = home.run(run.run, raised, "stages.order=[encode-latents, index]")
    assert (report.exit_code, len(report.rejects)) == (0, 6), "each sample once"
    step, rejects = report.next_steps
    assert step.startswith("latentpress encode-latents --config ") and "--retry-rejects   # " in step
    assert rejects.startswith("latentpress status --rejects ")
