"""Attention of image and text together, whose processors get the mask of the padding of texts in a batch.

Most kernels are slower with a mask, and FlashAttention has none. The kernels for texts of exact lengths compute only
the real tokens: the tokens of all samples without padding, one sample after another, and the numbers at which each
sample ends. Not by diffusers' backend `flash_varlen`: its mask must end with the padding, while text often comes before
the image, and each call waits for the device.
"""

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch.nn.attention import varlen

EXACT_LENGTHS = AttentionBackendName.FLASH_VARLEN
#: Backends whose kernels can have a mask.
MASKED = (AttentionBackendName.NATIVE, AttentionBackendName._NATIVE_CUDNN, EXACT_LENGTHS)


class Processor:
    """Base class of attention processors.

    _attention_backend: the kernels, by diffusers' name of the attribute. The default is not None, because None selects
    the kernels of the environment variable DIFFUSERS_ATTN_BACKEND.
    """

    _attention_backend = AttentionBackendName.NATIVE


def attend(
    query_BSHD: torch.Tensor,
    key_BSHD: torch.Tensor,
    value_BSHD: torch.Tensor,
    mask: torch.Tensor | None,
    backend: AttentionBackendName,
) -> torch.Tensor:
    """Attention (B, S, heads, D), computed by a backend; by torch's own choice if it can't have the mask. mask: (B, S)
    or (B, 1, 1, S), True for real tokens; None if all tokens are real. Without padding the kernels for exact lengths
    are torch's FlashAttention."""
    if mask is None:
        backend = AttentionBackendName._NATIVE_FLASH if backend == EXACT_LENGTHS else backend
        return dispatch_attention_fn(query_BSHD, key_BSHD, value_BSHD, backend=backend)
    if backend == EXACT_LENGTHS:
        return attend_exact_lengths(query_BSHD, key_BSHD, value_BSHD, mask.reshape(query_BSHD.shape[:2]))
    backend = backend if backend in MASKED else AttentionBackendName.NATIVE
    mask = mask if mask.ndim == 4 else mask[:, None, None]
    return dispatch_attention_fn(query_BSHD, key_BSHD, value_BSHD, attn_mask=mask, backend=backend)


def attend_exact_lengths(
    query_BSHD: torch.Tensor, key_BSHD: torch.Tensor, value_BSHD: torch.Tensor, mask_BS: torch.Tensor
) -> torch.Tensor:
    """Attention (B, S, heads, D) of the real tokens of each sample, in any places; 0 for padding. The host does not
    wait for the device: all tokens are packed, the padding after all real tokens, where the kernel does not read it.
    """
    batch, length = mask_BS.shape
    order = (~mask_BS.flatten()).byte().argsort(stable=True)  # the numbers of real tokens, then of padding
    ends = F.pad(mask_BS.sum(1).cumsum(0), (1, 0)).int()
    is_padding = torch.arange(batch * length, device=order.device)[:, None, None] >= ends[-1]
    # The kernel does not write numbers of padding, in both passes. In the backward pass, `masked_fill` drops them.
    packed = [
        values.flatten(0, 1).index_select(0, order).masked_fill(is_padding, 0)
        for values in (query_BSHD, key_BSHD, value_BSHD)
    ]
    query, key, value = packed
    out = varlen.varlen_attn(query, key, value, ends, ends, length, length)
    assert isinstance(out, torch.Tensor)  # a tuple only if more is asked for
    out = out.masked_fill(is_padding, 0)
    return torch.empty_like(out).index_copy(0, order, out).unflatten(0, (batch, length))
