"""Runs of the trainer on the emulated device and on the CPU, in turn in one process."""

from accelerate.test_utils.testing import AccelerateTestCase

from tests.trainer import runs


def train(config) -> dict:
    """On the device that the configuration names."""
    AccelerateTestCase("run").tearDown()  # forgets the device of another run
    return runs.train(config)
