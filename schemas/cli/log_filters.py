"""What libraries log in an ordinary run and no user can act on, each by its own words, so that nothing else is hidden.

Imported by schemas.cli.console, and so by every program and worker before the libraries are.
"""

import logging

#: Logger -> how its messages begin.
IGNORED_MESSAGES = {
    # On CPUs with AVX512-BF16, wherever bitsandbytes is installed: it then computes with its own library.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community",
}

for name, beginning in IGNORED_MESSAGES.items():
    logging.getLogger(name).addFilter(lambda record, words=beginning: not record.getMessage().startswith(words))  # type: ignore[misc]
