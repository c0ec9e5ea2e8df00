"""The example family's transformer, which diffusers does not have: what `ModelFamily.load` says of it, and no more."""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int, source: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_out = nn.Linear(width, width), nn.Linear(width, width)
        self.to_k, self.to_v = nn.Linear(source, width), nn.Linear(source, width)

    def forward(self, x_BND: torch.Tensor, source_BMD: torch.Tensor) -> torch.Tensor:
        projected = (self.to_q(x_BND), self.to_k(source_BMD), self.to_v(source_BMD))
        q, k, v = (values.unflatten(-1, (self.heads, -1)).transpose(1, 2) for values in projected)
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, text: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn1, self.attn2 = Attention(width, width, heads), Attention(width, text, heads)

    def forward(self, x_BND: torch.Tensor, text_BLD: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x_BND)
        x_BND = x_BND + self.attn1(normed, normed)
        return x_BND + self.attn2(self.norm(x_BND), text_BLD)


class ExampleTransformer(ModelMixin, ConfigMixin):
    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(
        self,
        in_channels: int = 4,
        width: int = 24,
        heads: int = 2,
        num_layers: int = 2,
        text_layers: int = 2,
        text_dim: int = 64,
    ) -> None:
        super().__init__()
        self.proj_in, self.proj_out = nn.Linear(in_channels * 4, width), nn.Linear(width, in_channels * 4)
        self.place, self.time = nn.Linear(3, width), nn.Linear(1, width)
        self.blocks = nn.ModuleList(Block(width, text_layers * text_dim, heads) for _ in range(num_layers))
        self.free_blocks = nn.ModuleList(
            [Block(width, text_layers * text_dim, heads)]
        )  # for clips without given frames
        self.gradient_checkpointing = False

    def forward(
        self, x_BCTHW: torch.Tensor, time_B: torch.Tensor, text_BLD: torch.Tensor, has_given_frames: bool = True
    ) -> torch.Tensor:
        patches = x_BCTHW.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).permute(0, 2, 3, 5, 1, 4, 6).flatten(4)
        axes = [torch.arange(size, device=x_BCTHW.device) for size in patches.shape[1:4]]
        places = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).to(x_BCTHW.dtype).sin()
        x = (
            self.proj_in(patches)
            + self.place(places)
            + self.time(time_B[:, None].to(x_BCTHW.dtype))[:, None, None, None]
        )
        tokens: Any = x.flatten(1, 3)
        for block in self.blocks if has_given_frames else (*self.free_blocks, *self.blocks):
            if self.gradient_checkpointing and torch.is_grad_enabled():
                tokens = self._gradient_checkpointing_func(block, tokens, text_BLD)
            else:
                tokens = block(tokens, text_BLD)
        out = self.proj_out(tokens).view_as(patches).unflatten(4, (-1, 2, 2))
        return out.permute(0, 4, 1, 2, 5, 3, 6).flatten(5).flatten(3, 4)
