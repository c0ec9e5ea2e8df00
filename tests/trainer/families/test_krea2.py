"""What only Krea 2 has: its shift of noise levels, blocks of texts, padding before the text's end, and norms that are
float32 in a model of another dtype."""

from functools import partial

import diffusers
import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.models.transformers.transformer_krea2 import Krea2AttnProcessor, Krea2TextFusion
from diffusers.pipelines.krea2 import pipeline_krea2
from diffusers.pipelines.krea2.pipeline_krea2 import calculate_shift
from safetensors.torch import save_file

from cache.models.compatibility import CheckpointMismatch, check_distilled
from schemas.catalog import FAMILIES
from stages.encoding.text.base import TextRequest
from stages.encoding.text.qwen3_vl import Encoder
from tests.trainer.pipelines import make_batch, pipeline, random
from tests.trainer.runs import prepared
from trainer.adapters.header import rename
from trainer.families.base import KeptTokens, change_arguments, sampling
from trainer.families.krea2 import FAMILY, Krea2
from trainer.families.qwen_image import pack
from trainer.methods.tread import begin, end
from trainer.setup.blocks import checkpoint_blocks
from trainer.validation import Denoising, load_scheduler

pytestmark = pytest.mark.usefixtures("one_thread")

KIND, CPU = "krea2", torch.device("cpu")


def test_the_shift_by_tokens_is_the_pipelines():
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_image_seq_len=6400)
    for tokens in (64, 4096, 6400, 16384):
        mu = torch.tensor(calculate_shift(tokens, 256, 6400, 0.5, 1.15))
        assert FAMILY.shift_by_tokens(tokens) == pytest.approx(mu.exp().item(), rel=1e-6)
        Krea2().set_timesteps(scheduler, 50, tokens, CPU)
        shift = FAMILY.shift_by_tokens(tokens)
        assert scheduler.sigmas[25].item() == pytest.approx(shift * 0.5 / (1 + (shift - 1) * 0.5), abs=1e-6)


def test_turbos_samples_are_the_pipelines(tiny, monkeypatch, record_property):
    """With one shift for all sizes, without guidance; the text without padding."""
    family, flavour = Krea2(), FAMILY.flavours["krea-2-turbo"]
    pipe, model = pipeline(KIND, tiny(KIND)), family.load(str(tiny(KIND))).eval()
    pipe.register_to_config(is_distilled=True)
    pipe.register_modules(
        scheduler=load_scheduler(str(tiny(KIND))), vae=AutoencoderKLQwenImage.from_pretrained(tiny(KIND) / "vae")
    )
    batch, noise = make_batch(KIND, model, [7]), random(1, 16, 1, 8, 12)
    text = batch.text_BLD.unflatten(-1, (model.config.num_text_layers, -1))
    monkeypatch.setattr(pipeline_krea2, "randn_tensor", lambda *_, **__: noise[:, :, 0].clone())
    wanted = pipe(
        prompt_embeds=text,
        prompt_embeds_mask=torch.ones(1, 7, dtype=torch.bool),
        num_inference_steps=flavour.steps,
        guidance_scale=flavour.guidance,
        height=64,
        width=96,
        output_type="latent",
        return_dict=False,
    )[0]
    scheduler = load_scheduler(str(tiny(KIND)), changes=flavour.scheduler)
    denoising = Denoising(model, family, "t2i", batch, None, noise, scheduler, flavour.steps)
    denoising.take_steps(model, flavour.guidance)
    difference = (pack(denoising.finish()) - wanted).abs().max().item()
    record_property("largest difference", difference)
    assert wanted.std() > 0.1 and difference <= 2e-5


@pytest.mark.slow
def test_turbo_is_trained_with_an_assistant_alone(ready, tiny, tmp_path):
    """The error names both choices. The published assistant has the modules' original names."""
    config = ready(KIND, adapter={"rank": 2})
    model = config.model.model_copy(update={"flavour": "krea-2-turbo"})
    with pytest.raises(CheckpointMismatch, match="krea-2-turbo is distilled to few steps") as caught:
        check_distilled(model, print)
    assert "train krea-2-raw" in caught.value.next_step and "set model.assistant" in caught.value.next_step
    tensors = {}
    for name, module in Krea2().load(str(tiny(KIND))).named_modules():
        if isinstance(module, torch.nn.Linear):
            start = f"diffusion_model.{rename(name, FAMILY.original_names.paths)}"
            tensors[f"{start}.lora_A.weight"] = random(4, module.in_features) * 0.1
            tensors[f"{start}.lora_B.weight"] = random(module.out_features, 4) * 0.1
    assert {"diffusion_model.blocks.0.attn.wq.lora_A.weight", "diffusion_model.first.lora_A.weight"} <= tensors.keys()
    save_file(tensors, tmp_path / "assistant.safetensors")
    pipe = pipeline(KIND, tiny(KIND))
    pipe.load_lora_weights(tmp_path / "assistant.safetensors")  # by the converter of diffusers
    model = model.model_copy(update={"assistant": str(tmp_path / "assistant.safetensors")})
    check_distilled(model, print)
    run = prepared(config.model_copy(update={"model": model}))
    batch, sigma = make_batch(KIND, run.model, [6]), torch.tensor([0.3])
    with torch.no_grad():
        shown = run.denoiser(batch.latents_BCTHW, sigma, batch)
        with sampling(run.model):
            base = run.denoiser(batch.latents_BCTHW, sigma, batch)
        wanted = pipe.transformer(**Krea2().model_inputs(run.model, batch.latents_BCTHW, sigma, batch, "t2i")).sample
    assert (shown - base).abs().max() > 1e-2 and (pack(shown) - wanted).abs().max() <= 1e-5


def test_an_over_long_caption_loses_its_end_and_not_the_templates(tiny):
    template = FAMILIES[KIND].templates["t2i"]
    encoder = Encoder(str(tiny(KIND)), None, template, 16, torch.float32, CPU)
    whole = encoder.prepare(TextRequest("a cat " * 40)).ids
    end = encoder._tokenizer(template.text.split("{}")[1])["input_ids"]
    assert len(whole) == 34 + 16 and whole[-len(end) :] == end
    short = encoder.prepare(TextRequest("a cat")).ids
    assert len(short) < 34 + 16 and short[-len(end) :] == end


def test_norms_stay_float32_and_the_samples_steps_have_the_dtype_of_the_weights(tiny):
    model = Krea2().load(str(tiny(KIND)), dtype=torch.bfloat16)
    dtypes = {name: weight.dtype for name, weight in model.named_parameters()}
    norms = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert norms == {name for name in dtypes if "norm" in name} and len(norms) > 20
    assert {*dtypes.values()} == {torch.float32, torch.bfloat16}
    assert Krea2().sampling_dtype(model) == torch.bfloat16


def test_a_step_in_bfloat16_is_the_pipelines_in_every_bit(tiny):
    """For a text without padding, at timesteps that bfloat16 rounds."""
    theirs = pipeline(KIND, tiny(KIND)).transformer.__class__.from_pretrained(
        tiny(KIND) / "transformer", torch_dtype=torch.bfloat16
    )
    ours = Krea2().load(str(tiny(KIND)), dtype=torch.bfloat16)
    batch = make_batch(KIND, ours, [7])
    text = batch.text_BLD.to(torch.bfloat16).unflatten(-1, (ours.config.num_text_layers, -1))
    places = diffusers.Krea2Pipeline.prepare_position_ids(7, 2, 2, CPU)
    latents = batch.latents_BCTHW.to(torch.bfloat16)
    for time in (1000.0, 857.6, 602.2, 8.9):
        timestep = (torch.tensor(time) / 1000).expand(1).to(torch.bfloat16)
        with torch.no_grad():
            made = Krea2().predict(ours, latents, torch.tensor([time]) / 1000, batch, "t2i")
            wanted = theirs(pack(latents), text, timestep, places, return_dict=False)[0]
        assert made.dtype == torch.bfloat16 and torch.equal(pack(made), wanted)


def test_blocks_of_texts_are_computed_again_in_the_backward_pass(tiny):
    """The stock forward pass of `text_fusion` does not checkpoint them."""
    family, calls = Krea2(), []
    model = family.load(str(tiny(KIND))).train()
    blocks = family.blocks(model, "t2i")
    checkpoint_blocks(model, blocks)
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    batch = make_batch(KIND, model, [7, 4])
    predicted = family.predict(model, batch.latents_BCTHW, torch.tensor([0.3, 0.7]), batch, "t2i")
    assert calls == [*range(len(blocks))]
    predicted.sum().backward()
    assert sorted(calls) == sorted(2 * [*range(len(blocks))])


def by_hand(model, latents_C1HW, sigma, text_LD, kept) -> torch.Tensor:
    """(N, C) of one sample by blocks with the stock attention. kept: image tokens of the second block."""
    text = text_LD.unflatten(-1, (model.config.num_text_layers, -1))[None]
    text = model.txt_in(Krea2TextFusion.forward(model.text_fusion, text))
    time = model.time_embed(sigma[None], torch.float32)
    modulation = model.time_mod_proj(torch.nn.functional.gelu(time, approximate="tanh"))
    places = diffusers.Krea2Pipeline.prepare_position_ids(
        len(text_LD), *(side // 2 for side in latents_C1HW.shape[2:]), CPU
    )
    cosine, sine = model.rotary_emb(places)
    x = torch.cat([text, model.img_in(pack(latents_C1HW[None]))], 1)
    for number, block in enumerate(model.transformer_blocks):
        tokens = [*range(x.shape[1])]
        if number == 1:
            tokens = [*range(len(text_LD)), *(len(text_LD) + place for place in kept)]
        x = x.clone()
        x[:, tokens] = block(x[:, tokens], modulation, (cosine[tokens], sine[tokens]))
    return model.final_layer(x[:, len(text_LD) :], time)[0]


def test_a_route_equals_its_blocks_by_hand(tiny, record_property):
    """Each sample drops tokens of its own; of two texts one is padded."""
    family, sigma = Krea2(), torch.tensor([0.3, 0.7])
    model = family.load(str(tiny(KIND)))
    batch, places = make_batch(KIND, model, [7, 4], side=8), torch.tensor([[0, 3, 4, 9, 14], [1, 2, 7, 8, 13]])
    kept, block = KeptTokens(places, 16), model.transformer_blocks[1]
    hooks = [
        change_arguments(block, partial(begin, kept, family.block_tokens(block))),
        block.register_forward_hook(partial(end, kept, family.block_tokens(block))),
        *family.route_blocks([block], kept),
    ]
    with torch.no_grad():
        made = pack(family.predict(model, batch.latents_BCTHW, sigma, batch, "t2i"))
        for hook in hooks:
            hook.remove()
        for each in model.transformer_blocks:
            each.attn.set_processor(Krea2AttnProcessor())
        texts = [text[:length] for text, length in zip(batch.text_BLD, batch.lengths, strict=True)]
        rows = zip(batch.latents_BCTHW, sigma, texts, places.tolist(), strict=True)
        wanted = torch.stack([by_hand(model, *row) for row in rows])
    difference = (made - wanted).abs().max().item()
    record_property("largest difference", difference)
    assert difference <= 1e-5
