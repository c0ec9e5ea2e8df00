"""What only FLUX.2 klein has: its shift of noise levels, and two kinds of blocks."""

from functools import partial

import diffusers
import pytest
import torch
from diffusers.models.transformers.transformer_flux2 import Flux2AttnProcessor, Flux2ParallelSelfAttnProcessor
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

from tests.trainer.pipelines import make_batch
from trainer.families import flux2
from trainer.families.base import KeptTokens, change_arguments
from trainer.families.flux2 import Flux2
from trainer.methods.tread import begin, end

pytestmark = pytest.mark.usefixtures("one_thread")

KIND = "flux2-klein"


def test_the_shift_by_tokens_and_steps_is_the_pipelines():
    """On both sides of the number of tokens from which the steps count no more; training takes that of 50 steps."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    for tokens in (64, 1024, 4300, 4301, 9216):
        for steps in (4, 50, 200):
            assert flux2.compute_mu(tokens, steps) == pytest.approx(compute_empirical_mu(tokens, steps), rel=1e-12)
        Flux2().set_timesteps(scheduler, 50, tokens, torch.device("cpu"))
        shift, sigma = flux2.FAMILY.shift_by_tokens(tokens), 0.5
        assert scheduler.sigmas[25].item() == pytest.approx(shift * sigma / (1 + (shift - 1) * sigma), abs=1e-6)


def test_a_scheduler_with_noise_levels_of_its_own_keeps_them():
    """As the pipeline, which then gives the number of steps alone."""
    schedulers = [
        diffusers.UniPCMultistepScheduler(
            use_flow_sigmas=True, prediction_type="flow_prediction", use_dynamic_shifting=True
        )
        for _ in range(2)
    ]
    Flux2().set_timesteps(schedulers[0], 4, 256, torch.device("cpu"))
    schedulers[1].set_timesteps(4, mu=compute_empirical_mu(256, 4))
    assert torch.equal(schedulers[0].sigmas, schedulers[1].sigmas)


def by_hand(model, latents_C1HW, sigma, text_LD, kept) -> torch.Tensor:
    """(N, C) of one sample by blocks with the stock attention. kept: image tokens of the second and third block."""
    text, x = model.context_embedder(text_LD[None]), model.x_embedder(latents_C1HW.flatten(1).T[None])
    time = model.time_guidance_embed(1000 * sigma[None], None)
    image_mod, text_mod = model.double_stream_modulation_img(time), model.double_stream_modulation_txt(time)
    grid = (torch.arange(side) for side in (1, *latents_C1HW.shape[2:], 1))
    places = (torch.arange(side) for side in (1, 1, 1, len(text_LD)))
    image, words = (model.pos_embed(torch.cartesian_prod(*each)) for each in (grid, places))
    for number, block in enumerate([*model.transformer_blocks, *model.single_transformer_blocks]):
        tokens = kept if number in (1, 2) else [*range(x.shape[1])]
        rotary = tuple(torch.cat([word, places[tokens]]) for word, places in zip(words, image, strict=True))
        if number < len(model.transformer_blocks):
            text, new = block(x[:, tokens], text, image_mod, text_mod, rotary)
        else:
            joint = block(torch.cat([text, x[:, tokens]], 1), None, model.single_stream_modulation(time), rotary)
            text, new = joint.tensor_split([len(text_LD)], 1)
        x = x.clone()
        x[:, tokens] = new
    return model.proj_out(model.norm_out(x, time))[0]


def test_a_route_over_both_kinds_of_blocks_equals_its_blocks_by_hand(tiny, record_property):
    """Each sample drops tokens of its own; of two texts one is padded."""
    model, sigma = Flux2().load(str(tiny(KIND))), torch.tensor([0.3, 0.7])
    batch, places = make_batch(KIND, model, [7, 4]), torch.tensor([[0, 3, 4, 9, 14], [1, 2, 7, 8, 13]])
    kept, (first, last) = KeptTokens(places, 16), Flux2().visual_blocks(model)[1:3]
    hooks = [
        change_arguments(first, partial(begin, kept, Flux2().block_tokens(first))),
        last.register_forward_hook(partial(end, kept, Flux2().block_tokens(last))),
        *Flux2().route_blocks([first, last], kept),
    ]
    with torch.no_grad():
        made = flux2.pack(Flux2().predict(model, batch.latents_BCTHW, sigma, batch, "t2i"))
        for hook in hooks:
            hook.remove()
        for block in model.transformer_blocks:
            block.attn.set_processor(Flux2AttnProcessor())
        for block in model.single_transformer_blocks:
            block.attn.set_processor(Flux2ParallelSelfAttnProcessor())
        texts = [text[:length] for text, length in zip(batch.text_BLD, batch.lengths, strict=True)]
        rows = zip(batch.latents_BCTHW, sigma, texts, places.tolist(), strict=True)
        wanted = torch.stack([by_hand(model, *row) for row in rows])
    difference = (made - wanted).abs().max().item()
    record_property("largest difference", difference)
    assert difference <= 1e-5
