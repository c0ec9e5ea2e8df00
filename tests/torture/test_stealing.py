"""`--steal` by two processes at once."""

from pathlib import Path

import pytest

from stages import bucket, discover, encode_latents, encode_text
from tests.forms import long
from tests.processes import Child
from tests.torture.kills import Stage, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("program", [encode_text, long(encode_latents)])
def test_a_part_that_is_done_steals_from_one_that_waits(project, steps, tmp_path: Path, program) -> None:
    """Which does not do again what was stolen, save what it had read ahead: units of one text each are more than one.
    The shards are those of one run."""
    home = project("kandinsky5-image-t2i", cache={"unit_mib": 0.004})
    for number in range(10):
        home.image(f"{number}.png", (64, 64), f"picture {number}", number)
    home.run(discover.run)
    home.run(bucket.run)
    stage = Stage(home, program)
    expected = stage.whole()
    only, at = stage.points["during a write"]

    def wait() -> None:
        (tmp_path / "midst").touch()
        wait_for((tmp_path / "on").exists)

    def work() -> None:
        steps.arm(at, wait, only)
        report = stage.run(shard="1/2", steal=True, prefetch=1)
        assert report.exit_code == 0 and report.done < 5 and "units_of_other_parts" not in report.details, report

    second = Child(work)
    assert second.until((tmp_path / "midst").exists), "it ended before it was in the midst"
    report = stage.run(shard="0/2", steal=True)
    assert report.exit_code == 0 and report.details["units_of_other_parts"] >= 2, "of three that remained"
    assert 0 < stage.left(expected) <= 2
    (tmp_path / "on").touch()
    assert second.wait() == 0
    assert stage.files() == expected
