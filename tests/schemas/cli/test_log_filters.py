"""What libraries say reaches the user where it matters to him, and not otherwise."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# bitsandbytes asks its native library whether the CPU has AVX512-BF16; here the answer is yes on any CPU.
FORCED = """
import ctypes, logging, sys
sys.modules["kernels"] = None  # not installed
load = ctypes.cdll.LoadLibrary

def loaded(path):
    library = load(path)
    if "bitsandbytes" in str(path):
        library.has_avx512bf16_cpu = lambda: True
    return library

ctypes.cdll.LoadLibrary = loaded
import {first}
import bitsandbytes
from bitsandbytes.functional import has_avx512bf16
print(has_avx512bf16())
logging.getLogger("bitsandbytes.backends.cpu.ops").warning("what matters")
"""


def said(first: str) -> str:
    done = subprocess.run([sys.executable, "-c", FORCED.format(first=first)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    return done.stderr


def test_a_missing_kernel_is_no_news_to_the_user() -> None:
    assert "Failed to load CPU gemm_4bit_forward" in said("ctypes"), "bitsandbytes says it no longer, or otherwise"
    assert said("schemas.cli.console") == "what matters\n"
