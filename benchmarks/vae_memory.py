"""Peak memory of the autoencoders' encoding, with and without each memory option.

    python -m benchmarks.vae_memory                          computed for the published sizes, on any machine
    python -m benchmarks.vae_memory --measure cpu            peak RSS of a reduced HunyuanVideo VAE, beside the computed
    python -m benchmarks.vae_memory --measure cuda           torch.cuda.max_memory_allocated, the published sizes

Computed: `vae.encode` of the real shapes on torch's meta device, counting the bytes of all tensors that are alive at
once, weights and the float32 and cast input included. What kernels take inside of themselves (cuDNN's workspace, the
layout that oneDNN makes of a convolution's input) is not in it, and attention counts as a kernel that keeps no scores.
Measured: each line in a process of its own, random weights of the same structure.
"""

import argparse
import resource
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from examples.tiny_models import make_model, make_untrained
from schemas.catalogue import FAMILIES
from stages.encoding.vae.base import MemoryOptions

GIB = 2**30
MODEL_NAMES = {"flux": "flux_vae", "hunyuan_video": "hunyuan_vae", "dc_ae": "dc_ae"}
TILES = {family.autoencoder: family.tile for family in FAMILIES.values()}
CHUNKS = {"hunyuan_video": (4, 2, 1)}
# autoencoder -> (frames, height, width) of the usual sizes
USUAL_SIZES = {
    "flux": [(1, 1024, 1024)],
    "hunyuan_video": [(61, 512, 768), (121, 512, 768)],
    "dc_ae": [(1, 1024, 1024), (1, 2048, 2048)],
}
#: The published structure with a quarter of the channels.
REDUCED = {"block_out_channels": (32, 64, 128, 128)}


@dataclass(frozen=True)
class Case:
    """One encoding of one sample. shape: frames, height, width. overrides: of the autoencoder's own shape."""

    name: str
    shape: tuple[int, int, int]
    dtype: str
    memory_options: MemoryOptions
    overrides: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        words = [f"chunk_frames {self.memory_options.chunk_frames}"] if self.memory_options.chunk_frames else []
        words += (
            [f"tiling {self.memory_options.tile}/{self.memory_options.tile_stride}"] if self.memory_options.tile else []
        )
        return " + ".join(words) or "plain"

    def pixels(self, device: str) -> torch.Tensor:
        return torch.zeros(1, 3, *self.shape, device=device, dtype=torch.float32)

    def encode(self, vae: torch.nn.Module, pixels_BCTHW: torch.Tensor) -> None:
        with torch.no_grad():
            given = pixels_BCTHW if self.name == "hunyuan_video" else pixels_BCTHW[:, :, 0]
            vae.encode(given.to(getattr(torch, self.dtype)))


def memory_options_for(name: str) -> list[MemoryOptions]:
    tile, stride = TILES[name]
    chunks = [MemoryOptions(chunk_frames=frames) for frames in CHUNKS.get(name, ())]
    both = [MemoryOptions(tile=tile, tile_stride=stride, chunk_frames=1)] if chunks else []
    return [MemoryOptions(), *chunks, MemoryOptions(tile=tile, tile_stride=stride), *both]


def usual_cases(name: str, dtypes: tuple[str, ...]) -> Iterator[Case]:
    for shape in USUAL_SIZES[name]:
        for options in memory_options_for(name):
            for dtype in dtypes:
                yield Case(name, shape, dtype, options)


# --- computed ---


class FlashAttentionMode(TorchFunctionMode):
    """Attention as a kernel that keeps no scores: its output alone is made."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return torch.empty_like(args[0])
        return func(*args, **(kwargs or {}))


class MemoryMeter(TorchDispatchMode):
    """Bytes of the storages that are alive, and the most that ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.live = self.peak = 0

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.drop, key)

    def drop(self, key: int) -> None:
        self.live -= self.sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return out


def compute_peak(case: Case) -> int:
    """Bytes, from shapes alone."""
    kept = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, case.dtype))
    try:
        with torch.device("meta"):
            vae = make_untrained(MODEL_NAMES[case.name], "true", **dict(case.overrides)).eval()
    finally:
        torch.set_default_dtype(kept)
    import_module(f"stages.encoding.vae.{case.name}").Autoencoder.apply_memory_options(vae, case.memory_options)
    meter = MemoryMeter()
    for parameter in vae.parameters():
        meter.add(parameter)
    with meter, FlashAttentionMode():
        case.encode(vae, case.pixels("meta"))
    return meter.peak


# --- measured ---


def measure_cpu(case: Case) -> tuple[int, float]:
    """(bytes of peak RSS beyond what the process had with torch loaded, seconds), in a process of its own."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure_cpu, (case,))


def _measure_cpu(case: Case) -> tuple[int, float]:
    torch.set_num_threads(1)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    vae = make_model(MODEL_NAMES[case.name], "true", dtype=case.dtype, overrides=dict(case.overrides))
    import_module(f"stages.encoding.vae.{case.name}").Autoencoder.apply_memory_options(vae, case.memory_options)
    begin = time.perf_counter()
    case.encode(vae, case.pixels("cpu"))
    seconds = time.perf_counter() - begin
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) * 1024, seconds


def measure_cuda(case: Case) -> tuple[int, float]:
    """(bytes of torch.cuda.max_memory_allocated, seconds of the second run), in this process."""
    vae = make_model(MODEL_NAMES[case.name], "true", dtype=case.dtype, device="cuda")
    import_module(f"stages.encoding.vae.{case.name}").Autoencoder.apply_memory_options(vae, case.memory_options)
    torch.cuda.reset_peak_memory_stats()
    seconds = 0.0
    for _ in range(2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        case.encode(vae, case.pixels("cuda"))
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated()
    del vae
    torch.cuda.empty_cache()
    return peak, seconds


def print_row(case: Case, *figures: str) -> None:
    frames, height, width = case.shape
    print(
        "| " + " | ".join([case.name, f"{frames}x{height}x{width}", case.dtype, case.label, *figures]) + " |",
        flush=True,
    )


def measure(names: list[str], device: str, shape: tuple[int, int, int]) -> None:
    print("| autoencoder | frames x height x width | precision | memory options | computed GiB | measured GiB | s |")
    print("|---|---|---|---|---:|---:|---:|")
    overrides = tuple(REDUCED.items()) if device == "cpu" else ()
    cases = [case for name in names for case in usual_cases(name, ("float32", "bfloat16", "float16"))]
    if device == "cpu":
        option_sets = [MemoryOptions(), *(MemoryOptions(chunk_frames=frames) for frames in (4, 1))]
        cases = [Case("hunyuan_video", shape, "float32", one, overrides) for one in option_sets]
    for case in cases:
        try:
            found, seconds = measure_cpu(case) if device == "cpu" else measure_cuda(case)
        except torch.OutOfMemoryError:
            print_row(case, f"{compute_peak(case) / GIB:.2f}", "out of memory", "")
            continue
        print_row(case, f"{compute_peak(case) / GIB:.2f}", f"{found / GIB:.2f}", f"{seconds:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--autoencoder", choices=list(MODEL_NAMES), nargs="+", default=list(MODEL_NAMES))
    parser.add_argument("--measure", choices=("cpu", "cuda"), help="default: only compute")
    parser.add_argument("--shape", default="17x192x256", help="frames x height x width of what a CPU measures")
    options = parser.parse_args()
    if options.measure:
        frames, height, width = (int(part) for part in options.shape.split("x"))
        measure(options.autoencoder, options.measure, (frames, height, width))
        return
    print("| autoencoder | frames x height x width | precision | memory options | computed GiB |")
    print("|---|---|---|---|---:|")
    for name in options.autoencoder:
        for case in usual_cases(name, ("float32", "bfloat16")):  # float16 takes the bytes of bfloat16
            print_row(case, f"{compute_peak(case) / GIB:.2f}")


if __name__ == "__main__":
    main()
