"""The tiny checkpoints of all kinds."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples import tiny_models


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[[str], Path]) -> Path:
    """The checkpoints that all tests share. Another process or an earlier run may have built them."""
    out = tmp_path_factory.mktemp("models")
    for kind in tiny_models.KINDS:
        (out / kind).symlink_to(tiny(kind))
    return out
