"""What libraries say reaches the user where it matters to him, and not otherwise."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# bitsandbytes asks its native library whether the CPU has AVX512-BF16; here the answer is yes on any CPU.
FORCED = """
import ctypes, logging, os, sys, warnings
import schemas.cli.console
sys.modules["kernels"] = None  # not installed
load, make, said = ctypes.cdll.LoadLibrary, logging.getLogRecordFactory(), []

def loaded(path):
    library = load(path)
    if "bitsandbytes" in str(path):
        library.has_avx512bf16_cpu = lambda: True
    return library

def noted(*parts, **more):
    record = make(*parts, **more)
    said.append(record.getMessage())
    return record

ctypes.cdll.LoadLibrary = loaded
logging.setLogRecordFactory(noted)
import bitsandbytes
from bitsandbytes.functional import has_avx512bf16
assert has_avx512bf16()
logging.getLogger("bitsandbytes.backends.cpu.ops").warning("what matters")
print("\\n".join(said), flush=True)
import torch

def norm():
    torch.nn.functional.rms_norm(torch.ones(2, 8), (8,), torch.ones(8, dtype=torch.bfloat16))

if os.fork() == 0:  # where it is not silenced, to standard output
    os.dup2(1, 2)
    warnings.resetwarnings()
    norm()
    os._exit(0)
os.wait()
norm()
"""


@pytest.mark.long
def test_a_missing_kernel_and_an_unfused_norm_are_no_news_to_the_user() -> None:
    done = subprocess.run([sys.executable, "-c", FORCED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Failed to load CPU gemm_4bit_forward" in done.stdout, "bitsandbytes says it no longer, or otherwise"
    assert "Mismatch dtype between input and weight" in done.stdout, "torch says it no longer, or otherwise"
    assert done.stderr == "what matters\n"
