"""The rate of `features` beside its model is measured in every way."""

import re

import pytest

from benchmarks import features

pytestmark = pytest.mark.long


def test_the_stage_and_the_bare_model_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    features.main(["rate", "--images", "4", "--repeat", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 JPEG files of 1 megapixel"
    rows = [
        re.fullmatch(r"\| ([\w ]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+), ([\d.]+) \|", line)
        for line in lines
    ]
    found = {row[1]: [float(number) for number in row.groups()[1:]] for row in rows if row}
    assert [*found] == ["features", "features without a model", "the model alone"]
    assert found["features"][3:] == [1, 1]
    for seconds, processor, rate, *_ in found.values():
        assert processor > 0 and rate == pytest.approx(4 / seconds, rel=0.1)
