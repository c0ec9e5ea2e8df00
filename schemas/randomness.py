"""Stateless random numbers, the same on every machine and in every release."""

import numpy as np
from numpy.typing import NDArray

_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix_bits(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    values = values ^ (values >> _SHIFTS[0])
    values *= _FACTORS[0]  # in place: half the time of new arrays
    values ^= values >> _SHIFTS[1]
    values *= _FACTORS[1]
    values ^= values >> _SHIFTS[2]
    return values


def to_unit_interval(seeds: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) from mixed seeds."""
    return (seeds >> np.uint64(11)).astype(np.float64) * 2.0**-53
