"""An array as shards store it: the name of its dtype, its shape and raw little-endian bytes.

Arrow and numpy do not have bfloat16 and float8; these are stored as patterns of 16 and 8 bits, so that caches do not
need torch.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

_CODES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int32": "<i4", "int64": "<i8", "uint8": "u1"}
_CODES |= {"int8": "i1", "float8_e4m3fn": "u1"}
#: Name of a dtype in torch -> numpy dtype of its bytes.
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(code) for name, code in _CODES.items()}
#: Float dtype -> bit pattern of infinity.
INFINITY_BITS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}
#: Float dtype -> first bit pattern of a positive number that is not finite. float8 has a single NaN and no infinity.
NOT_FINITE_BITS = {**INFINITY_BITS, "float8_e4m3fn": 0x7F}
#: Name of a dtype -> name of the numpy dtype for its bit patterns.
PATTERNS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}
CHECK_BLOCK = 1 << 17  # numbers checked at a time
MAX_DIMENSIONS, MAX_DIMENSION_SIZE = 32, (1 << 31) - 1  # limits of numpy and of int32 in Arrow shards


def count_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of an array in bytes. Raises ValueError for an unknown dtype or an impossible shape."""
    if dtype not in NUMPY_DTYPES:
        raise ValueError(f"shards can't store dtype {dtype!r}; choose from {', '.join(NUMPY_DTYPES)}")
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"a shape has {len(shape)} dimensions; the maximum is {MAX_DIMENSIONS}")
    if any(size < 0 for size in shape):
        raise ValueError(f"shape {shape} has a negative dimension")
    # Dimensions of 0 count as 1, because numpy also refuses large shapes with a dimension of 0.
    if any(size > MAX_DIMENSION_SIZE for size in shape) or math.prod(size or 1 for size in shape) >= 1 << 60:
        raise ValueError(f"shape {shape} is too large for an array")
    return math.prod(shape) * NUMPY_DTYPES[dtype].itemsize


@dataclass(frozen=True, eq=False)
class Array:
    """An array. data: object with the buffer protocol, contiguous, row-major and little-endian. Raises ValueError if
    its length does not match dtype and shape. It may be a view into a memory map: do not write to it."""

    dtype: str
    shape: tuple[int, ...]
    data: Any

    def __post_init__(self) -> None:
        expected = count_bytes(self.dtype, self.shape)
        if self.nbytes != expected:
            raise ValueError(f"{self.nbytes} bytes can't be {self.dtype} of shape {self.shape} ({expected} bytes)")

    @classmethod
    def from_numpy(cls, array: np.ndarray, dtype: str | None = None) -> "Array":
        """Wrap `array`, without a copy if possible. dtype: a name in PATTERNS if the array holds bit patterns; by
        default the array's dtype."""
        name = dtype or array.dtype.name
        count_bytes(name, array.shape)  # ValueError for an unknown dtype
        stored_name = PATTERNS.get(name, name)
        if array.dtype.name != stored_name:
            raise ValueError(f"{name} needs an array of {stored_name}, not of {array.dtype.name}; convert it first")
        raw = np.ascontiguousarray(array, dtype=NUMPY_DTYPES[name]).reshape(-1).view(np.uint8)
        return cls(name, tuple(array.shape), raw)

    def numpy(self) -> np.ndarray:
        """Return a read-only view; for dtypes in PATTERNS, of their bit patterns."""
        array = np.frombuffer(self.data, dtype=NUMPY_DTYPES[self.dtype]).reshape(self.shape)
        array.flags.writeable = False
        return array

    def raw(self) -> memoryview:
        """Return a flat view of the bytes."""
        view = memoryview(self.data)
        return view.cast("B") if view.nbytes else memoryview(b"")

    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite. Such numbers have an exponent of ones only."""
        if self.dtype not in NOT_FINITE_BITS or not self.nbytes:
            return True
        unsigned = np.frombuffer(self.data, f"<u{NUMPY_DTYPES[self.dtype].itemsize}")
        signed, positive = unsigned.view(unsigned.dtype.str.replace("u", "i")), NOT_FINITE_BITS[self.dtype]
        negative = positive | 1 << (8 * unsigned.itemsize - 1)
        # Bit patterns grow with the magnitude, so two maxima find all numbers that are not finite. Each block is read
        # from the processor's cache: twice as fast as masks of the array's size.
        return not any(
            signed[i : i + CHECK_BLOCK].max() >= positive or unsigned[i : i + CHECK_BLOCK].max() >= negative
            for i in range(0, len(unsigned), CHECK_BLOCK)
        )

    @property
    def nbytes(self) -> int:
        return memoryview(self.data).nbytes

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Array):
            return NotImplemented
        return (self.dtype, self.shape, self.raw()) == (other.dtype, other.shape, other.raw())
