"""Hide messages of libraries that no user can act on, each by its own words.

schemas.cli.console imports this, and so every program and worker does before the libraries.
"""

import logging

#: Logger -> beginning of the message.
IGNORED_MESSAGES = {
    # On CPUs with AVX512-BF16, with bitsandbytes installed, which then computes with its own library.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community",
}

for name, beginning in IGNORED_MESSAGES.items():
    logging.getLogger(name).addFilter(lambda record, words=beginning: not record.getMessage().startswith(words))  # type: ignore[misc]
