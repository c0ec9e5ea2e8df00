import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cache.shards.tensors import NUMPY_DTYPES, Array, count_bytes

names = st.sampled_from(sorted(NUMPY_DTYPES))
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@given(names, shapes, st.randoms())
def test_round_trip_keeps_every_bit(name, shape, random):
    raw = random.randbytes(count_bytes(name, shape))
    array = Array(name, shape, raw)
    copy = Array.from_numpy(array.numpy(), name)
    assert copy == array
    assert array.numpy().shape == shape
    assert bytes(copy.raw()) == raw


def test_big_endian_and_strided_input_become_plain():
    big = np.arange(6, dtype=">i4").reshape(2, 3).T
    array = Array.from_numpy(big)
    assert np.array_equal(array.numpy(), big)
    assert bytes(array.raw()) == big.astype("<i4").tobytes()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Array("float64", (1,), bytes(8)), "choose from float32"),
        (lambda: Array("float32", (2,), bytes(7)), "8 bytes"),
        (lambda: Array("float32", (-1, -1), bytes(4)), "negative"),
        (lambda: Array.from_numpy(np.zeros(1)), "float64"),
        (lambda: Array.from_numpy(np.zeros(1, "f4"), "bfloat16"), "uint16"),
        (lambda: Array.from_numpy(np.zeros(1, "f4"), "float16"), "convert it first"),
    ],
)
def test_what_cannot_be_stored_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
