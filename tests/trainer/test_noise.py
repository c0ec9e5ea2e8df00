"""Noise, compared with numpy's generator and numbers computed one by one."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from schemas.identity import derive_seed
from trainer.noise import CPU_PART, compute_words, philox, seeded_noise, seeded_uniform


def bits(words) -> torch.Tensor:
    return torch.from_numpy(np.array(words, np.uint64).view(np.int64))


def names(count: int, step: int = 5) -> list[str]:
    return [f"0/{step}/{position}" for position in range(count)]


def test_the_generator_gives_numpys_words() -> None:
    """For random counters and keys, and for counters and keys whose halves carry."""
    rng = np.random.default_rng(0)
    edges = np.array([0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1], np.uint64)
    numbers = np.concatenate([rng.choice(edges, (6, 200)), rng.integers(0, 2**64, (6, 100), np.uint64)], 1)
    words = philox(bits(numbers[:4]), bits(numbers[4:]))
    for number, column in enumerate(numbers.T.tolist()):
        counter, key = (sum(word << 64 * place for place, word in enumerate(it)) for it in (column[:4], column[4:]))
        stream = np.random.Philox(counter=(counter - 1) % 2**256, key=key)  # numpy counts before it computes
        assert torch.equal(words[:, number], bits(stream.random_raw(4)))


@pytest.mark.parametrize("places", [slice(0, 1), slice(0, 8), slice(4, 9), slice(4096, 6000)])
def test_words_of_other_devices_are_those_of_the_cpu(places) -> None:
    seeds = [derive_seed(name, "noise") for name in names(3)]
    expected = [bits(np.random.Philox(key=seed).random_raw(places.stop))[places] for seed in seeds]
    assert torch.equal(compute_words(torch.tensor(seeds), places), torch.stack(expected))


def test_noise_is_the_definition() -> None:
    """Word by word: pairs of a radius and an angle of 32 bits each, rounded to float32 once; and uniform numbers."""
    shape = (3, 5, 7)
    noise, uniform = (draw(names(2), "here", shape) for draw in (seeded_noise, seeded_uniform))
    assert noise.shape == uniform.shape == (2, *shape) and noise.dtype == uniform.dtype == torch.float32
    for row, name in enumerate(names(2)):
        words = np.random.Philox(key=derive_seed(name, "here")).random_raw(105).tolist()
        expected = []
        for word in words[:53]:
            radius = math.sqrt(-2 * math.log(((word >> 32) + 0.5) / 2**32))
            angle = 2 * math.pi * (word & 0xFFFFFFFF) / 2**32
            expected += [radius * math.cos(angle), radius * math.sin(angle)]
        torch.testing.assert_close(noise[row].flatten(), torch.tensor(expected[:105]), rtol=1.2e-7, atol=0)
        assert uniform[row].flatten().tolist() == [(word >> 40) / 2**24 for word in words]


def test_a_number_depends_on_identity_purpose_and_place_alone() -> None:
    """They do not depend on the rest of the batch, the shape, parts, threads or torch's seed, and do not change torch's
    generator."""
    before, long = torch.get_rng_state(), (3, CPU_PART - 1)  # several parts, the last one shorter
    full = seeded_noise(names(3), "noise", long)
    assert torch.equal(full[[2, 0]], seeded_noise([names(3)[2], names(3)[0]], "noise", long))
    for shape in ((1,), (7,), (2, CPU_PART), (2 * CPU_PART + 1,)):
        part = seeded_noise(names(3), "noise", shape)
        assert torch.equal(part.flatten(1), full.flatten(1)[:, : math.prod(shape)])
    with ThreadPoolExecutor(3) as pool:
        assert all(
            torch.equal(full, second_noise)
            for second_noise in pool.map(lambda _: seeded_noise(names(3), "noise", long), range(6))
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    assert torch.equal(full, seeded_noise(names(3), "noise", long))
    torch.set_num_threads(threads)
    assert torch.equal(before, torch.get_rng_state())
    second_noises = [
        seeded_noise(identities, *purpose, (9,)) for identities, *purpose in ((names(3), "n"), (names(3, 6), "noise"))
    ]
    assert not any((full.flatten(1)[:, :9] == second_noise).any() for second_noise in second_noises)
    uniform = seeded_uniform(names(3), "sigma", long)
    assert torch.equal(uniform[:, 0, 0], seeded_uniform(names(3), "sigma")) and uniform.max() < 1
