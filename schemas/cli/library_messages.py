"""Messages of libraries that no user can act on. Programs and workers silence them before they import the libraries."""

import logging
import warnings

#: Logger -> beginning of a message, empty for all. On CPUs with AVX512-BF16 bitsandbytes then computes with its own
#: library; torchao's are of compiled kernels and tensor classes that nothing here uses.
NOISE = {
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community",
    "torchao": "Failed to load ",
    "torch.utils._pytree": "<enum ",
    "gcsfs": "",  # what it also raises, with a traceback
    "diffusers.quantizers.torchao.torchao_quantizer": "Unable to import `torchao` Tensor objects",
}
#: torch says that float32 norms of bfloat16 weights have no fused kernel; bitsandbytes that nothing is paged on a CPU,
#: as docs/optimizers.md does.
IGNORED_WARNINGS = ("Mismatch dtype between input and weight", "Paged optimizers are not supported on CPU")


def silence_libraries() -> None:
    for name, start in NOISE.items():
        logging.getLogger(name).addFilter(
            lambda record, start=start: not record.getMessage().startswith(start)  # type: ignore[misc]
        )
    for start in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", start, UserWarning)
