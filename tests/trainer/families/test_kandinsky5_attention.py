"""NABLA, compared with its definition and the pipelines' parameters. Masking is tested with the family."""

from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.transformers import transformer_kandinsky as stock

from trainer.batch import Batch
from trainer.families import kandinsky5 as attention
from trainer.families.kandinsky5 import Kandinsky5

NABLA = "kandinsky5-video-t2v-nabla"
OTHERS = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "scheduler")
SPARSE = {"attention_P": 0.35, "attention_wT": 1, "attention_wH": 1, "attention_wW": 1}
LATENT = (16, 4, 32, 32)  # 4 frames of 256x256 pixels: 16 blocks


pytestmark = pytest.mark.usefixtures("one_thread")


def make_batch() -> Batch:
    draw = torch.Generator().manual_seed(0)
    latents, text, pooled = (torch.randn(1, *size, generator=draw) for size in (LATENT, (5, 64), (32,)))
    return Batch(latents, None, text, torch.ones(1, 5, dtype=torch.bool), pooled, ["0"], "256x256@13")


class ByHand(stock.Kandinsky5AttnProcessor):
    """NABLA from its definition: blocks that hold the share P of softmax(mean q . mean k), and a window."""

    densities: list[float]

    def __init__(self, keep_all=False):
        self.densities, self.keep_all = [], keep_all

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, rotary_emb=None, sparse_params=None):
        q, k, v = (
            layer(hidden_states).unflatten(-1, (attn.num_heads, -1))
            for layer in (attn.to_query, attn.to_key, attn.to_value)
        )
        q, k = (self.rotated(norm(x), rotary_emb) for norm, x in ((attn.query_norm, q), (attn.key_norm, k)))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if not self.keep_all:
            selection = self.flavour_spec(q.detach(), k.detach())
            self.densities.append(selection.float().mean().item())
            scores = scores.masked_fill(~torch.kron(selection, torch.ones(64, 64)).bool(), float("-inf"))
        return attn.out_layer((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2, -1))

    @staticmethod
    def rotated(x, rope):
        pairs = x.reshape(*x.shape[:-1], -1, 1, 2)
        return (rope * pairs).sum(-1).reshape(x.shape)

    @staticmethod
    def flavour_spec(q, k):
        q_mean, k_mean = (x.unflatten(2, (-1, 64)).mean(3) for x in (q, k))
        weights = (q_mean @ k_mean.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        selection = torch.zeros_like(weights, dtype=torch.bool)
        for place in np.ndindex(*weights.shape[:-1]):
            left_out = 0.0
            for block in weights[place].argsort().tolist():
                left_out += weights[place][block].item()
                selection[place][block] = left_out >= 1 - SPARSE["attention_P"]
        return selection | torch.eye(weights.shape[-1], dtype=torch.bool)  # a window of 1 is the block itself


def nabla_run(tiny, processor=None):
    """(prediction, gradients) of the sparse model, with its visual self-attention by `processor`.

    With a float32 rotary: rounding to bfloat16 would make a last bit's difference 60,000 times larger.
    """
    model = Kandinsky5().load(str(tiny(NABLA)), float32_rotary=True)
    model.register_to_config(**SPARSE)
    for block in model.visual_transformer_blocks if processor else ():
        block.self_attention.set_processor(processor)
    batch = make_batch()
    predicted = Kandinsky5().predict(model, batch.latents_BCTHW, torch.tensor([0.5]), batch, "t2v")
    predicted.square().sum().backward()
    return predicted.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
def test_nabla_equals_its_definition_and_differs_from_full_attention(tiny, record_property):
    by_hand = ByHand()
    (ours, our_grads), (expected, grads), (full, _) = (
        nabla_run(tiny, processor) for processor in (None, by_hand, ByHand(keep_all=True))
    )
    record_property("density", max(by_hand.densities))
    assert max(by_hand.densities) < 0.5
    difference = (ours - expected).abs().max().item()
    record_property("largest difference", difference)
    record_property("from full attention", (full - expected).abs().max().item())
    assert difference <= 1e-5
    assert (full - expected).abs().max() > 100 * difference
    assert our_grads.keys() == grads.keys()
    for name, grad in our_grads.items():
        assert (grad - grads[name]).norm() <= 1e-4 * grads[name].norm().clamp(min=1e-2), name


def test_nabla_is_read_from_the_checkpoint_and_equals_get_sparse_params(tiny):
    transformer = stock.Kandinsky5Transformer3DModel.from_pretrained(tiny(NABLA) / "transformer")
    pipe = diffusers.Kandinsky5T2VPipeline(transformer=transformer, **dict.fromkeys(OTHERS))
    expected = pipe.get_sparse_params(torch.zeros(1, 5, 32, 48, 33), "cpu")
    params = attention.sparse_params(Kandinsky5().load(str(tiny(NABLA))), 5, 32, 48)
    assert params.keys() == expected.keys()
    assert torch.equal(params.pop("sta_mask"), expected.pop("sta_mask"))
    assert params == expected
    assert attention.sparse_params(Kandinsky5().load(str(tiny("kandinsky5-video-t2v"))), 5, 32, 48) is None


@pytest.mark.parametrize("window", [(3, 3, 3), (1, 5, 3), (11, 3, 3)])
def test_window_equals_fast_sta_nabla(window):
    expected = diffusers.Kandinsky5T2VPipeline.fast_sta_nabla(5, 4, 3, *window, device="cpu")
    assert torch.equal(attention.window_mask((5, 4, 3), window), expected)


def test_nabla_needs_whole_blocks():
    config = SimpleNamespace(attention_type="nabla", patch_size=(1, 2, 2))
    with pytest.raises(ValueError, match=r"1280x720 pixels.* multiples of 128"):
        attention.sparse_params(SimpleNamespace(config=config), 5, 90, 160)


@pytest.mark.slow
def test_flex_attention_that_is_not_compiled_is_refused():
    from torch.nn.attention.flex_attention import flex_attention

    with pytest.raises(RuntimeError, match="ignores its block mask"):
        attention.check_block_mask_used(flex_attention, torch.device("cpu"), torch.float32, 32)
