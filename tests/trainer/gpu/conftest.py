"""The device of these tests: a CPU, on which the same code runs as far as possible, and a CUDA device."""

from collections.abc import Iterator

import pytest
from accelerate.test_utils.testing import AccelerateTestCase


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    AccelerateTestCase("run").tearDown()  # forgets the device of other tests
    yield request.param
    AccelerateTestCase("run").tearDown()
