"""The HunyuanVideo VAE of Kandinsky 5 Video: 16 channels, stride 8 in space and 4 in time.

diffusers encodes clips of more than 16 frames in overlapping windows. The result differs from encoding clips whole. It
is kept, because users of the pipelines get the same result, and it is part of the cache's fingerprint.

The forwards of its modules are replaced: they take less memory and give the same numbers up to rounding. In diffusers a
residual block of 17 frames of 512x768 holds four activations of 1.7 GB (bfloat16), one of them a padded copy, and the
attention of the middle block builds a mask of 30,720 x 30,720. Here

- a convolution pads and computes a few frames at a time. If its input is not needed afterwards and has as many channels
  as its output, it overwrites the input from the last frame to the first, since a frame depends only on itself and on
  earlier frames;
- a group norm with its nonlinearity is computed for some groups of channels at a time, because groups are independent;
  it spans time, so it can't be split into frames;
- the attention runs frame by frame over the current and earlier frames, the only frames that the mask allows.

Two activations and a few frames remain. Splitting the whole encoder into chunks would compute a different function,
because the norms and the attention see all frames.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import (
    AutoencoderKLHunyuanVideo,
    HunyuanVideoCausalConv3d,
    HunyuanVideoMidBlock3D,
    HunyuanVideoResnetBlockCausal3D,
)

from stages.encoding.vae import base


class Autoencoder(base.Autoencoder):
    """Clips of 1 + a multiple of 4 frames, with diffusers' defaults. `chunk_frames` gives the same result with less
    memory."""

    vae_class = AutoencoderKLHunyuanVideo

    @classmethod
    def apply_memory_options(cls, vae: Any, memory_options: base.MemoryOptions) -> None:
        super().apply_memory_options(vae, memory_options)
        if memory_options.chunk_frames is not None:
            apply_chunking(vae, memory_options.chunk_frames)

    def library_settings(self) -> dict[str, bool | int]:
        """framewise: whether clips are encoded in windows. window, stride: their length and distance, in frames."""
        return {
            "framewise": self._vae.use_framewise_encoding,
            "window": self._vae.tile_sample_min_num_frames,
            "stride": self._vae.tile_sample_stride_num_frames,
        }


NORM_CHUNKS = 8  # chunks of a group norm, whose temporary memory is an eighth of the activation


def apply_chunking(vae: Any, frames: int) -> None:
    """Make `vae` compute at most `frames` frames of a convolution at once, in its encoder and decoder."""
    assert frames >= 1
    for module in vae.modules():
        # Set on the object and not on its class, so that other autoencoders in the process keep their forwards.
        if isinstance(module, HunyuanVideoCausalConv3d):
            setattr(module, "forward", partial(chunked_conv, module, frames=frames))  # noqa: B010
        elif isinstance(module, HunyuanVideoResnetBlockCausal3D):
            setattr(module, "forward", partial(residual_block, module, frames=frames))  # noqa: B010
        elif isinstance(module, HunyuanVideoMidBlock3D):
            setattr(module, "forward", partial(mid_block, module))  # noqa: B010


def chunked_conv(conv: Any, x_BCTHW: torch.Tensor, frames: int, may_overwrite: bool = False) -> torch.Tensor:
    """The causal convolution, `frames` frames of its output at a time.

    may_overwrite: whether the result may overwrite x, if the shapes allow it.
    """
    inner, (*spatial, before, _) = conv.conv, conv.time_causal_padding
    size, stride = inner.kernel_size[0], inner.stride[0]
    assert inner.padding == (0, 0, 0) and inner.dilation == (1, 1, 1) and before == size - 1
    count = (x_BCTHW.shape[2] - 1) // stride + 1
    in_place = may_overwrite and inner.stride == (1, 1, 1) and inner.in_channels == inner.out_channels
    out = x_BCTHW if in_place else None
    for first in reversed(range(0, count, frames)):
        last = min(first + frames, count)
        begin = first * stride - before
        piece = x_BCTHW[:, :, max(begin, 0) : (last - 1) * stride + 1]
        piece = inner(F.pad(piece, (*spatial, max(-begin, 0), 0), mode=conv.pad_mode))
        if out is None:
            out = piece.new_empty(*piece.shape[:2], count, *piece.shape[3:])
        out[:, :, first:last] = piece
    assert out is not None, "a clip has frames"
    return out


def chunked_group_norm(norm: Any, nonlinearity: Any, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write nonlinearity(group norm(x)) to `out`, which may be x."""
    group_channels = norm.num_channels // norm.num_groups
    bounds = [norm.num_groups * number // NORM_CHUNKS for number in range(NORM_CHUNKS + 1)]
    for first, last in pairwise(bounds):
        if first == last:  # fewer groups than chunks
            continue
        channels = slice(first * group_channels, last * group_channels)
        piece = F.group_norm(x[:, channels], last - first, norm.weight[channels], norm.bias[channels], norm.eps)
        out[:, channels] = nonlinearity(piece)
    return out


def residual_block(block: Any, x: torch.Tensor, frames: int) -> torch.Tensor:
    """HunyuanVideoResnetBlockCausal3D's forward, in inference. It overwrites x if input and output have the same number
    of channels, so that the blocks of a level share two activations, although the caller's variables keep a level's
    input alive."""
    x = x.contiguous()
    h = chunked_group_norm(block.norm1, block.nonlinearity, x, torch.empty_like(x))
    h = chunked_conv(block.conv1, h, frames, may_overwrite=True)
    h = chunked_group_norm(block.norm2, block.nonlinearity, h, h)
    h = chunked_conv(block.conv2, h, frames, may_overwrite=True)
    return x.add_(h) if block.conv_shortcut is None else h.add_(block.conv_shortcut(x))


def mid_block(block: Any, x_BCTHW: torch.Tensor) -> torch.Tensor:
    """HunyuanVideoMidBlock3D's forward."""
    x_BCTHW = block.resnets[0](x_BCTHW)
    for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
        if attention is not None:
            shape = x_BCTHW.shape[2:]
            attended_BLC = frame_causal_attention(attention, x_BCTHW.permute(0, 2, 3, 4, 1).flatten(1, 3), shape[0])
            x_BCTHW = attended_BLC.unflatten(1, shape).permute(0, 4, 1, 2, 3)
        x_BCTHW = resnet(x_BCTHW)
    return x_BCTHW


def frame_causal_attention(attention: Attention, x_BLC: torch.Tensor, frames: int) -> torch.Tensor:
    """Attention of each token to its own frame and to earlier ones; L is frames x tokens of a frame."""
    frame_tokens = x_BLC.shape[1] // frames
    normed = attention.group_norm(x_BLC.transpose(1, 2)).transpose(1, 2)
    query, key, value = (
        project(normed).unflatten(2, (attention.heads, -1)).transpose(1, 2)
        for project in (attention.to_q, attention.to_k, attention.to_v)
    )
    out = torch.empty_like(query)
    for end in range(frame_tokens, frames * frame_tokens + 1, frame_tokens):
        tokens = slice(end - frame_tokens, end)
        out[:, :, tokens] = F.scaled_dot_product_attention(query[:, :, tokens], key[:, :, :end], value[:, :, :end])
    projected = attention.to_out[0](out.transpose(1, 2).flatten(2))
    return (projected + x_BLC) / attention.rescale_output_factor
