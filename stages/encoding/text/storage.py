"""Embeddings in 8 bits (`text.storage`), and a scale for each token, by which its numbers are multiplied when read.

The trainer turns them back on its device (`trainer/batch.py`).
"""

import torch

from stages.engines.jobs import RoundingError

#: dtype -> its largest number, which a token's largest is stored as.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def quantize_tokens(embeds_LD: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, RoundingError]:
    """Values of `dtype`, (L, D); scale_L, float32, of which none is zero; and the error of values x scales.

    What is not finite makes its token's scale NaN or infinite.
    """
    exact = embeds_LD.float()
    scale_L = (exact.abs().amax(1) / LARGEST[dtype]).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = exact / scale_L[:, None]
    values = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
    error = (values.float() * scale_L[:, None] - exact).double()
    squares = exact.double().square().sum().item()
    return values, scale_L, RoundingError(squares, error.square().sum().item(), error.abs().max().item())
