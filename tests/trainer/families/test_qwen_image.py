"""What only Qwen-Image has: its shift of noise levels, and references without noise."""

from functools import partial

import diffusers
import pytest
import torch

from tests.trainer.families.batches import alone
from tests.trainer.pipelines import make_batch
from trainer.families import qwen_image
from trainer.families.base import KeptTokens, change_arguments
from trainer.families.qwen_image import QwenImage
from trainer.methods.tread import begin, end

pytestmark = pytest.mark.usefixtures("one_thread")


PLUS = "qwen-image-edit-plus"


def test_the_shift_by_tokens_is_the_pipelines():
    """At 1328x1328 pixels and at both ends of the line, and beyond them."""
    pipe = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192
    )
    for tokens in (64, 256, 6889, 8192, 10000):
        QwenImage().set_timesteps(pipe, 4, tokens, torch.device("cpu"))
        shift, sigma = qwen_image.FAMILY.shift_by_tokens(tokens), 0.5
        assert pipe.sigmas[2].item() == pytest.approx(shift * sigma / (1 + (shift - 1) * sigma), abs=1e-6)
    pipe.register_to_config(shift_terminal=0.02)  # which the installed scheduler makes NaN of one step
    QwenImage().set_timesteps(pipe, 1, 64, torch.device("cpu"))
    assert (pipe.sigmas.tolist(), pipe.timesteps.tolist()) == ([1, 0], [1000])


def by_hand(model, single, noisy_BCTHW, sigma_B, kept) -> torch.Tensor:
    """(N, 4 C) of one sample by blocks with the stock attention. kept: of the second and third block, of the N tokens
    of the noisy image; they have all of those of the references, which have no noise."""
    latents = (noisy_BCTHW, *single.references)
    packed = [qwen_image.pack(each) for each in latents]
    count, x = packed[0].shape[1], model.img_in(torch.cat(packed, 1))
    text = model.txt_in(model.txt_norm(single.text_BLD))
    time = model.time_text_embed(torch.cat([sigma_B, 0 * sigma_B]), x)
    shapes = [(1, each.shape[3] // 2, each.shape[4] // 2) for each in latents]
    rope, text_rope = model.pos_embed([shapes], max_txt_seq_len=text.shape[1], device=x.device)
    index = (torch.arange(x.shape[1]) >= count).int()[None]
    for number, block in enumerate(model.transformer_blocks):
        tokens = [*(kept if number else range(count)), *range(count, x.shape[1])]
        rotary = rope[tokens], text_rope
        text, new = block(x[:, tokens], text, None, time, rotary, None, index[:, tokens])
        x = x.clone()
        x[:, tokens] = new
    return model.proj_out(model.norm_out(x, time[:1]))[0, :count]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_route_past_references_equals_its_blocks_by_hand(tiny, record_property, checkpointing):
    """Each sample drops tokens of its own, and no reference's: which have the noise level 0."""
    model, sigma = QwenImage().load(str(tiny(PLUS))), torch.tensor([0.3, 0.7])
    batch, places = make_batch(PLUS, model, [7, 4], side=6), torch.tensor([[0, 3, 4, 6, 8], [1, 2, 5, 7, 8]])
    kept, (first, last) = KeptTokens(places, 9), QwenImage().visual_blocks(model)[1:]
    change_arguments(first, partial(begin, kept, QwenImage().block_tokens(first)))
    last.register_forward_hook(partial(end, kept, QwenImage().block_tokens(last)))
    QwenImage().route_blocks([first, last], kept)
    if checkpointing:
        model.enable_gradient_checkpointing()
    made = qwen_image.pack(QwenImage().predict(model, batch.latents_BCTHW, sigma, batch, "i2i")).detach()
    stock = diffusers.QwenImageTransformer2DModel.from_pretrained(tiny(PLUS) / "transformer")
    with torch.no_grad():
        rows = [
            by_hand(stock, alone(batch, n), batch.latents_BCTHW[[n]], sigma[[n]], places[n].tolist()) for n in range(2)
        ]
    difference = (made - torch.stack(rows)).abs().max().item()
    record_property("largest difference", difference)
    assert difference <= 1e-5


def test_what_it_can_not_compute_is_refused(tiny):
    model = QwenImage().load(str(tiny("qwen-image")))
    batch, odd = (make_batch("qwen-image", model, [3], side=side) for side in (4, 5))
    with pytest.raises(ValueError, match="i2i with 0 references"):
        QwenImage().model_inputs(model, batch.latents_BCTHW, torch.ones(1), batch, "i2i")
    with pytest.raises(ValueError, match="no task 't2v'; valid: t2i"):
        QwenImage().model_inputs(model, batch.latents_BCTHW, torch.ones(1), batch, "t2v")
    with pytest.raises(ValueError, match="40x40 pixels: sides must be multiples of 16"):
        QwenImage().model_inputs(model, odd.latents_BCTHW, torch.ones(1), odd, "t2i")
