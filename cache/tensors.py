"""An array as it lies in a shard: a dtype's name, a shape and raw little-endian bytes.

Arrow and numpy have no bfloat16; here it is its 16-bit pattern, so that caches need no torch.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

#: dtype name -> the numpy dtype of its bytes. Names are torch's.
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "uint8": np.dtype("u1"),
}

#: float dtype -> the pattern of its infinity.
INFINITY_BITS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}
CHECK_BLOCK = 1 << 17  # numbers looked at together
MAX_DIMENSIONS, MAX_DIMENSION_SIZE = (
    32,
    (1 << 31) - 1,
)  # of a shape: what numpy takes, and what an Arrow shard's int32 holds


def count_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array. ValueError for an unknown dtype or a shape that no array has."""
    if dtype not in NUMPY_DTYPES:
        raise ValueError(f"dtype {dtype!r} is not stored in shards; choose from {', '.join(NUMPY_DTYPES)}")
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"a shape of {len(shape)} dimensions; at most {MAX_DIMENSIONS} are stored")
    if any(size < 0 for size in shape):
        raise ValueError(f"shape {shape} has a negative dimension")
    # Also where another dimension is 0: numpy refuses such a shape, when the array is used.
    if any(size > MAX_DIMENSION_SIZE for size in shape) or math.prod(size or 1 for size in shape) >= 1 << 60:
        raise ValueError(f"shape {shape} is larger than any array")
    return math.prod(shape) * NUMPY_DTYPES[dtype].itemsize


@dataclass(frozen=True, eq=False)
class Array:
    """`data` is anything with the buffer protocol: contiguous, row-major, little-endian, as long as dtype
    and shape say (ValueError otherwise). It may be a view into a memory map: it is not to be written."""

    dtype: str
    shape: tuple[int, ...]
    data: Any

    def __post_init__(self) -> None:
        expected = count_bytes(self.dtype, self.shape)
        if self.nbytes != expected:
            raise ValueError(
                f"{self.nbytes} bytes can't be {self.dtype} of shape {self.shape}, which has {expected} bytes"
            )

    @classmethod
    def from_numpy(cls, array: np.ndarray, dtype: str | None = None) -> "Array":
        """Wrap `array` without a copy where it is contiguous and little-endian. `dtype="bfloat16"` takes the
        uint16 patterns; every other dtype is the array's own."""
        name = dtype or array.dtype.name
        if name not in NUMPY_DTYPES:
            raise ValueError(f"dtype {name!r} is not stored in shards; choose from {', '.join(NUMPY_DTYPES)}")
        own = "uint16" if name == "bfloat16" else name
        if array.dtype.name != own:
            raise ValueError(f"{name} is made from {own}, not from {array.dtype.name}; convert it first")
        raw = np.ascontiguousarray(array, dtype=NUMPY_DTYPES[name]).reshape(-1).view(np.uint8)
        return cls(name, tuple(array.shape), raw)

    def numpy(self) -> np.ndarray:
        """The array, read-only and without a copy; bfloat16 as uint16 patterns."""
        array = np.frombuffer(self.data, dtype=NUMPY_DTYPES[self.dtype]).reshape(self.shape)
        array.flags.writeable = False
        return array

    def raw(self) -> memoryview:
        """The bytes, flat and without a copy."""
        view = memoryview(self.data)
        return view.cast("B") if view.nbytes else memoryview(b"")

    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite: an exponent of ones alone is one or the other."""
        if self.dtype not in INFINITY_BITS or not self.nbytes:
            return True
        unsigned = np.frombuffer(self.data, f"<u{NUMPY_DTYPES[self.dtype].itemsize}")
        signed, positive = unsigned.view(unsigned.dtype.str.replace("u", "i")), INFINITY_BITS[self.dtype]
        negative = positive | 1 << (8 * unsigned.itemsize - 1)
        blocks = range(0, len(unsigned), CHECK_BLOCK)
        # Patterns grow with the magnitude, so a maximum finds all that is not finite. Two of them read a block from the
        # processor's cache and write nothing: twice as fast as masks, which are arrays of the same size.
        return not any(
            signed[i : i + CHECK_BLOCK].max() >= positive or unsigned[i : i + CHECK_BLOCK].max() >= negative
            for i in blocks
        )

    @property
    def nbytes(self) -> int:
        return memoryview(self.data).nbytes

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Array):
            return NotImplemented
        return (self.dtype, self.shape, self.raw()) == (other.dtype, other.shape, other.raw())

    __hash__ = None  # type: ignore[assignment]
