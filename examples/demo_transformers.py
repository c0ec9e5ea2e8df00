"""The demo's transformers, whose weights begin so that they learn fast."""

from collections.abc import Sequence
from typing import Any

import torch

from examples.tiny_models import make_untrained

TRANSFORMERS: dict[str, dict[str, Any]] = {
    "image": {"model_dim": 128, "ff_dim": 384},
    "video": {"model_dim": 128, "ff_dim": 384},
    "sana": {"num_attention_heads": 4, "num_cross_attention_heads": 4, "cross_attention_dim": 128, "num_layers": 3},
    "z_image": {"dim": 128, "axes_dims": (16, 24, 24)},
    "qwen_image": {"num_attention_heads": 4},
    "flux2": {"num_attention_heads": 4},
    "wan": {"num_attention_heads": 4, "ffn_dim": 384},
}


def make_transformer(part: str, **overrides: Any) -> Any:
    """A transformer that begins as the identity and can learn where its tokens are.

    A transformer of the classes' own weights must first learn to carry the noise through. And Kandinsky 5 knows
    positions by rotary embeddings alone, which are relative: in pure noise, all that tells a token its place is how
    many others it attends to. So self-attention begins with windows of random width and direction, from biases of
    queries and keys. 300 steps then gave six captions their photographs; without, their colors in the wrong places.
    """
    torch.manual_seed(0)
    model = make_untrained(part, **TRANSFORMERS[part], **overrides)
    with torch.no_grad():
        if part == "sana":
            _carry_through(model.patch_embed.proj.weight.flatten(1), model.proj_out.weight, range(32))
            return model
        if part == "z_image":  # the pipeline negates its output
            _carry_through(model.all_x_embedder["2-1"].weight, model.all_final_layer["2-1"].linear.weight, range(64))
            model.all_final_layer["2-1"].linear.weight.neg_()
            return model
        if part == "qwen_image":
            _carry_through(model.img_in.weight, model.proj_out.weight, range(64))
            return model
        if part == "flux2":
            _carry_through(model.x_embedder.weight, model.proj_out.weight, range(128))
            return model
        if part == "wan":
            _begin_wan(model)
            return model
        channels, inputs = 16, model.visual_embeddings.in_layer.in_features // 4
        # The input has a patch's channels last, the output has them first.
        order = [place * inputs + channel for channel in range(channels) for place in range(4)]
        _carry_through(model.visual_embeddings.in_layer.weight, model.out_layer.out_layer.weight, order)
        for block in model.visual_transformer_blocks:
            for projection in (block.self_attention.to_query, block.self_attention.to_key):
                projection.bias.normal_()
            block.self_attention.to_query.weight *= 0.5
            gates = block.visual_modulation.out_layer.bias.view(9, -1)  # shift, scale and gate, three times
            gates[2::3] = 0.5
    return model


def _begin_wan(model: Any) -> None:
    """Windows and gates as of Kandinsky 5, for positions are relative here, too. And no mask hides the zeros behind a
    text of some seventy tokens in 512: they begin with scores and values of 0, and those of the text are spread by 3,
    so that it is most of what attention gives.

    Four clips as averages of 8x8 cells, 300 steps: the loss at a noise level of 0.95 was 0.58, without this 0.82.
    """
    # The output has a patch's channels last.
    order = [channel * 4 + place for place in range(4) for channel in range(16)]
    _carry_through(model.patch_embedding.weight.flatten(1), model.proj_out.weight, order)
    embedder = model.condition_embedder.text_embedder
    for layer in (embedder.linear_1, embedder.linear_2):
        layer.bias.zero_()
    for block in model.blocks:
        for projection in (block.attn1.to_q, block.attn1.to_k):
            projection.bias.normal_()
        block.attn1.to_q.weight *= 0.5
        block.scale_shift_table[:, 2::3] = 0.5  # of shift, scale and gate, twice
        for projection in (block.attn2.to_k, block.attn2.to_v):
            projection.bias.zero_()
        block.attn2.norm_q.weight *= 3


def _carry_through(into: torch.Tensor, out: torch.Tensor, columns: Sequence[int]) -> None:
    """Let `out` undo what `into` makes of the input's `columns`."""
    basis = torch.nn.init.orthogonal_(torch.empty(len(into), len(columns)))
    gain = (len(into) / len(columns)) ** 0.5
    into[:, list(columns)] = basis * gain
    out.copy_(basis.T / gain)
