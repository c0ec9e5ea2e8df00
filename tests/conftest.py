"""Fixtures shared by all tests."""

import hashlib
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings

# Several test processes share the cores; tiny models are no faster on two threads. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# For the same reason the time that an example takes says nothing.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

ROOT = Path(__file__).resolve().parent.parent
BUILDER = ROOT / "examples" / "tiny_models.py"


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], Path]:
    """kind -> folder of a tiny random checkpoint, built once and shared by every process and later run."""
    libraries = [f"{name}=={version(name)}" for name in ("torch", "diffusers", "transformers")]
    sources = b"".join(path.read_bytes() for path in sorted(BUILDER.parent.glob("tiny_*.py")))
    stamp = hashlib.sha256(sources + " ".join(libraries).encode()).hexdigest()[:12]

    @cache
    def folder(kind: str) -> Path:
        target = ROOT / ".tiny" / f"{kind}-{stamp}"
        if not target.exists():
            _build(kind, target)
        return target

    return folder


def _build(kind: str, target: Path) -> None:
    """Beside its place first, then renamed: another process sees a whole checkpoint or none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        made = Path(temporary) / kind
        _builder().build(kind, made)
        try:
            os.rename(made, target)
        except OSError:
            if not target.exists():  # another process that was faster is the one good reason
                raise
            shutil.rmtree(made)


@cache
def _builder():
    sys.path.insert(0, str(BUILDER.parent))
    return importlib.import_module(BUILDER.stem)
