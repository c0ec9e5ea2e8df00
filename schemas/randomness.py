"""Stateless random numbers, the same on every machine and in every release."""

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_BLOCK = 1 << 13  # positions permuted at a time, so that they stay in the processor's cache
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ROUND_NUMBERS = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def mix_bits(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    values = values ^ (values >> _SHIFTS[0])
    values *= _FACTORS[0]  # in place: half the time of new arrays
    values ^= values >> _SHIFTS[1]
    values *= _FACTORS[1]
    values ^= values >> _SHIFTS[2]
    return values


def to_unit_interval(seeds: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) from mixed seeds."""
    return (seeds >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permute(positions: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """The images of `positions` under the pseudo-random permutation of range(size) that `key` chooses: a Feistel
    network over the next power of four, repeated until the result is in range."""
    if size == 1:
        return np.zeros_like(positions)
    half = max(2, ((size - 1).bit_length() + 1) // 2)
    keys = mix_bits(_ROUND_NUMBERS ^ np.uint64(key))
    permuted = positions.astype(np.uint64)
    outside = np.arange(len(permuted))
    while len(outside):  # on average less than four rounds: the domain is smaller than 4 size
        for start in range(0, len(outside), _BLOCK):
            block = outside[start : start + _BLOCK]
            permuted[block] = _feistel(permuted[block], half, half, keys)
        outside = outside[permuted[outside] >= size]
    return permuted.view(np.int64)


def permute_groups(
    positions: NDArray[np.int64], groups: NDArray[np.int64], sizes: NDArray[np.int64], keys: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """(n,) the images of `positions`, each under the permutation of range(sizes[g]) that keys[g] chooses, g being its
    number in `groups`. sizes, keys: (G,), of all groups; fast where the numbers in `groups` are close together."""
    if not len(positions):
        return positions
    permuted, first, last = positions.astype(np.uint64), int(groups.min()), int(groups.max()) + 1
    groups, limits = groups - first, sizes[first:last].astype(np.uint64)
    bits = np.where(limits > 1, np.frexp(np.maximum(limits, 2) - 1)[1], 0)  # of its domain, less than twice its size
    rounds, group_bits = mix_bits(_ROUND_NUMBERS[:, None] ^ keys[first:last]), bits[groups]
    for count in np.unique(bits[bits > 0]).tolist():
        outside = np.flatnonzero(group_bits == count)
        while len(outside):
            for start in range(0, len(outside), _BLOCK):
                block = outside[start : start + _BLOCK]
                permuted[block] = _feistel(permuted[block], count // 2, count - count // 2, rounds[:, groups[block]])
            outside = outside[permuted[outside] >= limits[groups[outside]]]
    return permuted.view(np.int64)


def _feistel(values: NDArray[np.uint64], high: int, low: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of range(2**(high + low)): each round mixes some of the bits into the others, in turn. keys: for
    each round one, or one for each of the values."""
    masks = [np.uint64((1 << high) - 1), np.uint64((1 << low) - 1)]
    left, right = values >> np.uint64(low), values & masks[1]
    for number, key in enumerate(keys):
        mixed = mix_bits(right ^ key)
        mixed &= masks[number % 2]
        mixed ^= left
        left, right = right, mixed
    left <<= np.uint64(low)
    left |= right
    return left
