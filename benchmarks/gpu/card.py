"""Name, versions and peak rates of the card."""

import json
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks import device_usage
from benchmarks.gpu.parts import PartOptions

PACKAGES = ("diffusers", "transformers", "peft", "bitsandbytes", "torchao", "optimum-quanto", "torch-optimi", "av")
COPIED = 1 << 28  # bytes of a timed copy


def run(options: PartOptions) -> None:
    """Print a line of JSON: card, versions, details, peak_flops."""
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            f"torch {torch.__version__} does not find a CUDA device; install the build for your card "
            "(docs/install.md, For a GPU), or run the code without a card: "
            "python -m benchmarks.gpu --tiny --device cpu --results FOLDER"
        )
    peak = device_usage.peak_flops(device, torch.bfloat16, repeat=3)
    versions = f"torch {torch.__version__}" + "".join(
        f", {name} {installed}" for name in PACKAGES if (installed := find(name))
    )
    lines = [f"Python {platform.python_version()}, {versions}."]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        lines.append(
            f"{properties.total_memory / 2**30:.1f} GiB, compute capability {properties.major}.{properties.minor}, "
            f"CUDA {torch.version.cuda}. Copies from pinned memory: {copy_rate(device, True):.1f} GB/s, "
            f"from other memory {copy_rate(device, False):.1f}."
        )
    lines.append(f"A product of bfloat16 matrices: {peak / 1e12:.3g} TFLOP/s.")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    facts = {"card": name, "versions": f"torch {torch.__version__}", "details": "\n".join(lines), "peak_flops": peak}
    print(json.dumps(facts))


def find(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def copy_rate(device: torch.device, pinned: bool) -> float:
    """GB/s from the host to the device."""
    target = torch.empty(COPIED, dtype=torch.uint8, device=device)
    source = torch.ones(COPIED, dtype=torch.uint8, pin_memory=pinned)
    work = lambda: target.copy_(source, non_blocking=pinned)  # noqa: E731
    work()
    return COPIED / 1e9 / min(device_usage.time_call(work, device) for _ in range(3))
