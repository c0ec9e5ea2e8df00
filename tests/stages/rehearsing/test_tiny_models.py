"""The tiny checkpoints: reproducible and small; true sizes have the published numbers of parameters."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stages.rehearsing import tiny_models
from tests.forms import long

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[[str], Path]) -> Path:
    """The checkpoints that all tests share; another process or an earlier run may have built them."""
    out = tmp_path_factory.mktemp("models")
    for kind in tiny_models.KINDS:
        (out / kind).symlink_to(tiny(kind))
    return out


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kandinsky5-image-i2i", long("kandinsky5-video-t2v"), long("sana")])
def test_the_seed_alone_decides_the_bytes(models: Path, tmp_path: Path, kind: str) -> None:
    torch.manual_seed(1234)
    torch.set_num_threads(2)
    second_build = _files(tiny_models.build(kind, tmp_path / "again"))
    torch.set_num_threads(1)
    assert second_build == _files(models / kind)
    other_seed = _files(tiny_models.build(kind, tmp_path / "other", seed=1))
    weights = [name for name in second_build if name.endswith(".safetensors")]
    assert len(weights) >= 3 and all(other_seed[name] != second_build[name] for name in weights)


def test_all_kinds_are_small(models: Path) -> None:
    sizes = {kind: sum(map(len, _files(models / kind).values())) for kind in tiny_models.KINDS}
    assert max(sizes.values()) < 6e6 and sum(sizes.values()) < 4e6 * len(sizes), sizes


@pytest.mark.parametrize(
    ("part", "size", "billions"),
    [
        ("qwen", "true", 8.3), ("clip", "true", 0.123), ("clip_model", "true", 0.428), ("gemma", "true", 2.6),
        ("dinov2", "true", 1.14),
    ],
)  # fmt: skip
def test_true_sizes_have_the_true_numbers_of_parameters(part: str, size: str, billions: float) -> None:
    with torch.device("meta"):
        model = tiny_models.make_untrained(part, size)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e9 == pytest.approx(billions, rel=0.025)
