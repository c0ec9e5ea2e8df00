"""Importing large libraries in less time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

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
