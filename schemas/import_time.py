"""Importing large libraries in less time and memory, and without messages that no user can act on."""

import gc
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.abc import MetaPathFinder

MANY_OBJECTS = 100_000  # torch alone creates more, a program that has imported it before fewer


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """For imports of torch, transformers and diffusers. They create millions of objects that stay, and the collector
    would examine them again and again: a sixth of the import's time. Here it does so once at most, at the end."""
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > MANY_OBJECTS:
            gc.collect()
        gc.enable()


class _PandasFinder(MetaPathFinder):
    """Finds no pandas."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("left out by schemas.import_time", name=fullname)


def leave_out_pandas() -> None:
    """Let pyarrow find no pandas in this process, which it imports, where it is installed, at its first conversion and
    then has no use for: 50 MiB and a quarter of a second. It looks for it once. For programs that have no use for
    pandas either; they can still import it."""
    finder = _PandasFinder()
    sys.meta_path.insert(0, finder)
    try:
        import pyarrow as pa

        pa.scalar(0)
    finally:
        sys.meta_path.remove(finder)


#: Logger -> beginning of a message, empty for all. On CPUs with AVX512-BF16 bitsandbytes then computes with its own
#: library; torchao's are of compiled kernels and tensor classes that nothing here uses.
NOISE = {
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community",
    "torchao": "Failed to load ",
    "torch.utils._pytree": "<enum ",
    "diffusers.quantizers.torchao.torchao_quantizer": "Unable to import `torchao` Tensor objects",
}
#: torch says that float32 norms of bfloat16 weights have no fused kernel; bitsandbytes that nothing is paged on a CPU,
#: as docs/optimizers.md does.
IGNORED_WARNINGS = ("Mismatch dtype between input and weight", "Paged optimizers are not supported on CPU")


@lru_cache(None)
def silence_libraries() -> None:
    """Hide log records and warnings of libraries that ask for nothing. Only the first call has an effect."""
    for name, start in NOISE.items():
        logging.getLogger(name).addFilter(
            lambda record, start=start: not record.getMessage().startswith(start)  # type: ignore[misc]
        )
    for start in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", start, UserWarning)
