"""Peak memory of the autoencoders' encoding, with and without each memory option.

    python -m benchmarks.vae_memory                          computed for the published sizes, on any machine
    python -m benchmarks.vae_memory --measure cpu            peak RSS of a reduced HunyuanVideo VAE, and computed
    python -m benchmarks.vae_memory --measure cuda           torch.cuda.max_memory_allocated, the published sizes

Computed: `vae.encode` of the true shapes on torch's meta device, counting the bytes of all tensors that are alive at
the same time, including weights and the float32 and cast input. Memory inside kernels (cuDNN's workspace, oneDNN's
reordered copy of a convolution's input) is not counted, and attention counts as a kernel that does not store scores.
Measured: random weights of the same structure; on a CPU, each line in a separate process.
"""

import resource
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import get_context
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from benchmarks import device_usage
from benchmarks.common import make_parser, print_header, print_row, time_call
from schemas.catalog import FAMILIES
from stages.encoding.vae.base import MemoryOptions
from stages.rehearsing.tiny_models import make_model, make_untrained
from trainer.memory.meter import MemoryMeter

GIB = 2**30
MODEL_NAMES = {"flux": "flux_vae", "hunyuan_video": "hunyuan_vae", "dc_ae": "dc_ae"}
TILES = {family.autoencoder: family.tile for family in FAMILIES.values()}
CHUNKS = {"hunyuan_video": (4, 2, 1)}
# autoencoder -> usual sizes (frames, height, width)
USUAL_SIZES = {
    "flux": [(1, 1024, 1024)],
    "hunyuan_video": [(61, 512, 768), (121, 512, 768)],
    "dc_ae": [(1, 1024, 1024), (1, 2048, 2048)],
}
#: The published structure with a quarter of the channels.
REDUCED = {"block_out_channels": (32, 64, 128, 128)}


@dataclass(frozen=True)
class Case:
    """Encoding of one sample. shape: frames, height, width. overrides: changed keys of the autoencoder's
    configuration."""

    name: str
    shape: tuple[int, int, int]
    dtype: str
    options: MemoryOptions
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def cells(self) -> list[str]:
        options = [f"chunk_frames {self.options.chunk_frames}"] if self.options.chunk_frames else []
        options += [f"tiling {self.options.tile}/{self.options.tile_stride}"] if self.options.tile else []
        return [self.name, "x".join(map(str, self.shape)), self.dtype, " + ".join(options) or "none"]

    def apply_options(self, vae: torch.nn.Module) -> None:
        import_module(f"stages.encoding.vae.{self.name}").Autoencoder.apply_memory_options(vae, self.options)

    def encode(self, vae: Any, device: str) -> None:
        pixels_BCTHW = torch.zeros(1, 3, *self.shape, device=device, dtype=torch.float32)
        pixels = pixels_BCTHW if self.name == "hunyuan_video" else pixels_BCTHW[:, :, 0]
        with torch.no_grad():
            vae.encode(pixels.to(getattr(torch, self.dtype)))


def usual_cases(name: str, dtypes: tuple[str, ...]) -> list[Case]:
    tile, stride = TILES[name]
    options = [MemoryOptions(), *(MemoryOptions(chunk_frames=frames) for frames in CHUNKS.get(name, ()))]
    options += [MemoryOptions(tile=tile, tile_stride=stride)]
    options += [MemoryOptions(tile=tile, tile_stride=stride, chunk_frames=1)] if name in CHUNKS else []
    return [Case(name, shape, dtype, one) for shape in USUAL_SIZES[name] for one in options for dtype in dtypes]


# --- computed ---


class FlashAttentionMode(TorchFunctionMode):
    """Mode in which attention allocates only its output, like a kernel that does not store scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return torch.empty_like(args[0])
        return func(*args, **(kwargs or {}))


def compute_peak(case: Case) -> float:
    """Peak GiB, computed from shapes."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, case.dtype))
    try:
        with torch.device("meta"):
            vae = make_untrained(MODEL_NAMES[case.name], "true", **case.overrides).eval()
    finally:
        torch.set_default_dtype(default)
    case.apply_options(vae)
    meter = MemoryMeter()
    for parameter in vae.parameters():
        meter.add(parameter)
    with meter, FlashAttentionMode():
        case.encode(vae, "meta")
    return meter.peak / GIB


# --- measured ---


def measure_cpu(case: Case) -> tuple[float, float]:
    """(GiB by which the peak RSS grows after torch is loaded, seconds); to be called in a separate process."""
    torch.set_num_threads(1)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    vae = make_model(MODEL_NAMES[case.name], "true", dtype=case.dtype, overrides=case.overrides)
    case.apply_options(vae)
    seconds, _ = time_call(lambda: case.encode(vae, "cpu"))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) * 1024 / GIB, seconds


def measure_cuda(case: Case) -> tuple[float, float]:
    """(GiB of torch.cuda.max_memory_allocated, seconds of the second run), measured in this process."""
    vae = make_model(MODEL_NAMES[case.name], "true", dtype=case.dtype, device="cuda")
    case.apply_options(vae)
    torch.cuda.reset_peak_memory_stats()
    case.encode(vae, "cuda")
    seconds = device_usage.time_call(lambda: case.encode(vae, "cuda"), torch.device("cuda"))
    return torch.cuda.max_memory_allocated() / GIB, seconds


def measure(case: Case, device: str) -> list[str]:
    try:
        if device == "cuda":
            gib, seconds = measure_cuda(case)
        else:
            with get_context("spawn").Pool(1) as pool:
                gib, seconds = pool.apply(measure_cpu, (case,))
    except torch.OutOfMemoryError:
        return ["out of memory", ""]
    return [f"{gib:.2f}", f"{seconds:.1f}"]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--autoencoder", choices=list(MODEL_NAMES), nargs="+", default=list(MODEL_NAMES))
    parser.add_argument("--measure", choices=("cpu", "cuda"), help="default: only compute")
    parser.add_argument("--shape", default="17x192x256", help="frames x height x width to measure on a CPU")
    arguments = parser.parse_args()
    measured = ("measured GiB", "s") if arguments.measure else ()
    print_header("autoencoder", "frames x height x width", "precision", "options", "computed GiB", *measured)
    # float16 takes as many bytes as bfloat16, but has different kernels
    dtypes = ("float32", "bfloat16", "float16") if arguments.measure else ("float32", "bfloat16")
    cases = [case for name in arguments.autoencoder for case in usual_cases(name, dtypes)]
    if arguments.measure == "cpu":
        frames, height, width = (int(part) for part in arguments.shape.split("x"))
        options = [MemoryOptions(chunk_frames=chunk) for chunk in (None, 4, 1)]
        cases = [Case("hunyuan_video", (frames, height, width), "float32", one, REDUCED) for one in options]
    for case in cases:
        cells = measure(case, arguments.measure) if arguments.measure else []
        print_row(*case.cells, f"{compute_peak(case):.2f}", *cells)


if __name__ == "__main__":
    main()
